"""Programmatic dependent launch makes a chain of short kernels faster than plain stream order.

In stream order a kernel starts after its predecessor has finished and its writes are flushed. In a
chain of small layers, each kernel then pays a launch latency and the latency of its first loads of
weights (8 MiB) and state. With programmatic dependent launch (PDL) a kernel lets its successor
start at once. The successor loads its weights, which do not depend on the predecessor, and waits
only before it loads the state.

The gain is the independent part of a kernel: large in chains of short kernels with a prologue (here
the weights), a few per cent in a whole model. Both kernels must be resident on an SM at the same
time, so a kernel that fills an SM leaves nothing to overlap. The baseline is launched in a stream;
a CUDA graph would remove part of the same gap. The limit is the time to read all weights.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

WIDTH = 2048


def layers(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    count = bench.size(32, check=2)
    weights = torch.randn(count, WIDTH, WIDTH, device=bench.device) * (2 / WIDTH) ** 0.5
    start = torch.randn(WIDTH, device=bench.device)
    return weights.bfloat16(), start, torch.empty(count, WIDTH, device=bench.device), count


def in_fp64(weights, start, states, count):
    state, outputs = start.double(), []
    for matrix in weights:
        state = (matrix.double() @ state).relu()
        outputs.append(state)
    return torch.stack(outputs)


@pytest.mark.gpu(min_sm=90)
def test_pdl_chain(compare: Compare, nvcc: Nvcc) -> None:
    chain = nvcc("ch12/pdl_chain.cu")
    compare(
        baseline=chain["plain"],
        optimized=chain["overlapped"],
        inputs=layers,
        work=lambda weights, start, states, _: Work(
            read=weights.nbytes + states.nbytes,
            written=states.nbytes,
            flops=2 * weights.numel(),
            dtype="fp32",
        ),
        reference=in_fp64,
        evidence=[
            evidence.opcode("PREEXIT", kernel="layer_overlapped"),
            evidence.opcode("ACQBULK", kernel="layer_overlapped"),
            evidence.opcode("ACQBULK", kernel="layer_plain", max=0),
        ],
    )
