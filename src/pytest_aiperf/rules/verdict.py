"""Judge a comparison by the expectation of its claim."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pytest_aiperf.model import TIMED_UNIT, Expectation, Interval, Metric, Require, Result, Verdict

SAME_WITHIN = 0.02  #: The verdict is SAME when the whole interval lies within this distance of 1.
LEAST_DIFFERENCE = 0.001
"""Smaller differences count for neither arm. Scores and peak memory have no noise floor, and two
equal arms may differ by a few bytes that Python allocates."""
UNDECIDED = "undecided: "
"""Prefix of the reason if only noise keeps a claim from being met: on a quieter machine it may be.

`make bench` and reports list such claims apart from those that are not met.
"""
NOISY_FLOOR = 0.2
"""A noise floor above this is reported, because a claim of 1.2x could not be shown."""
SESSIONS_APART = 0.035
"""How far two sessions' intervals of one unchanged claim may lie apart.

An interval covers only the noise of its own session. Between two pairs of H200s, 28 of 71 and 30 of
68 intervals of unchanged claims did not overlap, and their ends lay up to 3.2 % apart. The price of
this tolerance: a smaller regression shows only in the history, as a lasting step.
"""

_FILE: Final = "expectations.yaml"  #: Names the source of requirements in messages.

_Problem = tuple[str, bool]
"""Reason why a claim is not met, and whether it may be met in another run."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a claim holds, and why."""

    holds: bool
    why: str  #: Why the claim fails; if it holds, its verdict and ratio.
    notes: tuple[str, ...] = ()  #: Remarks that do not affect whether the claim holds.
    advice: str = ""  #: Why the verdict is INCONCLUSIVE and what to do; empty for other verdicts.

    @property
    def is_undecided(self) -> bool:
        """Whether only noise keeps the claim from being met."""
        return self.why.startswith(UNDECIDED)


def depends_on_host(result: Result) -> bool:
    """Whether the figure depends on the host so much that two hosts' figures are not comparable."""
    timing = result.timing
    if result.host or timing is None:
        return result.host
    if timing.metric is Metric.SCORE:
        return TIMED_UNIT.search(timing.unit) is not None
    return timing.metric is Metric.WALL


def verdict(ratio: Interval, floor: float) -> Verdict:
    """Return the verdict of an interval, given the noise floor of its session."""
    floor = max(floor, LEAST_DIFFERENCE)
    if ratio.low > 1 + floor:
        return Verdict.FASTER
    if ratio.high * (1 + floor) < 1:  # 1 - floor would be negative on the noisiest machines
        return Verdict.SLOWER
    return Verdict.SAME if is_parity(ratio) else Verdict.INCONCLUSIVE


def is_parity(ratio: Interval) -> bool:
    """Whether the whole interval lies within ``SAME_WITHIN`` of 1."""
    return ratio.low >= 1 - SAME_WITHIN and ratio.high <= 1 + SAME_WITHIN


def noise_problem(floor: float) -> str | None:
    """Describe a noise floor so high that few claims can be shown; None if it is lower."""
    if not NOISY_FLOOR < floor < math.inf:
        return None
    return (
        f"noisy: two identical arms differ by {floor:.0%}, so only larger differences count; end "
        "other work on this machine, and measure again"
    )


def _why_inconclusive(ratio: Interval, floor: float, *, quick: bool) -> str:
    if ratio.low > 1 or ratio.high < 1:
        floor = max(floor, LEAST_DIFFERENCE)
        return (
            f"identical arms differ by up to {floor:.1%} in this session, and the interval is not "
            "beyond that; end other work on this machine, and measure again"
        )
    without = "without --quick, " if quick else ""
    return (
        f"the interval contains 1 and is too wide for SAME (within {SAME_WITHIN:.0%} of 1); "
        f"measure {without}on larger inputs, or on a quieter machine"
    )


