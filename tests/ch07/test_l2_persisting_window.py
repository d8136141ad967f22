"""An evict-first hint, or an access-policy window, beats an L2 cache that treats all lines alike.

Each of 16 Mi pairs multiplies a context with an item, as the sampled negatives of a retrieval model
do: 64 bytes that are needed once, and a row of 32 bytes of a table of 24 MiB. The table would fit
the L2 cache, but between two uses of a row, tens of megabytes of contexts pass through, and the
cache evicts what has not been used for a while. A miss is dear: a lone sector of 32 bytes is a DRAM
access of 64.

"hints" marks contexts, ids and scores as evict-first, so that their lines make room for each other
first. "window" leaves the loads as they are and states the policy where the kernel is launched: an
access-policy window over the table makes its lines persisting, and these have a part of the cache
to themselves. That part is a limit of the process (`cudaLimitPersistingL2CacheSize`), here the size
of the table, set before the claim for all arms. Each call ends by making the lines normal, or they
would stay in the cache for whatever runs next.

Where the loads can be changed, hints are the better choice: they need no limit, and on an H200 they
gain 1.21x, the window 1.03x. Both remove most misses: the traffic falls from 1.35 times the least
to 1.04 and 1.07. So traffic alone does not explain the times; what slows the window down was not
measured. The part that is set aside is not free for the others. In a probe with four times as many
pairs on an H100, which has 50 MiB of L2 cache, 24 MiB cost the baseline less than 1 %, 28 cost it 4
%, and 32, the most that it permits, 19 %: a window then looks 1.34 times as fast as the baseline,
of which only 1.12 are left against a baseline without a limit.

The limit is the traffic without the table, 72 of at most 136 bytes per pair. Neither gains anything
for a small table, or for ids of which few take most of the uses: these stay anyway. A table larger
than the part set aside evicts itself: then `hitRatio` makes a part of it persist. The library arm
is torch.compile.
"""

from contextlib import suppress

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence
from pytest_aiperf.errors import NeedsGpu

WIDTH, TABLE_MIB = 16, 24

Pairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]


def pairs(bench: Bench) -> Pairs:
    """Draw contexts, the ids of their items, and the table; make room for the scores."""
    count, entries = bench.size(2**24, check=10_007), bench.size(TABLE_MIB * 2**15, check=100)
    contexts = torch.randn(count, WIDTH, device=bench.device)
    ids = torch.randint(entries, (count,), dtype=torch.int32, device=bench.device)
    items = torch.randn(entries, WIDTH, device=bench.device).bfloat16()
    return contexts, ids, items, torch.empty(count, device=bench.device), count, entries


@torch.compile(dynamic=False)
def compiled(contexts, ids, items, out, *_):
    out.copy_((contexts * items[ids]).sum(1))


def in_fp64(contexts, ids, items, *_):
    parts = zip(contexts.split(2**22), ids.split(2**22), strict=True)
    return torch.cat([(part.double() * items[at].double()).sum(1) for part, at in parts])


@pytest.mark.gpu(min_sm=80)
@pytest.mark.parametrize("rung", ["hints", "window"])
def test_l2_persisting_window(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    score = nvcc("ch07/pair_scores.cu")
    with suppress(NeedsGpu):  # a check builds the kernels only
        score["set_aside"](TABLE_MIB)
    compare(
        baseline=score["no_policy"],
        optimized=score[rung],
        library=compiled,
        inputs=pairs,
        work=lambda contexts, ids, items, out, *_: Work(
            read=contexts.nbytes + ids.nbytes + items.nbytes, written=out.nbytes
        ),
        reference=in_fp64,
        # the contexts displace all else in the cache, and counters would be read per batch if cold
        cache="warm",
        # fewer than a quarter of the uses of a row read device memory
        evidence=[evidence.counter("dram__bytes.sum", max=1.2, per="work")],
    )
