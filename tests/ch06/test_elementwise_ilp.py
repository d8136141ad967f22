"""Several independent elements a thread hide the latency that one chain a thread leaves open.

Load, eight dependent FMAs, store: within an element everything waits for what came before. With one
element a thread a full multiprocessor has 2048 loads of 4 bytes in flight, 8 KiB, and fast memory
answers such a trickle at three fifths of its speed. With four, a thread has four loads in flight
before the first is needed, and the FMAs of one element run in the gaps of the others. The accesses
are as wide and as coalesced as before: only their independence is used.

The gain ends at the speed of memory, here near 1.6x; more elements then only cost registers and
leave fewer, larger pieces of work to spread over the chip. Where one load a thread already
saturates memory (16-byte loads, slower memory), there is nothing to win.
"""

import math

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

ELEMENTS = {"two": 2, "four": 4, "eight": 8}


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**26 + 1000, check=13_315)  # with a rest, which no chunk holds
    a = torch.randn(n, device=bench.device)
    return a, torch.empty_like(a), n


def power_series(a, out, n):
    powers = torch.ones_like(a, dtype=torch.float64)
    total = powers.clone()
    for k in range(1, 9):
        total.add_(powers.mul_(a), alpha=1 / math.factorial(k))
    return total


@pytest.mark.parametrize("rung", ELEMENTS)
def test_elementwise_ilp(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    evaluate = nvcc("ch06/elementwise_ilp.cu")
    compare(
        baseline=evaluate["one"],
        optimized=evaluate[rung],
        inputs=floats,
        work=lambda a, out, n: Work(bytes=2 * a.nbytes, flops=16 * n, dtype="fp32"),
        reference=power_series,
        evidence=[
            # the rest after the last whole chunk has a load of its own
            evidence.opcode("LDG.E", kernel=rung.title(), least=ELEMENTS[rung] + 1),
            evidence.spills(most=0),
        ],
    )
