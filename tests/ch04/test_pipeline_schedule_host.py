"""A better pipeline schedule keeps fewer activations live, or finishes earlier, than a simpler one.

Work is equal: each schedule runs the same layers on the same micro-batches and must produce the
same gradients. A virtual clock gives start times from dependencies alone. With p ranks and m
micro-batches GPipe keeps all m live until the first backward. One-forward-one-backward (1F1B) keeps
p and takes the same time: m of m + p - 1 slots are useful, 8 of 11 here. Interleaving two chunks of
layers per rank fills the pipeline in half the time: m of m + (p - 1) / 2 slots are useful, for
twice the messages and some of the memory that 1F1B saved.

The counts are exact if all chunks take equally long and sending takes no time. "memory" is judged
on the peak number of micro-batches live on a rank, "bubble" on the makespan.
"""

import numpy as np
import pytest

from kernels.ch04 import pipeline
from pytest_aiperf import Bench, Compare, Score

RANKS = 4


def network(bench: Bench) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(bench.seed)
    layers = rng.integers(-2, 3, (2 * RANKS, 4, 4)).astype(float)
    return layers, rng.integers(-2, 3, (8, 3, 4)).astype(float)


def peak_live(schedule):
    def arm(layers, batches):
        gradients, _, peak = pipeline.run(schedule(RANKS, len(batches)), layers, batches)
        return gradients, Score(peak, "micro-batches", "lower")

    return arm


def makespan(schedule):
    def arm(layers, batches):
        gradients, slots, _ = pipeline.run(schedule(RANKS, len(batches)), layers, batches)
        return gradients, Score(slots, "forward passes", "lower")

    return arm


def unpartitioned_gradients(layers, batches):
    """Differentiate sum(x W1 ... Wn) with respect to each W, without schedule or chunks."""
    gradients = []
    for i in range(len(layers)):
        before = batches.reshape(-1, 4) @ np.linalg.multi_dot([np.eye(4), *layers[:i], np.eye(4)])
        after = np.linalg.multi_dot([*layers[i + 1 :], np.eye(4), np.ones((4, 1))])
        gradients.append(np.outer(before.sum(0), after))
    return np.stack(gradients)


@pytest.mark.host
def test_pipeline_memory_host(compare: Compare) -> None:
    compare(
        baseline=peak_live(pipeline.gpipe),
        optimized=peak_live(pipeline.one_f_one_b),
        against="idiomatic",
        inputs=network,
        reference=unpartitioned_gradients,
        metric="score",
    )


@pytest.mark.host
def test_pipeline_bubble_host(compare: Compare) -> None:
    compare(
        baseline=makespan(pipeline.one_f_one_b),
        optimized=makespan(pipeline.interleaved),
        against="previous rung",
        inputs=network,
        reference=unpartitioned_gradients,
        metric="score",
    )
