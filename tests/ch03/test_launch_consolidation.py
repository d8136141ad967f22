"""One product with the weights side by side beats 64 small layers, even in a CUDA graph.

64 layers that read the same input (heads, experts that are all used, the q, k and v of attention)
are 64 products of 128 rows with 64 columns each. One of them keeps a few of the GPU's
multiprocessors busy, and its time is that of one tile's way through 1024 columns. A captured graph
does away with the launches, but not with that: its nodes run one after the other. With the weights
concatenated along their outputs, all columns are one product, whose tiles run side by side.

What the caller waits (wall) is judged, since it is what graphs improve already: the baseline is the
graph, captured in advance. The weights are concatenated once, when the model is loaded; the results
are columns of one matrix for both arms. The 8 MiB of weights stay in the L2 cache (warm). The gain
ends where one layer fills the GPU by itself, and the limit is the number of layers.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, evidence, prepared, static

LAYERS = 64


def heads(bench: Bench) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    width, each = bench.size(1024, check=32), bench.size(64, check=4)
    kind = {"device": bench.device, "dtype": torch.bfloat16}
    weights = list(torch.randn(LAYERS, width, each, **kind) * width**-0.5)
    x = torch.randn(128, width, **kind)
    return x, static(weights), torch.empty(len(x), LAYERS * each, **kind)


def one_by_one(x, weights, out):
    for weight, columns in zip(weights, out.chunk(LAYERS, 1), strict=True):
        torch.mm(x, weight, out=columns)


def captured(x, weights, out):
    one_by_one(
        x, weights, out
    )  # libraries set themselves up in a first call, which captures forbid
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_by_one(x, weights, out)
    return lambda x, weights, out: graph.replay()


def side_by_side(x, weights, out):
    joined = torch.cat(weights, 1)
    return lambda x, weights, out: torch.mm(x, joined, out=out)


@pytest.mark.gpu
def test_launch_consolidation(compare: Compare) -> None:
    compare(
        baseline=prepared(captured),
        optimized=prepared(side_by_side),
        against="previous rung",
        inputs=heads,
        reference=lambda x, weights, out: x.double() @ torch.cat(weights, 1).double(),
        metric="wall",
        cache="warm",
        # a product may be split along its sums, and then has a second kernel to add them up
        evidence=[evidence.kernels(most=2), evidence.kernels(most=1 / 32, per="baseline")],
    )
