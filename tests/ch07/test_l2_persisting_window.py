"""Evict-first hints or a persisting window keep a table in the L2 cache and beat plain loads.

Each of 16 Mi pairs multiplies a context with an item, as the sampled negatives of a retrieval model
do. A context has 128 bytes that are needed once, and an item is a row of 32 bytes in a table of 22
MiB (int8). The table would fit the L2 cache, 60 MiB on an H200 and 50 on an H100. But between two
uses of a row, 98 MB of contexts, ids and scores pass through on average, and the cache evicts what
has not been used for a while. A miss is expensive: a lone sector of 32 bytes is a DRAM access of
64.

"hints" marks contexts, ids and scores as evict-first, so that their lines make room for each other
first. "window" leaves the loads as they are and states the policy where the kernel is launched. An
access-policy window over the table makes its lines persisting (`hitRatio` 1), and these have a part
of the cache to themselves. The size of that part is a limit of the process
(`cudaLimitPersistingL2CacheSize`). It is set before the claim for all arms: 24 MiB, a bit more than
the table. Persisting lines stay until they are made normal. So the arm ends with a kernel that
reads each row once through a window that does this, and that kernel is timed, too.
`cudaCtxResetPersistingL2Cache` is no substitute: the host calls it, and it takes no stream in which
it would wait for the kernel.

Where the loads can be changed, hints are the better choice, because they need no limit and no
reset, and gain more. On an H200, plain loads cause 1.25 times the DRAM traffic that is needed
without the table, and both rungs remove nearly all of that excess. Hints are 1.24 times as fast as
plain loads, but the window only 1.07 times. Where the window loses time was not found: its last
kernel reads only a hundredth of these bytes. The part that is set aside is not free for other
lines. In a probe with contexts of half the size and four times as many pairs on an H100, 24 MiB
cost the baseline less than 1 % and 28 cost it 4 %. 32 MiB, the most that an H100 permits, cost it
19 %: a window then looks 1.34 times as fast as the baseline, but is only 1.12 times as fast as a
baseline without a limit. The evidence, the traffic of the DRAM, shows that rows stay in the cache.

The limit is the traffic without the table, 136 of at most 200 bytes per pair. That would be a gain
of 1.47x if each use of a row missed in the baseline, and less the more rows its cache keeps. By the
traffic that was counted on an H200 it is 1.25x, and hints nearly reach it. Neither rung should gain
anything if the table is small, if a few rows take most of the uses, or if the cache also holds what
passes between two uses: these rows stay anyway. A table larger than the part set aside evicts
itself; then a lower `hitRatio` makes a part of it persist. torch.compile is not an arm: it loads
the rows with an evict-last hint, and such lines stay in the cache for the arm that is timed next.
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
