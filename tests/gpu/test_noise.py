"""Verdicts on comparisons with a known answer: identical arms, and an arm that is 2 % slower.

`python -m pytest_aiperf prove` makes hundreds of shorter comparisons; these use the settings of a
claim.
"""

from collections import Counter

import pytest

from pytest_aiperf.claim.stopping_rule import STANDARD
from pytest_aiperf.device.cuda import CudaDevice
from pytest_aiperf.model import Verdict
from pytest_aiperf.proving.proofs import counted
from pytest_aiperf.proving.truth import judged, longer, on_gpu, quiet

COMPARISONS = 25


@pytest.fixture
def rig(gpu):
    return on_gpu(CudaDevice(gpu), quiet)


@pytest.fixture(params=["copy", "gemm", "softmax", "add"])
def kind(request, rig):
    return rig.kinds[request.param]


def verdicts(rig, inputs, arms):
    """Compare the same two arms repeatedly, each time with new allocations and seeds."""
    floor = rig.floor()
    comparisons = [
        judged(rig.clock, inputs, arms, floor, STANDARD, rig.seed()) for _ in range(COMPARISONS)
    ]
    counts = Counter(comparison.verdict for comparison in comparisons)
    print(dict(counts), {"floor": floor, **counted(comparisons)})
    return counts


def test_identical_arms_are_not_told_apart(rig, kind):
    inputs, arm = kind
    counts = verdicts(rig, inputs, (arm, arm))
    assert counts[Verdict.FASTER] + counts[Verdict.SLOWER] <= 1


def test_an_arm_slowed_by_two_percent_is_slower(rig, kind):
    slow, fast = longer(rig, kind)(0.02)
    counts = verdicts(rig, kind[0], (fast, slow))
    assert counts[Verdict.SLOWER] >= COMPARISONS - 1
