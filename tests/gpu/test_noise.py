"""What the harness says where the truth is known: of identical arms, and of one that is 2 % slower.

`pytest --gpu tests/gpu/test_noise.py -s` prints the counts that the README states.
"""

import random
from collections import Counter

import pytest
import torch

from pytest_aiperf import Bench
from pytest_aiperf.compare import noise_floor
from pytest_aiperf.cuda import CudaClock
from pytest_aiperf.judge import verdict
from pytest_aiperf.model import Metric, Mode, Verdict
from pytest_aiperf.replicate import PLAN, measure, speedup
from pytest_aiperf.trial import Claim, Trial

COMPARISONS = 25


def copying(bench):
    a = torch.randn(1 << 25, device=bench.device)
    return a, torch.empty_like(a)


def matrices(bench):
    a = torch.randn(4096, 4096, device=bench.device, dtype=torch.bfloat16)
    return a, torch.randn_like(a)


def rows(bench):
    return (torch.randn(8192, 4096, device=bench.device),)


def million(bench):
    x = torch.randn(1_000_000, device=bench.device)
    return x, torch.randn_like(x)


KINDS = {
    "copy": (copying, lambda a, out: out.copy_(a)),
    "gemm": (matrices, torch.mm),
    "softmax": (rows, lambda x: torch.softmax(x, 1)),
    "add": (million, torch.add),
}


def quiet(*_args, **_figures):
    pass


@pytest.fixture
def ours(gpu):
    return CudaClock(gpu)


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def verdicts(clock, inputs, baseline, optimized):
    """Judge the same two arms again and again, each time from fresh allocations and seeds."""
    floor = noise_floor(clock, 0, PLAN, quiet)
    claim = Claim({"baseline": baseline, "optimized": optimized}, inputs, baseline)
    found, widths = Counter(), []
    for i in range(COMPARISONS):
        trial = Trial(claim, clock, random.randrange(2**30) + i, full=True, say=quiet)
        ratio = speedup(measure(trial, Metric.DEVICE, PLAN))
        found[verdict(ratio, floor)] += 1
        widths.append((ratio.high - ratio.low) / 2)
    widths.sort()
    print(f"floor {floor:.4f}, median half-width {widths[len(widths) // 2]:.4f}", dict(found))
    return found


def test_identical_arms_are_not_told_apart(ours, kind):
    inputs, arm = kind
    found = verdicts(ours, inputs, arm, arm)
    assert found[Verdict.FASTER] + found[Verdict.SLOWER] <= 1


def test_an_arm_slowed_by_two_percent_is_slower(ours, kind):
    inputs, arm = kind
    args = [inputs(Bench("cuda", seed, full=True)) for seed in range(3)]

    def spinning(cycles):
        def call(*given):
            torch.cuda._sleep(cycles)
            return arm(*given)

        return call

    def seconds(cycles):
        block = ours.block([lambda a=a: spinning(cycles)(*a) for a in args] * 20, Mode.GRAPH)
        return min(block.run() for _ in range(20)) / 60

    for a in args:
        arm(*a)
    ours.settle(lambda: arm(*args[0]))
    # Both arms spin, one a little longer: a kernel of its own would be over 2 % of a short arm.
    long, short = seconds(50_000), seconds(1_000)
    extra = round(0.02 * short * 49_000 / (long - short))
    found = verdicts(ours, inputs, spinning(1_000), spinning(1_000 + extra))
    assert found[Verdict.SLOWER] >= COMPARISONS - 1
