"""A loop over rows with four or sixteen loads in flight is faster than one with a single load.

Each thread adds up one column of a matrix, as in the gradient of a bias. A GPU thread executes in
order and waits where a loaded value is needed, here at the addition after each load. When the loop
is unrolled by 4 or 16, the compiler moves that many loads before the first addition, so their
latencies overlap. The loop's counter and branch are also executed only once per 4 or 16 rows; their
share of the gain was not measured. The additions keep their order, so all results are
bit-identical. torch.sum, the library arm, is faster than both rungs: it takes 3 to 5 % less time
than the last.

Only the unroll factor differs, and each rung is measured against the one before it. Both baselines
are slower than what a user gets: without a pragma, nvcc unrolls this loop by 16 itself, as in the
last rung. `#pragma unroll 1` and `#pragma unroll 4` hold it back, to show what that unrolling is
worth. In other code it is lost where the loop contains a call, a wait, or a store that may alias
the loads. On an H200 the matrix has four blocks of 256 threads per SM. With more threads, or wider
loads, fewer loads per thread suffice. Both steps together gain 2.7x to 2.9x on H200s and 2.0x on an
H100. The limit is one read of the matrix.
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
