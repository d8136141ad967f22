"""A kernel with many resident warps beats one with few, but the gain shrinks as memory gets busy.

A block that reserves all shared memory of an SM is the only one resident: 8 of 64 warps, each of
which waits most of the time for its load of 16 bytes per lane. An SM then has 4 KiB of loads in
flight. A turn of the loop takes 0.56 µs on an H200 (497 turns in 278 µs), about one memory latency,
so its 132 SMs read 0.97 TB/s: 45 % of what a copy reads. Two resident blocks double the bytes in
flight, four come close to the limit, and eight gain 3 % more on an H200 and lose 1 % on an H100:
once memory is busy, further occupancy gains little. On an H200, full occupancy reaches 90 % of a
copy, and torch.mul, the library arm, 97 %. Bandwidth is not what stops this loop: threads that load
once and end reach 99 % (ch07/vectorized_copy). The cause was not examined. An H100 has no record of
the library arm yet.

Kernel and bytes are the same in every rung; only the shared memory reserved per block differs, and
with it the number of resident blocks, which is the grid. (The highest rung reserves none, and
leaves the division between L1 cache and shared memory to the driver.) The lowest rung is built to
be slow, so the baseline is naive. With several loads in flight per thread (ch08/bytes_in_flight), 8
warps per SM reach 89 % of a copy on an H200 and 94 % on an H100.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
OCCUPANCY_PERCENT = {"quarter": 25, "half": 50, "full": 100}


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    n = bench.size(2**26, check=4096)
    a = torch.randn(n, device=bench.device)
    return a, torch.empty_like(a), 0.75, n


def by_torch(a, out, factor, _n):
    torch.mul(a, factor, out=out)


@pytest.mark.parametrize("rung", OCCUPANCY_PERCENT)
def test_occupancy_block_size(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    scale = nvcc("ch08/occupancy.cu")
    compare(
        baseline=scale["eighth"],
        optimized=scale[rung],
        library=by_torch,
        against="naive",
        inputs=floats,
        work=lambda a, out, factor, n: Work(read=a.nbytes, written=a.nbytes, flops=n, dtype="fp32"),
        reference=lambda a, out, factor, n: a.double() * factor,
        evidence=[
            # a condition of all rungs: above 32 registers, 64 warps would not fit on an SM
            evidence.registers(max=32, kernel="scale"),
            evidence.counter(OCCUPANCY, kernel="scale", min=0.8 * OCCUPANCY_PERCENT[rung]),
        ],
    )
