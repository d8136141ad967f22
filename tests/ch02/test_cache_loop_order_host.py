"""The loop order that walks along cache lines beats the textbook triple loop.

A cache line holds 16 floats. The textbook's innermost loop (ijk) walks down a column of the second
matrix with a stride of 4 KiB. Each step fetches a line and uses one float of it. All lines of a
column map to the same few L1 sets, since 4 KiB is a power of two, so they evict each other before
the next column needs them; with other row lengths ijk loses less. With the two inner loops
interchanged (ikj) the innermost loop walks along a row of the second matrix and of the result:
stride 1, every float of a line is used, and the hardware prefetches the next line.

Both orders do the same multiplications and add them in the same order. ikj gains further because
the compiler can vectorize it. The baseline is naive because the loop order is the subject. BLAS,
the library arm, also blocks for every level of the cache, and is the right choice in practice.
Matrices that fit the L1 cache gain from vectorization only.
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
        work=lambda a, b, out: Work(
            read=a.nbytes + b.nbytes,
            written=out.nbytes,
            flops=2 * len(a) * b.size,
            dtype="fp32",
        ),
        reference=lambda a, b, out: a.astype(float) @ b.astype(float),
        metric="wall",
        cache="warm",
    )
