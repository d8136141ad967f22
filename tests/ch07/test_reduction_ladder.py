"""A grid-stride sum with four loads in flight per thread beats a shared-memory tree.

The textbook tree needs nine barriers for 512 elements. Half of the threads idle in the first step,
more in each further one, and a thread has only 4 bytes in flight. With shuffles, lanes exchange
values without shared memory and one barrier is left ("shuffle"), but each thread still reads one
element and takes part in a reduction for it. "grid_stride" starts only as many blocks as the SMs
hold at once. Their threads walk through the whole array in steps of the size of the grid (a
grid-stride loop) and add into registers. They combine their sums once at the end, with one
atomicAdd per block instead of further passes. Few blocks, the loop and the atomicAdd come as one
rung: only with few blocks is one atomicAdd each cheap, and only with a loop do few blocks cover the
array. With 4 bytes in flight per thread, this rung reaches half of the read rate on an H200, where
"shuffle" has a quarter. "in_flight" loads four elements per thread before it adds them, and reaches
nine tenths. In "wide" each of these loads has 16 bytes instead of 4, and nothing else changes. It
gains only 4 % on an H200 and 2 % on an H100, because the loads of 4 bytes keep memory busy already.
All rungs but "wide" are slower than CUB, the library arm.

Each rung is measured against the one before it. The last one beats CUB by 1 to 2 % on H200s and 1 %
on an H100, most likely because CUB combines its sums in a second kernel. The limit is one read of
the array at memory bandwidth. On short arrays, launches and the final combination may cost more
than the bytes. The summands are positive, so a different order of additions changes only the last
bits. The last ones are larger, so that the sum is wrong without them.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LADDER = ["tree", "shuffle", "grid_stride", "in_flight", "wide"]
PROOF = {
    "shuffle": [
        evidence.opcode("SHFL", kernel="sum_shuffle", min=10),
        evidence.opcode("BAR", kernel="sum_shuffle", max=1),
        evidence.opcode("BAR", kernel="sum_tree", min=9),
    ],
    "grid_stride": [
        # no shuffles and no barrier for each element, only a load, an addition and the loop
        evidence.counter("smsp__inst_executed.sum", max=0.5, per="baseline"),
        evidence.launches(max=2),  # a memset of the sum, then the kernel
    ],
    "in_flight": [
        evidence.opcode("LDG.E", kernel="sum_in_flight", min=5),  # four in the loop, one behind it
        evidence.opcode("LDG.E", kernel="sum_grid_stride", max=2),
    ],
    "wide": [evidence.opcode("LDG.E.128", kernel="sum_wide", min=4)],
}


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**27 - 5, check=5003)  # three are left after the last whole vector
    a = torch.rand(n, device=bench.device)
    a[-512:] *= 1000  # without the last tile the sum is wrong by at least 0.4 %,
    a[-3:] *= 1000  # and without the three that are left over, by 2 %
    return a, torch.empty(1, device=bench.device), n


@pytest.mark.parametrize("rung", PROOF)
def test_reduction_ladder(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    total = nvcc("ch07/reduction.cu")
    compare(
        baseline=total[LADDER[LADDER.index(rung) - 1]],
        optimized=total[rung],
        library=total["cub_sum"],
        against="idiomatic" if rung == LADDER[1] else "previous rung",
        inputs=floats,
        work=lambda a, out, n: Work(read=a.nbytes, written=out.nbytes, flops=n, dtype="fp32"),
        reference=lambda a, out, n: a.sum(0, keepdim=True, dtype=torch.float64),
        evidence=PROOF[rung],
    )
