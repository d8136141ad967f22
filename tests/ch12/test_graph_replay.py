"""Replaying a CUDA graph of 200 tiny kernels beats launching them, from Python or from C++.

Each integration step depends on the one before, so the steps cannot be batched, and each kernel
takes about a microsecond. One kernel could run all steps, because they are elementwise; these stand
for kernels that cannot be fused (ch12/fusion_vs_graph). Eager execution is CPU-bound: Python and
the dispatcher take several microseconds per operation, during which the GPU waits. A CUDA graph
records the kernels once. Its replay is a single launch, and the GPU starts each node as soon as the
node before has finished. "torch_graph" captures the eager loop and saves Python, the dispatcher and
the launches at once. "cpp_graph" captures a C++ loop that launches as many kernels, and is judged
against that loop, so its gain comes from the launches alone. With H200s the C++ loop took 0.7 to
1.0 ms and the eager one 1.3 to 2.1, with an H100 0.9 and 1.9: both depend on the host.

The claim is judged on wall time, because only the CPU overhead shrinks: the kernels do the same
work. The 4 KB of data stay in the L2 cache, so the cache is declared warm. A graph is bound to the
addresses of its capture: new values must be written into the same tensors, shapes must not change,
and nothing in it may synchronize with the host. It gains nothing where kernels take longer than
their launches.
"""

from functools import partial

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence, prepared

STEPS = 100


def pendulums(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(1024, device=bench.device)
    return angle, torch.empty_like(angle)


def eager(angle, out):
    """Integrate angle' = -sin(angle) over 100 Euler steps, two kernels each."""
    out.copy_(angle)
    for _ in range(STEPS):
        out.sub_(torch.sin(out), alpha=0.01)


def cpp(launcher, angle, out):
    temporary = torch.empty_like(angle)  # in a capture, it belongs to the graph
    launcher(angle, out, temporary, len(angle), STEPS)


def captured(launch, angle, out):
    launch(angle, out)  # the first launch loads the kernels, which is not allowed in capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(angle, out)
    return lambda angle, out: graph.replay()


def in_fp64(angle, out):
    angle = angle.double()
    for _ in range(STEPS):
        angle = angle - 0.01 * torch.sin(angle)
    return angle


@pytest.mark.gpu
@pytest.mark.parametrize("rung", ["torch_graph", "cpp_graph"])
def test_graph_replay(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    in_cpp = partial(cpp, nvcc("ch12/graph_replay.cu")["integrate"])
    launch = in_cpp if rung == "cpp_graph" else eager
    compare(
        baseline=launch,
        optimized=prepared(partial(captured, launch)),
        inputs=pendulums,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(max=1)],
    )
