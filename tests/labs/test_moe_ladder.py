"""A layer of 32 experts: from a loop over experts to one graph without a decision on the CPU.

Each token wants two experts of 32, so that sorting tokens by expert gives 32 products of different
heights. In a loop they run one after the other, each too small for the GPU, and the CPU must wait
for the router to know the heights. "grouped" gives all of them to one kernel that reads the borders
on the GPU. "fused" merges the steps between the products: gate and activation, and the weighted
sum of each token's two results. "graph" launches it all at once, which the loop never could be: it
asks for the heights in the middle.

What the caller waits for (wall) is judged, each rung against the sorted loop. With many tokens an
expert, the products fill the GPU in the loop, too, and only the waiting is gained; with few, the
limit is reading the experts' weights. All rungs route in fp32: a tie that is decided otherwise
gives another result, which no tolerance would cover.
"""

import pytest
import torch

from kernels.labs import moe
from pytest_aiperf import Bench, Compare, evidence, prepared, static

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def layer(bench: Bench) -> State:
    """Make tokens that each prefer two experts clearly, the router, and the experts' matrices."""
    tokens, width = bench.size(2048, check=16), bench.size(1024, check=64)
    experts, inner = bench.size(32, check=8), bench.size(1024, check=32)
    kind = {"device": bench.device, "dtype": torch.bfloat16}
    router, _ = torch.linalg.qr(torch.randn(width, experts, device=bench.device))
    chosen = torch.rand(tokens, experts, device=bench.device).argsort(1)
    x = torch.randn(tokens, width, device=bench.device) / 4
    x += 3 * router.T[chosen[:, 0]] + 2.5 * router.T[chosen[:, 1]]
    up = torch.randn(experts, width, 2 * inner, **kind) * width**-0.5
    down = torch.randn(experts, inner, width, **kind) * inner**-0.5
    return x.bfloat16(), static(router.contiguous()), static(up), static(down)


def in_fp64(x, router, up, down):
    """Every expert for every token, and what is not wanted times zero."""
    weights, experts = torch.softmax(x.double() @ router.double(), 1).topk(moe.TOP)
    shares = torch.zeros(len(x), router.shape[1], dtype=torch.float64, device=x.device)
    shares.scatter_(1, experts, weights)
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert, share in enumerate(shares.unbind(1)):
        hidden = moe.gated(x.double() @ up[expert].double())
        out += share[:, None] * (hidden @ down[expert].double())
    return out


RUNGS = {
    "grouped": (moe.grouped, 0.5),
    "fused": (moe.fused, 0.5),
    "graph": (prepared(moe.graph), 0.05),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_moe_ladder(compare: Compare, rung: str) -> None:
    optimized, launches = RUNGS[rung]
    compare(
        baseline=moe.loop,
        optimized=optimized,
        inputs=layer,
        reference=in_fp64,
        metric="wall",
        evidence=[evidence.launches(most=launches, per="baseline")],
    )
