"""out = a @ b.T in three Triton rungs; a is m x k, b is n x k, both row-major.

pointer      One program per tile; every thread computes addresses and masks for its loads.
descriptor   One program per tile, with tensor descriptors: on Hopper and later, TMA loads and
             stores the tiles and handles the bounds.
persistent   One program per SM, which loops over tiles with descriptors, so that the loads of the
             next tile can start while this one is stored.

All rungs use the grouped tile order (L2 swizzle): tiles are numbered column by column within groups
of 8 tile rows, so that concurrent programs share operands in the L2 cache.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

TILE_M, TILE_N, TILE_K = 128, 256, 64
SHAPE = {"TILE_M": TILE_M, "TILE_N": TILE_N, "TILE_K": TILE_K}


@triton.jit
def _tile_origin(tile, m, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return the first row and column of a tile in the grouped order."""
    tiles_n, tiles_m = tl.cdiv(n, TILE_N), tl.cdiv(m, TILE_M)
    group_begin = tile // (8 * tiles_n) * 8
    index, group_rows = tile - group_begin * tiles_n, min(8, tiles_m - group_begin)
    return (group_begin + index % group_rows) * TILE_M, index // group_rows * TILE_N


@triton.jit
def _pointer(  # noqa: PLR0917  Triton kernels take their arguments by position
    a, b, out, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):  # fmt: skip
    top, left = _tile_origin(tl.program_id(0), m, n, TILE_M, TILE_N)
    row, column = top + tl.arange(0, TILE_M), left + tl.arange(0, TILE_N)
    k_offset = tl.arange(0, TILE_K)
    # rows and columns beyond the end wrap around to the first ones; the store masks them
    a_pointers = a + (row % m)[:, None].to(tl.int64) * k + k_offset[None, :]
    b_pointers = b + (column % n)[None, :].to(tl.int64) * k + k_offset[:, None]
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        remaining = k - start
        acc = tl.dot(
            tl.load(a_pointers + start, mask=k_offset[None, :] < remaining, other=0.0),
            tl.load(b_pointers + start, mask=k_offset[:, None] < remaining, other=0.0),
            acc,
        )
    mask = (row < m)[:, None] & (column < n)[None, :]
    out_pointers = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _descriptor(  # noqa: PLR0917  Triton kernels take their arguments by position
    a, b, out, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):  # fmt: skip
    top, left = _tile_origin(tl.program_id(0), m, n, TILE_M, TILE_N)
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        acc = tl.dot(a.load([top, start]), b.load([left, start]).T, acc)
    out.store([top, left], acc.to(out.dtype))


@triton.jit
def _persistent(  # noqa: PLR0917  Triton kernels take their arguments by position
    a, b, out, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(m, TILE_M) * tl.cdiv(n, TILE_N)
    # flatten=True merges both loops into one, so the software pipeline continues across tiles
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        top, left = _tile_origin(tile, m, n, TILE_M, TILE_N)
        acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        for start in range(0, k, TILE_K):
            acc = tl.dot(a.load([top, start]), b.load([left, start]).T, acc)
        out.store([top, left], acc.to(out.dtype))


def _descriptors(a, b, out):
    return (
        TensorDescriptor.from_tensor(a, [TILE_M, TILE_K]),
        TensorDescriptor.from_tensor(b, [TILE_N, TILE_K]),
        TensorDescriptor.from_tensor(out, [TILE_M, TILE_N]),
    )


def _tiles(a, b):
    return triton.cdiv(len(a), TILE_M) * triton.cdiv(len(b), TILE_N)


def pointer(a, b, out):
    size = len(a), len(b), a.shape[1]
    _pointer[(_tiles(a, b),)](a, b, out, *size, **SHAPE, num_warps=8, num_stages=3)


def descriptor(a, b, out):
    size, matrices = (len(a), len(b), a.shape[1]), _descriptors(a, b, out)
    _descriptor[(_tiles(a, b),)](*matrices, *size, **SHAPE, num_warps=8, num_stages=3)


def persistent(a, b, out):
    size, matrices = (len(a), len(b), a.shape[1]), _descriptors(a, b, out)
    programs = 3  # few in Triton's interpreter, so that a program has several tiles
    if a.is_cuda:
        programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    programs = min(programs, _tiles(a, b))
    _persistent[(programs,)](
        *matrices, *size, **SHAPE, PROGRAMS=programs, num_warps=8, num_stages=3
    )
