"""Threads that read ahead let storage and the CPU work at the same time.

Fetching an object block by block and checking each (here its BLAKE2 digest) takes turns: the CPU
waits for storage, storage for the CPU. With four threads that ask for the next blocks while one is
hashed, the waits run side by side, and beside the hashing. Python's lock is no hindrance: a read
gives it up while it waits, hashing gives it up for large blocks.

One block ahead would hide at most one wait behind the hashing of one block; with enough of them the
limit is the longer of the two stages: hashing all blocks, or waiting for all over the number of
threads. Storage is simulated: each block comes out of the page cache after a wait of 3 ms, as from
object storage or a busy disk. Where storage is bound by bandwidth, requests wait for each other,
and more than one ahead gains nothing.
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

from pytest_aiperf import Bench, Compare, Work

BLOCKS, READERS = 8, 4
LATENCY = 3e-3


@lru_cache(maxsize=4)  # both arms read the same file, and nobody writes it
def random_file(seed: int, size: int) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it has no name, and goes when nobody has it
    file.write(np.random.default_rng(seed).bytes(size))
    file.flush()
    return file


def stored(bench: Bench) -> tuple[IO[bytes], int]:
    block = bench.size(1 << 18, check=4096)
    return random_file(bench.seed, BLOCKS * block), block


def fetch(file, block, i):
    time.sleep(LATENCY)
    return os.pread(file.fileno(), block, i * block)


def digest(data):
    return np.frombuffer(hashlib.blake2b(data).digest(), np.uint8)


def in_turn(file, block):
    return np.stack([digest(fetch(file, block, i)) for i in range(BLOCKS)])


def reading_ahead(file, block):
    with ThreadPoolExecutor(READERS) as threads:
        blocks = threads.map(partial(fetch, file, block), range(BLOCKS))
        return np.stack([digest(data) for data in blocks])


def of_the_whole(file, block):
    file.seek(0)
    return np.stack([digest(file.read(block)) for _ in range(BLOCKS)])


@pytest.mark.host
def test_prefetch_thread_host(compare: Compare) -> None:
    compare(
        baseline=in_turn,
        optimized=reading_ahead,
        inputs=stored,
        work=lambda file, block: Work(bytes=BLOCKS * block, written=0),
        reference=of_the_whole,
        metric="wall",
        cache="warm",
    )
