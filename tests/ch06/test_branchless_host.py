"""Filtering without a branch beats a branch that the CPU cannot predict.

A filter copies the elements below a limit. Written with `if`, each element decides whether the next
instructions run. The CPU does not wait for the decision: it predicts it from the history, and a
wrong guess discards what was done since. On random data with half of the elements below the limit,
every second guess is wrong. The branchless loop always stores the element and advances the output
by the result of the comparison, 0 or 1: it stores more, but has nothing to predict. On a host with
32 CPUs the branch takes 6.3 ms for a million elements and the branchless loop 1.06 ms. If every
second guess is wrong, each wrong one costs about 10 ns.

"half" filters random data at its median, the worst case for the branch. "rare" keeps 10 % of the
elements: a branch predicted as never taken would be wrong every tenth time, and the gain is smaller
(2.4x instead of 6.0x). A predictor that finds patterns in random data can be wrong more often.
"sorted" shows where the gain ends: the data of "half" in sorted order, so that the branch goes one
way for the first half and the other way for the second. The prediction is wrong about once, and the
branchless loop may even lose, because it stores every element. On the same host it takes 1.12 times
as long (1.00 to 1.26). It is only required to take at most 1.43 times as long, and no bound tests
that its gain has ended. If almost all or almost no elements are kept, unsorted data are predicted
as well. There the branch may win by more if it skips more work than one store.

Virtual machines usually offer no counter of mispredictions; a test beside the claim checks that the
compiler's code branches on the comparison in one loop and not in the other. A million elements are
more than the predictor can memorize. If a benchmark filters the same few thousand elements again
and again, the predictor may learn them, and the gain shrinks. AVX-512 has an instruction that
filters 16 floats at once (vcompressps), the expert's choice where it exists. It is no arm here,
because the loops are compiled for any CPU of the architecture. np.compress, the library arm, writes
a mask first and reads it again. On the same host it takes 2.2 ("half"), 3.3 ("rare") and 1.5 times
("sorted") as long as the branchless loop. Compilers turn simple branches into selects by
themselves, but not this one: they must not add a store.
"""

import platform
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from kernels.ch06.assembly import instructions
from kernels.ch06.filter_loops import SOURCE, select
from pytest_aiperf import Bench, Compare, Work

CASES = {"half": 0.5, "rare": 0.1, "sorted": 0.5}  # the share of the elements that are kept


def below(x, limit):
    return x[x < np.float32(limit)]


def compressed(x, limit):
    return np.compress(x < np.float32(limit), x)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86 instructions")
def test_only_one_loop_branches_on_the_data() -> None:
    mnemonics = instructions(SOURCE)
    compares = {
        name: [after for before, after in pairwise(mnemonics[name]) if "comiss" in before]
        for name in ("branching", "branchless")
    }
    assert [m for m in compares["branching"] if m.startswith("j")]
    assert compares["branchless"]
    assert not [m for m in compares["branchless"] if m.startswith("j")]


@pytest.mark.host
@pytest.mark.parametrize("case", CASES)
def test_branchless_host(compare: Compare, case: str) -> None:
    def uniform(bench: Bench) -> tuple[np.ndarray, float]:
        x = np.random.default_rng(bench.seed).random(bench.size(2**20, check=1000), np.float32)
        x[::100] = CASES[case]  # equal to the limit: not kept
        x[-1] = 0
        if case == "sorted":
            x.sort()
        return x, CASES[case]

    compare(
        baseline=partial(select, "branching"),
        optimized=partial(select, "branchless"),
        library=compressed,
        inputs=uniform,
        work=lambda x, limit: Work(read=x.nbytes, written=x.nbytes * limit),
        reference=below,
        metric="wall",
        cache="warm",
    )
