"""A gated MLP with fp8 weights, for many tokens (prefill) and for one token (decode).

prefill   Arithmetic is the limit, so the GEMMs multiply fp8 operands. The kernel that normalizes a
          row and the kernel that applies the gate also quantize their results, so no 16-bit copy of
          them is written. The GEMMs are library calls.
decode    Reading the weights is the limit. Two matrix-vector kernels convert the weights in
          registers and do not quantize the token. The norm scales the whole token by one
          factor, so the kernel applies it after the product. Weights are copied to shared memory
          several steps ahead (a software pipeline of asynchronous copies), because loads in
          registers would keep fewer bytes in flight. A block has only two warps, which leaves room
          for more blocks per SM: others may copy while one adds up its products.

Each row of a weight (an output) and each token has a scale of its own.
"""

import torch
import triton
import triton.language as tl

FP8_MAX = 448
"""The largest finite value of float8_e4m3fn."""

EPSILON = tl.constexpr(1e-6)
"""Added to the mean square in RMSNorm."""

GATE_UP_TILE = {"ROWS": 4, "STEP": 512, "STAGES": 4, "num_warps": 2}
"""Outputs of a block, inputs per step, pipeline stages and warps: the fastest of 55 on an H200."""

DOWN_TILE = {"ROWS": 4, "STEP": 1024, "STAGES": 3, "num_warps": 2}
"""The same for the second kernel: the fastest of 72 on an H200."""


@triton.jit
def _store_quantized(  # noqa: PLR0917  a Triton launch passes arguments by position
    values, at, columns, out, scales, FP8_MAX: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / FP8_MAX
    quantized = (values / scale).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * columns + at, quantized)
    tl.store(scales + row, scale)


@triton.jit
def _norm_quantize(x, out, scales, WIDTH: tl.constexpr, FP8_MAX: tl.constexpr):
    at = tl.arange(0, WIDTH)
    row = tl.load(x + tl.program_id(0).to(tl.int64) * WIDTH + at).to(tl.float32)
    row *= tl.rsqrt(tl.sum(row * row, 0) / WIDTH + EPSILON)
    _store_quantized(row, at, WIDTH, out, scales, FP8_MAX)


@triton.jit
def _gate_quantize(gate_up, out, scales, INNER: tl.constexpr, FP8_MAX: tl.constexpr):
    at = tl.arange(0, INNER)
    start = gate_up + tl.program_id(0).to(tl.int64) * 2 * INNER
    gate = tl.load(start + at).to(tl.float32)
    row = gate * tl.sigmoid(gate) * tl.load(start + INNER + at).to(tl.float32)
    _store_quantized(row, at, INNER, out, scales, FP8_MAX)


@triton.jit
def _gate_up_token(  # noqa: PLR0917  a Triton launch passes arguments by position
    x, weight, scales, out, width, inner,
    ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, STEP)
    gate_rows = weight + row[:, None].to(tl.int64) * width + at[None, :]
    up_rows = gate_rows + inner.to(tl.int64) * width
    gate, up = tl.zeros((ROWS, STEP), tl.float32), tl.zeros((ROWS, STEP), tl.float32)
    squares = tl.zeros((STEP,), tl.float32)
    for first in tl.range(0, width, STEP, num_stages=STAGES):
        token = tl.load(x + first + at).to(tl.float32)
        squares += token * token
        gate += tl.load(gate_rows + first).to(tl.float32) * token[None, :]
        up += tl.load(up_rows + first).to(tl.float32) * token[None, :]
    rms_factor = tl.rsqrt(tl.sum(squares, 0) / width + EPSILON)
    g = tl.sum(gate, 1) * tl.load(scales + row) * rms_factor
    u = tl.sum(up, 1) * tl.load(scales + inner + row) * rms_factor
    tl.store(out + row, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty))


@triton.jit
def _down_token(  # noqa: PLR0917  a Triton launch passes arguments by position
    hidden, weight, scales, x, out, inner,
    ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, STEP)
    weight_rows = weight + row[:, None].to(tl.int64) * inner + at[None, :]
    partial_sums = tl.zeros((ROWS, STEP), tl.float32)
    for first in tl.range(0, inner, STEP, num_stages=STAGES):
        token = tl.load(hidden + first + at).to(tl.float32)
        partial_sums += tl.load(weight_rows + first).to(tl.float32) * token[None, :]
    y = tl.sum(partial_sums, 1) * tl.load(scales + row) + tl.load(x + row).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty))


def quantized(weight, dtype):
    """Return a weight (outputs x inputs) in ``dtype`` and the scale of each output."""
    scale = weight.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / FP8_MAX
    return (weight / scale).to(dtype), scale


def _fp8_gemm(a, a_scale, b, b_scale, out_dtype):
    if not a.is_cuda:  # PyTorch has no fp8 GEMM on the CPU
        return ((a.float() @ b.float().T) * a_scale * b_scale.T).to(out_dtype)
    return torch._scaled_mm(  # noqa: SLF001  torch has no public name for it
        a, b.T, a_scale, b_scale.T, out_dtype=out_dtype, use_fast_accum=True
    )


def prefill(x, gate_up, gate_up_scale, down, down_scale):
    (tokens, width), inner = x.shape, down.shape[1]
    scales = torch.empty(tokens, 1, device=x.device)
    x_fp8 = torch.empty_like(x, dtype=down.dtype)
    _norm_quantize[(tokens,)](x, x_fp8, scales, width, FP8_MAX, num_warps=8)
    projected = _fp8_gemm(x_fp8, scales, gate_up, gate_up_scale, x.dtype)
    scales, hidden = torch.empty_like(scales), projected.new_empty(tokens, inner, dtype=down.dtype)
    _gate_quantize[(tokens,)](projected, hidden, scales, inner, FP8_MAX, num_warps=16)
    return x + _fp8_gemm(hidden, scales, down, down_scale, x.dtype)


def decode(x, gate_up, gate_up_scale, down, down_scale):
    width, inner = down.shape
    hidden, out = x.new_empty(inner), torch.empty_like(x)
    _gate_up_token[(inner // GATE_UP_TILE["ROWS"],)](
        x, gate_up, gate_up_scale, hidden, width, inner, **fitted(GATE_UP_TILE, width)
    )
    _down_token[(width // DOWN_TILE["ROWS"],)](
        hidden, down, down_scale, x, out, inner, **fitted(DOWN_TILE, inner)
    )
    return out


def fitted(tile, inputs):
    """Return a tile whose step is at most the number of inputs."""
    return tile | {"STEP": min(tile["STEP"], inputs)}
