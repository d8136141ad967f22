"""One gather from a mapped shard beats a read call per record.

A batch takes 4000 records of 2 KiB (512 tokens) in random order from one packed file. Reading each
with its own `pread` crosses from Python to the kernel and back 4000 times. Mapped, the shard is an
array: one indexing call copies all records straight out of the page cache, and the kernel is
entered only for pages that are not mapped yet, 16 neighbours at a time.

The page cache is the medium, warm for both arms since the shard was just written; mapping it is
part of the call. With a cold cache the disk decides, and a mapping reads it page by page, which
queued or larger reads beat. From about 16 KiB a record, the copy outweighs the calls.
"""

import os
import tempfile
from functools import lru_cache
from typing import IO

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work

TOKENS = 512


@lru_cache(maxsize=4)  # both arms read the same file, and nobody writes it
def packed(seed: int, records: int) -> IO[bytes]:
    tokens = np.random.default_rng(seed).integers(0, 50_000, (records, TOKENS), dtype=np.int32)
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it has no name, and goes when nobody has it
    file.write(tokens.data)
    file.flush()
    return file


def shard(bench: Bench) -> tuple[IO[bytes], np.ndarray]:
    records = bench.size(10_000, check=50)
    order = np.random.default_rng(bench.seed).permutation(records)
    return packed(bench.seed, records), order[: bench.size(4_000, check=20)]


def read_each(file, wanted):
    batch = np.empty((len(wanted), TOKENS), np.int32)
    for row, record in zip(batch, wanted.tolist(), strict=True):
        os.preadv(file.fileno(), [row], record * row.nbytes)
    return batch


def gather(file, wanted):
    return np.memmap(file, np.int32, "r").reshape(-1, TOKENS)[wanted]


def read_all(file, wanted):
    file.seek(0)
    return np.frombuffer(file.read(), np.int32).reshape(-1, TOKENS)[wanted]


@pytest.mark.host
def test_packed_shard(compare: Compare) -> None:
    compare(
        baseline=read_each,
        optimized=gather,
        against="previous rung",
        inputs=shard,
        work=lambda file, wanted: Work(bytes=2 * 4 * TOKENS * len(wanted)),
        reference=read_all,
        metric="wall",
        cache="warm",
    )
