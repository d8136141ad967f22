"""Norm or activation function, then quantization: what runs before each fp8 GEMM of a decoder.

Attention and feed-forward begin with a residual addition and RMSNorm, per token: total =
x + residual; values = total / sqrt(mean(total ** 2) + EPSILON) * weight. Before the second GEMM of
feed-forward, values = silu(gate) * up. An fp8 GEMM reads codes of one byte and a scale per token:
scale = max(abs(values)) / E4M3_MAX; codes = values / scale.

*_then_quantize   Two kernels: the first writes the values in 16 bits, the second reads them again
                  and quantizes. The norm is `one_pass` of ch09, the second kernel that of ch19.
*_quantize        One kernel: the values stay in registers, in fp32.
*_steps           One PyTorch operation per step, for torch.compile.

In all kernels, a block keeps a token's row in registers. The fused kernels do the same arithmetic
as the two kernels, but do not round the values to 16 bits.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import rms_norm, silu

from kernels.ch09.add_rms_norm import EPSILON, one_pass
from kernels.ch19.rowwise_fp8 import E4M3_MAX, MIN_MAGNITUDE, quantize


@triton.jit
def _store_quantized(  # noqa: PLR0917  the arguments of a kernel, in its order
    values, codes, scales, token, offsets, mask,
    E4M3_MAX: tl.constexpr, MIN_MAGNITUDE: tl.constexpr,
):  # fmt: skip
    scale = tl.maximum(tl.max(tl.abs(values), 0), MIN_MAGNITUDE) / E4M3_MAX
    tl.store(codes + offsets, (values / scale).to(codes.dtype.element_ty), mask=mask)
    tl.store(scales + token, scale)


@triton.jit
def _add_norm_quantize(  # noqa: PLR0917  a Triton launch passes arguments by position
    x, residual, weight, total, codes, scales, width, epsilon,
    E4M3_MAX: tl.constexpr, MIN_MAGNITUDE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, ROW)
    mask = column < width
    offsets = token * width + column
    a = tl.load(x + offsets, mask=mask, other=0)
    rounded = a + tl.load(residual + offsets, mask=mask, other=0)
    tl.store(total + offsets, rounded, mask=mask)
    wide = rounded.to(tl.float32)  # the norm uses the rounded sum, which the next layer reads
    rstd = 1 / tl.sqrt(tl.sum(wide * wide, 0) / width + epsilon)
    values = wide * rstd * tl.load(weight + column, mask=mask, other=0).to(tl.float32)
    _store_quantized(values, codes, scales, token, offsets, mask, E4M3_MAX, MIN_MAGNITUDE)


@triton.jit
def _silu_mul(gate_up, out, width, ROW: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, ROW)
    mask = column < width
    gate_at = gate_up + token * 2 * width + column  # a token's gate and up lie side by side
    gate = tl.load(gate_at, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_at + width, mask=mask, other=0).to(tl.float32)
    values = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + token * width + column, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu_mul_quantize(  # noqa: PLR0917  a Triton launch passes arguments by position
    gate_up, codes, scales, width,
    E4M3_MAX: tl.constexpr, MIN_MAGNITUDE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, ROW)
    mask = column < width
    gate_at = gate_up + token * 2 * width + column
    gate = tl.load(gate_at, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_at + width, mask=mask, other=0).to(tl.float32)
    values = gate / (1 + tl.exp(-gate)) * up
    offsets = token * width + column
    _store_quantized(values, codes, scales, token, offsets, mask, E4M3_MAX, MIN_MAGNITUDE)


def _empty_codes(tokens, width, dtype, device):
    codes = torch.empty(tokens, width, dtype=dtype, device=device)
    return codes, torch.empty(tokens, 1, device=device)


def _row_and_warps(width, per_thread):
    """Return the columns of a block and its warps, for a number of elements per thread."""
    row = triton.next_power_of_2(width)
    return row, min(max(row // (32 * per_thread), 1), 32)


def norm_then_quantize(x, residual, weight, dtype):
    norm, total = one_pass(x, residual, weight)
    return *quantize(norm, dtype), total


def norm_quantize(x, residual, weight, dtype):
    total = torch.empty_like(x)
    codes, scales = _empty_codes(*x.shape, dtype, x.device)
    row, warps = _row_and_warps(x.shape[1], per_thread=16)  # as in one_pass
    _add_norm_quantize[(len(x),)](
        *(x, residual, weight, total, codes, scales, x.shape[1], EPSILON),
        *(E4M3_MAX, MIN_MAGNITUDE, row),
        num_warps=warps,
    )
    return codes, scales, total


def silu_mul_then_quantize(gate_up, dtype):
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    values = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    row, warps = _row_and_warps(width, per_thread=32)
    _silu_mul[(tokens,)](gate_up, values, width, row, num_warps=warps)
    return quantize(values, dtype)


def silu_mul_quantize(gate_up, dtype):
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    codes, scales = _empty_codes(tokens, width, dtype, gate_up.device)
    row, warps = _row_and_warps(width, per_thread=32)  # as in both kernels of the baseline
    _silu_mul_quantize[(tokens,)](
        *(gate_up, codes, scales, width, E4M3_MAX, MIN_MAGNITUDE, row), num_warps=warps
    )
    return codes, scales


def _quantize_steps(x, dtype):
    values = x.float()
    scales = values.abs().amax(1, keepdim=True).clamp(min=MIN_MAGNITUDE) / E4M3_MAX
    return (values / scales).to(dtype), scales


def norm_steps(x, residual, weight, dtype):
    total = x + residual
    norm = rms_norm(total, weight.shape, weight, EPSILON)
    return *_quantize_steps(norm, dtype), total


def silu_mul_steps(gate_up, dtype):
    gate, up = gate_up.chunk(2, 1)
    return _quantize_steps(silu(gate) * up, dtype)
