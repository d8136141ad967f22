"""A gated MLP with weights in fp8, for many tokens and for one: four Triton kernels.

prefill   arithmetic binds, so that the products shall be of fp8 as well: the kernel that normalises
          a row and the one that applies the gate also quantise it, and no value in 16 bits is
          written in between. The products themselves are the library's.
decode    little is done but reading the weights. They are widened in registers and the token is not
          quantised at all; of the norm no more is left than a factor, since it commutes with the
          product.

Each row of a weight (an output) and each token has a scale of its own.
"""

import torch
import triton
import triton.language as tl

LARGEST = 448  # of float8_e4m3fn
EPSILON = tl.constexpr(1e-6)


@triton.jit
def _store_quantised(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    values, at, columns, out, scales, LARGEST: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / LARGEST
    quantised = (values / scale).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * columns + at, quantised)
    tl.store(scales + row, scale)


@triton.jit
def _norm_quantise(x, out, scales, WIDTH: tl.constexpr, LARGEST: tl.constexpr):
    at = tl.arange(0, WIDTH)
    row = tl.load(x + tl.program_id(0).to(tl.int64) * WIDTH + at).to(tl.float32)
    row *= tl.rsqrt(tl.sum(row * row, 0) / WIDTH + EPSILON)
    _store_quantised(row, at, WIDTH, out, scales, LARGEST)


@triton.jit
def _gate_quantise(both, out, scales, INNER: tl.constexpr, LARGEST: tl.constexpr):
    at = tl.arange(0, INNER)
    start = both + tl.program_id(0).to(tl.int64) * 2 * INNER
    gate = tl.load(start + at).to(tl.float32)
    row = gate * tl.sigmoid(gate) * tl.load(start + INNER + at).to(tl.float32)
    _store_quantised(row, at, INNER, out, scales, LARGEST)


@triton.jit
def _gate_up_token(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    x, weight, scales, out, width, inner, ROWS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, STEP)
    gates = weight + row[:, None].to(tl.int64) * width + at[None, :]
    ups = gates + inner.to(tl.int64) * width
    gate, up = tl.zeros((ROWS, STEP), tl.float32), tl.zeros((ROWS, STEP), tl.float32)
    squares = tl.zeros((STEP,), tl.float32)
    for first in range(0, width, STEP):
        token = tl.load(x + first + at).to(tl.float32)
        squares += token * token
        gate += tl.load(gates + first).to(tl.float32) * token[None, :]
        up += tl.load(ups + first).to(tl.float32) * token[None, :]
    factor = tl.rsqrt(tl.sum(squares, 0) / width + EPSILON)
    g = tl.sum(gate, 1) * tl.load(scales + row) * factor
    u = tl.sum(up, 1) * tl.load(scales + inner + row) * factor
    tl.store(out + row, g * tl.sigmoid(g) * u)


@triton.jit
def _down_token(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    hidden, weight, scales, x, out, inner, ROWS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, STEP)
    rows = weight + row[:, None].to(tl.int64) * inner + at[None, :]
    total = tl.zeros((ROWS, STEP), tl.float32)
    for first in range(0, inner, STEP):
        token = tl.load(hidden + first + at)
        total += tl.load(rows + first).to(tl.float32) * token[None, :]
    y = tl.sum(total, 1) * tl.load(scales + row) + tl.load(x + row).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty))


def quantised(weight, kind):
    """Give a weight (outputs x inputs) in fewer bits, and the scale of each output."""
    scale = weight.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (weight / scale).to(kind), scale


def _product(a, a_scale, b, b_scale, wide):
    if not a.is_cuda:  # there are no fp8 products on a CPU
        return ((a.float() @ b.float().T) * a_scale * b_scale.T).to(wide)
    return torch._scaled_mm(  # noqa: SLF001  torch has no public name for it
        a, b.T, a_scale, b_scale.T, out_dtype=wide, use_fast_accum=True
    )


def prefill(x, gate_up, gate_up_scale, down, down_scale):
    (tokens, width), inner = x.shape, down.shape[1]
    scales = torch.empty(tokens, 1, device=x.device)
    narrow = torch.empty_like(x, dtype=down.dtype)
    _norm_quantise[(tokens,)](x, narrow, scales, width, LARGEST, num_warps=8)
    both = _product(narrow, scales, gate_up, gate_up_scale, x.dtype)
    scales, hidden = torch.empty_like(scales), both.new_empty(tokens, inner, dtype=down.dtype)
    _gate_quantise[(tokens,)](both, hidden, scales, inner, LARGEST, num_warps=16)
    return x + _product(hidden, scales, down, down_scale, x.dtype)


def decode(x, gate_up, gate_up_scale, down, down_scale):
    width, inner = down.shape
    hidden = torch.empty(inner, device=x.device)
    out = torch.empty_like(x)
    tile = {"ROWS": 4, "STEP": min(1024, width), "num_warps": 4}
    _gate_up_token[(inner // 4,)](x, gate_up, gate_up_scale, hidden, width, inner, **tile)
    _down_token[(width // 4,)](hidden, down, down_scale, x, out, inner, **tile)
    return out
