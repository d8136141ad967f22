"""Reading the next block past the page cache in a thread while one is hashed beats taking turns.

Read and hashed block by block (here with BLAKE2), a file keeps either the CPU or the disk idle. A
second buffer and a thread that reads the next block while this one is hashed (read-ahead, double
buffering) hide the shorter of the two stages behind the longer. Python's GIL does not prevent that:
a read releases it while it waits, and hashing releases it for large blocks. Both arms read past the
page cache (O_DIRECT), as databases do and as programs do that read more than memory holds. So each
read waits for the disk. Both arms read the blocks in order.

The limit is (read + hash) / max(read, hash), less the first read, which nothing hides: 1.88x for 16
blocks if both stages take equally long. A block of 1.5 MiB takes 1 to 2 ms to hash, and about as
long to read at 1 GB/s. So the gain depends on the disk: where it is several times faster or slower,
little is left to hide. Then the remedy is to make the longer stage faster: with several requests in
flight for the disk (ch05/io_block_depth_host), or with several threads that hash. Who may use the
page cache should first try ordinary reads in sequence: the operating system then reads ahead by
itself, and the thread gains less.
"""

import hashlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pytest

from kernels.ch05.direct_reads import DirectFile
from pytest_aiperf import Bench, Compare, Work, evidence

BLOCKS = 16


@lru_cache(maxsize=4)  # both arms read the same file; neither writes it
def random_file(seed: int, size: int) -> DirectFile:
    return DirectFile(np.random.default_rng(seed).bytes(size))


def stored(bench: Bench) -> tuple[DirectFile, int]:
    block = bench.size(3 << 19, check=4096)
    return random_file(bench.seed, BLOCKS * block), block


def read(file, buffer, i):
    if os.preadv(file.fileno(), [buffer], i * len(buffer)) != len(buffer):
        raise EOFError(f"the file ends within block {i}")


def digest(data):
    return np.frombuffer(hashlib.blake2b(data).digest(), np.uint8)


def one_by_one(file, block):
    buffer, digests = mmap.mmap(-1, block), []  # aligned to pages, as O_DIRECT needs it
    for i in range(BLOCKS):
        read(file, buffer, i)
        digests.append(digest(buffer))
    return np.stack(digests)


def read_ahead(file, block):
    buffers, digests = [mmap.mmap(-1, block) for _ in range(2)], []
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read, file, buffers[0], 0)
        for i in range(BLOCKS):
            reading.result()
            if i + 1 < BLOCKS:
                reading = reader.submit(read, file, buffers[(i + 1) % 2], i + 1)
            digests.append(digest(buffers[i % 2]))
    return np.stack(digests)


def buffered(file, block):
    with os.fdopen(os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY), "rb") as again:
        digests = [hashlib.blake2b(again.read(block)).digest() for _ in range(BLOCKS)]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(BLOCKS, -1)


@pytest.mark.host
def test_prefetch_thread_host(compare: Compare) -> None:
    compare(
        baseline=one_by_one,
        optimized=read_ahead,
        inputs=stored,
        work=lambda file, block: Work(read=BLOCKS * block),
        reference=buffered,
        metric="wall",
        cache="warm",
        # the CPU hashes for a larger part of the time
        evidence=[evidence.busy_cores(min=1.1, per="baseline")],
    )
