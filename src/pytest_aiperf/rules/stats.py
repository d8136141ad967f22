"""Ratios of arms with their confidence intervals."""

import functools
import math
import statistics
import sys
from collections.abc import Iterable, Sequence

from pytest_aiperf.model import Interval, Replicate, Round, Timing

LEVEL = 0.99  #: Confidence level of every interval.
_MAX_LOG = math.log(sys.float_info.max)
"""Largest logarithm of a float. The interval of two scores that are far apart is wider."""


def as_float(value: object) -> float | None:
    """Return a number as a float, which any record can hold; None for other values."""
    try:
        return None if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


@functools.cache
def t_quantile(p: float, df: int) -> float:
    """Quantile of Student's t with ``df`` degrees of freedom."""
    from scipy.special import stdtrit  # imported late: slow for pytest's start

    return float(stdtrit(df, p))


def paired_log_ratio(blocks: Round, numerator: str, denominator: str) -> float:
    """Log-ratio of two arms in one round; the mirrored (ABBA) order cancels a linear drift."""
    return _mean_log(blocks, numerator) - _mean_log(blocks, denominator)


def _mean_log(blocks: Round, arm: str) -> float:
    return statistics.fmean(map(math.log, blocks.seconds[arm]))


def log_ratio(replicate: Replicate, numerator: str, denominator: str) -> float:
    """One replicate's log-ratio: the median of its rounds, robust against one disturbed round."""
    return statistics.median(paired_log_ratio(r, numerator, denominator) for r in replicate.rounds)


def interval(logs: Sequence[float]) -> Interval:
    """Student's t-interval of the mean of log-ratios, as a ratio.

    A single log-ratio has no spread, so its interval is infinitely wide. Equal log-ratios, as of
    bytes or counts, give an interval of zero width.
    """
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(0.0, math.exp(mean), math.inf)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    half = t_quantile(0.5 + LEVEL / 2, len(logs) - 1) * error
    return Interval(_exp(mean - half), _exp(mean), _exp(mean + half))


def _exp(log: float) -> float:
    """Return exp(log), which is infinite where it exceeds the largest float."""
    return math.exp(log) if log <= _MAX_LOG else math.inf


def comparison(replicates: Iterable[Replicate], numerator: str, denominator: str) -> Interval:
    """Ratio of two arms with its confidence interval; each replicate is one sample."""
    return interval([log_ratio(r, numerator, denominator) for r in replicates])


def speedup(timing: Timing, of: str = "baseline") -> Interval:
    """Return how many times better the optimized arm is than ``of``, whatever the unit."""
    arms = (of, "optimized") if timing.better == "lower" else ("optimized", of)
    return comparison(timing.replicates, *arms)


def half_width(ratio: Interval) -> float:
    """Relative half-width of the interval; infinite for an unbounded interval."""
    if ratio.low <= 0 or math.isinf(ratio.high):
        return math.inf
    log = (math.log(ratio.high) - math.log(ratio.low)) / 2
    return math.expm1(log) if log <= _MAX_LOG else math.inf


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Total length of the union of the spans; overlaps count once."""
    total, covered_until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


def mean_call_s(replicates: Iterable[Replicate], arm: str) -> float:
    """Seconds per call of an arm: the geometric mean over replicates.

    Computed like :func:`comparison`, so that the times of two arms have the ratio that is shown
    beside them; medians over all blocks do not, when clocks or a shared host drift. The equality is
    exact for up to two rounds per replicate.
    """
    logs = (statistics.median(_mean_log(b, arm) for b in r.rounds) for r in replicates)
    return math.exp(statistics.fmean(logs))


def median_call_s(replicates: Iterable[Replicate], arm: str) -> float:
    """Seconds per call of an arm: the median over all its blocks."""
    return statistics.median(s for r in replicates for b in r.rounds for s in b.seconds[arm])
