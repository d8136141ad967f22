"""A kernel that may start early fetches its weights while the one before it still works.

In stream order a kernel starts when its predecessor has ended and its writes are flushed: in a
chain of small layers each pays a launch latency, and then waits for the first bytes of its 8 MiB of
weights and of the state, which it fetches together. With programmatic dependent launch a kernel
lets its successor start at once; that one fetches what does not depend on the predecessor, and
waits only before it fetches the state.

The gain is the part of a kernel that may run ahead: much in chains of short kernels with a prologue
(here the weights), a few per cent in a whole model. Both kernels must find room on a multiprocessor
at the same time: a kernel that fills it leaves nothing to overlap. The limit is the time to read
all weights.
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
    state, found = start.double(), []
    for matrix in weights:
        state = (matrix.double() @ state).relu()
        found.append(state)
    return torch.stack(found)


@pytest.mark.gpu(min_sm=90)
def test_pdl_chain(compare: Compare, nvcc: Nvcc) -> None:
    chain = nvcc("ch12/pdl_chain.cu")
    compare(
        baseline=chain["plain"],
        optimized=chain["overlapped"],
        inputs=layers,
        work=lambda weights, start, states, _: Work(
            weights.nbytes + 2 * states.nbytes, 2 * weights.numel(), "fp32", states.nbytes
        ),
        reference=in_fp64,
        evidence=[
            evidence.opcode("PREEXIT", kernel="layer_overlapped"),
            evidence.opcode("ACQBULK", kernel="layer_overlapped"),
            evidence.opcode("ACQBULK", kernel="layer_plain", most=0),
        ],
    )
