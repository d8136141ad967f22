"""Worker processes that multiply matrices, each with so many BLAS threads."""

import atexit
import multiprocessing
import os
import time
from functools import cache
from unittest import mock

import numpy as np

WORKERS = 4
_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def cores():
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def power(matrix, exponent):
    """Multiply a matrix with itself: a row of small products, as a model's layers are."""
    result = matrix
    for _ in range(exponent - 1):
        result = result @ matrix
    return result


@cache
def crew(threads):
    """Start the workers, once; a BLAS library reads its number of threads when it is loaded."""
    chosen = dict.fromkeys(_VARIABLES, str(threads))
    with mock.patch.dict(os.environ, chosen):
        pool = multiprocessing.get_context("spawn").Pool(WORKERS)
        # so slow that each worker gets one: all have loaded NumPy before the variables change back
        pool.map(time.sleep, [0.2] * WORKERS, chunksize=1)
        pool.starmap(power, [(np.eye(64, dtype=np.float32), 4)] * WORKERS, chunksize=1)
    atexit.register(pool.terminate)
    return pool


def powers(threads, matrices, exponent):
    """Give each worker one matrix; return all results."""
    tasks = [(matrix, exponent) for matrix in matrices]
    return np.stack(crew(threads).starmap(power, tasks, chunksize=1))
