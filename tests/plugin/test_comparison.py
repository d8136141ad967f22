"""Two runs are compared claim by claim."""

import dataclasses
import math

import pytest

from pytest_aiperf.model import Interval, Metric, Outcome
from pytest_aiperf.records.comparison import State, changes, ratio_of, stack_changes
from tests.plugin.records import H200, result, timing


def claim(name="ch07/copy", speedup=2.0, half=0.002, **more):
    record = result(name, **{"key": "h200", "code": "abc"} | more)
    ratio = Interval(speedup * (1 - half), speedup, speedup * (1 + half))
    return dataclasses.replace(record, speedup=ratio)


def without(name, **more):
    """A claim that was not measured."""
    return dataclasses.replace(claim(name), speedup=None, outcome=Outcome.ERROR, **more)


@pytest.mark.parametrize(
    ("speedup", "half", "state"),
    [
        (2.0, 0.002, State.SAME),
        (1.95, 0.002, State.SAME),  # sessions may differ by 3.5 %
        (1.90, 0.002, State.REGRESSED),
        (1.90, 0.08, State.SAME),  # the interval is too wide for a verdict
        (2.10, 0.002, State.IMPROVED),
    ],
)
def test_the_interval_decides(speedup, half, state):
    [change] = changes([claim()], [claim(speedup=speedup, half=half)])
    assert change.state is state
    assert change.ratio.value == pytest.approx(speedup / 2.0)


def test_new_gone_and_stale():
    old = [claim("a"), claim("b"), claim("c")]
    broken = without("c", message="why\nand where")
    listed = {c.claim: c for c in changes(old, [claim("b", code="other"), broken, claim("d")])}
    states = {name: c.state for name, c in listed.items()}
    assert states == {"a": State.GONE, "b": State.STALE, "c": State.GONE, "d": State.NEW}
    assert listed["c"].why == "ERROR: why"


def test_a_claim_measured_in_one_run_is_new_or_gone():
    assert [c.state for c in changes([without("a")], [claim("a")])] == [State.NEW]
    assert [c.state for c in changes([claim("a")], [without("a")])] == [State.GONE]
    [never] = changes([without("a")], [without("a")])
    assert (never.state, never.why) == (State.SAME, "measured in neither run")


@pytest.mark.parametrize(
    ("more", "uuid", "state"),
    [
        ({"timing": timing(metric=Metric.WALL)}, "GPU-2", State.MOVED),
        ({"timing": timing(metric=Metric.WALL)}, "GPU-1", State.REGRESSED),
        ({"host": True, "gpu": None}, None, State.MOVED),
        ({}, "GPU-2", State.REGRESSED),
    ],
    ids=["wall, another machine", "wall, the same", "a host claim", "device time"],
)
def test_a_figure_that_depends_on_the_host_moves_instead_of_regressing(more, uuid, state):
    gpu = uuid and dataclasses.replace(H200, uuid=uuid)
    [change] = changes([claim(**more)], [claim(speedup=1.5, **more | {"gpu": gpu})])
    assert change.state is state


def test_a_claim_is_compared_on_its_own_gpu_only():
    listed = changes([claim()], [claim(key="b200", speedup=1.0)])
    assert {(c.key, c.state) for c in listed} == {("h200", State.GONE), ("b200", State.NEW)}


def test_the_worst_come_first():
    old = [claim("a"), claim("b"), claim("c")]
    new = [claim("a"), claim("b", speedup=3.0), claim("c", speedup=1.0)]
    assert [c.claim for c in changes(old, new)] == ["c", "b", "a"]


def test_errors_of_both_runs_count():
    ratio = ratio_of(Interval(1.94, 2.0, 2.06), Interval(0.96, 1.0, 1.04))
    assert ratio.value == 2.0
    assert math.log(ratio.high / 2.0) == pytest.approx(math.hypot(0.03, 0.04), rel=0.05)
    assert math.isinf(ratio_of(Interval(0, 1, math.inf), Interval(1, 1, 1)).high)


def test_differences_of_the_stack_are_listed():
    old = [claim(stack={"torch": "2.10", "driver": "580"})]
    new = [claim(stack={"torch": "2.11", "driver": "580", "cuda": "13.0"})]
    assert stack_changes(old, new) == ["cuda none -> 13.0", "torch 2.10 -> 2.11"]
