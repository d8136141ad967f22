"""An FP8 GEMM that adds partial sums in fp32 beats cuBLAS in fp16, with the same accuracy.

Hopper's tensor cores multiply twice as many fp8 values per clock as fp16 ones, but they add the
products with about 14 bits. In a long sum whose terms do not average to zero, such as the gradient
of a weight or an activation with an offset, each new product loses its low bits. Two-level
accumulation (promotion, as in DeepSeek-V3's training and in DeepGEMM) keeps only sums of 128
products in the tensor cores. After each, the sum is added to fp32 accumulators in registers by
ordinary instructions, and the next one starts at zero. The library arm, cuBLASLt without fast
accumulation, is accurate as well and 1.4 times as fast as this kernel: it is what a program should
call.

The arms multiply the same numbers, which are exact in fp8, so that no quantization error enters
the comparison. The operands have an offset, so that sums grow. The tolerance enforces promotion: it
is that of the fp16 result, 0.125 % (root mean square) and 0.2 % for an element. In an emulation of
accumulators with 14 bits, sums of 128 products are off by 0.01 %, less than the rounding to fp16
(0.02 %), and sums of all 8192 by 0.5 % at least. The tolerance of bf16, 1 %, would not tell them
apart.

A second set of accumulators leaves room for tiles of 128 x 128 elements only, where the fastest fp8
kernels (ch14/triton_fp8_matmul) have 128 x 256. That is not what costs most: cuBLASLt promotes in
tiles of 144 x 128 and reaches 97 % of the fp8 limit, this kernel 68 %; the cause was not measured.
Where the sums are short, or their terms average to zero, promotion is not needed.
"""

import pytest
import torch

from kernels.ch10 import promoted_fp8
from pytest_aiperf import Bench, Compare, Work, evidence

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(bench: Bench) -> Operands:
    """Make two fp8 matrices with an offset, the same two in fp16, and the scale 1."""
    n, k = bench.size(8192, check=256), bench.size(8192, check=256)
    fp8 = [(1 + torch.randn(n, k, device=bench.device)).to(torch.float8_e4m3fn) for _ in range(2)]
    return *fp8, *(x.half() for x in fp8), torch.ones((), device=bench.device)


def cublaslt(a8, b8, a, b, one):
    return torch._scaled_mm(a8, b8.T, one, one, out_dtype=a.dtype, use_fast_accum=False)


@pytest.mark.gpu(min_sm=90, cpu=True)
def test_fp8_promoted_gemm(compare: Compare) -> None:
    compare(
        baseline=lambda a8, b8, a, b, one: a @ b.T,
        optimized=lambda a8, b8, a, b, one: promoted_fp8.multiply(a8, b8, a.dtype),
        library=cublaslt,
        against="library",
        inputs=operands,
        work=lambda a8, b8, a, b, one: Work(
            read=a8.nbytes + b8.nbytes,
            written=2 * len(a8) * len(b8),
            flops=2 * a8.numel() * len(b8),
            dtype="fp8",
        ),
        reference=lambda a8, b8, a, b, one: a.double() @ b.double().T,
        evidence=[
            evidence.counter("sm__ops_path_tensor_src_fp8.sum", min=8192**3),
            evidence.opcode("QGMMA", kernel="_promoted"),
            evidence.opcode("FADD", kernel="_promoted", min=64),  # one per element and thread
            evidence.spills(kernel="_promoted"),
        ],
    )
