"""Mapping a file of rows beats reading it to average one column, and a file of columns beats both.

A table of 16 numeric columns lies in two binary files: row by row, as records are written, and
column by column, as Parquet, Arrow and other analytical formats store it. No arm parses text. The
baseline reads the whole row file into an array and averages one of its columns. Each rung changes
one thing:

* "mapped_rows" maps the same file into memory (mmap) instead of reading it. The average walks
  through the pages of the page cache, and no byte is copied. But a row is 64 bytes, one cache line:
  for 4 bytes of every row, all pages of the file are mapped and all its lines are fetched.
* "columns" maps the column file instead. The average is the same line of code, but the numbers of a
  column are contiguous: a sixteenth of the pages and of the lines, and every byte of them is used.

The evidence is page faults: a mapping causes some, where the baseline reads into memory that is
mapped already, and a column causes far fewer than all rows. A test beside the claim counts the
bytes that the baseline copies and the rungs do not. The fetched cache lines are not counted, since
virtual machines usually offer no counter of them: how much of the gain of "columns" is lines and
how much is faults was not measured. Both files are in the page cache, because they were just
written. With a cold cache the disk decides: mapping the rows can gain little then, because all
pages are read either way.

The limit of "columns" is the ratio of all columns to those that are used, 16 here, and the gain
stays below it where adding a column's numbers takes longer than fetching them. On a host with 32
CPUs the gain is 4.4x (3.9 to 5.0), after 2.4x (1.9 to 3.1) for "mapped_rows". A query over k
columns gains at most 16 / k, and one over all of them nothing. Rows win where single records are
looked up or appended: appending a row to a column file touches 16 places, and column formats
therefore write groups of rows at a time. There is no library arm, because pyarrow is not among the
packages of the course.
"""

import math
import tempfile
from functools import lru_cache
from typing import IO

import numpy as np
import pytest

from kernels.ch05.read_counts import COUNTS, reads_of
from pytest_aiperf import Bench, Compare, Work, evidence

COLUMNS, USED = 16, 3


def written(table: np.ndarray) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - unnamed, deleted with its last reference
    file.write(table.tobytes())
    file.flush()
    return file


@lru_cache(maxsize=4)  # all arms read the same files; none writes them
def files(seed: int, rows: int) -> tuple[IO[bytes], IO[bytes]]:
    table = np.random.default_rng(seed).random((rows, COLUMNS), np.float32)
    return written(table), written(table.T)


def tables(bench: Bench) -> tuple[IO[bytes], IO[bytes], int]:
    rows = bench.size(400_000, check=100)
    return *files(bench.seed, rows), rows


def mean(column):
    return column.mean(dtype=float)


def read_rows(by_row, by_column, rows):
    by_row.seek(0)
    return mean(np.fromfile(by_row, np.float32).reshape(rows, COLUMNS)[:, USED])


def mapped_rows(by_row, by_column, rows):
    return mean(np.memmap(by_row, np.float32, "r", shape=(rows, COLUMNS))[:, USED])


def columns(by_row, by_column, rows):
    return mean(np.memmap(by_column, np.float32, "r", shape=(COLUMNS, rows))[USED])


def exact(by_row, by_column, rows):
    by_row.seek(0)
    numbers = memoryview(by_row.read()).cast("f")[USED::COLUMNS]
    return math.fsum(numbers) / rows


@pytest.mark.skipif(not COUNTS.exists(), reason="this system does not count reads")
def test_only_the_baseline_copies_the_file() -> None:
    inputs = tables(Bench("cpu", seed=0, full=True))
    copied = {arm: reads_of(arm, *inputs)[1] for arm in (read_rows, mapped_rows, columns)}
    assert copied[read_rows] >= 4 * COLUMNS * inputs[-1]
    assert max(copied[mapped_rows], copied[columns]) < 4096


RUNGS = {
    # mapping 25.6 MB takes 13 faults or more; the baseline reads into memory that is mapped already
    "mapped_rows": (read_rows, mapped_rows, "idiomatic", evidence.page_faults(min=8)),
    # a sixteenth of the pages, or 2 huge pages instead of 13
    "columns": (
        mapped_rows,
        columns,
        "previous rung",
        evidence.page_faults(max=0.3, per="baseline"),
    ),
}


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_columnar_binary_host(compare: Compare, rung: str) -> None:
    baseline, optimized, against, proof = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        against=against,
        inputs=tables,
        work=lambda by_row, by_column, rows: Work(read=4 * rows),
        reference=exact,
        metric="wall",
        cache="warm",
        evidence=[proof],
    )
