"""One unused word a row ends the bank conflicts of a shared-memory tile.

Shared memory answers a warp from 32 banks at once. With rows of 32 words the 32 lanes that read a
column ask the same bank and wait for each other. With rows of 33 words (padded), or with the
columns of each row reordered by XOR (swizzled), they ask 32 different banks.

A tile is turned many times for each trip to device memory, so shared memory is what binds: its
traffic is 8 bytes an element and turn, its roof 128 bytes a clock and multiprocessor. A turn
writes a row (1 clock a warp either way) and reads a column (32 clocks against 1), which limits
the gain to 33 / 2. A tile used once between load and store is bound by device memory and gains
far less. `work` is left out: it counts device memory, which hardly matters here.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence


def tiles(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    count = bench.size(8192, check=67)
    turns = bench.size(63, check=7)
    a = torch.randn(count, 32, 32, device=bench.device)
    return a, torch.empty_like(a), count, turns


CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"


@pytest.mark.parametrize("rung", ["padded", "swizzled"])
def test_bank_conflicts(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    turn = nvcc("ch06/bank_conflicts.cu")
    compare(
        baseline=turn["conflicted"],
        optimized=turn[rung],
        against="idiomatic",
        inputs=tiles,
        reference=lambda a, out, count, turns: torch.rot90(a, turns, dims=(1, 2)),
        evidence=[evidence.counter(CONFLICTS, most=0.05, per="baseline")],
    )
