"""A pool of worker processes that stays alive beats starting processes for each task or batch.

A process is expensive to start. fork copies the page tables of its parent, which in a program that
has imported an AI framework maps hundreds of megabytes. Then both processes fault on every page
that one of them writes first (copy on write), and the page tables are freed when the process ends.
The other start methods cost more: spawn starts an interpreter that imports all modules again.

Eight shards of a log are parsed, about 1 ms of JSON each: work that holds the GIL, so that threads
would not help. The baseline is naive: it starts a process for each shard, two at a time.
"pool_per_batch" starts two workers that share the shards, as `with ProcessPoolExecutor(2) as pool:
pool.map(...)` in a function does: two starts instead of eight. "warm_pool" has started its workers
in an earlier call: none. It is judged against the pool per batch. What remains is the parsing, and
pickling through pipes.

The gain shrinks as tasks get longer, and vanishes for tasks of seconds. Workers that live long keep
what they allocate (`max_tasks_per_child` limits that) and see the modules and globals that their
parent had when they were started. fork is unsafe while other threads of the parent hold locks:
Python 3.14 starts workers with forkserver by default.
"""

import json
import re

import numpy as np
import pytest

from kernels.ch03 import worker_pools
from pytest_aiperf import Bench, Compare, evidence

SHARDS = 8
LADDER = [worker_pools.process_per_task, worker_pools.pool_per_batch, worker_pools.warm_pool]
# after each fork, the parent faults on every page that it writes
PAGE_FAULTS = {
    "pool_per_batch": 0.7,  # two forks instead of eight, and the pool's threads and queues
    "warm_pool": 0.3,  # no fork
}


def log(bench: Bench) -> tuple[bytes, ...]:
    rng, lines = np.random.default_rng(bench.seed), bench.size(400, check=10)
    ms = rng.integers(1, 4000, (SHARDS, lines)) / 4
    status = rng.choice([200, 404, 503], (SHARDS, lines))
    return tuple(
        "\n".join(
            json.dumps({"path": "/v1/completions", "ms": m, "status": int(s)})
            for m, s in zip(*shard, strict=True)
        ).encode()
        for shard in zip(ms, status, strict=True)
    )


def by_pattern(*shards):
    rows = []
    for shard in shards:
        numbers = re.findall(rb'"ms": ([\d.]+), "status": (\d+)', shard)
        ms, status = np.array(numbers, dtype=float).T
        rows.append((len(ms), np.count_nonzero(status == 503), ms.sum()))
    return np.array(rows)


@pytest.mark.host
@pytest.mark.parametrize("rung", PAGE_FAULTS)
def test_persistent_worker_pool_host(compare: Compare, rung: str) -> None:
    number = list(PAGE_FAULTS).index(rung)
    compare(
        baseline=LADDER[number],
        optimized=LADDER[number + 1],
        against="naive" if number == 0 else "previous rung",
        inputs=log,
        reference=by_pattern,
        metric="wall",
        cache="warm",
        evidence=[evidence.page_faults(max=PAGE_FAULTS[rung], per="baseline")],
    )
