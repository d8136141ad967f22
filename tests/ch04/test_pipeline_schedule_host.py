"""The order of a pipeline's steps decides how much it holds and how long it waits.

Work is equal: each schedule runs the same layers on the same micro-batches and must give the same
gradients; a virtual clock says when, by nothing but dependencies. With p ranks and m micro-batches
GPipe keeps all m alive until the first backward; one-forward-one-backward (1F1B) keeps p, in the
same time: m of m + p - 1 slots are useful, 8 of 11 here. Interleaving two chunks of layers a rank
fills the pipeline in half the time: m of m + (p - 1) / 2, for twice the messages and some of the
memory that 1F1B had saved.

The counts are exact, and hold where all chunks take equally long and sending takes no time.
"memory" is judged by the most micro-batches alive on a rank, "bubble" by the makespan.
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


def alive(schedule):
    def arm(layers, batches):
        gradients, _, most = pipeline.run(schedule(RANKS, len(batches)), layers, batches)
        return gradients, Score(most, "micro-batches", "lower")

    return arm


def makespan(schedule):
    def arm(layers, batches):
        gradients, slots, _ = pipeline.run(schedule(RANKS, len(batches)), layers, batches)
        return gradients, Score(slots, "forward passes", "lower")

    return arm


def gradients_of_the_whole(layers, batches):
    """Differentiate sum(x W1 ... Wn) by each W: no schedule, no chunks."""
    found = []
    for i in range(len(layers)):
        before = batches.reshape(-1, 4) @ np.linalg.multi_dot([np.eye(4), *layers[:i], np.eye(4)])
        after = np.linalg.multi_dot([*layers[i + 1 :], np.eye(4), np.ones((4, 1))])
        found.append(np.outer(before.sum(0), after))
    return np.stack(found)


@pytest.mark.host
def test_pipeline_memory_host(compare: Compare) -> None:
    compare(
        baseline=alive(pipeline.gpipe),
        optimized=alive(pipeline.one_f_one_b),
        against="idiomatic",
        inputs=network,
        reference=gradients_of_the_whole,
        metric="score",
    )


@pytest.mark.host
def test_pipeline_bubble_host(compare: Compare) -> None:
    compare(
        baseline=makespan(pipeline.one_f_one_b),
        optimized=makespan(pipeline.interleaved),
        against="previous rung",
        inputs=network,
        reference=gradients_of_the_whole,
        metric="score",
    )
