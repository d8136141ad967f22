"""Evaluating a NumPy expression chunk by chunk beats evaluating it with whole-array temporaries.

NumPy evaluates an expression one operation at a time, and six of the seven here write to a new
array. With results of 32 MiB, each operation reads its input from main memory and writes its result
to fresh pages, which the operating system maps and clears on the first access (page faults). For
chunks of 128 KiB the temporaries stay in the L2 cache and reuse the same memory, so main memory is
read once for the input and written once for the output: the gain of loop fusion, without a
compiler. In-place operations on the whole array (`out=`, the library arm) avoid the page faults,
too, and can beat chunks where memory bandwidth is high.

The baseline is naive, because the page faults are most of its cost. A chunk and its temporaries
must fit in the cache, and must be large enough to outweigh the Python overhead of eight calls.
Arrays that fit in the cache gain little; operations across chunks (sorting, means) cannot be split
in this way.
"""

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work, evidence

CHUNK = 2**15  # floats: 128 KiB


def values(bench: Bench) -> np.ndarray:
    """Return 32 MiB of repeated numbers: drawing all of them would take longer than the claim."""
    drawn = np.random.default_rng(bench.seed).standard_normal(2**16 + 25, dtype=np.float32)
    return np.tile(drawn, bench.size(128, check=1))


def bump(x):
    """Standardise, clip to three deviations, and weight with a parabola around the mean."""
    return 1 - (((x - 0.1) * 1.5).clip(-3, 3) / 6 + 0.5) ** 2


def chunk_by_chunk(x):
    out = np.empty_like(x)
    for start in range(0, len(x), CHUNK):
        out[start : start + CHUNK] = bump(x[start : start + CHUNK])
    return out


def in_place(x):
    y = x - 0.1
    y *= 1.5
    y.clip(-3, 3, out=y)
    y /= 6
    y += 0.5
    np.square(y, out=y)
    return np.subtract(1, y, out=y)


@pytest.mark.host
def test_chunked_fusion_host(compare: Compare) -> None:
    compare(
        baseline=bump,
        optimized=chunk_by_chunk,
        library=in_place,
        against="naive",
        inputs=values,
        work=lambda x: Work(read=x.nbytes, written=x.nbytes, flops=8 * x.size, dtype="fp32"),
        reference=lambda x: 1 - np.square(np.clip((x.astype("d") - 0.1) / 4, -0.5, 0.5) + 0.5),
        metric="wall",
        # one array of fresh pages instead of six
        evidence=[evidence.page_faults(max=0.5, per="baseline")],
    )
