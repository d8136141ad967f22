"""Replaying a captured CUDA graph beats launching its 200 tiny kernels one by one.

Each integration step depends on the one before, so the steps cannot be batched, and each kernel
takes about a microsecond. Eager execution is CPU-bound: dispatching an operation takes several
microseconds, during which the GPU waits. A CUDA graph records the kernels once. Its replay is a
single launch, and the GPU starts each node as soon as the node before has finished.

The claim is judged on wall time, because only the CPU overhead shrinks: the kernels are the same.
The 4 KB of data stay in the L2 cache, so the cache is declared warm. A graph is bound to the
addresses of its capture: new values must be written into the same tensors, shapes must not change,
and nothing in it may synchronise with the host. It gains nothing where kernels take longer than
their launches.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, evidence, prepared


def pendulums(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(1024, device=bench.device)
    return angle, torch.empty_like(angle)


def integrate(angle, out):
    """Integrate angle' = -sin(angle) over 100 Euler steps, two kernels each."""
    out.copy_(angle)
    for _ in range(100):
        out.sub_(torch.sin(out), alpha=0.01)


def captured(angle, out):
    integrate(angle, out)  # the first launch loads the kernels, which is not allowed in capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        integrate(angle, out)
    return lambda angle, out: graph.replay()


def in_fp64(angle, out):
    angle = angle.double()
    for _ in range(100):
        angle = angle - 0.01 * torch.sin(angle)
    return angle


@pytest.mark.gpu
def test_graph_replay(compare: Compare) -> None:
    compare(
        baseline=integrate,
        optimized=prepared(captured),
        inputs=pendulums,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(max=1)],
    )
