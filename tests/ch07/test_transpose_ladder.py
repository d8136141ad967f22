"""A tile without bank conflicts transposes a matrix at the speed of a copy.

Turning tiles in shared memory makes both sides of a transposition coalesced: rows in, rows out. But
a tile of 32 words a row lies with each of its columns in one bank, so that reading a column takes
32 clocks instead of one, and shared memory becomes slower than device memory. One unused word a row
("padded") spreads a column over all banks. "swizzled" gets there without unused words, in tiles of
64 x 64 that 16-byte accesses fill and empty: a quarter of the instructions, 256 bytes in a row.

The limit is the time of a copy. Where the matrix stays in the L2 cache, or is transposed by the
kernel that needs it anyway, there is less or nothing to win. torch's own transposing copy is the
library arm; it leaves the rearranging to the caches.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"
ACCESSES = {"padded": "LDS", "swizzled": "LDS.128"}


def matrix(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(8192, check=128)
    a = torch.randn(n, n, device=bench.device)
    return a, torch.empty_like(a), n


@pytest.mark.parametrize("rung", ACCESSES)
def test_transpose_ladder(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    transpose = nvcc("ch07/transpose.cu")
    compare(
        baseline=transpose["conflicted"],
        optimized=transpose[rung],
        library=lambda a, out, n: out.copy_(a.T),
        against="idiomatic",  # both rungs are ways out of the same tile, not steps on each other
        inputs=matrix,
        work=lambda a, out, n: Work(bytes=2 * a.nbytes),
        reference=lambda a, out, n: a.T,
        evidence=[
            evidence.opcode(ACCESSES[rung], kernel=f"transpose_{rung}", least=4),
            evidence.counter(CONFLICTS, kernel="transpose", most=0.1, per="baseline"),
        ],
    )
