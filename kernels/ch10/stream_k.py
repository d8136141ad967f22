"""out = a @ b.T, where the k slices of all tiles are shared out equally: stream-K.

The slices of all tiles form one sequence, which is cut into one equal share per program. A share
has at least as many slices as a tile, so at most two programs work on a tile. The program that has
the tile's first slice owns it. The other one has the last slices; it writes its partial sum to a
workspace and sets a flag, which the owner waits for.

Each program goes through its share from start to end. So the last slices of another program's tile
come first, and the owner, for which that tile is the last one, finds the partial sum ready. All
programs must run at the same time: there is one per SM.
"""

import torch
import triton
import triton.language as tl

from kernels.ch10.persistent_matmul import SHAPE, TILE_M, TILE_N, _descriptors, _tile_origin, _tiles


@triton.jit
def _stream_k(  # noqa: PLR0917  Triton kernels take their arguments by position
    a, b, out, partial_sums, flags, m, n, k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    # from the last share to the first: Triton's interpreter runs one program after the other, and
    # an owner waits for the program with the next share
    share = PROGRAMS - 1 - tl.program_id(0)
    slices = tl.cdiv(k, TILE_K)
    total = tl.cdiv(m, TILE_M) * tl.cdiv(n, TILE_N) * slices
    position, end = total * share // PROGRAMS, total * (share + 1) // PROGRAMS
    offsets = tl.arange(0, TILE_M)[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
    while position < end:
        tile, first = position // slices, position % slices
        last = min(slices, first + end - position)
        top, left = _tile_origin(tile, m, n, TILE_M, TILE_N)
        acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        for i in range(first, last):
            acc = tl.dot(a.load([top, i * TILE_K]), b.load([left, i * TILE_K]).T, acc)
        if first > 0:
            tl.store(partial_sums + share * TILE_M * TILE_N + offsets, acc)
            tl.debug_barrier()  # all threads have stored their part
            tl.atomic_xchg(flags + share, 1, sem="release")
        else:
            if last < slices:
                # the flag is cleared for the next call
                while tl.atomic_cas(flags + share + 1, 1, 0, sem="acquire") == 0:
                    pass
                tl.debug_barrier()
                acc += tl.load(partial_sums + (share + 1) * TILE_M * TILE_N + offsets)
            out.store([top, left], acc.to(out.dtype))
        position += last - first


def stream_k(a, b, _out):
    """Return the product with a workspace of its own: a partial sum and a flag per program."""
    programs = 3  # few in Triton's interpreter
    if a.is_cuda:
        programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    assert programs <= _tiles(a, b), "a share must not be shorter than a tile"
    partial_sums = torch.empty(programs, TILE_M, TILE_N, device=a.device)
    flags = torch.zeros(programs, dtype=torch.int32, device=a.device)

    def run(a, b, out):
        size, matrices = (len(a), len(b), a.shape[1]), _descriptors(a, b, out)
        _stream_k[(programs,)](
            *matrices, partial_sums, flags, *size, **SHAPE, PROGRAMS=programs,
            num_warps=8, num_stages=3,
        )  # fmt: skip

    return run
