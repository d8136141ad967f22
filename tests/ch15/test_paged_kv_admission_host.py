"""In a simulation, a paged KV cache admits several times more sequences than full reservation.

The final length of a sequence is unknown. Reserving the longest possible length for each is simple
and leaves most of the pool empty: here a sequence may reach 16,384 tokens and reaches 1,400 on
average. Decoding is bound by reading the weights, so tokens per second grow with the sequences per
step, and unused memory is lost throughput. Blocks of doubling size ("buddy") waste up to half of
each block and copy a sequence when it moves. Pages of 16 tokens ("paged", as in vLLM's
PagedAttention) need no contiguous space, waste less than one page per sequence, and never copy. The
library arm knows a limit for the answer (max_tokens), and reserves contiguous space for it and the
prompt. "paged" serves 1.7 times as many sequences per step as this arm, and "buddy", which needs no
limit, 1.05 times.

The score is the mean number of sequences that get a token in a step, over a trace that all arms
serve to its end. Overcommitting has a price: when the pool is full, the youngest sequence is
preempted and starts again, and the tokens that it lost do not count. Two results are checked
exactly. The values that stand for keys and values are added up at the end of each sequence, and the
sum must be that of the values written, so no two sequences may share a slot. And each sequence must
run for one step per generated token, so the steps that the score counts are real.

The 2,000 prompts and answers have the quantiles of the Azure LLM inference trace of 2023
(conversations). All lengths, the pool included, are divided by four, and only the pages are not.
The pool has room for 16 sequences of the longest length, or for 193 of the mean length that a
sequence has while it runs, so the limit is 12x: "buddy" serves 5.8 times as many sequences per step
as full reservation, and "paged" 9.5 times. "paged" fills 97 % of the pool until the queue is empty;
the tail, when too few sequences are left, is what keeps it well below the limit. In "buddy" and in
the library arm, tokens that are kept fill about half of the pool. Where all sequences reach the
longest length, nothing is gained. Steps are counted, not time: the copies of "buddy" and the
repeated prefill of a preempted sequence cost nothing here. "buddy" preempts 500 to 2,100 times for
2,000 sequences, "paged" 56 to 98 times and the library arm never, so prefill would cost "buddy"
more than its lead over that arm.
"""

import numpy as np
import pytest

from kernels import azure_trace
from kernels.ch15 import kv_allocators
from pytest_aiperf import Bench, Compare, Score

CONTEXT = 16384
"""Tokens that a sequence may have: the power of two that holds the trace's longest ones."""

MAX_ANSWER = 1024
"""Tokens that an answer may have; the trace's longest has 1,000."""

RUNGS = {"buddy": kv_allocators.Buddy, "paged": kv_allocators.Paged}
Trace = tuple[np.ndarray, np.ndarray, np.ndarray, int]


def trace(bench: Bench) -> Trace:
    """Draw prompt and final lengths, and a pool of 16 times the longest possible length."""
    rng = np.random.default_rng(bench.seed)
    count, divisor = bench.size(2000, check=300), bench.size(4, check=128)
    percents = 100 * (np.arange(count) + 0.5) / count
    prompts, answers = (
        np.ceil(rng.permutation(azure_trace.tokens_at(percents, tokens)) / divisor).astype(int)
        for tokens in (azure_trace.PROMPTS, azure_trace.ANSWERS)
    )
    longest = CONTEXT // divisor
    values = rng.integers(-(2**40), 2**40, (count, longest))
    return prompts, prompts + answers, values, 16 * longest


def max_answer(memory, longest):
    return kv_allocators.MaxAnswer(memory, longest * MAX_ANSWER // CONTEXT)


def simulate(allocator):
    def arm(prompts, lengths, values, pool):
        sums, admitted, ended = kv_allocators.serve(prompts, lengths, values, pool, allocator)
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
        library=simulate(max_answer),
        inputs=trace,
        reference=sums_and_steps,
        metric="score",
    )
