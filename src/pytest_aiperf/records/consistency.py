"""Checks that a record is consistent: its figures with its samples, its outcome with both."""

import math
from collections.abc import Iterator
from dataclasses import astuple
from itertools import chain
from typing import Final

from pytest_aiperf.machine.requirements import claim_id
from pytest_aiperf.model import ARMS, Interval, Metric, Outcome, Result, Timing, Verdict
from pytest_aiperf.rules import evidence, roofline, stats
from pytest_aiperf.rules.verdict import is_parity, verdict

MAX_ALLOWED: Final = 4.0
"""Largest tolerance in a record. Errors are relative, so a baseline in the narrowest dtype has at
most an error of 1, and another arm may have four times the baseline's."""
ROUNDING: Final = 1e-6
"""Largest relative difference between a stated figure and the one computed from the samples; other
versions of the libraries that compute it may round differently."""


def contradiction(record: Result) -> str | None:
    """Describe the first part of a record that contradicts another part; None if there is none.

    Everything that follows from the samples is computed again, so a figure that was edited, or that
    an arm wrote into its own process, does not count.
    """
    timings = [timing for timing in (record.timing, *record.also) if timing is not None]
    # in this order: later functions rely on what the earlier ones have checked
    problems = chain(
        _numbers(record),
        *map(_samples, timings),
        _ratios(record),
        _conclusion(record),
        _agreement(record),
        _limits(record, timings),
    )
    try:
        return next(problems, None)
    except ArithmeticError:
        return "its samples are too large or too small for a ratio"


def _numbers(record: Result) -> Iterator[str]:
    if record.nodeid and claim_id(record.nodeid) != record.claim:
        yield f"its test {record.nodeid[:80]!r} is not that of the claim {record.claim[:80]!r}"
    if record.attempts < 1 or min(record.rung_index, record.seconds, record.floor) < 0:
        yield "its attempts, rung_index, seconds or floor is too small"
    if record.expectation is not None and (recorded := record.expectation.recorded):
        low, value, high = recorded.speedup
        if not 0 < recorded.least <= low <= value <= high:
            yield "its expectation is no interval above 0"
    work = record.work
    if work is not None and min(work.read, work.written, work.flops) < 0:
        yield "its work is negative"


def _samples(timing: Timing) -> Iterator[str]:
    rounds = [blocks for replicate in timing.replicates for blocks in replicate.rounds]
    if not rounds or not all(replicate.rounds for replicate in timing.replicates):
        yield f"its {timing.metric} timing has no rounds"
        return
    arms = rounds[0].seconds.keys()
    if not {"baseline", "optimized"} <= arms <= {*ARMS, "first"}:
        yield f"its {timing.metric} timing is not one of a baseline and an optimized arm"
    if timing.calls.keys() != arms or min(*timing.calls.values(), timing.sets) < 1:
        yield f"its {timing.metric} timing has no calls of an arm, or calls of no arm"
    if any(blocks.seconds.keys() != arms for blocks in rounds):
        yield f"its {timing.metric} rounds have different arms"
    for blocks in rounds:
        counts = {len(values) for values in blocks.seconds.values()}
        # two arms of a ladder may be one, which has one letter in the order
        ordered = {blocks.order.count(initial) for initial in set(blocks.order)}
        if len(counts) != 1 or 0 in counts or not ordered <= counts:
            yield f"its {timing.metric} rounds have blocks that their order does not name"
        if not set(blocks.order) <= {arm[0].upper() for arm in arms}:
            yield f"its {timing.metric} rounds have an order of other arms"
        if not all(value > 0 for values in blocks.seconds.values() for value in values):
            yield f"its {timing.metric} samples are not all above 0"
    units = {Metric.DEVICE: "s", Metric.WALL: "s", Metric.MEMORY: "B"}
    if timing.metric in units and (timing.unit, timing.better) != (units[timing.metric], "lower"):
        yield f"its {timing.metric} timing is in {timing.unit[:80]!r}, {timing.better} is better"


