"""Walking along the rows of a row-major matrix beats walking down its columns.

A tall matrix (20,000 x 40) is multiplied by a small one, with three nested loops in C. A cache line
holds 16 floats. With the rows' index in the innermost loop (jki, as one would write it in Fortran
or MATLAB, where columns are contiguous) each step is one row, 160 bytes, further down: it fetches
one line of the left matrix and one of the result, uses one float of each, and when the next column
needs these lines again, 40,000 others (2.5 MB) have pushed them out of the L1 cache and, where it
is smaller, the L2 cache; where they fit in L2, less of the gain remains. With the columns' index
innermost (ikj) the steps are one float wide, every float of a line is used, and the hardware
prefetches the next line. BLAS, the library arm, also blocks for registers and for each level of the
cache: it is faster than all rungs and the right choice in practice.

All orders multiply the same numbers and add them in the same order. Since neighbouring iterations
of ikj write neighbouring floats, the compiler can also vectorize it. "scalar" forbids that in both
arms, so that only the order of memory accesses changes; "vectors" allows it, and is judged against
"scalar". Matrices that fit in the L1 cache gain from vectorization only. Hosts offer no cache
counters here, so the ratio is the only evidence.
"""

from functools import partial

import numpy as np
import pytest

from kernels.ch02.matmul_loops import multiply
from pytest_aiperf import Bench, Compare, Work


def matrices(bench: Bench) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(bench.seed)
    rows, n = bench.size(20_000, check=50), 40
    a = rng.random((rows, n), np.float32)
    return a, rng.random((n, n), np.float32), np.empty_like(a)


scalar_jki = partial(multiply, "jki", vectorize=False)
scalar_ikj, ikj = partial(multiply, "ikj", vectorize=False), partial(multiply, "ikj")
RUNGS = {
    "scalar": {"baseline": scalar_jki, "optimized": scalar_ikj, "against": "naive"},
    "vectors": {"baseline": scalar_ikj, "optimized": ikj, "against": "previous rung"},
}


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_cache_loop_order_host(compare: Compare, rung: str) -> None:
    compare(
        **RUNGS[rung],
        library=lambda a, b, out: np.matmul(a, b, out=out),
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
