"""A pipeline that alternates forwards and backwards keeps fewer activations live than GPipe.

Each schedule runs the same layers on the same micro-batches and must produce the same gradients.
With p ranks and m micro-batches, GPipe runs all forwards before the first backward, so the
activations of all m are live at once. One-forward-one-backward (1F1B) starts the backward of a
micro-batch as soon as it can, and the first rank never holds more than p of them: 4 instead of 8
here. Both take the same time, 3 (m + p - 1) forward passes if a backward takes two.

The count is exact, from a simulation on a virtual clock; a test beside the claim compares it with
the closed forms, m and min(m, p). The limit is m / p: with no more micro-batches than ranks, 1F1B
saves nothing. Activations can also be recomputed in the backward pass, which saves more memory and
costs a forward pass; both are used together. Interleaving chunks of layers gives up some of the
memory (test_pipeline_bubble_host.py).
"""

import pytest

from kernels.ch04 import pipeline
from kernels.ch04.pipeline_network import RANKS, SIZES, network, simulated, unpartitioned_gradients
from pytest_aiperf import Compare, Score


def peak_live(schedule):
    def arm(layers, batches):
        gradients, _, peak = pipeline.run(schedule(RANKS, len(batches)), layers, batches)
        return gradients, Score(peak, "micro-batches", "lower")

    return arm


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
