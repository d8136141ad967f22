"""Blocks that take their next item from a shared counter finish together, whatever its length.

One item in 32 is about 32 times as long as the others. Dealt out in advance, 64 items a block, an
unlucky block gets many of the long ones while the rest of the GPU waits for it. Taken from a
counter, one atomic addition an item, work goes where somebody is free. A block asks for its next
item when it begins one, so that it does not wait for the answer; at the end others wait for that
item and the one after it at most.

The largest share is 2.2 times the mean one, but a long item is a quarter of a share and cannot be
divided: were the counter free, 132 blocks would gain 1.6x, and 1.5x with 4 items at a time
(computed for such items). A plain grid of one block an item is balanced too, by the hardware; the
queue is for blocks that stay because starting is costly (here each first copies a table to shared
memory). Even items gain nothing, and where items are shorter than an addition to the counter,
blocks wait for it: then take several at once ("chunked").
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence

WORDS, LANES = 16384, 256


def items(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    count, kind = bench.size(8448, check=40), {"device": bench.device, "dtype": torch.int32}
    table = torch.randint(2**30, (WORDS,), **kind)
    usual = torch.randint(16, 49, (count,), **kind)
    is_long = torch.rand(count, device=bench.device) < 1 / 32
    lengths = torch.where(is_long, 32 * usual, usual)
    return table, lengths, torch.empty(count, LANES, **kind), count


def walked(table, lengths, out, count):
    """Look walks up: where each number of steps leads from each word, step after step doubled."""
    words = torch.arange(WORDS, device=table.device)
    steps = torch.arange(int(lengths.max()), device=table.device)
    leads = table.long()[(words ^ steps[:, None]) % WORDS]  # row i: step i alone
    done = 1
    while done < len(steps):  # row i: the steps up to i, `done` of them at most
        leads[done:] = leads[done:].gather(1, leads[:-done] % WORDS)
        done *= 2
    starts = torch.arange(count * LANES, device=table.device).view(count, LANES)
    return leads[lengths.long()[:, None] - 1, starts % WORDS]


@pytest.mark.parametrize("rung", ["queue", "chunked"])
def test_atomic_work_queue(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    walk = nvcc("ch12/atomic_work_queue.cu")
    compare(
        baseline=walk["static_split"],
        optimized=walk[rung],
        inputs=items,
        reference=walked,
        cache="warm",
        evidence=[
            evidence.opcode("ATOMG", kernel="walk_queue"),
            evidence.opcode("ATOMG", kernel="walk_static", most=0),
        ],
    )
