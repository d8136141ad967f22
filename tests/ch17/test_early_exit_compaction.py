"""Layers that only see the tokens which still need them beat layers that see all.

Easy tokens are done after a few layers. A model that runs all layers for all tokens and picks each
token's output afterwards has saved nothing: a masked token costs as much as any other. Gathering
the tokens that go on into a shorter matrix after each layer lets the products shrink with them.
Here the tokens need 4 of 12 layers on average, which bounds the gain at 3x.

How many tokens go on is known on the GPU only, and the host must know it to launch the next layer:
one wait for each layer, and a gather of the rows that stay. So what the caller waits (wall) is
judged, and the gain ends where a layer takes no longer than the wait (some tens of microseconds).
In place of a trained exit classifier the first channel, which no layer changes, says how many
layers a token needs; a model with attention must also make keys and values of tokens that have
left.
"""

import torch
from torch.nn.functional import gelu, rms_norm

from pytest_aiperf import Bench, Compare, evidence

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tokens(bench: Bench) -> Inputs:
    """Make an MLP of 12 residual layers and tokens, half of which need at most 2 of them."""
    count, width, depth = bench.size(32768, check=100), bench.size(1024, check=32), 12
    kind = {"device": bench.device, "dtype": torch.bfloat16}
    up = torch.randn(depth, width, 4 * width, **kind) * width**-0.5
    down = torch.randn(depth, 4 * width, width, **kind) * 0.5 * (4 * width) ** -0.5
    down[:, :, 0] = 0
    needed = torch.tensor([1, 1, 2, 2, 2, 2, 3, 3, 6, 6, 8, 12], device=bench.device)
    x = torch.randn(count, width, **kind)
    x[:, 0] = needed[torch.randperm(count, device=bench.device) % len(needed)]
    return x, up, down


def layer(x, up, down):
    return x + gelu(rms_norm(x, x.shape[1:]) @ up) @ down


def everywhere(x, up, down):
    needed, out = x[:, :1].clone(), torch.empty_like(x)
    for done, weights in enumerate(zip(up, down, strict=True), 1):
        x = layer(x, *weights)
        torch.where(needed == done, x, out, out=out)
    return out


def compacted(x, up, down):
    out, rows = torch.empty_like(x), torch.arange(len(x), device=x.device)
    for done, weights in enumerate(zip(up, down, strict=True), 1):
        x = layer(x, *weights)
        out[rows] = x  # a token that goes on is written again, when it is done
        going_on = (x[:, 0] > done).nonzero()[:, 0]  # waits for the GPU
        x, rows = x[going_on], rows[going_on]
    return out


def in_fp64(x, up, down):
    """Run the tokens that need so many layers through them, each such group on its own."""
    needed, up, down = x[:, 0].int(), up.double(), down.double()
    out = torch.empty_like(x, dtype=torch.float64)
    for count in needed.unique().tolist():
        group = x[needed == count].double()
        for weights in zip(up[:count], down[:count], strict=True):
            group = layer(group, *weights)
        out[needed == count] = group
    return out


def test_early_exit_compaction(compare: Compare) -> None:
    compare(
        baseline=everywhere,
        optimized=compacted,
        inputs=tokens,
        reference=in_fp64,
        metric="wall",
        evidence=[evidence.counter("dram__bytes.sum", most=0.6, per="baseline")],
    )
