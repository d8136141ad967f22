"""A WHILE node in a CUDA graph, or a mapped flag, beats a host that copies a flag every step.

Each step takes a few microseconds, and its result decides whether another one is needed. If the
host decides, every step costs a launch, a copy of the flag, and a host wake-up. "mapped_flag"
writes the flag to mapped pinned host memory, which saves the copy but not the wake-up. "while_node"
keeps the loop on the GPU: the last block of a step sets the condition of a WHILE node in a CUDA
graph, and the host launches once for hundreds of steps.

The claim is judged on wall time, because the kernels are the same. The gain is small where a step
takes longer than a launch and a wake-up, or where the host may check only once in several steps,
which makes the host loop faster. The body of a conditional node may contain kernels and copies, but
nothing that needs the host.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence, prepared

TOLERANCE = 0.4
EVIDENCE = {
    "mapped_flag": evidence.launches(max=0.55, per="baseline"),
    # one launch for hundreds of steps; a trace counts the body's kernels as one more launch
    "while_node": evidence.launches(max=0.01, per="baseline"),
}


def equations(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    b = torch.randn(65536, device=bench.device)
    return b, torch.empty_like(b)


def in_fp64(b, x):
    b = b.double()
    x = torch.zeros_like(b)
    unconverged = torch.ones((), dtype=b.dtype, device=b.device)
    while unconverged:  # checked every 32 steps; steps after convergence change nothing
        for _ in range(32):
            residual = x + 0.5 * torch.sin(x) - b
            x = x - 0.01 * unconverged * residual
            unconverged = unconverged * (residual.abs().max() > TOLERANCE)
    return x


class Graph:
    """An executable graph, destroyed with this object."""

    def __init__(self, solve, b, x):
        handle = torch.zeros(1, dtype=torch.int64).pin_memory()
        solve["build_graph"](b, x, len(b), TOLERANCE, handle)
        self.handle = int(handle)
        self.launch, self.destroy = solve["launch_graph"], solve["destroy_graph"]

    def __call__(self, b, x):
        self.launch(self.handle)

    def __del__(self):
        self.destroy(self.handle)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", EVIDENCE)
def test_conditional_graph(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    solve = nvcc("ch12/conditional_graph.cu")

    def host_poll(b, x):
        device_flag = torch.zeros(1, dtype=torch.int32, device=b.device)
        host_flag = pinned_flag()
        return lambda b, x: solve["host_poll"](b, x, len(b), TOLERANCE, device_flag, host_flag)

    def mapped_flag(b, x):
        host_flag = pinned_flag()
        return lambda b, x: solve["mapped_flag"](b, x, len(b), TOLERANCE, host_flag)

    def pinned_flag():
        return torch.zeros(1, dtype=torch.int32).pin_memory()

    arms = {"mapped_flag": mapped_flag, "while_node": lambda b, x: Graph(solve, b, x)}
    compare(
        baseline=prepared(host_poll),
        optimized=prepared(arms[rung]),
        inputs=equations,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[EVIDENCE[rung]],
    )
