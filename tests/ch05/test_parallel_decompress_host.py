"""Decompressing blocks in several threads beats one thread, because zlib releases the GIL.

A DEFLATE stream (gzip, zlib, PNG, ZIP) is sequential: the position and meaning of each code depend
on those before it, so an ordinary decoder keeps only one core busy. Formats for parallel readers
therefore compress blocks independently (BGZF, Parquet pages, HDF5 and Zarr chunks). CPython's zlib
releases the global interpreter lock (GIL) while it decompresses, so a pool of threads reaches all
cores, and the contents need not be sent from one process to another.

The limit is the number of cores, less the imbalance of the last blocks: 40 blocks are 20 per core
on two cores, but only 2.5 on 16. On 16 logical CPUs, eight of them get three blocks if none is
interrupted, so the gain is 13.3x at most; 9.1x (7.4 to 11.2) was measured. Two logical CPUs share a
core, which may explain the rest; that was not measured. Other work also lowers the gain, because it
shares the cores with the pool. Since the size of the contents is known (`bufsize`), zlib allocates
it once and takes the GIL once per block; otherwise it does so each time that it doubles its buffer.
Where decompressing a block takes no longer than handing it to the pool, tens of microseconds,
threads gain nothing. Faster decoders (ISA-L, zlib-ng) also help on one core, and their gain
multiplies with that of the threads.
"""

import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work, evidence

BLOCK_BYTES = 1 << 19
thread_pool = cache(ThreadPoolExecutor)


# compression takes longer than both arms; the result can be shared, because bytes are immutable
@lru_cache(maxsize=4)
def compressed_walks(seed: int, count: int) -> tuple[bytes, ...]:
    steps = np.random.default_rng(seed).integers(-2, 3, (count, BLOCK_BYTES // 2), np.int8)
    return tuple(zlib.compress(walk.cumsum(dtype=np.int16), 1) for walk in steps)


def blocks(bench: Bench) -> tuple[bytes, ...]:
    return compressed_walks(bench.seed, bench.size(40, check=3))


def checksum(block):
    return zlib.crc32(zlib.decompress(block, bufsize=BLOCK_BYTES))


def one_thread(*blocks):
    return np.array([checksum(block) for block in blocks])


def threads(*blocks):
    return np.array(list(thread_pool().map(checksum, blocks)))


def piece_by_piece(*blocks):
    """Decompress and check at most 10,000 bytes at a time."""
    checksums = []
    for block in blocks:
        stream, crc = zlib.decompressobj(), 0
        while not stream.eof:
            crc = zlib.crc32(stream.decompress(stream.unconsumed_tail or block, 10_000), crc)
        checksums.append(crc)
    return np.array(checksums)


@pytest.mark.host
def test_parallel_decompress_host(compare: Compare) -> None:
    compare(
        baseline=one_thread,
        optimized=threads,
        inputs=blocks,
        work=lambda *blocks: Work(read=sum(map(len, blocks))),
        reference=piece_by_piece,
        metric="wall",
        cache="warm",
        # the same CPU time on more cores
        evidence=[evidence.busy_cores(min=1.2, per="baseline")],
    )
