"""Setting the parameters of two nodes of a CUDA graph beats capturing the graph again.

A graph is bound to the addresses of its capture. If the next call has its data elsewhere, the
simplest answer is to capture and instantiate the graph again, and that costs the host many times
its launch. "exec_update" still captures, but takes over the new parameters into the instantiated
graph (cudaGraphExecUpdate): it saves the instantiation, and works for any change that leaves the
topology as it is. "set_parameters" knows the nodes of the graph and sets the arguments of the two
kernels, of 32, whose addresses change (cudaGraphExecKernelNodeSetParams). Both are judged against a
capture per row. A running graph is not affected, so nothing waits.

The claim is judged on wall time for 50 rows, each with a launch of the graph: the kernels of a
chain take their time in all arms, and the less the host does, the closer the time comes to
theirs. The library arm is what PyTorch programs do: the graph stays as it is, and the row is
copied to the address that it reads. That takes two more copies per launch, small ones here; where
inputs are large, changing two pointers is cheaper.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence

N, STEPS = 4096, 32
EVIDENCE = {
    "exec_update": evidence.busy_share(min=0.2),  # the same kernels in less time
    "set_parameters": evidence.api_calls(max=0.2, per="baseline"),
}


def rows(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    angles = torch.randn(50, N, device=bench.device)
    return angles, torch.empty_like(angles), len(angles)


def in_fp64(angles, out, count):
    angles = angles.double()
    for _ in range(STEPS):
        angles = angles - 0.01 * torch.sin(angles)
    return angles


@pytest.mark.parametrize("rung", EVIDENCE)
def test_graph_param_update(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    launch = nvcc("ch12/graph_parameters.cu")
    compare(
        baseline=launch["recapture"],
        optimized=launch[rung],
        library=launch["static_buffers"],
        inputs=rows,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[EVIDENCE[rung]],
    )
