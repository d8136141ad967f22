"""Independent chains of multiplications are faster than one serial chain.

The geometric mean of growth factors needs their product. In a serial chain each multiplication
waits for the one before and pays its full latency of 3 to 4 clocks, although the CPU can start two
per clock. With the numbers dealt out to two, four or eight accumulators, as many multiplications
are independent, and an out-of-order CPU overlaps them (instruction-level parallelism, ILP). The
compiler must not do this by itself, because the order of multiplications changes the rounding; it
may with `-ffast-math`, which is off in all arms. The library arm, sixteen chains in SIMD registers
of two numbers each, is faster than all rungs: an instruction multiplies two chains at once.

Little's law predicts the gains: latency times throughput is the number of multiplications in flight
that keeps the multipliers busy. That is 6 with a latency of 3 clocks (AMD's Zen) and 8 with one of
4 (Intel's Skylake and later). Up to there, twice as many chains halve the time. So "two" and "four"
can each gain 2x, and "eight" 6/4 or 8/4. More scalar chains gain nothing: two multiplications per
clock are the limit. Each also takes a load, of which some CPUs start no more than two per clock.
The gain is smaller if another thread uses the same core's multipliers (SMT), and it ends earlier
where data comes from farther than the L1 cache.

Here the numbers fit in the L1 cache: 2048 of them are 16 KiB. Each call passes over them 256 times,
so that the call from Python is a small part of its time. All arms make the same passes, and the
chains run on from one to the next. All rungs are C without SIMD: a test beside the claim checks
that their multiplications are scalar, and that none of the chains was merged. The record itself has
no evidence, since instructions per clock need the CPU's counters.
"""

import platform
from functools import partial

import numpy as np
import pytest

from kernels.ch06.assembly import instructions
from kernels.ch08.product_chains import CHAINS, SCALAR, SIMD_SOURCE, SOURCE, geometric_mean
from pytest_aiperf import Bench, Compare, Work

LADDER = list(CHAINS)
PASSES = 256


def growth(bench: Bench) -> tuple[np.ndarray, int]:
    """Draw daily growth factors; the product of all passes lies within the range of doubles."""
    rng = np.random.default_rng(bench.seed)
    return rng.lognormal(0, 0.01, 2**11), PASSES


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86 instructions")
def test_the_chains_are_scalar() -> None:
    for name, mnemonics in instructions(SOURCE, *SCALAR).items():
        # one per chain in the loop, and then the products of the chains are multiplied
        assert sum(m.endswith("mulsd") for m in mnemonics) >= 2 * CHAINS[name] - 1
        assert not [m for m in mnemonics if m.endswith("mulpd")]
    assert [m for m in instructions(SIMD_SOURCE)["simd"] if m.endswith("mulpd")]


@pytest.mark.host
@pytest.mark.parametrize("chains", LADDER[1:])
def test_ilp_accumulators_host(compare: Compare, chains: str) -> None:
    compare(
        baseline=partial(geometric_mean, LADDER[LADDER.index(chains) - 1]),
        optimized=partial(geometric_mean, chains),
        library=partial(geometric_mean, "simd"),
        against="idiomatic" if chains == LADDER[1] else "previous rung",
        inputs=growth,
        work=lambda factors, passes: Work(flops=factors.size * passes, dtype="fp64"),
        reference=lambda factors, passes: np.exp(np.log(factors).mean()),
        metric="wall",
        cache="warm",
    )
