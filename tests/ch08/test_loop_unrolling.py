"""Unrolling a loop over rows puts more loads in flight than a loop with one load per iteration.

Each thread adds up one column of a matrix, as in the gradient of a bias. A GPU thread executes in
order and waits where a loaded value is needed, here at the addition after each load. Unrolled by 4
or 16, the compiler moves that many loads before the first addition, so their latencies overlap. The
loop's counter and branch, executed once per 4 or 16 rows, matter less. The additions keep their
order, so all results are bit-identical. torch.sum, the library arm, is faster than both rungs, by
3 % than the last.

Only the unroll factor differs, and each rung is measured against the one before it. nvcc unrolls
such a loop by itself; the first baseline is naive because `#pragma unroll 1` forbids that. On an
H200 the matrix has four blocks of 256 threads per SM. With more threads, or wider loads, fewer
loads per thread suffice. Loads cannot move above a store that may alias them, so a loop with such
stores gains little. The limit is one read of the matrix.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LADDER = {"rolled": 1, "unrolled_4": 4, "unrolled_16": 16}
RUNGS = list(LADDER)


def matrix(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    # no multiples of the unroll factor and of the block
    rows, columns = bench.size(2005, check=37), bench.size(4 * 132 * 256 - 8, check=1000)
    a = torch.randn(rows, columns, device=bench.device) + 0.5
    return a, torch.empty(columns, device=bench.device), rows, columns


@pytest.mark.parametrize("rung", RUNGS[1:])
def test_loop_unrolling(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    column_sum = nvcc("ch08/column_sum.cu")
    compare(
        baseline=column_sum[RUNGS[RUNGS.index(rung) - 1]],
        optimized=column_sum[rung],
        library=lambda a, out, *_: torch.sum(a, 0, out=out),
        against="naive" if rung == RUNGS[1] else "previous rung",
        inputs=matrix,
        work=lambda a, out, rows, columns: Work(
            read=a.nbytes, written=out.nbytes, flops=rows * columns, dtype="fp32"
        ),
        reference=lambda a, out, *_: a.sum(0, dtype=torch.float64),
        evidence=[evidence.opcode("LDG.E", kernel=f"<{LADDER[rung]}>", min=LADDER[rung])],
    )
