"""Evaluating a NumPy expression chunk by chunk beats evaluating it in place on the whole array.

NumPy evaluates an expression one operation at a time. The usual form makes temporary arrays, up to
one per operation (NumPy may reuse some); the operating system maps and clears fresh pages for each
of them on the first access, and these page faults are part of its cost. So is the copy of its
result into `out`, which is one more pass. "in_place" (`out=`) has no temporaries and no copy, but
each of the seven operations still reads the whole array of 128 MiB from main memory and writes it
back: seven passes. In "chunks" of 256 KiB, all operations but the first find the chunk in a cache,
and main memory is read once for the input and written once for the output: the gain of loop fusion,
without a compiler (cache blocking).

Each rung is judged against the one before it. The evidence of "in_place" is that the page faults
are gone; hosts offer no counter of the bytes from main memory here. For "chunks", a test beside the
claim runs both functions on arrays that record each access, and simulates a cache that keeps the
blocks used last. In place, the array is read from memory 7 times and written back 7 times; by
chunks once each, and 7 times again where a chunk does not fit. (Reads of lines that are then
overwritten are not counted.) A chunk must fit in the cache with its input, and must be large enough
to outweigh the Python overhead of seven calls. The ratio of the passes, 7x, is the limit; it can be
reached only where operations on cached data are faster than memory. The gain here is far less;
NumPy's arithmetic on one core may be too slow for more, which was not measured. Arrays that fit in
the cache gain nothing; operations across chunks (sorting, means) cannot be split in this way.
Compilers fuse loops by themselves (numexpr, Numba, torch.compile). There is no library arm: numexpr
is not among the packages of the course, and torch.compile on the host, which is, was not measured.
So it is open whether a compiler is faster.
"""

from collections import OrderedDict
from typing import ClassVar

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work, evidence

CHUNK = 2**16  # floats: 256 KiB


def values(bench: Bench) -> np.ndarray:
    """Return 128 MiB of repeated numbers: drawing all of them would take longer than the claim."""
    drawn = np.random.default_rng(bench.seed).standard_normal(2**16 + 25, dtype=np.float32)
    return np.tile(drawn, bench.size(512, check=1))


def inputs(bench: Bench) -> tuple[np.ndarray, np.ndarray]:
    x = values(bench)
    return x, np.empty_like(x)


def bump(x):
    """Standardise, clip to three deviations, and weight with a parabola around the mean."""
    return 1 - (((x - 0.1) * 1.5).clip(-3, 3) / 6 + 0.5) ** 2


def bump_into(y, x):
    """Compute `bump` without temporaries: all operations but the first are in place."""
    np.subtract(x, 0.1, out=y)
    y *= 1.5
    np.clip(y, -3, 3, out=y)
    y /= 6
    y += 0.5
    np.square(y, out=y)
    np.subtract(1, y, out=y)


def in_place(x, out):
    bump_into(out, x)


def chunk_by_chunk(x, out):
    for start in range(0, len(x), CHUNK):
        bump_into(out[start : start + CHUNK], x[start : start + CHUNK])


class Recorded(np.ndarray):
    """An array whose operations are recorded: the arrays that each one reads, and its output."""

    operations: ClassVar[list[tuple[list[np.ndarray], np.ndarray]]] = []

    def __array_ufunc__(self, ufunc, method, *inputs, out, **options):
        plain = [x.view(np.ndarray) if isinstance(x, Recorded) else x for x in inputs]
        self.operations.append(([x for x in plain if isinstance(x, np.ndarray)], out[0]))
        getattr(ufunc, method)(*plain, out=out[0].view(np.ndarray), **options)
        return out[0]


def passes_over_memory(evaluate, floats: int, cache_bytes: int, block: int = 2**12) -> float:
    """Count what a least-recently-used cache reads from memory and writes back, in passes.

    An operation walks through its arrays together, block by block.
    """
    arrays = [np.zeros(floats, np.float32) for _ in range(2)]
    Recorded.operations.clear()
    evaluate(*(x.view(Recorded) for x in arrays))
    cache, moved = OrderedDict(), 0  # whether each block has been written
    for inputs, out in Recorded.operations:
        for offset in range(0, out.nbytes, block):
            for x in (*inputs, out):
                number = (x.ctypes.data + offset) // block
                is_dirty = cache.pop(number, None)
                moved += is_dirty is None and x is not out
                cache[number] = x is out or bool(is_dirty)
                if len(cache) > cache_bytes // block:
                    moved += cache.popitem(last=False)[1]
    return (moved + sum(cache.values())) * block / arrays[0].nbytes


@pytest.mark.parametrize(
    ("cache_bytes", "by_chunks"),
    [(2**20, 2), (2**17, 14)],  # a chunk of x and one of the result fit, or do not
)
def test_chunks_that_fit_the_cache_are_read_and_written_once(cache_bytes, by_chunks) -> None:
    n = 16 * CHUNK
    assert passes_over_memory(in_place, n, cache_bytes) == pytest.approx(14, rel=0.1)
    assert passes_over_memory(chunk_by_chunk, n, cache_bytes) == pytest.approx(by_chunks, rel=0.1)


def with_temporaries(x, out):
    out[:] = bump(x)


FEWER_FRESH_PAGES = evidence.page_faults(max=0.5, per="baseline")
RUNGS = {
    "in_place": (with_temporaries, in_place, "naive", [FEWER_FRESH_PAGES]),
    "chunks": (in_place, chunk_by_chunk, "previous rung", []),
}


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_chunked_fusion_host(compare: Compare, rung: str) -> None:
    baseline, optimized, against, proof = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        against=against,
        inputs=inputs,
        work=lambda x, out: Work(read=x.nbytes, written=x.nbytes, flops=8 * x.size, dtype="fp32"),
        reference=lambda x, out: 1 - np.square(np.clip((x.astype("d") - 0.1) / 4, -0.5, 0.5) + 0.5),
        metric="wall",
        cache="warm",
        evidence=proof,
    )
