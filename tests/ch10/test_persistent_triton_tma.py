"""Tensor descriptors make a Triton product faster than pointers, and persistent programs more so.

With pointers every thread computes the addresses and masks of what it loads, and keeps them in
registers that the sums need. A tensor descriptor names the tile instead: the copy engine (TMA) of
Hopper fetches it, checks the bounds and lays it out for the tensor cores. A persistent program
walks through many tiles, so that its loads run ahead into the next one while this one is stored,
and nothing is set up anew for each tile.

Each rung is compared with the one below it; cuBLAS is the library arm. Descriptors ask for rows
that begin at multiples of 16 bytes. The gain shrinks as k grows, because a tile's beginning and end
weigh less, and ends where the last round of tiles leaves most multiprocessors idle.
"""

import pytest
import torch

from kernels.ch10 import persistent_matmul
from pytest_aiperf import Bench, Compare, Work, evidence

LADDER = ["pointer", "descriptor", "persistent"]


def matrices(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, n, k = bench.size(8192, check=200), bench.size(8192, check=264), bench.size(4096, check=72)
    a = torch.randn(m, k, device=bench.device).half()
    b = torch.randn(n, k, device=bench.device).half()
    return a, b, a.new_empty(m, n)


@pytest.mark.parametrize("rung", LADDER[1:])
def test_persistent_triton_tma(compare: Compare, rung: str) -> None:
    compare(
        baseline=getattr(persistent_matmul, LADDER[LADDER.index(rung) - 1]),
        optimized=getattr(persistent_matmul, rung),
        library=lambda a, b, out: torch.mm(a, b.T, out=out),
        against="previous rung",
        inputs=matrices,
        work=lambda a, b, out: Work(
            a.nbytes + b.nbytes + out.nbytes, 2 * a.numel() * len(b), "fp16"
        ),
        reference=lambda a, b, out: a.double() @ b.double().T,
        evidence=[evidence.opcode("UTMALDG", kernel=f"_{rung}"), evidence.kernels(most=1)],
    )
