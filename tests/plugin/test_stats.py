"""Statistics, checked against published tables and simulations."""

import math
import random
from types import SimpleNamespace

import pytest

from pytest_aiperf.model import Interval
from pytest_aiperf.rules import stats


def rounds(*pairs):
    return SimpleNamespace(
        rounds=[SimpleNamespace(seconds={"baseline": b, "optimized": o}) for b, o in pairs]
    )


@pytest.mark.parametrize(
    ("p", "df", "table"), [(0.995, 7, 3.499), (0.995, 31, 2.744), (0.975, 1, 12.706)]
)
def test_t_quantile_matches_the_printed_table(p, df, table):
    assert stats.t_quantile(p, df) == pytest.approx(table, abs=5e-4)


def test_a_linear_drift_cancels_in_a_mirrored_round():
    drift = [1.00, 1.01, 1.02, 1.03]  # baseline, optimized, optimized, baseline
    mirrored = SimpleNamespace(
        seconds={"baseline": (2 * drift[0], 2 * drift[3]), "optimized": (drift[1], drift[2])}
    )
    assert stats.paired_log_ratio(mirrored, "baseline", "optimized") == pytest.approx(
        math.log(2), abs=2e-4
    )


def test_one_disturbed_round_does_not_move_a_replicate():
    quiet = ((2.0, 2.0), (1.0, 1.0))
    disturbed = ((2.0, 2.0), (1.0, 9.0))
    replicate = rounds(quiet, disturbed, quiet)
    assert stats.log_ratio(replicate, "baseline", "optimized") == pytest.approx(math.log(2))


def test_interval_covers_the_truth_in_99_of_100():
    rng = random.Random(1)
    hits = sum(
        (i := stats.interval([rng.gauss(0.1, 0.01) for _ in range(8)])).low
        <= math.exp(0.1)
        <= i.high
        for _ in range(2000)
    )
    assert 0.98 <= hits / 2000 <= 0.998


def test_one_replicate_gives_an_infinite_interval():
    assert stats.interval([0.5]).high == math.inf
    assert stats.half_width(stats.interval([0.5])) == math.inf


@pytest.mark.parametrize("logs", [[0.0, 25.0], [720.0, 720.0]])
def test_an_interval_may_be_wider_than_floats_are_large(logs):
    """For example after two replicates with residuals of 1e-16 and 1e-5."""
    interval = stats.interval(logs)
    assert interval.high == math.inf
    assert stats.half_width(interval) == math.inf
    assert stats.half_width(Interval(5e-324, 1.0, 1e308)) == math.inf


def test_equal_replicates_give_an_interval_without_width():
    interval = stats.interval([math.log(2)] * 3)
    assert (interval.low, interval.high) == (pytest.approx(2), pytest.approx(2))


def test_half_width_is_relative():
    assert stats.half_width(Interval(1.98, 2.0, 2.02)) == pytest.approx(0.01, rel=0.01)


def test_overlapping_spans_count_once():
    assert stats.covered([]) == 0
    assert stats.covered([(4, 6), (0, 2), (1, 3), (1, 2), (-2, -1)]) == 6
    start = (1 << 57) + 1  # an integer that no float represents exactly
    assert stats.covered([(start, start + 3), (start + 2, start + 4)]) == 4


def test_the_times_of_two_arms_have_the_ratio_of_their_comparison():
    drifted = rounds(((9.0, 9.6), (2.0, 2.2)), ((8.8, 9.1), (2.1, 1.9)))
    quiet = rounds(((2.0, 2.2), (1.0, 1.0)))
    replicates = [quiet, drifted, rounds(((2.1, 2.0), (1.0, 1.1)))]
    baseline, optimized = (stats.mean_call_s(replicates, a) for a in ("baseline", "optimized"))
    ratio = stats.comparison(replicates, "baseline", "optimized").value
    assert baseline / optimized == pytest.approx(ratio, rel=1e-12)
    assert stats.mean_call_s([quiet], "baseline") == pytest.approx(math.sqrt(2.0 * 2.2))


def test_the_median_call_is_the_median_over_all_blocks():
    replicates = [rounds(((2.0, 2.2), (1.0, 1.0))), rounds(((2.1, 9.0), (1.0, 1.0)))]
    assert stats.median_call_s(replicates, "baseline") == pytest.approx(2.15)
