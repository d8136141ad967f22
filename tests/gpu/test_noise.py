"""What the harness says where the truth is known: of identical arms, and of one that is 2 % slower.

`python -m pytest_aiperf prove` makes hundreds of shorter comparisons; these are a claim's.
"""

from collections import Counter

import pytest

from pytest_aiperf.claim.stopping_rule import PLAN
from pytest_aiperf.device.cuda import CudaClock
from pytest_aiperf.model import Verdict
from pytest_aiperf.proving.proofs import counted
from pytest_aiperf.proving.truth import judged, longer, on_gpu, quiet

COMPARISONS = 25


@pytest.fixture
def rig(gpu):
    return on_gpu(CudaClock(gpu), quiet)


@pytest.fixture(params=["copy", "gemm", "softmax", "add"])
def kind(request, rig):
    return rig.kinds[request.param]


def verdicts(rig, inputs, arms):
    """Judge the same two arms again and again, each time from fresh allocations and seeds."""
    floor = rig.floor()
    ones = [judged(rig.clock, inputs, arms, floor, PLAN, rig.seed()) for _ in range(COMPARISONS)]
    found = Counter(one.verdict for one in ones)
    print(dict(found), {"floor": floor, **counted(ones)})
    return found


def test_identical_arms_are_not_told_apart(rig, kind):
    inputs, arm = kind
    found = verdicts(rig, inputs, (arm, arm))
    assert found[Verdict.FASTER] + found[Verdict.SLOWER] <= 1


def test_an_arm_slowed_by_two_percent_is_slower(rig, kind):
    slow, fast = longer(rig, kind)(0.02)
    found = verdicts(rig, kind[0], (fast, slow))
    assert found[Verdict.SLOWER] >= COMPARISONS - 1
