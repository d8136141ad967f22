"""An FP8 GEMM that adds partial sums in fp32 beats cuBLAS in fp16, with the same accuracy.

Hopper's tensor cores multiply twice as many fp8 values per clock as fp16 ones, but they add the
products with about 14 bits. In a long sum whose terms do not average to zero, such as the gradient
of a weight or an activation with an offset, each new product loses its low bits. Two-level
accumulation (promotion, as in DeepSeek-V3's training and in DeepGEMM) keeps only short sums, of 128
products here, in the tensor cores. After each, the sum is added to fp32 accumulators in registers
by ordinary instructions, and the next one starts at zero. "cublaslt" is cuBLASLt without fast
accumulation: it has that accuracy, and is what a program should call. "triton" is a kernel that
shows how promotion works. It beats fp16 as well, but it is slower than cuBLASLt, its library arm.

The arms multiply the same numbers, which are exact in fp8, so the comparison contains no
quantization error. The time of quantizing is not part of it either (ch19). The operands have an
offset, so that sums grow. The tolerance enforces promotion: it is that of the fp16 result, 0.125 %
(root mean square) and 0.2 % for an element. A test beside the claim checks that fast accumulation
exceeds it. The tolerance of bf16, 1 %, would not tell the two apart.

The limit is 2x, where both types run at the rate of the tensor cores. In "triton", a second set of
accumulators leaves room for tiles of 128 x 128 elements only, where the kernel without promotion
(ch14/triton_fp8_matmul) has 128 x 256. But cuBLASLt's kernel reaches 96 % of the fp8 rate with
tiles that are hardly larger, 144 x 128 by its name, so something else costs more; what it is was
not measured. Where the sums are short, or their terms average to zero, promotion is not needed.
"""

import pytest
import torch

from kernels.ch10 import promoted_fp8
from pytest_aiperf import Bench, Compare, Work, evidence

RMS_TOLERANCE = 0.00125
"""Root mean square that the result may be off by, relative to that of the result, in fp16."""

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(bench: Bench) -> Operands:
    """Make two fp8 matrices with an offset, the same two in fp16, and the scale 1."""
    n, k = bench.size(8192, check=256), bench.size(8192, check=256)
    fp8 = [(1 + torch.randn(n, k, device=bench.device)).to(torch.float8_e4m3fn) for _ in range(2)]
    return *fp8, *(x.half() for x in fp8), torch.ones((), device=bench.device)


def cublaslt(a8, b8, a, b, one, *, fast=False):
    return torch._scaled_mm(a8, b8.T, one, one, out_dtype=a.dtype, use_fast_accum=fast)


def triton(a8, b8, a, b, one):
    return promoted_fp8.multiply(a8, b8, a.dtype)


ON_FP8_UNITS = evidence.counter("sm__ops_path_tensor_src_fp8.sum", min=8192**3)
RUNGS = {
    "cublaslt": (cublaslt, [ON_FP8_UNITS]),
    "triton": (
        triton,
        [
            ON_FP8_UNITS,
            evidence.opcode("QGMMA", kernel="_promoted"),
            evidence.opcode("FADD", kernel="_promoted", min=64),  # one per element and thread
            evidence.spills(kernel="_promoted"),
        ],
    ),
}


def test_fast_accumulation_is_not_accurate_enough() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper's tensor cores add fp8 products with 14 bits")
    n = 8192
    a8, b8 = (
        (1 + torch.randn(rows, n, device="cuda")).to(torch.float8_e4m3fn) for rows in (256, n)
    )
    one, expected = torch.ones((), device="cuda"), a8.double() @ b8.double().T
    errors = {}
    for fast in (False, True):
        difference = cublaslt(a8, b8, a8.half(), b8.half(), one, fast=fast).double() - expected
        errors[fast] = float((difference.square().mean() / expected.square().mean()).sqrt())
    assert errors[False] <= RMS_TOLERANCE < errors[True]


@pytest.mark.gpu(min_sm=90, cpu=True)
@pytest.mark.parametrize("rung", RUNGS)
def test_fp8_promoted_gemm(compare: Compare, rung: str) -> None:
    optimized, proof = RUNGS[rung]
    compare(
        baseline=lambda a8, b8, a, b, one: a @ b.T,
        optimized=optimized,
        library=cublaslt if rung == "triton" else None,
        against="library",
        inputs=operands,
        work=lambda a8, b8, a, b, one: Work(
            read=a8.nbytes + b8.nbytes,
            written=2 * len(a8) * len(b8),
            flops=2 * a8.numel() * len(b8),
            dtype="fp8",
        ),
        reference=lambda a8, b8, a, b, one: a.double() @ b.double().T,
        evidence=proof,
    )
