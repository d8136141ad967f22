"""On Blackwell, warp specialisation should beat one thread that does all (not measured).

Nothing here has been measured. The kernels compile for sm_100a and sm_103a, and have never been
executed: neither that they are right nor that one is faster has been shown, and there is no bar.
The text below says what is expected.

A single thread issues tcgen05.mma, which accumulates in tensor memory (TMEM). In the baseline, that
thread also requests the tiles. A thread that alternates between loading and multiplying has one
load in flight beside one product, and the tensor cores idle during the epilogue. Warp
specialisation overlaps all three: a producer warp loads four stages ahead (TMA), an MMA warp issues
the products, and four warps run the epilogue. Two accumulators in TMEM alternate, so the epilogue
of a tile overlaps the products of the next.

cuBLAS is the library arm. The gain shrinks as k grows, because the epilogue weighs less, and with
two blocks per SM, which fill each other's gaps. Both arms use the same instructions. Three things
change together: the specialised arm has roles, four stages instead of two, and one block per SM,
which loops over tiles.
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
        work=lambda a, b, out, m, n, k: Work(
            read=a.nbytes + b.nbytes, written=out.nbytes, flops=2 * m * n * k, dtype="bf16"
        ),
        reference=lambda a, b, out, m, n, k: a.double() @ b.double().T,
        evidence=[
            evidence.opcode("UTCHMMA", kernel="gemm_specialised"),
            evidence.opcode("UTMALDG.2D", kernel="gemm_specialised"),
            evidence.opcode("LDTM", kernel="gemm_specialised"),
            evidence.spills(kernel="gemm_specialised"),
            evidence.grid_size(max=512),  # one block per SM instead of one for each of 2048 tiles
        ],
    )
