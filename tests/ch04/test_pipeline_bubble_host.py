"""A pipeline schedule that interleaves two chunks of layers per rank finishes earlier than 1F1B.

Each schedule runs the same layers on the same micro-batches and must produce the same gradients. A
virtual clock gives start times from dependencies alone. With p ranks and m micro-batches,
one-forward-one-backward (1F1B) fills and drains the pipeline in p - 1 slots, in which most ranks
idle (the bubble): m of m + p - 1 slots are useful, 8 of 11 here. Interleaving two chunks of layers
per rank, as in Megatron-LM, fills it in half the time: m of m + (p - 1) / 2 slots are useful, for
twice the messages and some of the memory that 1F1B saved (test_pipeline_memory_host.py). The
library arm, the zero-bubble schedule ZB-H1, is faster still: 27.95 forward passes, where
interleaving takes 29.95 and 1F1B 33.95. It splits the backward pass into the gradients of inputs,
which other ranks wait for, and those of weights, which fill the slots that would be idle.

The score is the makespan, exact if all chunks take equally long. A message keeps its sender busy
for 0.05 of a forward pass; with asynchronous sends, messages cost less. Without them, the bubble
alone gives 33 / 28.5. A test beside the claim compares the makespans without messages with the
closed forms. The gain falls as m grows, because the bubble does not, and ends where twice as many
messages cost more than the shorter bubble saves. DualPipe, which runs two pipelines in opposite
directions, is not measured here.
"""

import pytest

from kernels.ch04 import pipeline
from kernels.ch04.pipeline_network import RANKS, SIZES, network, simulated, unpartitioned_gradients
from pytest_aiperf import Compare, Score

MESSAGE = 0.05  # in forward passes


def makespan(schedule):
    def arm(layers, batches):
        steps = schedule(RANKS, len(batches))
        gradients, slots, _ = pipeline.run(steps, layers, batches, MESSAGE)
        return gradients, Score(slots, "forward passes", "lower")

    return arm


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_makespans_are_those_of_the_closed_forms(ranks: int, micro_batches: int) -> None:
    whole, half = 3 * (micro_batches + ranks - 1), 3 * (micro_batches + (ranks - 1) / 2)
    assert simulated(pipeline.gpipe, ranks, micro_batches)[0] == whole
    assert simulated(pipeline.one_f_one_b, ranks, micro_batches)[0] == whole
    assert simulated(pipeline.interleaved, ranks, micro_batches)[0] == half
    assert simulated(pipeline.zero_bubble, ranks, micro_batches) == (whole - 2 * (ranks - 1), ranks)


@pytest.mark.host
def test_pipeline_bubble_host(compare: Compare) -> None:
    compare(
        baseline=makespan(pipeline.one_f_one_b),
        optimized=makespan(pipeline.interleaved),
        library=makespan(pipeline.zero_bubble),
        against="previous rung",
        inputs=network,
        reference=unpartitioned_gradients,
        metric="score",
    )
