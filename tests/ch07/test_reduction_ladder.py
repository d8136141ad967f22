"""A sum that walks the array with wide loads and adds in registers runs at the speed of reading.

The textbook tree spends nine barriers on 512 elements, with half of the threads idle after the
first step and 4 bytes a thread in flight. Shuffles hand values from lane to lane without shared
memory and leave one barrier. What remains is paid for each element that is read, and is taken out
by turning the loops round: as many blocks as fit walk over the whole array, four 16-byte loads a
thread under way at a time, and reduce among threads once, at the very end.

Each rung is measured against the one before it; torch.sum is the library arm. The limit is the
array once over memory bandwidth; below a few megabytes launches and the final combination weigh
more than the bytes. The summands are positive, so that rounding in another order stays near the
last bit.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LADDER = ["tree", "shuffle", "grid_stride"]
PROOF = {
    "shuffle": [
        evidence.opcode("SHFL", kernel="sum_shuffle", least=10),
        evidence.opcode("BAR", kernel="sum_shuffle", most=1),
        evidence.opcode("BAR", kernel="sum_tree", least=9),
    ],
    "grid_stride": [
        evidence.opcode("LDG.E.128", kernel="sum_grid_stride", least=4),
        evidence.launches(most=2),  # clear the sum, then add to it
    ],
}


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**27 - 5, check=5000)
    return torch.rand(n, device=bench.device), torch.empty(1, device=bench.device), n


@pytest.mark.parametrize("rung", PROOF)
def test_reduction_ladder(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    total = nvcc("ch07/reduction.cu")
    compare(
        baseline=total[LADDER[LADDER.index(rung) - 1]],
        optimized=total[rung],
        library=lambda a, out, n: torch.sum(a, 0, keepdim=True, out=out),
        against="idiomatic" if rung == LADDER[1] else "previous rung",
        inputs=floats,
        work=lambda a, out, n: Work(bytes=a.nbytes, flops=n, dtype="fp32", written=4),
        reference=lambda a, out, n: a.sum(0, keepdim=True, dtype=torch.float64),
        evidence=PROOF[rung],
    )
