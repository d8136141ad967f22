"""Sixteen kernels of eight blocks run side by side, not in turn.

A stream runs its kernels in order, whether they need each other or not. A kernel of 8 blocks keeps
8 of a GPU's multiprocessors busy (an H200 has 132); the next one waits although the others idle.
Told apart by streams, the 16 kernels run at once, and take about as long as one of them.

Only device time is judged: the launches, the fork and the join cost the host more than one stream
does, which "branches" (the streams captured as a graph) and "one_grid" (one launch) take back.
The limit is the number of kernels, less the microseconds by which the last starts after the first;
it sinks where kernels need more than their share of the multiprocessors. 128 KiB of data stay in
the cache (warm). Streams show their use where kernels differ; alike ones are better one grid.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence, prepared

COUNT = 16 * 8 * 256


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
        launch(*inputs)  # streams and events are made in a first call, which captures forbid
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(*inputs)
        return lambda *inputs: graph.replay()

    return prepared(make)


@pytest.mark.parametrize("rung", ["streams", "branches", "one_grid"])
def test_concurrent_small_kernels(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    swing = nvcc("ch11/small_kernels.cu")
    compare(
        baseline=swing["one_stream"],
        optimized=captured(swing["streams"]) if rung == "branches" else swing[rung],
        inputs=pendulums,
        reference=in_fp64,
        cache="warm",
        # "streams" launches what one stream does; only when the kernels run differs
        evidence=[] if rung == "streams" else [evidence.launches(most=1)],
    )
