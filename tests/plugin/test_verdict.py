"""Comparison and expectation to verdict."""

import pytest

from pytest_aiperf.model import Expectation, Interval, Recorded, Require, Verdict
from pytest_aiperf.rules.verdict import judge, verdict


def recorded(low, value, high):
    return Recorded((low, value, high), 3, "c0de", "torch 2", "2026-01-01")


@pytest.mark.parametrize(
    ("ratio", "floor", "says"),
    [
        ((1.01, 1.02, 1.03), 0.005, Verdict.FASTER),
        ((1.004, 1.02, 1.03), 0.005, Verdict.INCONCLUSIVE),
        ((0.97, 0.98, 0.99), 0.005, Verdict.SLOWER),
        ((0.99, 1.00, 1.01), 0.02, Verdict.SAME),
        ((0.97, 1.00, 1.04), 0.0, Verdict.INCONCLUSIVE),
        ((1.004, 1.006, 1.008), 0.005, Verdict.SAME),
    ],
)
def test_verdict(ratio, floor, says):
    assert verdict(Interval(*ratio), floor) is says


def test_without_an_expectation_a_claim_needs_only_faster():
    assert judge(Interval(1.1, 1.2, 1.3), 0.01).holds
    assert not judge(Interval(0.99, 1.0, 1.01), 0.01).holds


def test_require_is_held_with_the_lower_end():
    wanted = Expectation(Require(speedup=1.5))
    assert judge(Interval(1.5, 1.6, 1.7), 0.0, wanted).holds
    lost = judge(Interval(1.49, 1.6, 1.7), 0.0, wanted)
    assert not lost.holds
    assert "below the required 1.5x" in lost.why


def test_required_library_ratio():
    wanted = Expectation(Require(library=0.99))
    ratio = Interval(2, 2, 2)
    assert judge(ratio, 0.0, wanted, library=Interval(0.99, 1, 1.01)).holds
    assert not judge(ratio, 0.0, wanted, library=Interval(0.98, 1, 1.01)).holds
    assert "no library arm" in judge(ratio, 0.0, wanted).why


def test_required_share():
    wanted = Expectation(Require(share=0.85))
    assert judge(Interval(2, 2, 2), 0.0, wanted, share=0.9).holds
    assert not judge(Interval(2, 2, 2), 0.0, wanted, share=0.8).holds
    assert "not known" in judge(Interval(2, 2, 2), 0.0, wanted).why


def test_a_drop_below_the_recorded_interval_fails_though_still_faster():
    wanted = Expectation(recorded=recorded(1.9, 2.0, 2.1), key="h200")
    lost = judge(Interval(1.5, 1.6, 1.7), 0.0, wanted)
    assert not lost.holds
    assert "dropped below the recorded 2x" in lost.why


@pytest.mark.parametrize(
    ("high", "floor", "holds"),
    [(1.90, 0.0, True), (1.88, 0.0, False), (1.88, 0.04, True)],
    ids=["as sessions differ", "by more", "by no more than this session's noise"],
)
def test_sessions_may_differ_by_some(high, floor, holds):
    wanted = Expectation(recorded=recorded(1.95, 1.96, 1.97), key="h200")
    assert judge(Interval(high - 0.02, high - 0.01, high), floor, wanted).holds is holds


def test_overlap_with_the_recorded_interval_holds():
    wanted = Expectation(recorded=recorded(1.9, 2.0, 2.1), key="h200")
    assert judge(Interval(1.8, 1.85, 1.91), 0.0, wanted).holds


def test_better_than_recorded_is_a_note_and_holds():
    held = judge(
        Interval(2.5, 2.6, 2.7), 0.0, Expectation(recorded=recorded(1.9, 2.0, 2.1), key="h200")
    )
    assert held.holds
    assert "--update-expectations" in held.notes[0]


def test_changed_code_is_never_compared():
    stale = Expectation(recorded=recorded(9.0, 9.5, 9.9), key="h200", stale=True)
    held = judge(Interval(1.5, 1.6, 1.7), 0.0, stale)
    assert held.holds
    assert "the code changed" in held.notes[0]


def test_other_hosts_figures_are_not_compared():
    wanted = Expectation(Require(speedup=1.2), recorded(9.0, 9.5, 9.9), "cpu")
    assert judge(Interval(1.5, 1.6, 1.7), 0.0, wanted, compare_recorded=False).holds


def test_parity_is_a_claim_where_it_was_recorded_or_required():
    same = Interval(0.99, 1.0, 1.01)
    assert judge(same, 0.0, Expectation(recorded=recorded(0.99, 1.0, 1.01), key="h200")).holds
    assert judge(same, 0.0, Expectation(recorded=recorded(0.992, 0.995, 0.998), key="h200")).holds
    assert judge(same, 0.0, Expectation(Require(speedup=0.98))).holds
    assert not judge(Interval(0.9, 0.91, 0.92), 0.0, Expectation(Require(speedup=0.98))).holds
