"""Reading blocks ahead in a thread beats waiting for storage before hashing each block.

Fetched and hashed block by block (here with BLAKE2), an object keeps either the CPU or storage
idle. Storage is simulated here: each block comes from the page cache after a sleep of 3 ms, as from
object storage or a busy disk, so the waits do not depend on the machine. A thread that requests the
next blocks while one is hashed ("one_reader") hides the shorter of the two stages behind the
longer. Python's GIL does not prevent that: a read releases it while it waits, and hashing releases
it for large blocks. Hashing a block takes 1 to 2 ms, less than its wait, so with one reader part of
the wait remains. Four threads ("four_readers") keep four requests in flight; then hashing is the
longer stage.

The limits follow from the two times: with one reader (wait + hash) / max(wait, hash), and with
enough readers (wait + hash) / hash, less the first wait, which nothing hides. Hashing in the
readers as well would use more cores; here it stays in one thread, as a stage does that cannot be
split. Where bandwidth rather than latency limits storage, parallel requests gain nothing over one
reader.
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

BLOCKS = 16
LATENCY_S = 3e-3  # simulated wait per block; hashing 1.5 MiB takes 1 to 2 ms


@lru_cache(maxsize=4)  # both arms read the same file; neither writes it
def random_file(seed: int, size: int) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - unnamed, deleted with its last reference
    file.write(np.random.default_rng(seed).bytes(size))
    file.flush()
    return file


def stored(bench: Bench) -> tuple[IO[bytes], int]:
    block = bench.size(3 << 19, check=4096)
    return random_file(bench.seed, BLOCKS * block), block


def fetch(file, block, i):
    time.sleep(LATENCY_S)
    return os.pread(file.fileno(), block, i * block)


def digest(data):
    return np.frombuffer(hashlib.blake2b(data).digest(), np.uint8)


def one_by_one(file, block):
    return np.stack([digest(fetch(file, block, i)) for i in range(BLOCKS)])


def read_ahead(readers, file, block):
    with ThreadPoolExecutor(readers) as threads:
        blocks = threads.map(partial(fetch, file, block), range(BLOCKS))
        return np.stack([digest(data) for data in blocks])


def sequential_digests(file, block):
    file.seek(0)
    digests = [hashlib.blake2b(file.read(block)).digest() for _ in range(BLOCKS)]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(BLOCKS, -1)


one_reader = partial(read_ahead, 1)
RUNGS = {"one_reader": 1, "four_readers": 4}


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_prefetch_thread_host(compare: Compare, rung: str) -> None:
    compare(
        baseline=one_by_one,
        optimized=partial(read_ahead, RUNGS[rung]),
        inputs=stored,
        work=lambda file, block: Work(read=BLOCKS * block),
        reference=sequential_digests,
        metric="wall",
        cache="warm",
        # each block is waited for by a reader, and most are handed to a thread that waits
        evidence=[evidence.context_switches(min=1.5 * BLOCKS)],
    )
