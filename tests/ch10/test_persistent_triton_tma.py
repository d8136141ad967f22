"""Tensor descriptors make a Triton GEMM faster than pointers, and a persistent grid even faster.

With pointers, every thread computes addresses and masks for its loads and keeps them in registers.
With a tensor descriptor, Hopper's Tensor Memory Accelerator (TMA) loads the tile and stores the
result, checks the bounds and writes the layout that the tensor cores read. How much of the gain is
addresses, registers or the store was not measured. A persistent program loops over many tiles.
Triton merges this loop with the one over k (flatten=True), so that loads for the next tile overlap
the epilogue of this one, and the prologue is paid once per program instead of once per tile. The
evidence counts programs; it does not show the overlap. With descriptors, the kernel has 0.81 to
0.83 of the speed of cuBLAS, the library arm; with a persistent grid as well, it is 1 % faster than
cuBLAS.

Each rung is compared with the one before. Descriptors need rows that start at multiples of 16
bytes. The gain of a persistent grid should shrink as k grows, because prologue and epilogue weigh
less; no other k was measured. It does not help where the last wave of tiles leaves most SMs idle
(test_stream_k.py).
"""

import pytest
import torch

from kernels.ch10 import persistent_matmul
from pytest_aiperf import Bench, Compare, Work, evidence

LADDER = ["pointer", "descriptor", "persistent"]
EVIDENCE = {
    "descriptor": [],  # without TMA, the baseline has no UTMALDG
    # one program per SM instead of one for each of the 2048 tiles
    "persistent": [evidence.grid_size(max=512)],
}


def matrices(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, n, k = bench.size(8192, check=200), bench.size(8192, check=264), bench.size(4096, check=72)
    a = torch.randn(m, k, device=bench.device).half()
    b = torch.randn(n, k, device=bench.device).half()
    return a, b, a.new_empty(m, n)


@pytest.mark.gpu(min_sm=90, cpu=True)
@pytest.mark.parametrize("rung", EVIDENCE)
def test_persistent_triton_tma(compare: Compare, rung: str) -> None:
    compare(
        baseline=getattr(persistent_matmul, LADDER[LADDER.index(rung) - 1]),
        optimized=getattr(persistent_matmul, rung),
        library=lambda a, b, out: torch.mm(a, b.T, out=out),
        against="previous rung",
        inputs=matrices,
        work=lambda a, b, out: Work(
            read=a.nbytes + b.nbytes,
            written=out.nbytes,
            flops=2 * a.numel() * len(b),
            dtype="fp16",
        ),
        reference=lambda a, b, out: a.double() @ b.double().T,
        evidence=[
            evidence.opcode("UTMALDG", kernel=f"_{rung}"),
            evidence.kernels(max=1),
            *EVIDENCE[rung],
        ],
    )
