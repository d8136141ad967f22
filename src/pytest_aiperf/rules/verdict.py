"""Comparison and expectation to verdict; pure."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_aiperf.model import Expectation, Interval, Metric, Result, Verdict

SAME_WITHIN = 0.02
"""Two arms are the same when the whole interval lies within this of 1."""

SESSIONS_APART = 0.035
"""Two sessions' figures of one claim may be so far apart without any change of it.

An interval knows only the noise of its own session. Of unchanged claims that were timed on the
device, measured on two H200s, 28 of 71 pairs of intervals did not meet, and 30 of 68 on two others:
up to 3.2 % lay between their ends, both times. The figure was chosen after such pairs had failed,
and what it costs is that a smaller loss shows only in a history, as a lasting step.
"""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether the claim holds, and why in words; ``notes`` do not decide."""

    holds: bool
    why: str
    notes: tuple[str, ...] = ()


def is_hosts(result: Result) -> bool:
    """Whether a figure is as much the host's as the GPU's: hosts differ more than GPUs do."""
    return result.host or (result.timing is not None and result.timing.metric is Metric.WALL)


def verdict(ratio: Interval, floor: float) -> Verdict:
    """Name what an interval says, given the noise floor of the session."""
    if ratio.low > 1 + floor:
        return Verdict.FASTER
    if ratio.high < 1 - floor:
        return Verdict.SLOWER
    if is_parity(ratio):
        return Verdict.SAME
    return Verdict.INCONCLUSIVE


def is_parity(ratio: Interval) -> bool:
    """Whether the whole interval says that nothing worth naming lies between two arms."""
    return ratio.low >= 1 - SAME_WITHIN and ratio.high <= 1 + SAME_WITHIN


def judge(
    ratio: Interval,
    floor: float,
    expectation: Expectation | None = None,
    *,
    library: Interval | None = None,
    share: float | None = None,
    compare_recorded: bool = True,
) -> Judgement:
    """Hold a comparison against what is expected of it.

    Without an expectation a claim needs only FASTER. ``require`` is held with the interval's
    lower end. A recorded figure is lost when the whole interval lies below the recorded one by
    more than sessions differ; a figure recorded as SAME allows SAME. Recorded figures of changed
    code, and those of another host (``compare_recorded`` false), are not compared.
    """
    expectation = expectation or Expectation()
    says = verdict(ratio, floor)
    lost: list[str] = []
    notes: list[str] = []
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
        allowed.add(Verdict.SAME)  # a human wrote down that parity is the claim
    if says not in allowed:
        lost.append(f"{says} where {' or '.join(sorted(allowed))} is claimed: {ratio}")
    if required is not None and ratio.low < required:
        lost.append(f"speedup {ratio}: its lower end is below the required {required:g}x")

    wanted = expectation.require.library
    if wanted is not None and library is None:
        lost.append(f"{wanted:g}x of the library is required, but there is no library arm")
    elif wanted is not None and library is not None and library.low < wanted:
        lost.append(f"library ratio {library}: its lower end is below the required {wanted:g}x")
    wanted = expectation.require.share
    if wanted is not None and share is None:
        lost.append(f"{wanted:.0%} of the limit is required, but the claim's share is not known")
    elif wanted is not None and share is not None and share < wanted:
        lost.append(f"share of the limit {share:.0%} is below the required {wanted:.0%}")

    if recorded:
        low, value, high = recorded.speedup
        apart = max(floor, SESSIONS_APART)
        if ratio.high < low * (1 - apart):
            lost.append(
                f"speedup {ratio} has dropped below the recorded {value:g}x [{low:g}, {high:g}] "
                f"of {expectation.key}"
            )
        elif ratio.low > high * (1 + apart):
            notes.append(f"better than the recorded {value:g}x: --update-expectations records it")
    return Judgement(not lost, "; ".join(lost) or f"{says}: {ratio}", tuple(notes))
