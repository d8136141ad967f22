"""Evict-first hints or a persisting window keep a table in the L2 cache and beat plain loads.

Each of 16 Mi pairs multiplies a context with an item, as the sampled negatives of a retrieval model
do: 128 bytes that are needed once, and a row of 32 bytes of a table of 22 MiB in int8. The table
would fit the L2 cache, 60 MiB on an H200 and 50 on an H100. But between two uses of a row, 98 MB of
contexts, ids and scores pass through on average, and the cache evicts what has not been used for a
while. A miss is expensive: a lone sector of 32 bytes is a DRAM access of 64.

"hints" marks contexts, ids and scores as evict-first, so that their lines make room for each other
first. "window" leaves the loads as they are and states the policy where the kernel is launched: an
access-policy window over the table makes its lines persisting (`hitRatio` 1), and these have a part
of the cache to themselves. That part is a limit of the process (`cudaLimitPersistingL2CacheSize`),
24 MiB and so a bit more than the table, set before the claim for all arms. Persisting lines stay
until they are made normal, so the arm ends with a kernel that reads each row once through a window
that does this; it is timed, too. `cudaCtxResetPersistingL2Cache` is no substitute: the host calls
it, and it takes no stream in which it would wait for the kernel.

Where the loads can be changed, hints are the better choice, because they need no limit and no
reset, and gain more. On an H200 both bring the traffic of the DRAM to that without the table, from
1.25 times as much; hints are then 1.24 times as fast as plain loads, but the window only 1.07
times. What it loses was not found: its last kernel reads only a hundredth of these bytes. The part
that is set aside is not free for the others. In a probe with contexts of half the size and four
times as many pairs on an H100, 24 MiB cost the baseline less than 1 %, 28 cost it 4 %, and 32, the
most that it permits, 19 %: a window then looks 1.34 times as fast as the baseline, of which only
1.12 are left against a baseline without a limit. The evidence, the traffic of the DRAM, shows that
rows stay in the cache.

The limit is the traffic without the table, 136 of at most 200 bytes per pair: 1.47x if each use of
a row misses in the baseline, and less the more rows its cache keeps. By the traffic that was
counted on an H200 it is 1.25x, and hints reach it. Neither gains anything for a small table, for
ids of which few take most of the uses, or in a cache that holds the stream between two uses as
well: these rows stay anyway. A table larger than the part set aside evicts itself; then a lower
`hitRatio` makes a part of it persist. torch.compile is not an arm: it loads the rows with an
evict-last hint, and such lines stay in the cache for the arm that is timed next.
"""

from contextlib import suppress

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence
from pytest_aiperf.errors import NeedsGpu

WIDTH = 32
TABLE_MIB = 22
SET_ASIDE_MIB = 24
"""Of the L2 cache for persisting lines: more than the table, should its sets fill unevenly."""

Pairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]


def pairs(bench: Bench) -> Pairs:
    """Draw contexts, the ids of their items, and the table; make room for the scores."""
    count, entries = bench.size(2**24, check=10_007), bench.size(TABLE_MIB * 2**15, check=100)
    contexts = torch.randn(count, WIDTH, device=bench.device)
    ids = torch.randint(entries, (count,), dtype=torch.int32, device=bench.device)
    items = torch.randint(-127, 128, (entries, WIDTH), dtype=torch.int8, device=bench.device)
    return contexts, ids, items, torch.empty(count, device=bench.device), count, entries


def in_fp64(contexts, ids, items, *_):
    parts = zip(contexts.split(2**21), ids.split(2**21), strict=True)
    return torch.cat([(part.double() * items[at].double()).sum(1) for part, at in parts])


@pytest.mark.gpu(min_sm=80)
@pytest.mark.parametrize("rung", ["hints", "window"])
def test_l2_persisting_window(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    score = nvcc("ch07/pair_scores.cu")
    with suppress(NeedsGpu):  # a check builds the kernels only
        score["set_aside"](SET_ASIDE_MIB)
    compare(
        baseline=score["no_policy"],
        optimized=score[rung],
        inputs=pairs,
        work=lambda contexts, ids, items, out, *_: Work(
            read=contexts.nbytes + ids.nbytes + items.nbytes, written=out.nbytes
        ),
        reference=in_fp64,
        # the contexts displace all else in the cache, and counters would be read per batch if cold
        cache="warm",
        # fewer than a quarter of the uses of a row read device memory
        evidence=[evidence.counter("dram__bytes.sum", max=1.1, per="work")],
    )
