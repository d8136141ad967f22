"""Grouped GEMMs, fused elementwise steps and a CUDA graph each beat a Python loop over 32 experts.

Each token is routed to two of 32 experts, so sorting the tokens by expert leaves 32 GEMMs of
different heights. The loop runs them one after the other, each too small to fill the GPU, and the
CPU waits for the router's result to get the heights. "grouped" computes all of them in one kernel,
which reads the group offsets on the GPU. "fused" merges the steps between the GEMMs: gate and
activation, and the weighted sum of a token's two results. "graph" launches everything at once. The
loop could not be captured, because it needs the heights on the CPU.

Each rung is judged against the loop, on wall time. With many tokens per expert the loop's GEMMs
fill the GPU as well, and only the wait is saved; with few, the limit is reading the experts'
weights. All rungs route in fp32: a tie that is broken differently selects another expert, an error
that no tolerance covers.
"""

import pytest
import torch

from kernels.labs import moe
from pytest_aiperf import Bench, Compare, evidence, prepared, static

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def layer(bench: Bench) -> State:
    """Draw tokens that each clearly prefer two experts, the router and the experts' weights."""
    tokens, width = bench.size(2048, check=16), bench.size(1024, check=64)
    experts, inner = bench.size(32, check=8), bench.size(1024, check=32)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    router, _ = torch.linalg.qr(torch.randn(width, experts, device=bench.device))
    preferred = torch.rand(tokens, experts, device=bench.device).argsort(1)
    x = torch.randn(tokens, width, device=bench.device) / 4
    x += 3 * router.T[preferred[:, 0]] + 2.5 * router.T[preferred[:, 1]]
    up = torch.randn(experts, width, 2 * inner, **options) * width**-0.5
    down = torch.randn(experts, inner, width, **options) * inner**-0.5
    return x.bfloat16(), static(router.contiguous()), static(up), static(down)


def in_fp64(x, router, up, down):
    """Run every expert on every token; the weight of an expert that was not selected is 0."""
    weights, experts = torch.softmax(x.double() @ router.double(), 1).topk(moe.TOP)
    gates = torch.zeros(len(x), router.shape[1], dtype=torch.float64, device=x.device)
    gates.scatter_(1, experts, weights)
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert, gate in enumerate(gates.unbind(1)):
        hidden = moe.gated(x.double() @ up[expert].double())
        out += gate[:, None] * (hidden @ down[expert].double())
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
        evidence=[evidence.launches(max=launches, per="baseline")],
    )
