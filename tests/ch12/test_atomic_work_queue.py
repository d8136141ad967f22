"""Persistent blocks that take items from an atomic work queue beat a static split of uneven items.

One item in 32 is about 32 times as long as the others. In a static split of 64 items per block, a
block with many long items delays the whole grid. With a queue, one atomicAdd per item, a block that
becomes free takes the next item (dynamic load balancing). A block requests its next item when it
starts the current one, so it does not wait for the atomic. At the end, the other blocks wait for at
most two items of the slowest.

The limit is 1.6x, and 1.5x with 4 items per atomicAdd ("chunked"), in a simulation of 132 blocks
whose counter costs nothing. The largest static share is 2.2 times the mean, but one long item is a
quarter of a mean share and cannot be split. On an H200 "queue" reaches 1.36x and "chunked" 1.39x: a
quarter of the atomics saves more than the coarser split loses. All rungs run one block per SM;
shared memory would allow three, which would hide more latency. The library arm is a grid of one
block per item, three per SM, which the hardware balances. It repeats the prologue for each item:
here the copy of a table to shared memory. Queues are for persistent blocks with a costly prologue.
Items of equal length gain nothing. Where items are shorter than an atomicAdd, blocks wait for the
counter; chunks reduce that.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence

WORDS, THREADS = 16384, 256
LEAST_BUSY_SM = "sm__cycles_active.min"


def items(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    count, options = bench.size(8448, check=40), {"device": bench.device, "dtype": torch.int32}
    table = torch.randint(2**30, (WORDS,), **options)
    usual = torch.randint(16, 49, (count,), **options)
    is_long = torch.rand(count, device=bench.device) < 1 / 32
    lengths = torch.where(is_long, 32 * usual, usual)
    return table, lengths, torch.empty(count, THREADS, **options), count


def walked(table, lengths, out, count):
    """Look up the walks in a table of all step counts and start words, by pointer doubling."""
    words = torch.arange(WORDS, device=table.device)
    steps = torch.arange(int(lengths.max()), device=table.device)
    targets = table.long()[(words ^ steps[:, None]) % WORDS]  # row i: step i alone
    span = 1
    while span < len(steps):  # row i: the last `span` steps up to step i
        targets[span:] = targets[span:].gather(1, targets[:-span] % WORDS)
        span *= 2
    starts = torch.arange(count * THREADS, device=table.device).view(count, THREADS)
    return targets[lengths.long()[:, None] - 1, starts % WORDS]


@pytest.mark.parametrize("rung", ["queue", "chunked"])
def test_atomic_work_queue(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    walk = nvcc("ch12/atomic_work_queue.cu")
    compare(
        baseline=walk["static_split"],
        optimized=walk[rung],
        library=walk["block_per_item"],
        inputs=items,
        reference=walked,
        cache="warm",
        evidence=[
            evidence.opcode("ATOMG", kernel="walk_queue"),
            # the same work in all: the SM that has least to do in the static split has more
            evidence.counter(LEAST_BUSY_SM, min=1.2, per="baseline"),
        ],
    )
