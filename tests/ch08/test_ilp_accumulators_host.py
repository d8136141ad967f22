"""Many independent products beat one serial chain of multiplications.

The geometric mean of growth factors needs their product. Multiplied one after the other, each
multiplication waits for the last: its latency of 4 clocks is paid 65536 times, while the processor
could start two or more in each clock. Cut into rows of 512 and multiplied row by row, the array has
512 products under way that do not depend on each other; the processor overlaps them, and its vector
instructions take several at once. One short chain at the end multiplies the 512.

Rows of 128 have enough chains, but numpy's way from one row to the next weighs more. Floating point
forbids the compiler to regroup the chain by itself, since rounding changes with the order (np.sum
regroups on its own). The array (512 KiB) stays in the L2 cache; from memory both would wait for the
same bytes, and gain less.
"""

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work


def growth(bench: Bench) -> np.ndarray:
    rng = np.random.default_rng(bench.seed)
    return rng.lognormal(0, 0.1, bench.size(2**16, check=2**12))


def one_chain(factors):
    return np.multiply.reduce(factors) ** (1 / factors.size)


def chains(factors, count):
    products = np.multiply.reduce(factors.reshape(-1, count), axis=0)
    return one_chain(products) ** (count / factors.size)


@pytest.mark.host
@pytest.mark.parametrize("count", [128, 512])
def test_ilp_accumulators_host(compare: Compare, count: int) -> None:
    compare(
        baseline=one_chain,
        optimized=lambda factors: chains(factors, count),
        inputs=growth,
        work=lambda factors: Work(flops=factors.size, dtype="fp64"),
        reference=lambda factors: np.exp(np.log(factors).mean()),
        metric="wall",
        cache="warm",
    )
