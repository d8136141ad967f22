"""Quantise each row of a matrix to fp8 with a scale of its own, in one pass, in Triton.

A block holds a whole row in its registers: it finds the largest magnitude, divides the row by the
scale that follows from it, and stores 1 byte an element. The row is loaded once.
"""

import torch
import triton
import triton.language as tl

LARGEST = 448  # of float8_e4m3fn
TINY = 1e-12  # so that a row of zeros has a scale, too


@triton.jit
def _quantize(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    x, out, scales, columns, LARGEST: tl.constexpr, TINY: tl.constexpr, ROW: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    start = program.to(tl.int64) * columns
    at = tl.arange(0, ROW)
    row = tl.load(x + start + at, mask=at < columns, other=0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(row), 0), TINY) / LARGEST
    tl.store(out + start + at, (row / scale).to(out.dtype.element_ty), mask=at < columns)
    tl.store(scales + program, scale)


def quantize(x, kind):
    out = torch.empty_like(x, dtype=kind)
    scales = torch.empty(len(x), 1, device=x.device)
    row = triton.next_power_of_2(x.shape[1])
    # 32 elements a thread: four loads of 16 bytes in flight
    warps = min(max(row // 1024, 1), 32)
    _quantize[(len(x),)](x, out, scales, x.shape[1], LARGEST, TINY, row, num_warps=warps)
    return out, scales
