"""a @ b.T of fp8 matrices in Triton: tensor cores fed by TMA, in two rungs.

tiles        One program per 128 x 256 tile of the result. The accumulators leave no room for a
             second program on the SM, so its tensor cores idle while the tile is stored.
persistent   One program per SM loops over tiles. Triton flattens the loop over tiles and the loop
             over K into one, so that the first loads of the next tile overlap this tile's epilogue.

Both operands are stored along K (K-major), the only layout that Hopper's fp8 instructions read.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SCHEDULE = {"TM": 128, "TN": 256, "TK": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 3}


@triton.jit
def _tile_origin(  # noqa: PLR0917  as in the kernels below
    tile, M, N, TM: tl.constexpr, TN: tl.constexpr, GROUP_M: tl.constexpr
):  # fmt: skip
    """Grouped tile order: groups of GROUP_M rows of tiles, each group column by column."""
    tiles_per_group = GROUP_M * tl.cdiv(N, TN)
    first_row = tile // tiles_per_group * GROUP_M
    group_rows = tl.minimum(tl.cdiv(M, TM) - first_row, GROUP_M)
    row = first_row + tile % tiles_per_group % group_rows
    return row * TM, tile % tiles_per_group // group_rows * TN


@triton.jit
def _tiles_fp8(  # noqa: PLR0917  a Triton launch passes arguments by position
    a, b, c, M, N, K, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, GROUP_M: tl.constexpr
):  # fmt: skip
    m, n = _tile_origin(tl.program_id(0), M, N, TM, TN, GROUP_M)
    accumulator = tl.zeros((TM, TN), tl.float32)
    for k in range(0, K, TK):
        accumulator = tl.dot(a.load([m, k]), b.load([n, k]).T, accumulator)
    c.store([m, n], accumulator.to(c.dtype))


@triton.jit
def _persistent_fp8(  # noqa: PLR0917  a Triton launch passes arguments by position
    a, b, c, M, N, K, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, TM) * tl.cdiv(N, TN), PROGRAMS, flatten=True):
        m, n = _tile_origin(tile, M, N, TM, TN, GROUP_M)
        accumulator = tl.zeros((TM, TN), tl.float32)
        for k in range(0, K, TK):
            accumulator = tl.dot(a.load([m, k]), b.load([n, k]).T, accumulator)
        c.store([m, n], accumulator.to(c.dtype))


def _arguments(a, b, dtype):
    (M, K), N = a.shape, len(b)
    c = torch.empty(M, N, device=a.device, dtype=dtype)
    tm, tn, tk = (SCHEDULE[name] for name in ("TM", "TN", "TK"))
    blocks = (a, [tm, tk]), (b, [tn, tk]), (c, [tm, tn])
    descriptors = [TensorDescriptor.from_tensor(x, block) for x, block in blocks]
    return c, triton.cdiv(M, tm) * triton.cdiv(N, tn), (*descriptors, M, N, K)


def tiles(a, b, dtype):
    c, tile_count, arguments = _arguments(a, b, dtype)
    _tiles_fp8[(tile_count,)](*arguments, **SCHEDULE)
    return c


def persistent(a, b, dtype):
    c, programs, arguments = _arguments(a, b, dtype)
    if a.is_cuda:
        sm_count = torch.cuda.get_device_properties(a.device).multi_processor_count
        programs = min(programs, sm_count)
    _persistent_fp8[(programs,)](*arguments, **SCHEDULE, PROGRAMS=programs)
    return c