def judge(
    ratio: Interval,
    floor: float,
    expectation: Expectation | None = None,
    *,
    library: Interval | None = None,
    share: Interval | None = None,
    compare_recorded: bool = True,
    quick: bool = False,
) -> Judgement:
    """Judge a comparison by its expectation.

    The verdict must be FASTER; parity suffices if the recorded interval is parity or the required
    speedup is 1. A required speedup below 1 is a margin: the lower end must reach it, whatever the
    verdict is. The lower end of the interval must meet ``require``. The interval must not lie
    wholly more than ``SESSIONS_APART`` below the recorded one and below the lowest estimate of
    earlier runs of the same code. What was recorded is ignored if the code has changed since, or if
    ``compare_recorded`` is false. ``quick`` states whether the run was quick, for the advice.

    The reason begins with ``UNDECIDED`` if nothing contradicts the claim: the verdict is FASTER or
    INCONCLUSIVE, and each interval, widened by the noise floor, reaches what is required of it.
    """
    expectation = expectation or Expectation()
    problems: list[_Problem] = []
    notes: list[str] = []
    advice = ""
    recorded = expectation.recorded if compare_recorded else None
    if recorded and expectation.stale:
        notes.append(
            f"the code changed since {expectation.key} was recorded ({recorded.recorded}): "
            "not compared; --update-expectations records it anew"
        )
        recorded = None

    allowed = {Verdict.FASTER}
    if recorded and is_parity(Interval(*recorded.speedup)):
        allowed.add(Verdict.SAME)
    required = expectation.require.speedup
    if required is not None and required <= 1:
        allowed.add(Verdict.SAME)  # the claim requires no speedup
    reached = verdict(ratio, floor)
    has_margin = required is not None and required < 1
    # a quiet session shows 0.99x as SLOWER, where a noisier one shows SAME: both are parity
    at_parity = Verdict.SAME in allowed and is_parity(ratio)
    if reached not in allowed and not (at_parity or has_margin):
        undecided = reached is Verdict.INCONCLUSIVE
        advice = _why_inconclusive(ratio, floor, quick=quick) if undecided else ""
        claimed = " or ".join(sorted(allowed))
        problems.append((f"{reached} where {claimed} is claimed: {ratio}", undecided))
    problems += _unmet(expectation.require, ratio, floor, library, share)

    if recorded:
        low, value, high = recorded.speedup
        apart = max(floor, SESSIONS_APART)
        if ratio.high < recorded.least * (1 - apart):
            runs = f" and {recorded.lowest:g}x before" if recorded.lowest else ""
            text = (
                f"speedup {ratio} has dropped below the recorded {value:g}x [{low:g}, {high:g}]"
                f"{runs} of {expectation.key}"
            )
            problems.append((text, False))
        elif ratio.low > high * (1 + apart):
            notes.append(f"better than the recorded {value:g}x: --update-expectations records it")
    head = UNDECIDED if all(undecided for _, undecided in problems) else ""
    why = head + "; ".join(text for text, _ in problems) if problems else f"{reached}: {ratio}"
    return Judgement(not problems, why, tuple(notes), advice)


def _unmet(
    require: Require,
    ratio: Interval,
    floor: float,
    library: Interval | None,
    share: Interval | None,
) -> Iterator[_Problem]:
    """Describe the requirements that a comparison does not meet."""
    for what, interval, required, write in (
        ("speedup", ratio, require.speedup, _ratios),
        ("library ratio", library, require.library, _ratios),
        ("share of the limit", share, require.share, _shares),
    ):
        if required is not None and interval is not None and interval.low < required:
            is_, required_ = write(interval, required)
            text = f"{what} {is_}: its lower end is below the {required_} that {_FILE} requires"
            if reaches := interval.high * (1 + floor) >= required:
                beyond = "the interval" if interval.high >= required else "the session's noise"
                text += f", but {beyond} reaches it: measure again"
            yield text, reaches
    if require.library is not None and library is None:
        text = f"{_FILE} requires {require.library:g}x of the library, but there is no library arm"
        yield text, False
    if require.share is not None and share is None:
        text = f"{_FILE} requires {require.share:.0%} of the limit, but the share is not known"
        yield text, False


def _ratios(ratio: Interval, required: float) -> tuple[str, str]:
    return str(ratio), f"{required:g}x"


def _shares(share: Interval, required: float) -> tuple[str, str]:
    """Write percentages with as many digits as the lower end and the requirement need to differ."""
    digits = next(n for n in range(17) if f"{share.low:.{n}%}" != f"{required:.{n}%}")
    value, low, high = (f"{x:.{digits}%}" for x in (share.value, share.low, share.high))
    return f"{value} [{low}, {high}]", f"{required:.{digits}%}"
