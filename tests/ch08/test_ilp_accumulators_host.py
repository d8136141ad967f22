"""Many independent products are faster than one serial chain of multiplications.

The geometric mean of growth factors needs their product. In a serial chain each multiplication
waits for the one before and pays its full latency of 4 clocks, although the CPU can start two or
more per clock. Split into rows of 512 that are multiplied element by element, the array has 512
independent accumulators: the CPU overlaps their multiplications, and SIMD instructions process
several at once. A short chain multiplies the 512 accumulators at the end.

Rows of 128 also give enough accumulators, but NumPy's overhead per row weighs more. The compiler
must not reorder the chain itself, because the order changes the rounding (np.sum reorders by
design). The 512 KiB array stays in the L2 cache; from main memory both arms would wait for the
same bytes and the gain would be smaller. The ratio is the only evidence, and it does not separate
the overlap from SIMD: hosts offer no counter of either here.
"""

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work


def growth(bench: Bench) -> np.ndarray:
    rng = np.random.default_rng(bench.seed)
    return rng.lognormal(0, 0.1, bench.size(2**16, check=2**12))


def serial(factors):
    return np.multiply.reduce(factors) ** (1 / factors.size)


def accumulators(factors, count):
    products = np.multiply.reduce(factors.reshape(-1, count), axis=0)
    return serial(products) ** (count / factors.size)


@pytest.mark.host
@pytest.mark.parametrize("count", [128, 512])
def test_ilp_accumulators_host(compare: Compare, count: int) -> None:
    compare(
        baseline=serial,
        optimized=lambda factors: accumulators(factors, count),
        inputs=growth,
        work=lambda factors: Work(flops=factors.size, dtype="fp64"),
        reference=lambda factors: np.exp(np.log(factors).mean()),
        metric="wall",
        cache="warm",
    )
