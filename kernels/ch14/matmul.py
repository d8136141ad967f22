"""a @ b by tiles in Triton: one kernel, and the schedules that lead to a fast one.

default     64 x 64 tiles, a row of them after the other: what a first kernel looks like.
larger      128 x 256 tiles. A tile loads K * (TM + TN) values for K * TM * TN multiplications, so
            the traffic between L2 and multiprocessors falls to 3/8.
autotuned   Triton times some schedules at the first call for a shape, and keeps the fastest. All
            walk the tiles in bands of rows: those that run at the same time form a block rather
            than a strip, and share more of what they load from device memory.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _matmul(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    a, b, c, M, N, K, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, BAND: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0)
    in_band = BAND * (N // TN)
    first = tile // in_band * BAND
    height = tl.minimum(M // TM - first, BAND)
    rows = (first + tile % in_band % height) * TM + tl.arange(0, TM)[:, None]
    columns = tile % in_band // height * TN + tl.arange(0, TN)[None, :]
    left = a + rows * K + tl.arange(0, TK)[None, :]
    right = b + tl.arange(0, TK)[:, None] * N + columns
    total = tl.zeros((TM, TN), tl.float32)
    for _ in range(0, K, TK):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += TK
        right += TK * N
    tl.store(c + rows * N + columns, total.to(c.dtype.element_ty))


def _schedule(*tile, BAND, num_warps, num_stages):
    shape = dict(zip(("TM", "TN", "TK"), tile, strict=True))
    return triton.Config(shape | {"BAND": BAND}, num_warps=num_warps, num_stages=num_stages)


DEFAULT = _schedule(64, 64, 32, BAND=1, num_warps=4, num_stages=3)
LARGER = _schedule(128, 256, 64, BAND=1, num_warps=8, num_stages=3)
SCHEDULES = [
    _schedule(128, 256, 64, BAND=8, num_warps=8, num_stages=3),
    _schedule(128, 256, 64, BAND=8, num_warps=8, num_stages=4),
    _schedule(128, 256, 64, BAND=16, num_warps=8, num_stages=4),
    _schedule(256, 128, 64, BAND=8, num_warps=8, num_stages=4),
    _schedule(128, 128, 64, BAND=8, num_warps=4, num_stages=4),
]


# The interpreter of the check has no clock to tune with.
_tuned = triton.autotune(
    SCHEDULES[: 1 if triton.knobs.runtime.interpret else None], key=["M", "N", "K"]
)(_matmul)


def _run(kernel, a, b, **schedule):
    c = torch.empty(len(a), b.shape[1], device=a.device, dtype=a.dtype)
    kernel[lambda chosen: (len(a) // chosen["TM"] * (b.shape[1] // chosen["TN"]),)](
        a, b, c, len(a), b.shape[1], len(b), **schedule
    )
    return c


def default(a, b):
    return _run(_matmul, a, b, **DEFAULT.all_kwargs())


def larger(a, b):
    return _run(_matmul, a, b, **LARGER.all_kwargs())


def autotuned(a, b):
    return _run(_tuned, a, b)
