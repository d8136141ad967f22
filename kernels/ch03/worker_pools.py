"""Parsing shards of a log in worker processes that live for a task, for a batch, or for good."""

import json
import multiprocessing
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial

import numpy as np

WORKERS = 2
"""Processes at a time. Two are enough for tasks that take less time than a process start."""

# fork is the fastest way to start a process: spawn starts an interpreter and imports again
_context = multiprocessing.get_context("fork")


def summarize(shard):
    """Count the requests and failures of a shard of JSON lines, and add up its milliseconds."""
    requests = [json.loads(line) for line in shard.splitlines()]
    failures = sum(request["status"] >= 500 for request in requests)
    return len(requests), failures, sum(request["ms"] for request in requests)


def process_per_task(*shards):
    """Start a process for each shard, as many at a time as a pool has."""
    running, summaries = deque(), []
    for shard in shards:
        if len(running) == WORKERS:
            summaries.append(_end(*running.popleft()))
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=_send_summary, args=(sender, shard))
        process.start()
        running.append((process, receiver))
    summaries += [_end(*task) for task in running]
    return np.array(summaries)


def _end(process, receiver):
    summary = receiver.recv()
    process.join()
    return summary


def _send_summary(sender, shard):
    sender.send(summarize(shard))


def pool_per_batch(*shards):
    """Start a pool, use it for one batch, and stop it."""
    with ProcessPoolExecutor(WORKERS, mp_context=_context) as pool:
        return np.array(list(pool.map(summarize, shards)))


_warm_pool = cache(partial(ProcessPoolExecutor, WORKERS, mp_context=_context))


def warm_pool(*shards):
    """Use a pool that the first call has started."""
    return np.array(list(_warm_pool().map(summarize, shards)))
