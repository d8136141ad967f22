"""A chain of operations run chunk by chunk stays in the cache that whole-array passes overflow.

NumPy computes an expression one operation at a time, each into a new array. With 32 MiB a result,
each operation reads the last one's from memory, writes its own there, and writes it to fresh pages,
which the operating system must clear first. Written for a chunk of 128 KiB, the same expression
finds in the L2 cache what it has just written, and its small results are memory that is used again.
Main memory sees the input once and the output once; the arithmetic, vectorised either way, is what
remains. It is what fusion gains, without a compiler.

A chunk must fit in the cache with its operands, and be large enough to outweigh eight calls from
Python (about a microsecond each). Arrays that fit in the cache as a whole gain little, and
operations that look across chunks (sorting, means) cannot be cut like this. In place on the whole
array (`out=`) the fresh pages are saved, but not the passes.
"""

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work

CHUNK = 2**15  # floats


def values(bench: Bench) -> np.ndarray:
    """Make 32 MiB of numbers, which repeat: drawing each takes longer than the arithmetic."""
    drawn = np.random.default_rng(bench.seed).standard_normal(2**16 + 25, dtype=np.float32)
    return np.tile(drawn, bench.size(128, check=1))


def bump(x):
    """Standardise, clip to three deviations, and weigh with a parabola around the mean."""
    return 1 - (((x - 0.1) * 1.5).clip(-3, 3) / 6 + 0.5) ** 2


def chunk_by_chunk(x):
    out = np.empty_like(x)
    for start in range(0, len(x), CHUNK):
        out[start : start + CHUNK] = bump(x[start : start + CHUNK])
    return out


@pytest.mark.host
def test_chunked_fusion_host(compare: Compare) -> None:
    compare(
        baseline=bump,
        optimized=chunk_by_chunk,
        inputs=values,
        work=lambda x: Work(bytes=2 * x.nbytes, flops=8 * x.size, dtype="fp32"),
        reference=lambda x: 1 - np.square(np.clip((x.astype("d") - 0.1) / 4, -0.5, 0.5) + 0.5),
        metric="wall",
    )
