"""In a simulation, a paged KV cache admits several times more sequences than full reservation.

The final length of a sequence is unknown. Reserving the longest possible length for each is simple
and leaves most of the pool empty: here a sequence may reach 1024 tokens and reaches about 140.
Decoding is bound by reading the weights, so tokens per second grow with the sequences per step, and
unused memory is lost throughput. Blocks of doubling size ("buddy") waste up to half of each block
and copy a sequence when it moves. Pages of 16 tokens ("paged") need no contiguous space, waste less
than one page per sequence, and never copy.

The score is the mean number of sequences that get a token in a step, over a trace that both arms
serve to its end. Overcommitting has a price: when the pool is full, the youngest sequence is
preempted and starts again, and the tokens that it lost do not count. Two results are checked
exactly. The values that stand for keys and values are read back at the end of each sequence and
must be those written, so no two sequences may share a slot. And each sequence must run for one step
per generated token, so the steps that the score counts are real. The limit is the longest over the
typical length; sequences of equal length gain nothing. The lengths are lognormal draws, not a
trace, and they set the gain: here "buddy" serves 3.9 times as many sequences per step as full
reservation, and "paged" 6.0 times. Steps are counted, not time: the copies of "buddy" and the
repeated prefill of a preempted sequence cost nothing here.
"""

import numpy as np
import pytest

from kernels.ch15 import kv_allocators
from pytest_aiperf import Bench, Compare, Score

RUNGS = {"buddy": kv_allocators.Buddy, "paged": kv_allocators.Paged}
Trace = tuple[np.ndarray, np.ndarray, np.ndarray, int]


def trace(bench: Bench) -> Trace:
    """Draw prompt and final lengths, and a pool of 16 times the longest possible length."""
    rng = np.random.default_rng(bench.seed)
    count, longest = bench.size(2000, check=300), bench.size(1024, check=128)
    prompts = rng.lognormal(np.log(longest / 20), 0.7, count).astype(int).clip(1, longest // 2)
    answers = rng.lognormal(np.log(longest / 16), 0.7, count).astype(int).clip(1, longest // 2)
    values = rng.integers(-(2**40), 2**40, (count, longest))
    return prompts, prompts + answers, values, 16 * longest


def simulate(allocator_class):
    def arm(prompts, lengths, values, pool):
        sums, admitted, ended = kv_allocators.serve(prompts, lengths, values, pool, allocator_class)
        score = Score((lengths - prompts).sum() / ended.max(), "sequences per step")
        return sums, ended - admitted, score

    return arm


def sums_and_steps(prompts, lengths, values, pool):
    sums = np.where(np.arange(values.shape[1]) < lengths[:, None], values, 0).sum(1)
    return sums, lengths - prompts


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_paged_kv_admission_host(compare: Compare, rung: str) -> None:
    compare(
        baseline=simulate(kv_allocators.MaxLength),
        optimized=simulate(RUNGS[rung]),
        inputs=trace,
        reference=sums_and_steps,
        metric="score",
    )
