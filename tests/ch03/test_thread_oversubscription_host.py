"""Worker processes that share the cores beat workers that each start one BLAS thread per core.

By default a BLAS library starts one thread per core. Four worker processes (a data loader's, a
server's) then run four threads per core. BLAS splits a product among its threads, and the product
ends when the last thread does. If one of them has no core, the others wait for it, and in the
middle of a product they spin on the cores that it needs. That is one cause; the other is that a
small product does not pay for a thread per core. The optimized arm divides the cores among the
workers, less one core for the process that hands out the work, so that every thread has its own
core (a logical CPU: two of them may share the units of a physical core). A worker gets at least one
thread. The library arm is a control that separates the causes. A single worker, with NumPy's
default of one thread per core, computes all products one after the other. They are split among as
many threads as in the baseline, but there are no more threads than cores. What the baseline loses
to the control is due to the missing cores. What the control loses to the optimized arm is due to
many threads for a small product.

Each worker, a process that already runs, multiplies a small matrix by itself 32 times, so that
random delays average out. The gain depends on the host. On one of 16 logical CPUs, a call takes 660
ms with 16 threads per worker, 23 with the control and 11 with three threads per worker. So of the
63x, missing cores account for a factor of 26 and many threads for 2.4; why the waits are that long
was not examined. A host of 32, measured before the control was added, had 2x to 9x. The thread
count is read when the library is loaded, hence the environment variables. Idle threads of one arm
would spin while the other arm is timed; instead, those of all arms sleep at once
(OPENBLAS_THREAD_TIMEOUT). Large products suffer less, since their threads synchronize less often. A
test beside the claim counts how often threads of the workers lose their core to another; it was not
run on the host of 16.
"""

from functools import partial

import numpy as np
import pytest

from kernels.ch03.blas_workers import (
    PRODUCTS,
    WORKERS,
    lost_cores,
    matrix_powers,
    usable_cores,
)
from pytest_aiperf import Bench, Compare

SHARE = max(1, (usable_cores() - 1) // WORKERS)
"""Threads per worker if each thread has a core, and one core is left for the calling process."""


def matrices(bench: Bench) -> np.ndarray:
    n = bench.size(256, check=64)
    rng = np.random.default_rng(bench.seed)
    normal = rng.standard_normal((WORKERS, n, n), np.float32)
    return normal / np.float32(n**0.5)  # so that powers have entries of equal magnitude


@pytest.mark.skipif(usable_cores() == SHARE, reason="one core: both arms have one thread")
def test_threads_of_oversubscribed_workers_take_each_others_cores() -> None:
    powers = np.tile(np.eye(256, dtype=np.float32), (WORKERS, 1, 1))
    switches = {}
    for threads in (usable_cores(), SHARE):
        matrix_powers(threads, powers)
        before = lost_cores(threads)
        for _ in range(5):
            matrix_powers(threads, powers)
        switches[threads] = lost_cores(threads) - before
    assert switches[usable_cores()] > 2 * switches[SHARE]


@pytest.mark.host
def test_thread_oversubscription_host(compare: Compare) -> None:
    compare(
        baseline=partial(matrix_powers, usable_cores()),
        optimized=partial(matrix_powers, SHARE),
        library=partial(matrix_powers, usable_cores(), workers=1),
        inputs=matrices,
        reference=lambda matrices: np.linalg.matrix_power(matrices.astype(float), PRODUCTS + 1),
        metric="wall",
        cache="warm",
    )
