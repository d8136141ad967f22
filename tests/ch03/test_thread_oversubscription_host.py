"""Worker processes that share the cores beat workers that each start a thread a core.

A BLAS library takes the machine for its own and starts a thread a core. In four worker processes
(a data loader's, a server's) that makes four threads for every core. A product is split among its
threads, and it is finished when the last of them is: when one of them has no core, the others
wait, spinning for a while on the cores that it needs. With the cores dealt out among the workers,
but one that is left to the process that hands out the work, every thread has its own, and a product
waits for nobody; where there are not so many cores, one thread a worker is the least there is.

Each worker multiplies a small matrix with itself, eight times in a row, in a process that stands
ready before the clock starts. Of single products most are nearly as fast as they would be alone,
and some take four times as long. The number of threads is read when the library is loaded, hence
from the environment of the process. OpenBLAS's idle threads sleep at once in both arms; else those
of one would spin through the other's turn. Large products are hurt less: their threads meet less
often. Where there is only one worker it should have all cores, of course.
"""

from functools import partial

import numpy as np
import pytest

from kernels.ch03.blas_workers import PRODUCTS, WORKERS, chains, cores
from pytest_aiperf import Bench, Compare


def matrices(bench: Bench) -> np.ndarray:
    n = bench.size(256, check=64)
    drawn = np.random.default_rng(bench.seed).standard_normal((WORKERS, n, n), np.float32)
    return drawn / np.float32(n**0.5)  # so that products keep their size


@pytest.mark.host
def test_thread_oversubscription_host(compare: Compare) -> None:
    compare(
        baseline=partial(chains, cores()),
        optimized=partial(chains, max(1, (cores() - 1) // WORKERS)),
        inputs=matrices,
        reference=lambda matrices: np.linalg.matrix_power(matrices.astype(float), PRODUCTS + 1),
        metric="wall",
        cache="warm",
    )
