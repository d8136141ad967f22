"""The verdict on an interval, and whether it meets an expectation."""

import dataclasses
import math

import pytest

from pytest_aiperf.model import Expectation, Interval, Recorded, Require, Verdict
from pytest_aiperf.rules.verdict import UNDECIDED, judge, noise_problem, verdict


def recorded(low, value, high):
    return Recorded((low, value, high), 3, "c0de", "torch 2", "2026-01-01")


@pytest.mark.parametrize(
    ("ratio", "floor", "expected"),
    [
        ((1.01, 1.02, 1.03), 0.005, Verdict.FASTER),
        ((1.004, 1.02, 1.03), 0.005, Verdict.INCONCLUSIVE),
        ((0.97, 0.98, 0.99), 0.005, Verdict.SLOWER),
        ((0.01, 0.02, 0.03), 1.85, Verdict.SLOWER),
        ((0.3, 0.32, 0.36), 1.85, Verdict.INCONCLUSIVE),
        ((0.99, 1.00, 1.01), 0.02, Verdict.SAME),
        ((0.97, 1.00, 1.04), 0.0, Verdict.INCONCLUSIVE),
        ((1.004, 1.006, 1.008), 0.005, Verdict.SAME),
        ((1.0004, 1.0004, 1.0004), 0.0, Verdict.SAME),
        ((0.9996, 0.9996, 0.9996), 0.0, Verdict.SAME),
        ((1.002, 1.002, 1.002), 0.0, Verdict.FASTER),
    ],
)
def test_verdict(ratio, floor, expected):
    assert verdict(Interval(*ratio), floor) is expected


@pytest.mark.parametrize(
    ("ratio", "floor", "why"),
    [
        ((1.05, 1.1, 1.15), 0.3, "identical arms differ by up to 30.0% in this session"),
        ((0.9, 0.92, 0.95), 0.1, "identical arms differ by up to 10.0% in this session"),
        ((0.95, 1.1, 1.25), 0.001, "the interval contains 1 and is too wide for SAME (within 2%"),
        ((0.95, 1.1, 1.25), 0.3, "the interval contains 1 and is too wide"),
    ],
)
def test_inconclusive_gives_its_reason_and_what_to_do(ratio, floor, why):
    judgement = judge(Interval(*ratio), floor)
    assert judgement.why.startswith("undecided: INCONCLUSIVE where FASTER is claimed: ")
    assert judgement.advice.startswith(why)
    assert "measure " in judgement.advice
    assert "GPU" not in judgement.advice  # a machine that measures host claims may have none


@pytest.mark.parametrize("quick", [False, True])
def test_only_a_quick_run_is_told_to_measure_without_quick(quick):
    advice = judge(Interval(0.95, 1.1, 1.25), 0.001, quick=quick).advice
    assert advice.endswith("on larger inputs, or on a quieter machine")
    assert ("measure without --quick, " in advice) is quick


def test_other_verdicts_need_no_reason():
    for ratio in ((0.8, 0.81, 0.82), (0.999, 1.0, 1.001)):
        assert not judge(Interval(*ratio), 0.01).advice


def test_a_high_noise_floor_is_a_problem():
    assert noise_problem(0.2) is None
    assert "two identical arms differ by 35%" in noise_problem(0.35)
    assert "GPU" not in noise_problem(0.35)
    assert noise_problem(math.inf) is None  # not measured yet


def test_without_an_expectation_a_claim_needs_only_faster():
    assert judge(Interval(1.1, 1.2, 1.3), 0.01).holds
    assert not judge(Interval(0.99, 1.0, 1.01), 0.01).holds


def test_the_lower_end_of_the_interval_must_meet_the_requirement():
    expectation = Expectation(Require(speedup=1.5))
    assert judge(Interval(1.5, 1.6, 1.7), 0.0, expectation).holds
    judgement = judge(Interval(1.49, 1.6, 1.7), 0.0, expectation)
    assert not judgement.holds
    assert "below the 1.5x that expectations.yaml requires" in judgement.why


@pytest.mark.parametrize(
    ("ratio", "library", "undecided"),
    [
        ((1.49, 1.6, 1.7), (1, 1, 1), True),
        ((1.3, 1.4, 1.49), (1, 1, 1), False),
        ((1.6, 1.6, 1.6), (0.9, 1, 1.1), True),
        ((1.6, 1.6, 1.6), (0.9, 0.95, 0.98), False),
        ((1.4, 1.5, 1.6), (0.9, 0.95, 0.98), False),
        ((0.9, 1.2, 1.6), (1, 1, 1), True),  # INCONCLUSIVE
        ((0.9, 1.1, 1.3), (1, 1, 1), False),  # INCONCLUSIVE, and too slow in any case
    ],
)
def test_a_claim_is_undecided_only_if_its_intervals_reach_what_is_required(
    ratio, library, undecided
):
    expectation = Expectation(Require(speedup=1.5, library=0.99))
    judgement = judge(Interval(*ratio), 0.0, expectation, library=Interval(*library))
    assert not judgement.holds
    assert judgement.why.startswith(UNDECIDED) == undecided
    assert ("but the interval reaches it" in judgement.why) >= undecided


@pytest.mark.parametrize(("floor", "undecided"), [(0.02, False), (0.6, True)])
def test_the_noise_floor_counts_in_what_an_interval_reaches(floor, undecided):
    judgement = judge(Interval(0.9, 1.0, 1.1), floor, Expectation(Require(speedup=1.5)))
    assert judgement.why.startswith(UNDECIDED) == undecided
    assert ("but the session's noise reaches it" in judgement.why) == undecided


