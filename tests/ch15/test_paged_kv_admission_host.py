"""Pages of the key-value cache admit several times the texts that worst-case reservations do.

Nobody knows how long a text will become. Reserving the longest possible for each is safe and
simple, and leaves most of the pool empty: here a text may reach 1024 tokens and reaches about 140.
Decoding is bound by the weights, so that the tokens a second grow with the texts in a step, and the
unused memory is lost throughput. Blocks of doubling size ("buddy") waste up to half of each and
copy a text when it moves; pages of 16 tokens ("paged") need no contiguous space, waste less than a
page a text, and never copy.

The score is how many texts got a token in a step, on average over the whole trace, which both arms
serve to its end. Over-committing has a price: when the pool runs dry, the youngest text gives its
pages back and starts again, which the average counts as waste. What stands for keys and values is
read back at each text's end and must be what was written, so no slot may belong to two texts. The
limit is the longest over the typical length; texts of equal length gain nothing.
"""

import numpy as np
import pytest

from kernels.ch15 import kv_allocators
from pytest_aiperf import Bench, Compare, Score

RUNGS = {"buddy": kv_allocators.Buddy, "paged": kv_allocators.Paged}
Trace = tuple[np.ndarray, np.ndarray, np.ndarray, int]


def trace(bench: Bench) -> Trace:
    """Draw prompts and final lengths, and a pool for 16 texts of the longest possible length."""
    rng = np.random.default_rng(bench.seed)
    count, longest = bench.size(500, check=60), bench.size(1024, check=128)
    prompts = rng.lognormal(np.log(longest / 20), 0.7, count).astype(int).clip(1, longest // 2)
    answers = rng.lognormal(np.log(longest / 16), 0.7, count).astype(int).clip(1, longest // 2)
    values = rng.integers(-(2**40), 2**40, (count, longest))
    return prompts, prompts + answers, values, 16 * longest


def served(kind):
    def arm(prompts, lengths, values, pool):
        sums, running = kv_allocators.serve(prompts, lengths, values, pool, kind)
        return sums, Score(running, "texts a step")

    return arm


def sums(prompts, lengths, values, pool):
    return np.where(np.arange(values.shape[1]) < lengths[:, None], values, 0).sum(1)


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_paged_kv_admission_host(compare: Compare, rung: str) -> None:
    compare(
        baseline=served(kv_allocators.MaxLength),
        optimized=served(RUNGS[rung]),
        inputs=trace,
        reference=sums,
        metric="score",
    )
