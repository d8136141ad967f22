"""Persistent blocks that take items from an atomic work queue beat a static split of uneven items.

One item in 32 is about 32 times as long as the others. In a static split of 64 items per block, a
block with many long items ends last, and the GPU is partly idle until then. With a queue, one
atomicAdd per item, a block that becomes free takes the next item (dynamic load balancing). The
library arm needs neither: it is a grid of one block per item, and the hardware starts the next
block where one ends. But it repeats the prologue for each item, here the copy of a table to shared
memory, and takes 1.8 times as long as the queue. A queue is for blocks that stay because their
prologue is costly, and for items of uneven length. Without a prologue, one block per item balances
as well and needs no counter; that case is not measured here.

All arms have as many blocks at a time as fit on the GPU, three per SM, so the rungs and the static
split differ only in how items are distributed. A block requests its next item when it starts the
current one, so it does not wait for the atomic. At the end, the other blocks wait for at most two
items of the slowest, in "chunked" for five. "chunked" takes 4 items per atomicAdd: a quarter of the
atomics, and a coarser split. It is judged against "queue" and claims parity: an item takes much
longer than an atomicAdd, so fewer of them gain nothing here.

The shared memory of an SM, which its three blocks share, is the bottleneck: a load of a warp from
random addresses takes about three wavefronts (bank conflicts), and 24 warps load. So the SM with
the most work decides (1.6 times the mean), not the block with the most work (2.4 times), which runs
faster once the others on its SM have ended. The last block of an SM cannot use the whole bandwidth,
because each step waits for the one before, so the limit is a little higher. These figures are
computed; no counter of shared memory was read. In a simulation of the loads, with one wavefront per
cycle and SM and 40 cycles of latency per step, perfect balance would gain 1.75x and the queue gains
1.4x. On H200s, 1.31x to 1.36x is measured. The queue, too, ends with long items that cannot be
split. Where the lengths are known, starting the longest items first shortens that end, in the
simulation to almost nothing. Items of equal length gain nothing. Where items are shorter than an
atomicAdd, blocks would wait for the counter, and chunks should reduce that.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence

WORDS, THREADS = 16384, 256
LEAST_BUSY_SM = "sm__cycles_active.min"
ATOMICS = "l1tex__t_requests_pipe_lsu_mem_global_op_atom.sum"
LADDER = ["static_split", "queue", "chunked"]
PROOF = {
    # the total work is the same: the least busy SM has more to do than in the static split
    "queue": evidence.counter(LEAST_BUSY_SM, min=1.2, per="baseline"),
    # one per four items, and one more per block
    "chunked": evidence.counter(ATOMICS, max=0.3, per="baseline"),
}


def items(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    # 64 items for each block of the static split: an H200 has 132 SMs, and three blocks fit on each
    count, options = bench.size(25344, check=40), {"device": bench.device, "dtype": torch.int32}
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


@pytest.mark.parametrize("rung", PROOF)
def test_atomic_work_queue(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    walk = nvcc("ch12/atomic_work_queue.cu")
    compare(
        baseline=walk[LADDER[LADDER.index(rung) - 1]],
        optimized=walk[rung],
        library=walk["block_per_item"],
        against="idiomatic" if rung == "queue" else "previous rung",
        inputs=items,
        reference=walked,
        cache="warm",
        evidence=[evidence.opcode("ATOMG", kernel="walk_queue"), PROOF[rung]],
    )
