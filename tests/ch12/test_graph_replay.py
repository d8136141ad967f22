"""Replaying a CUDA graph of 200 tiny kernels beats launching them, from Python or from C++.

Each integration step depends on the one before, so the steps cannot be batched, and each kernel
takes about a microsecond. Eager execution is CPU-bound: Python and the dispatcher take several
microseconds per operation, during which the GPU waits. "cpp_stream" launches the same number of
kernels from a C++ loop: its gain over eager is the share of Python and the dispatcher. A CUDA graph
records the kernels once. Its replay is a single launch, and the GPU starts each node as soon as the
node before has finished. "cpp_graph" captures the C++ loop and is judged against it: its gain is
the share of the launches themselves. "torch_graph" captures the eager loop and gains both at once.

The claim is judged on wall time, because only the CPU overhead shrinks: the kernels do the same
work. The 4 KB of data stay in the L2 cache, so the cache is declared warm. A graph is bound to the
addresses of its capture: new values must be written into the same tensors, shapes must not change,
and nothing in it may synchronise with the host. It gains nothing where kernels take longer than
their launches.
"""

from functools import partial

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence, prepared

STEPS = 100
EVIDENCE = {
    "torch_graph": evidence.launches(max=1),
    # as many kernels of the same work in less time; tracing slows both arms down
    "cpp_stream": evidence.busy_share(min=0.1),
    "cpp_graph": evidence.launches(max=1),
}


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
@pytest.mark.parametrize("rung", EVIDENCE)
def test_graph_replay(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    in_cpp = partial(cpp, nvcc("ch12/graph_replay.cu")["integrate"])
    arms = {
        "torch_graph": (eager, prepared(partial(captured, eager))),
        "cpp_stream": (eager, in_cpp),
        "cpp_graph": (in_cpp, prepared(partial(captured, in_cpp))),
    }
    baseline, optimized = arms[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        against="previous rung" if rung == "cpp_graph" else "idiomatic",
        inputs=pendulums,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[EVIDENCE[rung]],
    )
