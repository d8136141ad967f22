"""Sixteen kernels of eight blocks are faster concurrently than one after the other.

A stream runs its kernels in order, even where they are independent. A kernel of 8 blocks occupies 8
SMs (an H200 has 132), and the next one waits although the other SMs idle. In streams of their own
the 16 kernels run concurrently and take about as long as one of them.

The claim is judged on device time. The host's work is not part of it: 16 launches, the fork and the
join cost it more than a single stream; "branches" (the streams captured as a CUDA graph) and
"one_grid" (one launch) avoid that. The limit is the number of kernels, 16: on an H200, "streams"
reaches 13.4x, "branches" 14.3x and "one_grid" 15.9x. "streams" takes 36 to 59 µs longer than
"one_grid", and "branches" 25 to 35. In the traces, the 16 kernels together take at most 11 µs
longer than the one grid, so most of it is probably the fork and the join. The limit is lower where
the kernels together need more SMs than there are. Streams are for different kernels; identical ones
are better launched as one grid. The evidence of "one_grid" is only that there is one launch. That
its 128 blocks run concurrently shows in its time: 0.25 ms, as long as one of the 16 kernels takes
in the baseline. Input and result, 256 KiB together, stay in the L2 cache.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence, prepared

COUNT = 16 * 8 * 256
CONCURRENT = evidence.overlap(min=8)  # on average at least half of the 16 kernels run
EVIDENCE = {
    "streams": [CONCURRENT],
    "branches": [CONCURRENT, evidence.launches(max=1)],
    "one_grid": [evidence.launches(max=1)],
}


def pendulums(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    angles = torch.randn(COUNT, device=bench.device)
    return angles, torch.empty_like(angles), bench.size(4000, check=20)


def in_fp64(angles, out, steps):
    angles = angles.double()
    for _ in range(steps):
        angles.sub_(torch.sin(angles), alpha=5e-4)
    return angles


def captured(launch):
    def make(*inputs):
        launch(*inputs)  # creates the streams and events, which is not allowed during capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(*inputs)
        return lambda *inputs: graph.replay()

    return prepared(make)


@pytest.mark.parametrize("rung", EVIDENCE)
def test_concurrent_small_kernels(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    swing = nvcc("ch11/small_kernels.cu")
    compare(
        baseline=swing["one_stream"],
        optimized=captured(swing["streams"]) if rung == "branches" else swing[rung],
        inputs=pendulums,
        reference=in_fp64,
        cache="warm",
        evidence=EVIDENCE[rung],
    )
