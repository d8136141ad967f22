"""Setting the parameters of two nodes of a CUDA graph beats capturing the graph again.

A graph is bound to the addresses of its capture. If the next call has its data elsewhere, the
simplest answer is to capture and instantiate the graph again, and that takes the host longer than
the launch. A program that knows the nodes of the graph sets the arguments of those kernels whose
addresses change, here two of 16 (cudaGraphExecKernelNodeSetParams). A running graph is not
affected, so nothing waits. In between lies cudaGraphExecUpdate, which takes over the parameters of
a new capture into the instantiated graph: it saves only the instantiation, but works without
knowing which nodes change. It is not measured here.

The claim is judged on wall time for 50 rows, each with a launch of the graph. All arms run the same
800 kernels, whose time is the limit: on an H100 they take 0.84 of the 1.05 ms of the optimized arm.
That leaves 3.2x, although this arm makes 150 calls of the CUDA API and the baseline 1,100. The
library arm is what PyTorch programs do: the graph stays as it is, and the row is copied to the
address that it reads. That takes two more copies per launch, and for rows of 16 KiB 1.2 times as
long as changing two pointers. The gain ends where the kernels of a launch take much longer than a
capture.
"""

import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence

N, STEPS = 4096, 16


def rows(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    angles = torch.randn(50, N, device=bench.device)
    return angles, torch.empty_like(angles), len(angles)


def in_fp64(angles, out, count):
    angles = angles.double()
    for _ in range(STEPS):
        angles = angles - 0.01 * torch.sin(angles)
    return angles


def test_graph_param_update(compare: Compare, nvcc: Nvcc) -> None:
    launch = nvcc("ch12/graph_parameters.cu")
    compare(
        baseline=launch["recapture"],
        optimized=launch["set_parameters"],
        library=launch["static_buffers"],
        inputs=rows,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        # two changes and a launch per row, instead of a capture of 16 kernels
        evidence=[evidence.api_calls(max=0.3, per="baseline")],
    )
