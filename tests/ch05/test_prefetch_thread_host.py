"""Reading blocks ahead in threads beats waiting for storage before hashing each block.

Fetched and hashed block by block (here with BLAKE2), an object keeps either the CPU or storage
idle. Four reader threads request the next blocks while one block is hashed: their waits overlap
each other and the hashing. Python's GIL does not prevent that: a read releases it while it waits,
and hashing releases it for large blocks.

Here the waits are longer than the hashing, so most of the gain comes from four waits in parallel; a
single reader would hide at most the hashing. The limit is the longer of two stages: hashing all
blocks, or all waits divided by the number of threads. Storage is simulated: each block comes from
the page cache after a wait of 3 ms, as from object storage or a busy disk. Where bandwidth rather
than latency limits storage, parallel requests gain nothing beyond the overlap with hashing.
"""

import hashlib
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import IO

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work, evidence

BLOCKS, READERS = 8, 4
LATENCY_S = 3e-3  # simulated wait per block


@lru_cache(maxsize=4)  # both arms read the same file; neither writes it
def random_file(seed: int, size: int) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - unnamed, deleted with its last reference
    file.write(np.random.default_rng(seed).bytes(size))
    file.flush()
    return file


def stored(bench: Bench) -> tuple[IO[bytes], int]:
    block = bench.size(1 << 18, check=4096)
    return random_file(bench.seed, BLOCKS * block), block


def fetch(file, block, i):
    time.sleep(LATENCY_S)
    return os.pread(file.fileno(), block, i * block)


def digest(data):
    return np.frombuffer(hashlib.blake2b(data).digest(), np.uint8)


def one_by_one(file, block):
    return np.stack([digest(fetch(file, block, i)) for i in range(BLOCKS)])


def reading_ahead(file, block):
    with ThreadPoolExecutor(READERS) as threads:
        blocks = threads.map(partial(fetch, file, block), range(BLOCKS))
        return np.stack([digest(data) for data in blocks])


def sequential_digests(file, block):
    file.seek(0)
    return np.stack([digest(file.read(block)) for _ in range(BLOCKS)])


@pytest.mark.host
def test_prefetch_thread_host(compare: Compare) -> None:
    compare(
        baseline=one_by_one,
        optimized=reading_ahead,
        inputs=stored,
        work=lambda file, block: Work(read=BLOCKS * block),
        reference=sequential_digests,
        metric="wall",
        cache="warm",
        # besides the waits for storage, each reader waits for work at least once
        evidence=[evidence.context_switches(min=BLOCKS + READERS)],
    )
