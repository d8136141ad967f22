"""Reading one column from a file of columns beats reading it from a file of rows.

A table of 16 numeric columns lies in two files: row by row, as records are written, and column by
column, as Parquet, Arrow and other analytical formats store them. A query over one column must read
all of the row file, because the wanted 4 bytes are in every 64, and picks them out of memory that
it has just filled. From the column file it reads one contiguous range, a sixteenth of the bytes,
into an array that is ready to use.

Both files are in the page cache and memory is reused, so the gain is that of copying a sixteenth of
the bytes and of summing contiguous numbers. Most of what remains in the column arm is the summary
itself: reading alone gains more. Mapping the column file, the library arm, takes about as long as
reading the column. Mapping the row file instead of reading it saves the copy, but not the fetch of
every cache line. From a disk or over a network, where bandwidth is scarcer, the ratio comes closer
to the 16x of the bytes. Queries that need all columns gain nothing, and appending one row to a
column file touches 16 places: column formats therefore write groups of rows at a time.
"""

import tempfile
from functools import lru_cache
from typing import IO

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work, evidence

COLUMNS, WANTED = 16, 3


def written(table: np.ndarray) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - unnamed, deleted with its last reference
    file.write(table.tobytes())
    file.flush()
    return file


@lru_cache(maxsize=4)  # both arms read the same files; neither writes them
def files(seed: int, rows: int) -> tuple[IO[bytes], IO[bytes]]:
    # repeated rows: drawing all of them would take longer than the claim
    drawn = np.random.default_rng(seed).standard_normal((rows // 50, COLUMNS), np.float32)
    table = np.tile(drawn, (50, 1))
    return written(table), written(table.T)


def tables(bench: Bench) -> tuple[IO[bytes], IO[bytes], int]:
    rows = bench.size(200_000, check=100)
    return *files(bench.seed, rows), rows


def summary(column):
    return column.min(), column.max(), column.mean(dtype=float)


def from_rows(by_row, by_column, rows):
    by_row.seek(0)
    return summary(np.fromfile(by_row, np.float32).reshape(rows, COLUMNS)[:, WANTED])


def from_columns(by_row, by_column, rows):
    by_column.seek(4 * rows * WANTED)
    return summary(np.fromfile(by_column, np.float32, rows))


def mapped(by_row, by_column, rows):
    return summary(np.memmap(by_column, np.float32, "r", shape=(COLUMNS, rows))[WANTED])


def expected(by_row, by_column, rows):
    by_row.seek(0)
    column = np.frombuffer(by_row.read(), np.float32)[WANTED::COLUMNS].astype(float)
    return column.min(), column.max(), column.mean()


@pytest.mark.host
def test_columnar_binary_host(compare: Compare) -> None:
    compare(
        baseline=from_rows,
        optimized=from_columns,
        library=mapped,
        inputs=tables,
        work=lambda by_row, by_column, rows: Work(read=4 * rows),
        reference=expected,
        metric="wall",
        cache="warm",
        evidence=[evidence.peak_memory(max=0.1, per="baseline")],
    )
