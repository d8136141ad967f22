"""Claims whose arms spend time of the fake device."""

import numpy as np

from pytest_aiperf.claim.claim import claim_of
from tests.fake_gpu import spend


def vectors(bench):
    return (np.random.default_rng(bench.seed).random(bench.size(64, check=8)),)


def doubling(microseconds):
    def double(x):
        spend(microseconds * 1e-6)
        return x * 2

    return double


def a_claim(**words):
    usual = {
        "baseline": doubling(200),
        "optimized": doubling(100),
        "inputs": vectors,
        "reference": lambda x: x + x,
    }
    return claim_of(**usual | words)
