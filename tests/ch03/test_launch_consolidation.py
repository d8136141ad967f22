"""One GEMM over concatenated weights beats 64 small layers, even when a CUDA graph launches them.

64 layers that read the same input (heads, experts that are all active, the q, k and v projections
of attention) are 64 products of 128 rows with 64 columns each. One such product occupies a few SMs
and takes as long as one tile's loop over k = 1024. A CUDA graph removes the launch overhead but not
that latency: captured on one stream, its nodes run one after the other. (Captured with parallel
branches, they could overlap.) With the weights concatenated along the output dimension, all columns
are one product whose tiles run side by side.

The claim is judged on wall time against a graph that was captured in advance, so that the host's
launches are not part of the gain. The weights are concatenated once, when the model is loaded, and
both arms write the columns of one matrix. The 8 MiB of weights stay in the L2 cache (warm). The
gain ends where one layer fills the GPU by itself; the limit is the number of layers.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, evidence, prepared, static

LAYERS = 64


def heads(bench: Bench) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    width, columns = bench.size(1024, check=32), bench.size(64, check=4)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    weights = list(torch.randn(LAYERS, width, columns, **options) * width**-0.5)
    x = torch.randn(128, width, **options)
    return x, static(weights), torch.empty(len(x), LAYERS * columns, **options)


def one_by_one(x, weights, out):
    for weight, columns in zip(weights, out.chunk(LAYERS, 1), strict=True):
        torch.mm(x, weight, out=columns)


def captured(x, weights, out):
    one_by_one(x, weights, out)  # cuBLAS initialises in its first call, which must not be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_by_one(x, weights, out)
    return lambda x, weights, out: graph.replay()


def concatenated(x, weights, out):
    weight = torch.cat(weights, 1)
    return lambda x, weights, out: torch.mm(x, weight, out=out)


@pytest.mark.gpu
def test_launch_consolidation(compare: Compare) -> None:
    compare(
        baseline=prepared(captured),
        optimized=prepared(concatenated),
        against="previous rung",
        inputs=heads,
        reference=lambda x, weights, out: x.double() @ torch.cat(weights, 1).double(),
        metric="wall",
        cache="warm",
        # with split-K a second kernel adds up the partial sums
        evidence=[evidence.kernels(max=2), evidence.kernels(max=1 / 32, per="baseline")],
    )
