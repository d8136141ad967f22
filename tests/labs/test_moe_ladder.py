"""A grouped GEMM, a CUDA graph and fused kernels each speed up a layer of 32 experts.

Each token is routed to two of 32 experts, so sorting the tokens by expert leaves 32 GEMMs of
different heights. A Python loop runs them one after the other, and the CPU waits for the router's
result to get the heights. "grouped" computes each of the two products for all experts in one
kernel, which reads the group offsets on the GPU. Most of its gain is 340 launches that become 31:
on H200s the kernel time of a trace falls by a factor of 2.7, wall time by 8 to 11. Device time is
not judged, because the CPU waits in the middle of the loop. "graph" launches everything at once.
The loop could not be captured, because it needs the heights on the CPU. "fused" merges the steps
around the GEMMs into five kernels, such as the choice of experts, sorting, and the weighted sum of
a token's two results.

The library arm of "fused" is the grouped rung, compiled by torch.compile and captured in a graph.
It takes a tenth longer, with 23 kernels instead of 12. Fused MoE kernels of serving engines (vLLM,
SGLang) are not measured. The last rung reaches half of the read rate on an H200 and two thirds on
an H100: the grouped GEMMs read the weights at 0.6 and 0.8 of it and take six sevenths of the kernel
time. 15x in all was the aim. On H200s 12x to 20x was measured, and 15x on an H100: the loop takes
as long as the host needs for its 340 launches.

Each rung is judged against the one before, on wall time. The layer has 512 tokens, a large decode
batch: about 32 rows per expert, so the limit is reading the weights of all experts, and the
record has the share of the read rate. The experts are drawn evenly; a skewed router, whose groups
are less even, was not measured. Fusion comes last, because eager kernels as short as these wait for
their launches. With thousands of tokens, arithmetic binds, and the loop's GEMMs fill the GPU as
well. All rungs route in fp32: a tie that is broken differently selects another expert, an error
that no tolerance covers.
"""

import pytest
import torch

from kernels.labs import moe
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def layer(bench: Bench) -> State:
    """Draw tokens that each clearly prefer two experts, the router and the experts' weights."""
    tokens, width = bench.size(512, check=16), bench.size(2048, check=64)
    experts, inner = bench.size(32, check=8), bench.size(2048, check=32)
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
        gate_x, up_x = (x.double() @ up[expert].double()).tensor_split(2, 1)
        hidden = gate_x / (1 + (-gate_x).exp()) * up_x
        out += gate[:, None] * (hidden @ down[expert].double())
    return out


def reading_weights(x, router, up, down):
    """Count the weights of all experts: with 1,024 choices, each of 32 has some tokens."""
    return Work(read=up.nbytes + down.nbytes)


GRAPH = prepared(moe.in_graph(moe.grouped))
COMPILED = prepared(moe.in_graph(torch.compile(moe.grouped, dynamic=False)))
RUNGS = {
    # CUTLASS's grouped GEMM: one kernel for each of the two products of all experts
    "grouped": (moe.loop, moe.grouped, evidence.kernel_name("GroupProblemShape", min=2, max=2)),
    "graph": (moe.grouped, GRAPH, evidence.launches(max=0.1, per="baseline")),
    "fused": (GRAPH, prepared(moe.in_graph(moe.fused)), evidence.kernels(max=0.7, per="baseline")),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_moe_ladder(compare: Compare, rung: str) -> None:
    baseline, optimized, evidence_of_rung = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        library=COMPILED if rung == "fused" else None,
        against="idiomatic" if rung == "grouped" else "previous rung",
        inputs=layer,
        reference=in_fp64,
        work=reading_weights,
        metric="wall",
        evidence=[evidence_of_rung],
    )
