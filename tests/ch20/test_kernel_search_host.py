"""Successive halving takes less time than an exhaustive search with as many timed calls.

Variants of a product of 250 x 250 matrices in C differ in loop order, in the rows computed together
and in the tile of the inner dimension. Which one is fastest depends on caches and compiler, so it
has to be measured, more than once because of noise. An exhaustive search times all 16 variants
equally often, four times each, and spends most of its time on slow variants. Successive halving
times all of them once, keeps the faster half, times these twice as often, and so on: a slow variant
is timed once, and the last two are timed 15 times. Both searches make 64 calls. The gain grows with
the spread of the times: there is none if all variants are equally fast, and the limit is log2(16),
4x, if half of them take nearly all of the time. Where the noise is as large as the differences, a
single first call may drop the best variant; Hyperband therefore repeats successive halving with
fewer variants and more first calls.

The oracle comes first, outside the timing. Two variants skip the last rows and so do less work than
the correct ones with the same loops; a search without an oracle might return one of them. Faster is
no gain if the result is worse. So the claim fails if the median speed of the variants that halving
returns is less than 0.9 times that of the exhaustive search's. For this, all variants are timed in
turn, 64 times each. A test beside the claim counts the calls of both searches on a virtual clock.

Where one call per variant is enough, it takes less time than either search. Autotuners such as
Triton's give each variant the same time instead of the same number of calls, so that a slow one
costs no more than a fast one; they are not compared. A search is no better than its variants, which
are plain C for one thread, without the host's widest vectors. If you need a product, call a library
such as NumPy, which is not compared here; the lesson is how to search.
"""

from collections import Counter, defaultdict
from statistics import median

import numpy as np
import pytest

from kernels.ch20 import c_variants
from pytest_aiperf import Bench, Compare, prepared

CORRECT = [variant for variant in c_variants.VARIANTS if variant.tail]


def matrices(bench: Bench) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = bench.size(250, check=50)  # not a multiple of 4: the last rows do not fill a group
    a, b = np.random.default_rng(bench.seed).standard_normal((2, n, n), np.float32)
    return a, b, np.empty_like(a)


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        (c_variants.exhaustive, 16 * [4]),
        (c_variants.halving, 2 * [15] + 2 * [7] + 4 * [3] + 8 * [1]),
    ],
)
def test_calls_of_a_search(search, expected: list[int]) -> None:
    """Both searches make 64 calls, and halving makes most of them to fast variants."""
    calls = Counter()

    def seconds(variant):
        calls[variant] += 1
        return variant

    assert search(range(1, 17), seconds) == 1
    assert [calls[variant] for variant in range(1, 17)] == expected
    assert calls.total() == 64


RESULTS = defaultdict(list)
"""What each search has returned at full size: a single result may be a noisy one."""


def searching(search):
    """Return an arm that searches for the fastest variant and multiplies with it."""

    def prepare(a, b, _):
        correct = c_variants.correct(c_variants.VARIANTS, a, b)
        assert correct == CORRECT

        def search_and_multiply(a, b, out):
            fastest = search(correct, c_variants.stopwatch(a, b))
            c_variants.arm(fastest)(a, b, out)
            if len(a) > 100:  # the calls of the check are too short to rank variants by them
                RESULTS[search].append(fastest)

        return search_and_multiply

    return prepared(prepare)


@pytest.mark.host
def test_kernel_search_host(compare: Compare) -> None:
    compare(
        baseline=searching(c_variants.exhaustive),
        optimized=searching(c_variants.halving),
        inputs=matrices,
        reference=lambda a, b, out: a.astype(float) @ b.astype(float),
        metric="wall",
        cache="warm",
    )
    if RESULTS:
        a, b, _ = matrices(Bench("cpu", seed=0, full=True))
        speeds = c_variants.relative_speeds(CORRECT, c_variants.stopwatch(a, b))
        typical = {search: median(map(speeds.get, RESULTS[search])) for search in RESULTS}
        assert typical[c_variants.halving] >= 0.9 * typical[c_variants.exhaustive], typical
