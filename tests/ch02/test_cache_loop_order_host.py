"""The loop order that walks along cache lines beats the textbook triple loop.

A cache line holds 16 floats. The textbook's innermost loop (ijk) runs down a column of the second
matrix: each step lands 4 KiB further on, uses one float of the line it fetches, and by the time the
neighbouring column is due, the 1024 lines of a column have pushed each other out of the L1 cache.
With the two inner loops exchanged (ikj) the innermost runs along a row of the second matrix and of
the result: 4 bytes a step, every float of a line used, and the next line is fetched in advance.

Both orders do the same multiplications and add them up in the same order. The second gains once
more because neighbouring results fit a vector register, which the compiler then uses. The order
itself is the subject, hence the naive baseline: the library arm (BLAS) also blocks for every level
of the cache, and is what one should call. Matrices that fit the L1 cache show only the vectors.
"""

from functools import partial

import numpy as np
import pytest

from kernels.ch02.matmul_loops import multiply
from pytest_aiperf import Bench, Compare, Work


def matrices(bench: Bench) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(bench.seed)
    rows, n = bench.size(4, check=5), bench.size(1024, check=40)
    a = rng.random((rows, n), np.float32)
    return a, rng.random((n, n), np.float32), np.empty_like(a)


@pytest.mark.host
def test_cache_loop_order_host(compare: Compare) -> None:
    compare(
        baseline=partial(multiply, "ijk"),
        optimized=partial(multiply, "ikj"),
        library=lambda a, b, out: np.matmul(a, b, out=out),
        against="naive",
        inputs=matrices,
        work=lambda a, b, out: Work(b.nbytes + 2 * a.nbytes, 2 * len(a) * b.size, "fp32"),
        reference=lambda a, b, out: a.astype(float) @ b.astype(float),
        metric="wall",
        cache="warm",
    )
