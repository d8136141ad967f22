"""At an eighth of the occupancy, several loads in flight per thread beat one load per thread.

To reach the memory bandwidth, an SM needs tens of kilobytes in flight: its bandwidth times the
latency (Little's law). The bytes in flight are threads times loads per thread times bytes per load.
One block of 256 threads per SM with one 16-byte load per thread has 4 KiB, too little. If each
thread issues two, four or eight loads before it uses the first, the block has 8, 16 or 32 KiB.
Loads per thread replace most of the warps that do not fit (test_occupancy_block_size.py adds warps
instead). No rung reaches torch.mul, the library arm, which chooses its own grid. Eight loads come
to 0.9 of its rate on an H200 (89 % of a copy) and 0.95 on an H100 (94 %). Full occupancy with one
load per thread has the same 32 KiB in flight. On an H200 it reaches 90 % of a copy in a grid-stride
loop (test_occupancy_block_size.py), but 99 % in ch07/vectorized_copy, where each thread loads once
and ends. So the bytes in flight are not all that counts; why the loop is slower was not examined.

The grid is built to be small, as for a kernel that needs an SM's registers or shared memory for one
block, so the baseline is naive. All rungs are measured against it. The limit is memory bandwidth.
On an H200, twice the bytes in flight give 1.5x, not 2x: a turn of the loop takes 0.56 µs with one
load per thread, 0.76 with two and 2.3 with eight. Memory may respond later because it is busier;
that was not examined. Each 16-byte load in flight takes four registers per thread. At full
occupancy there is little to gain.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LOADS = {"two": 2, "four": 4, "eight": 8}
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    n = bench.size(2**27 + 1000, check=5000)  # with a remainder after the last whole chunk
    a = torch.randn(n, device=bench.device)
    return a, torch.empty_like(a), 0.75, n


@pytest.mark.parametrize("rung", LOADS)
def test_bytes_in_flight(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    scale = nvcc("ch08/bytes_in_flight.cu")
    compare(
        baseline=scale["one"],
        optimized=scale[rung],
        library=lambda a, out, factor, n: torch.mul(a, factor, out=out),
        against="naive",
        inputs=floats,
        work=lambda a, out, factor, n: Work(read=a.nbytes, written=a.nbytes, flops=n, dtype="fp32"),
        reference=lambda a, out, factor, n: a.double() * factor,
        evidence=[
            # the loop over the remainder contains one more load
            evidence.opcode("LDG.E.128", kernel=f"<{LOADS[rung]}>", min=LOADS[rung] + 1),
            # a condition: no rung has more warps
            evidence.counter(OCCUPANCY, kernel="scale_in_flight", max=13),
        ],
    )
