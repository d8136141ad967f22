"""Worker processes that multiply matrices, each with so many BLAS threads."""

import atexit
import multiprocessing
import os
import time
from functools import cache
from unittest import mock

import numpy as np

WORKERS = 4
PRODUCTS = 8  # a worker's, one after the other: whether a thread has to wait is chance
_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def cores():
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def chain(matrix):
    """Multiply a matrix with itself again and again: small products, as of a model's layers."""
    result = matrix
    for _ in range(PRODUCTS):
        result = result @ matrix
    return result


@cache
def crew(threads):
    """Start the workers, once; a BLAS library reads its number of threads when it is loaded."""
    chosen = dict.fromkeys(_VARIABLES, str(threads))
    # else threads that have nothing to do spin for 30 ms, on the cores of whose turn is next
    chosen["OPENBLAS_THREAD_TIMEOUT"] = "4"
    with mock.patch.dict(os.environ, chosen):
        pool = multiprocessing.get_context("spawn").Pool(WORKERS)
        # so slow that each worker gets one: all have loaded NumPy before the variables change back
        pool.map(time.sleep, [0.2] * WORKERS, chunksize=1)
        pool.map(chain, [np.eye(64, dtype=np.float32)] * WORKERS, chunksize=1)
    atexit.register(pool.terminate)
    return pool


def chains(threads, matrices):
    """Give each worker one matrix; return all results."""
    return np.stack(crew(threads).map(chain, matrices, chunksize=1))
