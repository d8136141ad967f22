"""Shared-memory tiles that are padded or swizzled beat tiles whose columns share a bank.

Shared memory has 32 banks, and each serves one word per clock. With rows of 32 words, the 32 lanes
that read a column access the same bank and are served one after the other. With one unused word per
row (33 words, "padded"), or with the columns of each row permuted by XOR ("swizzled"), they access
32 different banks.

Each tile is rotated many times per trip to device memory, so shared memory is the bottleneck: 8
bytes per element and rotation, at 128 bytes per clock and SM. Both arms are loops built to isolate
the conflicts, so the baseline is declared naive. A rotation writes a row (1 clock per warp in
either layout) and reads a column (32 clocks against 1), which limits the gain to 33 / 2. On an H200
the two layouts reach 13.4x, and their tiles move 25.8 TB/s through shared memory, 77 % of the 33.5
TB/s that 132 SMs have at 1980 MHz. Of the 163 µs, shared memory takes 126 at its full rate. Loading
and storing the tiles takes 16 at most, since other blocks hide a part. The last round, in which
some SMs idle (8192 tiles fill the GPU 7.8 times), takes 5 at most. At least 16 µs are unexplained:
probably the barriers, since all warps of a block wait for each other after each write and after
each read. `work` is omitted, since it counts device memory, which is not the limit. A tile that is
used once between load and store gains far less (2.2x in ch07/transpose_ladder): without conflicts,
device memory is its limit.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence


def tiles(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    count = bench.size(8192, check=67)
    rotations = bench.size(63, check=7)
    a = torch.randn(count, 32, 32, device=bench.device)
    return a, torch.empty_like(a), count, rotations


CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"


@pytest.mark.parametrize("rung", ["padded", "swizzled"])
def test_bank_conflicts(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    rotate = nvcc("ch06/bank_conflicts.cu")
    compare(
        baseline=rotate["conflicted"],
        optimized=rotate[rung],
        against="naive",  # a loop built to isolate the conflicts, not a kernel that users run
        inputs=tiles,
        reference=lambda a, out, count, rotations: torch.rot90(a, rotations, dims=(1, 2)),
        evidence=[evidence.counter(CONFLICTS, max=0.05, per="baseline")],
    )
