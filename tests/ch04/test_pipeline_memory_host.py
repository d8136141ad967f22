"""A pipeline that alternates forwards and backwards keeps fewer activations live than GPipe.

Each schedule runs the same layers on the same micro-batches and must produce the same gradients.
With p ranks and m micro-batches, GPipe runs all forwards before the first backward, so the
activations of all m are live at once. One-forward-one-backward (1F1B) starts the backward of a
micro-batch as soon as it can, and the first rank never holds more than p of them: 4 instead of 8
here. Both take the same time, 3 (m + p - 1) forward passes if a backward takes two.

The count is exact, from a simulation on a virtual clock; a test beside the claim compares it with
the closed forms, m and min(m, p). The limit is m / p. Activations can also be recomputed in the
backward pass, which saves more memory and costs a forward pass; both are used together.
Interleaving chunks of layers gives up some of the memory (test_pipeline_bubble_host.py).
"""

import numpy as np
import pytest

from kernels.ch04 import pipeline
from pytest_aiperf import Bench, Compare, Score

RANKS = 4
SIZES = [(2, 4), (4, 8), (4, 12), (8, 16)]
"""Ranks and micro-batches for which the simulation is compared with closed forms."""


def network(bench: Bench) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(bench.seed)
    layers = rng.integers(-2, 3, (2 * RANKS, 4, 4)).astype(float)
    return layers, rng.integers(-2, 3, (8, 3, 4)).astype(float)


def peak_live(schedule):
    def arm(layers, batches):
        gradients, _, peak = pipeline.run(schedule(RANKS, len(batches)), layers, batches)
        return gradients, Score(peak, "micro-batches", "lower")

    return arm


def unpartitioned_gradients(layers, batches):
    """Differentiate sum(x W1 ... Wn) with respect to each W, without schedule or chunks."""
    gradients = []
    for i in range(len(layers)):
        before = batches.reshape(-1, 4) @ np.linalg.multi_dot([np.eye(4), *layers[:i], np.eye(4)])
        after = np.linalg.multi_dot([*layers[i + 1 :], np.eye(4), np.ones((4, 1))])
        gradients.append(np.outer(before.sum(0), after))
    return np.stack(gradients)


def simulated(schedule, ranks, micro_batches):
    """Return makespan and peak of a schedule; the numbers that it multiplies do not matter."""
    _, slots, peak = pipeline.run(
        schedule(ranks, micro_batches), np.ones((2 * ranks, 1, 1)), np.ones((micro_batches, 1, 1))
    )
    return slots, peak


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_peaks_are_those_of_the_closed_forms(ranks: int, micro_batches: int) -> None:
    assert simulated(pipeline.gpipe, ranks, micro_batches)[1] == micro_batches
    assert simulated(pipeline.one_f_one_b, ranks, micro_batches)[1] == min(ranks, micro_batches)


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
