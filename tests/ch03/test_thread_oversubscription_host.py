"""Worker processes that share the cores beat workers that each start a thread a core.

A BLAS library takes the machine for its own and starts a thread a core. In four worker processes
(a data loader's, a server's) that makes four threads for every core. A product is split among its
threads, and it is finished when the last of them is: when one of them has no core, the others
wait, spinning for a while on the cores that it needs. With the cores dealt out among the workers
every thread has one, and a product waits for nobody.

Both arms do the same products in the same four processes, which stand ready before the clock
starts. The number of threads is read when the library is loaded, hence from the environment of
the process. Large products are hurt less: their threads meet less often. Where there is only
one worker it should have all cores, of course.
"""

from functools import partial

import numpy as np
import pytest

from kernels.ch03.blas_workers import WORKERS, cores, powers
from pytest_aiperf import Bench, Compare


def matrices(bench: Bench) -> tuple[np.ndarray, int]:
    rng, n = np.random.default_rng(bench.seed), bench.size(256, check=64)
    # scaled so that their powers neither grow nor vanish
    scale = np.float32(n**-0.5)
    return rng.standard_normal((WORKERS, n, n), np.float32) * scale, bench.size(2, check=5)


@pytest.mark.host
def test_thread_oversubscription_host(compare: Compare) -> None:
    compare(
        baseline=partial(powers, cores()),
        optimized=partial(powers, max(1, cores() // WORKERS)),
        inputs=matrices,
        reference=lambda matrices, n: np.linalg.matrix_power(matrices.astype(float), n),
        metric="wall",
        cache="warm",
    )