def _ratios(record: Result) -> Iterator[str]:
    """Compare each ratio with the samples."""
    timing = record.timing
    for name, arm in (("speedup", "baseline"), ("library", "library"), ("first", "first")):
        stated: Interval | None = getattr(record, name)
        computed = None
        if timing is not None and arm in timing.calls:
            computed = stats.speedup(timing, arm)
        if not _equal(stated, computed):
            yield f"its {name} is {stated}, its samples give {computed}"


def _equal(stated: Interval | None, computed: Interval | None) -> bool:
    if stated is None or computed is None:
        return stated is computed
    pairs = zip(astuple(stated), astuple(computed), strict=True)
    return all(math.isclose(a, b, rel_tol=ROUNDING) for a, b in pairs)


def _conclusion(record: Result) -> Iterator[str]:
    """Compare the verdict with the ratio, the evidence with its figures, the outcome with both."""
    computed = None if record.speedup is None else verdict(record.speedup, record.floor)
    if record.verdict is not None and record.verdict is not computed:
        yield f"its verdict is {record.verdict}, its speedup gives {computed}"
    for finding in record.evidence:
        piece, value, baseline = finding.evidence, finding.value, finding.baseline_value
        # a figure within the bounds may count as not held, where the baseline's figure is 0
        invented = finding.held and value is not None and not evidence.within(piece, value)
        if invented or (finding.held is None) is not (value is None):
            yield f"its evidence of {piece.kind} has held={finding.held} for {value}"
        in_baseline = None if baseline is None else evidence.within(piece, baseline)
        if finding.baseline_held is not in_baseline:
            yield f"its evidence of {piece.kind} has baseline_held={finding.baseline_held}"
    if record.outcome is Outcome.PASSED and record.speedup is not None:
        required = record.expectation.require.speedup if record.expectation else None
        within = record.speedup is not None and (
            is_parity(record.speedup) or record.speedup.low >= (required or math.inf)
        )
        if record.verdict not in (Verdict.FASTER, Verdict.SAME) and not (record.verdict and within):
            yield f"it PASSED with the verdict {record.verdict}"
        if problem := evidence.broken(record.evidence):
            yield f"it PASSED although {problem[:200]}"


def _agreement(record: Result) -> Iterator[str]:
    if record.verdict is None or record.timing is None:
        return  # it ended before it was judged
    missing = set(record.timing.calls) - {"first"} - {error.arm for error in record.agreement}
    if missing:
        yield f"its results were not checked: {', '.join(sorted(missing))}"
    for error in record.agreement:
        if not (0 <= error.error <= error.allowed and 0 <= error.rms <= error.rms_allowed):
            yield f"its arm {error.arm[:80]!r} does not agree with the reference"
        if (allowed := max(error.allowed, error.rms_allowed)) > MAX_ALLOWED:
            yield f"its arm {error.arm[:80]!r} may have an error of {allowed:g}"


def _limits(record: Result, timings: list[Timing]) -> Iterator[str]:
    """Compare each share of a limit with the samples, and with what is physically possible."""
    timing = next((timing for timing in timings if timing.unit == "s"), None)
    for arm, limit in record.limits.items():
        if timing is None or arm not in timing.calls or record.work is None or limit.limit <= 0:
            yield f"its limit of {arm[:80]!r} is one without a time, without work, or not above 0"
            return
        amount = record.work.bytes if limit.ceiling in roofline.MEMORY else record.work.flops
        rate = amount / stats.mean_call_s(timing.replicates, arm)
        if not (
            math.isclose(limit.rate, rate, rel_tol=ROUNDING)
            and math.isclose(limit.share, rate / limit.limit, rel_tol=ROUNDING)
        ):
            yield f"its share of the limit of {arm[:80]!r} is not that of its samples"
    if record.verdict is not None and (problem := roofline.impossible_time(record)):
        yield problem
