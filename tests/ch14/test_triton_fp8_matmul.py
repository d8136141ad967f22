"""A Triton GEMM of fp8 operands beats cuBLAS in 16 bits.

The fp8 instructions of the tensor cores multiply twice as many values a clock as the 16-bit ones,
and the operands are half as large, on their way and in shared memory. Both arms multiply the same
numbers, which fp8 represents exactly, so that no quantisation is hidden in the comparison.
"persistent" also loads the next tile while it stores one; cuBLASLt's fp8 GEMM is the library arm.

The gain stays below 2x: power is capped, and the clock falls under twice the work. Hopper adds up
fp8 products with about 14 bits, so that sums over K lose accuracy that bf16 keeps. In use, the
operands must be quantised first, which pays only where it is fused into what produces them
(ch19/fused_rowwise_quantize), and both must lie along K: a transposed operand costs a copy.
"""

import pytest
import torch

from kernels.ch14 import matmul_fp8
from pytest_aiperf import Bench, Compare, Work, evidence

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(bench: Bench) -> Operands:
    """Make two fp8 matrices, the same in 16 bits, and the scale 1."""
    n, k = bench.size(8192, check=256), bench.size(8192, check=128)
    wide = torch.bfloat16 if bench.full else torch.float16  # Triton's interpreter is wrong in bf16
    narrow = [torch.randn(n, k, device=bench.device).to(torch.float8_e4m3fn) for _ in range(2)]
    return *narrow, *(x.to(wide) for x in narrow), torch.ones((), device=bench.device)


def cublaslt(a8, b8, a, b, one):
    return torch._scaled_mm(a8, b8.T, one, one, out_dtype=a.dtype, use_fast_accum=True)


@pytest.mark.parametrize("rung", ["tiles", "persistent"])
def test_triton_fp8_matmul(compare: Compare, rung: str) -> None:
    multiply = getattr(matmul_fp8, rung)
    compare(
        baseline=lambda a8, b8, a, b, one: torch.mm(a, b.T),
        optimized=lambda a8, b8, a, b, one: multiply(a8, b8, a.dtype),
        library=cublaslt,
        against="library",
        inputs=operands,
        work=lambda a8, b8, a, b, one: Work(
            2 * a8.nbytes + 2 * len(a) ** 2, 2 * len(a) ** 2 * a.shape[1], "fp8"
        ),
        reference=lambda a8, b8, a, b, one: a.double() @ b.double().T,
        precision="fp8",
        evidence=[evidence.opcode("*Q*MMA", kernel="_fp8"), evidence.spills(most=0, kernel="_fp8")],
    )
