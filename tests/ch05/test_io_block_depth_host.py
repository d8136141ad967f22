"""Several reads in flight, or larger reads, beat reading 4 KiB records one at a time.

An epoch over a file that does not fit in memory reads every record from the disk, in random order.
One after the other, each read of 4 KiB pays the full latency of a request (tens to hundreds of
microseconds on NVMe and cloud disks), and disk and CPU take turns waiting for each other. There
are two ways out, which change one thing each.

* Queue depth: with 4 or 16 threads that read, 4 or 16 requests are in flight, and their latencies
  overlap (Little's law: throughput is requests in flight over latency). The order stays random. The
  limit is the number of requests per second of the disk, or that of the CPU, since Python's threads
  take turns in the interpreter. On a host with 16 CPUs a request takes 38 µs alone, and 16 threads
  complete one every 15 µs, with about twice the CPU time per request. Which limit that is was not
  measured. The evidence counts busy CPUs, not requests in flight. io_uring queues requests without
  threads; it was not compared.
* Block size: reads of 1 MiB move 256 records per request, so that bytes count and not requests:
  0.8 GB/s on that host. The records of a block arrive together. Training tolerates that if blocks
  come in random order and their records are mixed in a shuffle buffer, as loaders of packed shards
  do.

The file is opened with O_DIRECT, which bypasses the page cache: with a cached file, requests cost a
system call and a copy, and there is no latency to overlap. The file has only 8 MiB, so that the
baseline ends soon; the host of a virtual disk may serve it from its own memory. Buffered reads in
sequence gain less as well, because the kernel already reads ahead in large requests.
"""

import os
from functools import lru_cache, partial

import numpy as np
import pytest

from kernels.ch05.direct_reads import PAGE_BYTES, DirectFile, read_all
from pytest_aiperf import Bench, Compare, Work, evidence

page_by_page = partial(read_all, PAGE_BYTES, 1)
# the CPU works while several requests are in flight, instead of waiting for each
WAITS_LESS = evidence.busy_cores(min=1.2, per="baseline")
# each read waits once
FEWER_WAITS = evidence.context_switches(max=0.05, per="baseline")
RUNGS = {
    "depth_4": (partial(read_all, PAGE_BYTES, 4), WAITS_LESS),
    "depth_16": (partial(read_all, PAGE_BYTES, 16), WAITS_LESS),
    "blocks": (partial(read_all, 1 << 20, 1), FEWER_WAITS),
}


@lru_cache(maxsize=4)  # all arms read the same file
def random_file(seed: int, pages: int) -> DirectFile:
    return DirectFile(np.random.default_rng(seed).bytes(pages * PAGE_BYTES))


def shuffled(bench: Bench) -> tuple[DirectFile, np.ndarray]:
    pages = bench.size(2048, check=256)
    order = np.random.default_rng(bench.seed).permutation(pages)
    return random_file(bench.seed, pages), order


def buffered(file, order):
    with os.fdopen(os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY), "rb") as again:
        return np.frombuffer(again.read(), np.uint8)


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_io_block_depth_host(compare: Compare, rung: str) -> None:
    optimized, proof = RUNGS[rung]
    compare(
        baseline=page_by_page,
        optimized=optimized,
        inputs=shuffled,
        work=lambda file, order: Work(read=PAGE_BYTES * len(order)),
        reference=buffered,
        metric="wall",
        cache="warm",
        evidence=[proof],
    )
