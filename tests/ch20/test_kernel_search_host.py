"""Successive halving finds a faster kernel with a fifth of an exhaustive search's timed calls.

Variants of a product of 250 x 250 matrices in C differ in loop order, in the rows computed together
and in the tile of the inner dimension. Which one is fastest depends on caches and compiler, so it
has to be measured. Timing each variant 16 times would spend most calls on variants that lose by
far. Successive halving times all of them once, keeps the better half, times these twice as often,
and so on: the calls go to the variants that are hard to tell apart. A search is no better than its
variants, which are plain C for one thread, without the host's widest vectors. NumPy's matrix
product, the library arm, beats what it finds by far: on a host with 32 CPUs it takes a sixteenth of
the time. Whoever needs a product calls the library; the lesson is how to search.

The oracle comes first. Two variants skip the last rows and so do less work than the correct ones
with the same loops; a search without an oracle might return one of them. The gain over the first
variant, a plain triple loop, is 5.1x on that host (4.2 to 6.3). How much of it is the order of the
loops and how much the rows that are computed together depends on CPU and compiler. It shows that
the search found something, not how well it searches. That is checked once per replicate: the claim
fails if half of the finds are slower than 0.9 times that of an exhaustive search. Differences below
the timing noise cannot be resolved, and there any of the best variants will do.
"""

from functools import cache
from statistics import median

import numpy as np
import pytest

from kernels.ch20 import c_variants
from pytest_aiperf import Bench, Compare, Work, prepared


def matrices(bench: Bench) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = bench.size(250, check=50)  # not a multiple of 4: the last rows do not fill a group
    a, b = np.random.default_rng(bench.seed).standard_normal((2, n, n), np.float32)
    return a, b, np.empty_like(a)


RELATIVE_SPEEDS: list[float] = []
"""Speed of each find relative to that of an exhaustive search: one alone may be a noisy one."""


@cache
def found_by_exhaustive_search(n: int) -> c_variants.Variant:
    a, b = np.random.default_rng(0).standard_normal((2, n, n), np.float32)
    return c_variants.exhaustive(c_variants.correct(c_variants.VARIANTS, a, b), a, b)


def searched(a, b, _):
    correct = c_variants.correct(c_variants.VARIANTS, a, b)
    assert correct == [variant for variant in c_variants.VARIANTS if variant.tail]
    best, calls = c_variants.halving(correct, a, b)
    assert calls <= c_variants.exhaustive_calls(correct) / 5
    if len(a) > 100:  # the calls of the check are too short to rank variants by them
        other = found_by_exhaustive_search(len(a))
        RELATIVE_SPEEDS.append(c_variants.relative_speed(best, other, a, b))
        assert len(RELATIVE_SPEEDS) < 3 or median(RELATIVE_SPEEDS) >= 0.9, RELATIVE_SPEEDS
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
