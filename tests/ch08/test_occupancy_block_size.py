"""A kernel with many resident warps beats one with few, until the memory bandwidth is used up.

A block that reserves all shared memory of an SM is the only one resident: 8 of 64 warps, each of
which waits most of the time for its load of 16 bytes per lane. By Little's law, 4 KiB per SM for
each turn of its loop, 0.56 µs (497 turns in 278 µs), are 0.97 TB/s with the 132 SMs of an H200, as
much as 45 % of a copy reads. Two resident blocks double the bytes in flight, four come close to the
limit, and eight gain 3 % more on an H200 and lose 1 % on an H100: once memory is busy, further
occupancy gains little. On an H200 even full occupancy, with one load per thread, reaches 90 % of a
copy; torch.mul, the library arm, reaches 97 %. Why this loop stops at 90 % was not examined.

Kernel and bytes are the same in every rung; only the shared memory reserved per block differs, and
with it the number of resident blocks, which is the grid. (The highest rung reserves none, and
leaves the division between L1 cache and shared memory to the driver.) The lowest rung is built to
be slow, so the baseline is naive. With several loads in flight per thread (ch08/bytes_in_flight), 8
warps per SM reach 89 % of a copy.
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
