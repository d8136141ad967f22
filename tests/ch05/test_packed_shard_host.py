"""A gather from a mapped shard beats a read per record, and one read of the whole shard.

A batch takes 4000 records of 2 KiB (512 tokens) in random order from one packed file of 10,000.
The baseline reads each with its own `pread`: 4000 Python calls and 4000 system calls. Each rung
changes one thing:

* "read_all" reads the whole shard with one call and picks the records in memory, with one indexing
  call. This removes the calls, but copies 3.5 times the bytes: first all 20.5 MB of the shard, then
  the 8.2 MB of the batch. So it gains little: 1.07x on a host with 32 CPUs, which is not certain
  (0.96 to 1.20), and no gain is required of it.
* "gather" maps the shard into memory (mmap) instead of reading it. The same indexing call now
  copies the records straight out of the page cache, and the shard itself is not copied. The
  operating system runs only for page faults, and one fault maps many pages: by default 16
  (fault-around), and up to 2 MiB. In the record, 12 faults map the 20 MB.

The mapping itself is part of the call. The evidence of "read_all" is its memory, that of the whole
shard beside the batch. The evidence of "gather" is its page faults, where a read fills memory that
is mapped already. A test beside the claim counts the system calls that read.

The page cache is warm for all arms, since the shard was just written. With a cold cache the disk
decides: a mapping reads at its page faults, one after the other, and queued or larger reads may be
faster. "read_all" loses to the baseline where a batch takes only a small part of the shard (here it
takes 40 %), and fails where the shard does not fit in memory. The limit is one copy of the batch.
On the host with 32 CPUs the baseline takes 1.4 µs per record and the gather 0.4: for records whose
copy alone takes many microseconds, both rungs gain little.
"""

import os
import tempfile
from functools import lru_cache
from typing import IO

import numpy as np
import pytest

from kernels.ch05.read_counts import COUNTS, reads_of
from pytest_aiperf import Bench, Compare, Work, evidence

TOKENS = 512


def tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, (count, TOKENS), dtype=np.int32)


@lru_cache(maxsize=4)  # all arms read the same file; none writes it
def packed(seed: int, count: int) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - unnamed, deleted with its last reference
    file.write(tokens(seed, count).data)
    file.flush()
    return file


def shard(bench: Bench) -> tuple[IO[bytes], np.ndarray, int, int]:
    count = bench.size(10_000, check=50)
    order = np.random.default_rng(bench.seed).permutation(count)
    return packed(bench.seed, count), order[: bench.size(4_000, check=20)], bench.seed, count


def read_each(file, records, seed, count):
    batch = np.empty((len(records), TOKENS), np.int32)
    for row, record in zip(batch, records.tolist(), strict=True):
        os.preadv(file.fileno(), [row], record * row.nbytes)
    return batch


def read_all(file, records, seed, count):
    file.seek(0)
    return np.fromfile(file, np.int32).reshape(-1, TOKENS)[records]


def gather(file, records, seed, count):
    return np.memmap(file, np.int32, "r").reshape(-1, TOKENS)[records]


@pytest.mark.skipif(not COUNTS.exists(), reason="this system does not count reads")
def test_only_the_baseline_makes_a_system_call_per_record() -> None:
    inputs = shard(Bench("cpu", seed=0, full=False))
    calls = {arm: reads_of(arm, *inputs)[0] for arm in (read_each, read_all, gather)}
    assert calls[read_each] >= len(inputs[1])
    assert max(calls[read_all], calls[gather]) <= 8


RUNGS = {
    # the shard beside the batch
    "read_all": (read_each, read_all, "idiomatic", evidence.peak_memory(min=1.5, per="baseline")),
    # mapping 20 MB by faults of at most 2 MiB; reads fill memory that is mapped already
    "gather": (read_all, gather, "previous rung", evidence.page_faults(min=8)),
}


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_packed_shard_host(compare: Compare, rung: str) -> None:
    baseline, optimized, against, proof = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        against=against,
        inputs=shard,
        work=lambda file, records, seed, count: Work(
            read=4 * TOKENS * len(records), written=4 * TOKENS * len(records)
        ),
        reference=lambda file, records, seed, count: tokens(seed, count)[records],
        metric="wall",
        cache="warm",
        evidence=[proof],
    )
