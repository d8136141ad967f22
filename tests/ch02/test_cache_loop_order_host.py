"""Walking along the rows of a row-major matrix beats walking down its columns.

A tall matrix (50,000 x 40) is multiplied by a small one, with three nested loops in C. A cache line
holds 16 floats. With the rows' index in the innermost loop (jki, as one would write it in Fortran
or MATLAB, where columns are contiguous) each step is one row, 160 bytes, further down: it fetches
one line of the left matrix and one of the result, and uses one float of each. When the next column
needs these lines again, 100,000 others (6.4 MB) have pushed them out of the L1 cache, and out of an
L2 cache that is smaller than that. A larger L2 cache leaves less to gain. With the columns' index
innermost (ikj) the steps are one float wide, and every float of a line is used before the next line
is needed. In the model beside the claim, jki fetches 550 times as many lines as ikj. BLAS, the
library arm, also blocks for registers and each level of the cache, and uses all cores. It is faster
than all rungs, and the right choice in practice.

All orders multiply the same numbers and add them in the same order. Since neighboring iterations
of ikj write neighboring floats, the compiler can also vectorize it. "scalar" forbids that in both
arms, so that only the order of memory accesses changes; "vectors" allows it, and is judged against
"scalar". Matrices that fit in the L1 cache gain from vectorization only. Virtual machines usually
offer no cache counters. Tests beside the claim count the lines that both orders fetch in a model of
a cache, and check which code has vector instructions.
"""

import platform
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest

from kernels.ch02.matmul_loops import SCALAR, SOURCE, multiply
from kernels.ch06.assembly import instructions
from pytest_aiperf import Bench, Compare, Work

ROWS, WIDTH, LINE_BYTES = 50_000, 40, 64


def matrices(bench: Bench) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(bench.seed)
    rows, n = bench.size(ROWS, check=50), WIDTH
    a = rng.random((rows, n), np.float32)
    return a, rng.random((n, n), np.float32), np.empty_like(a)


def lines_per_step(cache_bytes, steps):
    """Fetch lines into an LRU cache; return how many a multiply-add fetches on average.

    ``steps`` has the i, j and p of each multiply-add c[i, j] += a[i, p] * b[p, j].
    """
    cache, fetched = OrderedDict(), 0
    for i, j, p in steps:
        elements = ("a", i * WIDTH + p), ("b", p * WIDTH + j), ("c", i * WIDTH + j)
        for matrix, element in elements:
            line = matrix, element * 4 // LINE_BYTES
            fetched += line not in cache
            cache[line] = None
            cache.move_to_end(line)
            if len(cache) > cache_bytes // LINE_BYTES:
                cache.popitem(last=False)
    return fetched / len(steps)


@pytest.mark.parametrize("cache_kib", [32, 2048])
def test_walking_down_columns_fetches_two_lines_per_step(cache_kib: int) -> None:
    """Simulate the first four passes over all rows, and as many steps along the rows."""
    jki = [(i, 0, p) for p in range(4) for i in range(ROWS)]
    ikj = [
        (i, j, p) for i in range(4 * ROWS // WIDTH**2) for p in range(WIDTH) for j in range(WIDTH)
    ]
    assert lines_per_step(cache_kib << 10, jki) > 1.99
    # a row of a and one of c have 2.5 lines each, for WIDTH**2 steps; b is fetched once
    assert lines_per_step(cache_kib << 10, ikj) < 0.006


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86 instructions")
def test_only_the_last_rung_multiplies_vectors() -> None:
    def multiplies_vectors(*flags):
        mnemonics = instructions(SOURCE, *flags)["ikj"]
        return any("mul" in m and m.endswith("ps") for m in mnemonics)

    assert multiplies_vectors()
    assert not multiplies_vectors(*SCALAR)


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
