"""Evaluating a NumPy expression chunk by chunk beats evaluating it in place on the whole array.

NumPy evaluates an expression one operation at a time. In place (`out=`), each of the seven
operations here reads the whole array of 128 MiB from main memory and writes it back: seven passes.
For chunks of 256 KiB, all operations but the first find the chunk in a cache, and main memory is
read once for the input and written once for the output: the gain of loop fusion, without a compiler
(cache blocking). The usual form, with a temporary array per operation (the library arm), is slower
than both: the operating system maps and clears fresh pages for each array on the first access, and
those page faults are most of its cost.

A chunk must fit in the cache with its input, and must be large enough to outweigh the Python
overhead of seven calls. The limit is that of the passes, 7x, where an operation takes no longer on
cached data than memory takes to deliver them; NumPy's operations on cached data are slower than
that on one core, so the gain is far less. Hosts offer no counter of the bytes from main memory
here, so the ratio is the only evidence. Arrays that fit in the cache gain nothing; operations
across chunks (sorting, means) cannot be split in this way.
"""

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work

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


def with_temporaries(x, out):
    out[:] = bump(x)


@pytest.mark.host
def test_chunked_fusion_host(compare: Compare) -> None:
    compare(
        baseline=in_place,
        optimized=chunk_by_chunk,
        library=with_temporaries,
        inputs=inputs,
        work=lambda x, out: Work(read=x.nbytes, written=x.nbytes, flops=8 * x.size, dtype="fp32"),
        reference=lambda x, out: 1 - np.square(np.clip((x.astype("d") - 0.1) / 4, -0.5, 0.5) + 0.5),
        metric="wall",
        cache="warm",
    )
