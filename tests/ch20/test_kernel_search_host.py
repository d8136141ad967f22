"""A search that soon gives up on bad candidates finds a fast one for an eighth of the timing.

Variants of a matrix product in C differ in loop order, in the rows computed together and in the
tile of the inner loop; which is best depends on caches and compiler, so that one measures.
Timing each of them 16 times would spend most of the time on those that lose by far. Successive
halving times all of them once, keeps the better quarter, times those four times as often, and so
on: the effort goes to where the differences are small.

The oracle comes first. Two variants leave out the last rows, and are among the fastest: a search
without an oracle would find them. The gain over the first variant is that of the loop order
and of the registers; noise that is larger than the differences between the best is what limits
such a search, and then any of them will do.
"""

import numpy as np
import pytest

from kernels.ch20 import c_variants
from pytest_aiperf import Bench, Compare, Work, prepared


def matrices(bench: Bench) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = bench.size(250, check=50)  # no multiple of 4: a tail is left
    a, b = np.random.default_rng(bench.seed).standard_normal((2, n, n), np.float32)
    return a, b, np.empty_like(a)


def found(a, b, _):
    right = c_variants.right(c_variants.VARIANTS, a, b)
    assert right == [variant for variant in c_variants.VARIANTS if variant.tail]
    best, calls = c_variants.halving(right, a, b)
    assert calls < 0.2 * c_variants.exhaustive_calls(right)
    return c_variants.arm(best)


@pytest.mark.host
def test_kernel_search_host(compare: Compare) -> None:
    compare(
        baseline=c_variants.arm(c_variants.START),
        optimized=prepared(found),
        inputs=matrices,
        work=lambda a, b, out: Work(3 * a.nbytes, 2 * len(a) ** 3, "fp32"),
        reference=lambda a, b, out: a.astype(float) @ b.astype(float),
        metric="wall",
        cache="warm",
    )
