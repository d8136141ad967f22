"""Verdicts on comparisons with a known answer: identical arms, and an arm that is 2 % slower.

These comparisons use the stopping rule of claims; `python -m pytest_aiperf prove` makes hundreds of
shorter ones.
"""

from collections import Counter

import pytest
from aiperf_selfcheck.checks import aggregate
from aiperf_selfcheck.ground_truth import calibrate_slowdown, compare, no_progress, on_gpu

from pytest_aiperf.claim.stopping_rule import STANDARD
from pytest_aiperf.device.cuda import CudaDevice
from pytest_aiperf.model import Verdict

COMPARISONS = 25


@pytest.fixture
def workbench(gpu):
    return on_gpu(CudaDevice(gpu), no_progress)


@pytest.fixture(params=["copy", "gemm", "softmax", "add"])
def kind(request, workbench):
    return workbench.kinds[request.param]


def verdicts(workbench, inputs, arms):
    """Compare the arms repeatedly, with new allocations and seeds; count the verdicts."""
    noise_floor = workbench.noise_floor()
    comparisons = [
        compare(workbench.device, inputs, arms, noise_floor, STANDARD, workbench.seed())
        for _ in range(COMPARISONS)
    ]
    counts = Counter(comparison.verdict for comparison in comparisons)
    print(dict(counts), {"floor": noise_floor, **aggregate(comparisons)})
    return counts


def test_identical_arms_are_not_told_apart(workbench, kind):
    inputs, arm = kind
    counts = verdicts(workbench, inputs, (arm, arm))
    assert counts[Verdict.FASTER] + counts[Verdict.SLOWER] <= 1


def test_an_arm_slowed_by_two_percent_is_slower(workbench, kind):
    slow, fast = calibrate_slowdown(workbench, kind)(0.02)
    counts = verdicts(workbench, kind[0], (fast, slow))
    assert counts[Verdict.SLOWER] >= COMPARISONS - 1