@pytest.mark.parametrize("more", [{"share": Interval(0.7, 0.8, 0.85)}, {}])
def test_a_claim_that_misses_anything_else_is_not_undecided(more):
    expectation = Expectation(Require(speedup=1.5, share=0.9))
    judgement = judge(Interval(1.4, 1.5, 1.6), 0.0, expectation, **more)
    assert not judgement.why.startswith(UNDECIDED)
    dropped = Expectation(Require(speedup=1.7), recorded(1.9, 2.0, 2.1), "h200")
    assert not judge(Interval(1.6, 1.7, 1.75), 0.0, dropped).why.startswith(UNDECIDED)


def test_required_library_ratio():
    expectation = Expectation(Require(library=0.99))
    ratio = Interval(2, 2, 2)
    assert judge(ratio, 0.0, expectation, library=Interval(0.99, 1, 1.01)).holds
    assert not judge(ratio, 0.0, expectation, library=Interval(0.98, 1, 1.01)).holds
    assert "no library arm" in judge(ratio, 0.0, expectation).why


def test_required_share():
    expectation = Expectation(Require(share=0.85))
    ratio = Interval(2, 2, 2)
    assert judge(ratio, 0.0, expectation, share=Interval(0.86, 0.9, 0.94)).holds
    lost = judge(ratio, 0.0, expectation, share=Interval(0.78, 0.8, 0.82))
    assert lost.why == (
        "share of the limit 80% [78%, 82%]: its lower end is below the 85% that expectations.yaml "
        "requires"
    )
    assert "not known" in judge(ratio, 0.0, expectation).why


def test_a_share_whose_interval_reaches_the_requirement_is_undecided():
    expectation = Expectation(Require(share=0.85))
    undecided = judge(Interval(2, 2, 2), 0.0, expectation, share=Interval(0.8499, 0.87, 0.89))
    assert not undecided.holds
    assert undecided.is_undecided
    assert undecided.why.startswith(
        "undecided: share of the limit 87.00% [84.99%, 89.00%]: its lower end is below the 85.00% "
    )


@pytest.mark.parametrize(("high", "holds"), [(1.69, False), (1.71, True)])
def test_what_an_earlier_run_of_the_same_code_reached_is_no_regression(high, holds):
    was = dataclasses.replace(recorded(1.9, 2.0, 2.1), lowest=1.76)
    judgement = judge(Interval(1.5, 1.6, high), 0.0, Expectation(recorded=was, key="h200"))
    assert judgement.holds == holds
    assert holds or "recorded 2x [1.9, 2.1] and 1.76x before of h200" in judgement.why


def test_a_claim_that_is_faster_fails_below_the_recorded_interval():
    expectation = Expectation(recorded=recorded(1.9, 2.0, 2.1), key="h200")
    judgement = judge(Interval(1.5, 1.6, 1.7), 0.0, expectation)
    assert not judgement.holds
    assert "dropped below the recorded 2x" in judgement.why


@pytest.mark.parametrize(
    ("high", "floor", "holds"),
    [(1.90, 0.0, True), (1.88, 0.0, False), (1.88, 0.04, True)],
    ids=["within the spread of sessions", "beyond it", "within this session's noise"],
)
def test_sessions_may_differ_a_little(high, floor, holds):
    expectation = Expectation(recorded=recorded(1.95, 1.96, 1.97), key="h200")
    assert judge(Interval(high - 0.02, high - 0.01, high), floor, expectation).holds is holds


def test_an_interval_that_overlaps_the_recorded_one_passes():
    expectation = Expectation(recorded=recorded(1.9, 2.0, 2.1), key="h200")
    assert judge(Interval(1.8, 1.85, 1.91), 0.0, expectation).holds


def test_a_better_ratio_than_recorded_passes_with_a_note():
    expectation = Expectation(recorded=recorded(1.9, 2.0, 2.1), key="h200")
    judgement = judge(Interval(2.5, 2.6, 2.7), 0.0, expectation)
    assert judgement.holds
    assert "--update-expectations" in judgement.notes[0]


def test_changed_code_is_never_compared():
    expectation = Expectation(recorded=recorded(9.0, 9.5, 9.9), key="h200", stale=True)
    judgement = judge(Interval(1.5, 1.6, 1.7), 0.0, expectation)
    assert judgement.holds
    assert "the code changed" in judgement.notes[0]


def test_figures_of_other_hosts_are_not_compared():
    expectation = Expectation(Require(speedup=1.2), recorded(9.0, 9.5, 9.9), "cpu")
    assert judge(Interval(1.5, 1.6, 1.7), 0.0, expectation, compare_recorded=False).holds


def test_the_verdict_same_passes_where_parity_is_recorded_or_required():
    same = Interval(0.99, 1.0, 1.01)
    assert judge(same, 0.0, Expectation(recorded=recorded(0.99, 1.0, 1.01), key="h200")).holds
    assert judge(same, 0.0, Expectation(recorded=recorded(0.992, 0.995, 0.998), key="h200")).holds
    assert judge(same, 0.0, Expectation(Require(speedup=0.98))).holds
    slower = Interval(0.982, 0.983, 0.985)
    assert judge(slower, 0.001, Expectation(Require(speedup=0.98))).holds
    assert not judge(slower, 0.001, Expectation(Require(speedup=0.99))).holds
    assert not judge(slower, 0.001).holds
    for margin, holds in ((0.89, True), (0.91, False), (1, False)):
        expectation = Expectation(Require(speedup=margin))
        assert judge(Interval(0.9, 0.95, 1.02), 0.0, expectation).holds is holds
