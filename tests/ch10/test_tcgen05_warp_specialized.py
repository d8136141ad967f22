"""Warps with one duty each keep Blackwell's tensor cores busy where one thread by turns does not.

tcgen05.mma is started by a single thread and adds to tensor memory, so neither registers nor other
warps are in its way. A thread that fetches and multiplies by turns has one tile under way beside
the product, and while the sums are carried out nothing is multiplied. With a warp that fetches four
stages ahead, a warp that multiplies and four that store, all three go on at once; two accumulators
in tensor memory take turns, so a tile is stored while the next one is summed.

cuBLAS is the library arm. The gain shrinks as k grows, because carrying out the sums weighs less,
and with two blocks a multiprocessor, which fill each other's gaps. The layout that copies and
products must agree on is checked by the compiler (static_assert) in every build.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence


def matrices(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    n = bench.size(8192, check=512)
    a, b = torch.randn(2, n, n, device=bench.device).bfloat16()
    return a, b, torch.empty_like(a), n, n, n


@pytest.mark.sm100
@pytest.mark.sm103
def test_tcgen05_warp_specialized(compare: Compare, nvcc: Nvcc) -> None:
    gemm = nvcc("ch10/tcgen05_warp_specialized.cu")
    compare(
        baseline=gemm["two_stage"],
        optimized=gemm["specialised"],
        library=lambda a, b, out, m, n, k: torch.mm(a, b.T, out=out),
        against="previous rung",
        inputs=matrices,
        work=lambda a, b, out, m, n, k: Work(3 * a.nbytes, 2 * m * n * k, "bf16"),
        reference=lambda a, b, out, m, n, k: a.double() @ b.double().T,
        evidence=[
            evidence.opcode("UTCHMMA", kernel="gemm_specialised"),
            evidence.opcode("UTMALDG.2D", kernel="gemm_specialised"),
            evidence.opcode("LDTM", kernel="gemm_specialised"),
            evidence.spills(kernel="gemm_specialised"),
        ],
    )
