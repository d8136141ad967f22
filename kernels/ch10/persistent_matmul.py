"""out = a @ b.T in three Triton rungs; a is m x k, b is n x k, both row-major.

pointer      one program a tile; every thread computes addresses and masks, and loads through them.
descriptor   one program a tile; tensor descriptors name the tiles, and on Hopper and later the copy
             engine (TMA) fetches and stores them: bounds are its business.
persistent   as many programs as multiprocessors, each walking through tiles with descriptors, so
             that the fetches of the next tile may begin while this one is stored.

All walk the tiles in groups of 8 rows, whose operands are then shared in the L2 cache.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS, COLUMNS, DEPTH = 128, 256, 64
SHAPE = {"ROWS": ROWS, "COLUMNS": COLUMNS, "DEPTH": DEPTH}


@triton.jit
def _corner(tile, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Give the first row and column of a tile."""
    across, down = tl.cdiv(n, COLUMNS), tl.cdiv(m, ROWS)
    first = tile // (8 * across) * 8
    inside, rows = tile - first * across, min(8, down - first)
    return (first + inside % rows) * ROWS, inside // rows * COLUMNS


@triton.jit
def _pointer(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    a, b, out, m, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    top, left = _corner(tl.program_id(0), m, n, ROWS, COLUMNS)
    row, column, depth = top + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    # rows and columns beyond the end fetch the first ones again: only the store leaves them out
    x = a + (row % m)[:, None].to(tl.int64) * k + depth[None, :]
    y = b + (column % n)[None, :].to(tl.int64) * k + depth[:, None]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, k, DEPTH):
        left_over = k - at
        sums = tl.dot(
            tl.load(x + at, mask=depth[None, :] < left_over, other=0.0),
            tl.load(y + at, mask=depth[:, None] < left_over, other=0.0),
            sums,
        )
    inside = (row < m)[:, None] & (column < n)[None, :]
    to = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _descriptor(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    a, b, out, m, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    top, left = _corner(tl.program_id(0), m, n, ROWS, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, k, DEPTH):
        sums = tl.dot(a.load([top, at]), b.load([left, at]).T, sums)
    out.store([top, left], sums.to(out.dtype))


@triton.jit
def _persistent(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    a, b, out, m, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(m, ROWS) * tl.cdiv(n, COLUMNS)
    # flattened, the two loops are one, whose software pipeline runs on from tile to tile
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        top, left = _corner(tile, m, n, ROWS, COLUMNS)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, k, DEPTH):
            sums = tl.dot(a.load([top, at]), b.load([left, at]).T, sums)
        out.store([top, left], sums.to(out.dtype))


def _described(a, b, out):
    return (
        TensorDescriptor.from_tensor(a, [ROWS, DEPTH]),
        TensorDescriptor.from_tensor(b, [COLUMNS, DEPTH]),
        TensorDescriptor.from_tensor(out, [ROWS, COLUMNS]),
    )


def _tiles(a, b):
    return triton.cdiv(len(a), ROWS) * triton.cdiv(len(b), COLUMNS)


def pointer(a, b, out):
    size = len(a), len(b), a.shape[1]
    _pointer[(_tiles(a, b),)](a, b, out, *size, **SHAPE, num_warps=8, num_stages=3)


def descriptor(a, b, out):
    size, matrices = (len(a), len(b), a.shape[1]), _described(a, b, out)
    _descriptor[(_tiles(a, b),)](*matrices, *size, **SHAPE, num_warps=8, num_stages=3)


def persistent(a, b, out):
    size, matrices = (len(a), len(b), a.shape[1]), _described(a, b, out)
    programs = 3  # without a GPU: so that a program has several tiles
    if a.is_cuda:
        programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    programs = min(programs, _tiles(a, b))
    _persistent[(programs,)](
        *matrices, *size, **SHAPE, PROGRAMS=programs, num_warps=8, num_stages=3
    )
