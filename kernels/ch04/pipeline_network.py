"""Layers, micro-batches and gradients of the pipeline claims, and a simulation by size."""

import numpy as np

from kernels.ch04 import pipeline
from pytest_aiperf import Bench

RANKS = 4
SIZES = [(2, 4), (4, 8), (4, 12), (8, 16)]
"""Ranks and micro-batches for which the simulation is compared with closed forms."""


def network(bench: Bench) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(bench.seed)
    layers = rng.integers(-2, 3, (2 * RANKS, 4, 4)).astype(float)
    return layers, rng.integers(-2, 3, (8, 3, 4)).astype(float)


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
