"""Successive halving finds a faster kernel with an eighth of an exhaustive search's timed calls.

Variants of a matrix product in C differ in loop order, in the rows computed together and in the
tile of the inner dimension. Which one is fastest depends on caches and compiler, so it has to be
measured. Timing each variant 16 times would spend most calls on variants that lose by far.
Successive halving times all of them once, keeps the better quarter, times these four times as
often, and so on: the calls go to the variants that are hard to tell apart.

The oracle comes first. Two variants skip the last rows and are among the fastest; a search without
an oracle would return one of them. The gain over the first variant comes from the loop order and
from keeping sums in registers. A search is no better than its variants: NumPy's matrix product, the
library arm, is usually faster than all of them. That the find is as fast as that of an exhaustive
search is not checked. The search cannot resolve differences below the timing noise, and there any
of the best variants will do.
"""

import numpy as np
import pytest

from kernels.ch20 import c_variants
from pytest_aiperf import Bench, Compare, Work, prepared


def matrices(bench: Bench) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = bench.size(250, check=50)  # not a multiple of 4: the last rows do not fill a group
    a, b = np.random.default_rng(bench.seed).standard_normal((2, n, n), np.float32)
    return a, b, np.empty_like(a)


def searched(a, b, _):
    correct = c_variants.correct(c_variants.VARIANTS, a, b)
    assert correct == [variant for variant in c_variants.VARIANTS if variant.tail]
    best, calls = c_variants.halving(correct, a, b)
    assert calls < 0.2 * c_variants.exhaustive_calls(correct)
    return c_variants.arm(best)


def traffic(a, b, out):
    return Work(read=a.nbytes + b.nbytes, written=out.nbytes, flops=2 * len(a) ** 3, dtype="fp32")


@pytest.mark.host
def test_kernel_search_host(compare: Compare) -> None:
    compare(
        baseline=c_variants.arm(c_variants.START),
        optimized=prepared(searched),
        library=lambda a, b, out: np.matmul(a, b, out=out),
        inputs=matrices,
        work=traffic,
        reference=lambda a, b, out: a.astype(float) @ b.astype(float),
        metric="wall",
        cache="warm",
    )
