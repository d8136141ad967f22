"""Each step of Hopper's matrix path beats the one before it, up to the library's speed.

With mma.sync, a warp carries every fragment through its registers, and 36 % of the tensor cores'
rate is reached: reading the fragments keeps shared memory busy for longer than the products take.
wgmma lets four warps name whole tiles in shared memory: one instruction multiplies 64 x 128 x 16.
Each step still waits for its product, and all threads copy in between. "tma" changes two things:
the copy engine fetches the tiles, so that no thread computes addresses and an mbarrier says when
the bytes are there, and the next product is under way while the block waits for the one before. At
last the warps specialise: one thread fetches ahead, two warpgroups multiply tiles of 128 x 256, and
the fetches of the next tile run while this one is stored.

Each rung is compared with the one below it, on the same operands (b transposed, as in a linear
layer); cuBLAS is the library arm. All rungs need whole tiles. The limit is the tensor cores' power:
at 8192 an H200 lowers its clock, and random data cost more of it than zeros. Small products gain
less, since their tiles do not fill the multiprocessors.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LADDER = ["mma_sync", "wgmma", "tma", "specialised"]
OPCODES = {
    "wgmma": ["HGMMA.64x128x16", "LDGSTS"],
    "tma": ["HGMMA.64x128x16", "UTMALDG.2D"],
    "specialised": ["HGMMA.64x256x16", "UTMALDG.2D", "USETMAXREG"],
}


def matrices(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    n = bench.size(8192, check=512)
    a, b = torch.randn(2, n, n, device=bench.device).bfloat16()
    return a, b, torch.empty_like(a), n, n, n


@pytest.mark.sm90
@pytest.mark.parametrize("rung", OPCODES)
def test_wgmma_ladder(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    gemm = nvcc("ch10/wgmma_ladder.cu")
    compare(
        baseline=gemm[LADDER[LADDER.index(rung) - 1]],
        optimized=gemm[rung],
        library=lambda a, b, out, m, n, k: torch.mm(a, b.T, out=out),
        against="previous rung",
        inputs=matrices,
        work=lambda a, b, out, m, n, k: Work(3 * a.nbytes, 2 * m * n * k, "bf16"),
        reference=lambda a, b, out, m, n, k: a.double() @ b.double().T,
        evidence=[
            *(evidence.opcode(name, kernel=f"gemm_{rung}") for name in OPCODES[rung]),
            evidence.spills(kernel=f"gemm_{rung}"),
        ],
    )
