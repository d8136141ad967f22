"""Worker processes that multiply matrices, each with a fixed number of BLAS threads."""

import atexit
import multiprocessing
import os
import re
import time
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np

WORKERS = 4
"""Worker processes, one per matrix; with default settings each starts one BLAS thread per core."""

PRODUCTS = 32
"""Consecutive products per worker and call: random delays of single products average out."""

_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def usable_cores():
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def matrix_power(matrix):
    """Multiply a matrix by itself PRODUCTS times: small products, as in a model's layers."""
    result = matrix
    for _ in range(PRODUCTS):
        result = result @ matrix
    return result


@cache
def worker_pool(threads, workers):
    """Start workers once per thread count: a BLAS library reads the count only at load time."""
    variables = dict.fromkeys(_VARIABLES, str(threads))
    # by default idle OpenBLAS threads spin for 2**26 cycles (about 30 ms), on cores that the other
    # arm needs; 2**4 cycles is the minimum
    variables["OPENBLAS_THREAD_TIMEOUT"] = "4"
    with mock.patch.dict(os.environ, variables):
        pool = multiprocessing.get_context("spawn").Pool(workers)
        # sleep 0.2 s per task, so that every worker has time to start before the first timed call
        pool.map(time.sleep, [0.2] * workers, chunksize=1)
        pool.map(matrix_power, [np.eye(64, dtype=np.float32)] * workers, chunksize=1)
    atexit.register(pool.terminate)
    return pool


def lost_cores(threads):
    """Count how often a thread of WORKERS workers has lost its core to another while it worked."""
    statuses = [s for p in worker_pool(threads, WORKERS)._pool for s in _statuses(p.pid)]  # noqa: SLF001
    found = (re.search(r"^nonvoluntary_ctxt_switches:\s*(\d+)", s, re.MULTILINE) for s in statuses)
    return sum(int(match[1]) for match in found if match)


def _statuses(process):
    return [file.read_text() for file in Path(f"/proc/{process}/task").glob("*/status")]


def matrix_powers(threads, matrices, workers=WORKERS):
    """Compute one power of each matrix on workers with ``threads`` BLAS threads each."""
    return np.stack(worker_pool(threads, workers).map(matrix_power, matrices, chunksize=1))
