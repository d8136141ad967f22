"""Independent chains of multiplications are faster than one serial chain.

The geometric mean of growth factors needs their product. In a serial chain each multiplication
waits for the one before and pays its full latency of 3 to 4 clocks, although the CPU can start two
per clock. With the numbers dealt out to two, four or eight accumulators, as many multiplications
are independent, and an out-of-order CPU overlaps them (instruction-level parallelism, ILP). Latency
times throughput, 6 to 8, is the number of chains that would keep the multipliers busy. The compiler
must not do this by itself, because the order of multiplications changes the rounding. The library
arm, NumPy on rows of 512 numbers, is faster than all rungs: SIMD instructions multiply several
chains at once.

All functions are C without SIMD: a test beside the claim checks that their multiplications are
scalar, so that SIMD has no part in the gain. On a host of 32 logical CPUs a call takes 30 µs with
one chain, 21 with two, 17 with four and 18 with eight, and NumPy's 16. So two chains do not halve
the time, and eight gain nothing: a part of each call does not depend on the chains. Which part was
not measured (the call itself, or the loads: a block of calls reads eight arrays of 128 KiB, more
than the L1 cache holds). The limit, two loads per clock, is not reached.
"""

import platform
from functools import partial

import numpy as np
import pytest

from kernels.ch06.assembly import instructions
from kernels.ch08.product_chains import CHAINS, SCALAR, SOURCE, geometric_mean
from pytest_aiperf import Bench, Compare, Work

LADDER = list(CHAINS)


def growth(bench: Bench) -> np.ndarray:
    rng = np.random.default_rng(bench.seed)
    return rng.lognormal(0, 0.1, bench.size(2**14, check=2**12))


def rows(factors):
    """Multiply rows of 512 element by element: NumPy's loop does that with SIMD instructions."""
    products = np.multiply.reduce(factors.reshape(-1, 512), axis=0)
    return np.multiply.reduce(products) ** (1 / factors.size)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86 instructions")
def test_the_chains_are_scalar() -> None:
    for name, mnemonics in instructions(SOURCE, *SCALAR).items():
        assert sum(m.endswith("mulsd") for m in mnemonics) >= CHAINS[name]
        assert not [m for m in mnemonics if m.endswith("mulpd")]


@pytest.mark.host
@pytest.mark.parametrize("chains", LADDER[1:])
def test_ilp_accumulators_host(compare: Compare, chains: str) -> None:
    compare(
        baseline=partial(geometric_mean, LADDER[LADDER.index(chains) - 1]),
        optimized=partial(geometric_mean, chains),
        library=rows,
        against="idiomatic" if chains == LADDER[1] else "previous rung",
        inputs=growth,
        work=lambda factors: Work(flops=factors.size, dtype="fp64"),
        reference=lambda factors: np.exp(np.log(factors).mean()),
        metric="wall",
        cache="warm",
    )
