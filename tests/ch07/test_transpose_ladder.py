"""A transpose whose shared-memory tile has no bank conflicts beats one whose columns share a bank.

Transposing tiles in shared memory makes both sides coalesced: rows in, rows out. But in a tile with
32 words per row, each column lies in one of the 32 banks. Reading a column then takes 32 clocks
instead of one, and shared memory becomes slower than device memory (ch06/bank_conflicts has the
conflicts alone). One unused word per row ("padded") spreads a column over all banks. A swizzle
("swizzled") needs no unused words: it stores the element of row r and column c at place c XOR r. So
lanes that access memory together use different banks, both when they write and when they read. Both
rungs are compared with the tile that has the conflicts.

"vectors" has no conflicts either, and it is compared with "swizzled". All of its accesses have 16
bytes, which takes a quarter of the load and store instructions. For that its tiles are 64 x 64, and
a thread transposes 4 x 4 floats in registers. Here padding would cost 16 bytes per row, so it
swizzles vectors. The limit is the time of a copy, of which "vectors" reaches 92 % on an H200 and 95
% on an H100; what takes the rest was not measured. Where the matrix stays in the L2 cache, or the
kernel that needs the transpose can do it itself, there is less or nothing to gain. The library arm
is torch's own transposing copy, which is slower than all rungs, even the one with conflicts.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
ACCESSES = 1 / 256
"""Accesses of 128 bytes by loads, and as many by stores, per byte that is read or written. If each
of them had a two-way conflict, as many conflicts would be counted."""
NO_CONFLICTS = [
    evidence.counter(CONFLICTS.format(op), kernel="transpose", max=0.5 * ACCESSES, per="work")
    for op in ("ld", "st")
]
LADDER = ["conflicted", "padded", "swizzled", "vectors"]
PROOF = {
    "padded": NO_CONFLICTS,
    "swizzled": NO_CONFLICTS,
    "vectors": [evidence.opcode("LDS.128", kernel="transpose_vectors", min=4), *NO_CONFLICTS],
}


def matrix(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(8256, check=128)
    a = torch.randn(n, n, device=bench.device)
    return a, torch.empty_like(a), n


@pytest.mark.parametrize("rung", PROOF)
def test_transpose_ladder(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    transpose = nvcc("ch07/transpose.cu")
    compare(
        baseline=transpose["swizzled" if rung == "vectors" else LADDER[0]],
        optimized=transpose[rung],
        library=lambda a, out, n: out.copy_(a.T),
        against="previous rung" if rung == "vectors" else "idiomatic",
        inputs=matrix,
        work=lambda a, out, n: Work(read=a.nbytes, written=out.nbytes),
        reference=lambda a, out, n: a.T,
        evidence=PROOF[rung],
    )
