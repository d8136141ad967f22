"""Replaying a captured CUDA graph beats launching its 200 tiny kernels one by one.

Each step of this integration needs the one before it, so it cannot be batched, and each kernel
works for about a microsecond. Eager, the CPU is the limit: dispatching one operation costs it
several microseconds, and the GPU waits. A graph records the kernels once; replaying them is one
call, and the GPU starts each node as soon as the last is done, about a microsecond a node.

What the caller waits for (wall) is judged, because only the CPU's part shrinks: the kernels are
the same. The cache is warm, since 4 kB stay in it anyway. The graph is bound to the addresses that
it was captured with: new values must be written into the same tensors, shapes may not change, and
nothing in between may wait for the GPU. It wins nothing where kernels outlast their launches.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, evidence, prepared


def pendulums(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(1024, device=bench.device)
    return angle, torch.empty_like(angle)


def settle(angle, out):
    """Integrate angle' = -sin(angle) over 100 Euler steps, two kernels each."""
    out.copy_(angle)
    for _ in range(100):
        out.sub_(torch.sin(out), alpha=0.01)


def captured(angle, out):
    settle(angle, out)  # kernels are loaded at their first launch, which a capture forbids
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        settle(angle, out)
    return lambda angle, out: graph.replay()


def in_fp64(angle, out):
    angle = angle.double()
    for _ in range(100):
        angle = angle - 0.01 * torch.sin(angle)
    return angle


@pytest.mark.gpu
def test_graph_replay(compare: Compare) -> None:
    compare(
        baseline=settle,
        optimized=prepared(captured),
        inputs=pendulums,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(1)],
    )
