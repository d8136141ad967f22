"""One gather from a memory-mapped shard beats one read call per record.

A batch takes 4000 records of 2 KiB (512 tokens) in random order from one packed file. Reading each
with its own `pread` costs 4000 Python calls and 4000 system calls. Mapped into memory, the shard is
an array: one indexing call copies all records straight out of the page cache. The operating system
runs only for page faults, and one fault maps many pages: usually 16 (fault-around), at most 2 MiB.

The page cache is warm for both arms, since the shard was just written. The mapping itself is part
of the call. Reading the whole shard in one call and picking the
records there is faster than 4000 calls, too, but copies 3.5 times the bytes of the gather: first
all 20.5 MB, then the 8.2 MB of the batch.
With a cold cache the disk decides, and a mapping reads it page by page, which queued or larger
reads beat. From about 16 KiB per record, the copy outweighs the calls. The evidence, page faults,
shows that the shard is mapped; it does not count the saved calls, which the code shows.
"""

import os
import tempfile
from functools import lru_cache
from typing import IO

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work, evidence

TOKENS = 512


@lru_cache(maxsize=4)  # both arms read the same file; neither writes it
def packed(seed: int, count: int) -> IO[bytes]:
    tokens = np.random.default_rng(seed).integers(0, 50_000, (count, TOKENS), dtype=np.int32)
    file = tempfile.TemporaryFile()  # noqa: SIM115 - unnamed, deleted with its last reference
    file.write(tokens.data)
    file.flush()
    return file


def shard(bench: Bench) -> tuple[IO[bytes], np.ndarray]:
    count = bench.size(10_000, check=50)
    order = np.random.default_rng(bench.seed).permutation(count)
    return packed(bench.seed, count), order[: bench.size(4_000, check=20)]


def read_each(file, records):
    batch = np.empty((len(records), TOKENS), np.int32)
    for row, record in zip(batch, records.tolist(), strict=True):
        os.preadv(file.fileno(), [row], record * row.nbytes)
    return batch


def gather(file, records):
    return np.memmap(file, np.int32, "r").reshape(-1, TOKENS)[records]


def read_all(file, records):
    file.seek(0)
    return np.frombuffer(file.read(), np.int32).reshape(-1, TOKENS)[records]


@pytest.mark.host
def test_packed_shard_host(compare: Compare) -> None:
    compare(
        baseline=read_each,
        optimized=gather,
        inputs=shard,
        work=lambda file, records: Work(
            read=4 * TOKENS * len(records), written=4 * TOKENS * len(records)
        ),
        reference=read_all,
        metric="wall",
        cache="warm",
        # mapping 20 MB by faults of at most 2 MiB; reads fill memory that is mapped already
        evidence=[evidence.page_faults(min=8)],
    )
