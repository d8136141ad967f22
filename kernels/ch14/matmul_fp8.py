"""a @ b.T of fp8 matrices in Triton: tensor cores fed by the bulk copy engine, in two rungs.

tiles        a program for each 128 x 256 tile of the result. While a program stores its tile, its
             multiprocessor computes nothing: the accumulators leave no room for a second program.
persistent   a program for each multiprocessor, which goes from tile to tile. The loop over tiles
             and the loop over K are one, so that the first loads of the next tile are under way
             while this one is stored.

Both operands are stored along K, the one layout that the fp8 instructions of Hopper read.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SCHEDULE = {"TM": 128, "TN": 256, "TK": 128, "BAND": 8, "num_warps": 8, "num_stages": 3}


@triton.jit
def _corner(  # noqa: PLR0917  as below
    tile, M, N, TM: tl.constexpr, TN: tl.constexpr, BAND: tl.constexpr
):  # fmt: skip
    """Where a tile starts: bands of BAND rows of tiles, each band column by column."""
    in_band = BAND * tl.cdiv(N, TN)
    first = tile // in_band * BAND
    height = tl.minimum(tl.cdiv(M, TM) - first, BAND)
    return (first + tile % in_band % height) * TM, tile % in_band // height * TN


@triton.jit
def _tiles_fp8(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    a, b, c, M, N, K, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, BAND: tl.constexpr
):  # fmt: skip
    m, n = _corner(tl.program_id(0), M, N, TM, TN, BAND)
    total = tl.zeros((TM, TN), tl.float32)
    for k in range(0, K, TK):
        total = tl.dot(a.load([m, k]), b.load([n, k]).T, total)
    c.store([m, n], total.to(c.dtype))


@triton.jit
def _persistent_fp8(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    a, b, c, M, N, K, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, BAND: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, TM) * tl.cdiv(N, TN), PROGRAMS, flatten=True):
        m, n = _corner(tile, M, N, TM, TN, BAND)
        total = tl.zeros((TM, TN), tl.float32)
        for k in range(0, K, TK):
            total = tl.dot(a.load([m, k]), b.load([n, k]).T, total)
        c.store([m, n], total.to(c.dtype))


def _arguments(a, b, kind):
    (M, K), N = a.shape, len(b)
    c = torch.empty(M, N, device=a.device, dtype=kind)
    tm, tn, tk = (SCHEDULE[name] for name in ("TM", "TN", "TK"))
    blocks = (a, [tm, tk]), (b, [tn, tk]), (c, [tm, tn])
    maps = [TensorDescriptor.from_tensor(x, block) for x, block in blocks]
    return c, triton.cdiv(M, tm) * triton.cdiv(N, tn), (*maps, M, N, K)


def tiles(a, b, kind):
    c, count, arguments = _arguments(a, b, kind)
    _tiles_fp8[(count,)](*arguments, **SCHEDULE)
    return c


def persistent(a, b, kind):
    c, count, arguments = _arguments(a, b, kind)
    if a.is_cuda:
        count = min(count, torch.cuda.get_device_properties(a.device).multi_processor_count)
    _persistent_fp8[(count,)](*arguments, **SCHEDULE, PROGRAMS=count)
    return c
