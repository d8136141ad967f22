"""Figures to places on a chart: per cent across, pixels down; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_aiperf.model import ARMS, Interval, Limit, Result, Timing
from pytest_aiperf.rules import stats

from .aggregate import heights, rung

ROOF_HEIGHT: Final = 340
"""Pixels of the roofline's plot."""

_COMPUTE: Final = "FLOP/s"


def arms(timing: Timing | None) -> list[str]:
    """Name the arms that every round of a comparison measured, in our order."""
    rounds = [b for r in timing.replicates for b in r.rounds] if timing else []
    return [arm for arm in ARMS if rounds and all(b.seconds.get(arm) for b in rounds)]


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from ``low`` to ``high``, logarithmic or not, and the figures that it names."""

    low: float
    high: float
    log: bool = True

    def at(self, value: float) -> float:
        """Place a figure in per cent; what lies outside stays at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return 100 * math.log(value / self.low) / math.log(self.high / self.low)
        return 100 * (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 7) -> list[tuple[float, float]]:
        """List round figures within the scale, each with its place."""
        return [(v, self.at(v)) for v in self._round(most)]

    def _round(self, most: int) -> list[float]:
        if not self.log:
            steps = [10.0**p * m for p in range(-6, 6) for m in (1, 2, 5)]
            step = next(s for s in steps if (self.high - self.low) / s <= most)
            first = math.ceil(self.low / step - 1e-9)
            last = math.floor(self.high / step + 1e-9)
            return [i * step for i in range(first, last + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for marks in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
            found = [m * 10.0**p for p in powers for m in marks]
            inside = [v for v in found if self.low * 0.999 <= v <= self.high * 1.001]
            if len(inside) <= most:
                return inside
        return inside[:: math.ceil(len(inside) / most)]


def speedup_axis(results: Iterable[Result]) -> Axis:
    """Span all speedups, and 1."""
    known = [r.speedup for r in results if r.speedup is not None]
    low = min([i.low for i in known if i.low > 0] + [1.0])
    high = max([i.high for i in known if math.isfinite(i.high)] + [2.0])
    return Axis(max(low * 0.95, 1e-3), high * 1.08)


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure between its limits, placed."""

    low: float
    value: float
    high: float


def bar(interval: Interval, axis: Axis) -> Bar:
    return Bar(axis.at(interval.low), axis.at(interval.value), axis.at(interval.high))


@dataclass(frozen=True, slots=True)
class Strip:
    """One claim's replicates: the ratio of each, its rounds' ratios, the interval of them all."""

    axis: Axis
    band: Bar
    replicates: tuple[float, ...]
    rounds: tuple[tuple[float, int], ...]
    one: float | None


def strip(result: Result) -> Strip | None:
    """Place what the replicates of a claim say, one dot each."""
    if result.timing is None or result.speedup is None:
        return None
    over, under = "baseline", "optimized"
    if result.timing.better == "higher":
        over, under = under, over
    replicates = result.timing.replicates
    try:
        each = [math.exp(stats.log_ratio(r, over, under)) for r in replicates]
        rounds = [
            (math.exp(stats.paired_log_ratio(b, over, under)), i)
            for i, r in enumerate(replicates)
            for b in r.rounds
        ]
    except (KeyError, ValueError):
        return None  # nothing measured, or figures that have no ratio
    shown = [*each, *(ratio for ratio, _ in rounds), result.speedup.low, result.speedup.high]
    shown = [v for v in shown if 0 < v < math.inf]
    low, high = min(shown), max(shown)
    room = max((high - low) * 0.08, result.speedup.value * 0.001)
    axis = Axis(max(low - room, low / 2), high + room, log=high > 3 * low)
    one = axis.at(1.0) if axis.low < 1 < axis.high else None
    placed = tuple((axis.at(ratio), i) for ratio, i in rounds)
    band = bar(result.speedup, axis)
    return Strip(axis, band, tuple(axis.at(v) for v in each), placed, one)


@dataclass(frozen=True, slots=True)
class Step:
    """One rung of a ladder: where it stands and how far up it goes, from the ladder's bottom."""

    rung: str
    start: float
    end: float
    height: float
    result: Result


@dataclass(frozen=True, slots=True)
class Ladder:
    """The rungs of one test as stairs over one axis."""

    axis: Axis
    steps: tuple[Step, ...]
    bottom: float


def ladder(rungs: Sequence[Result]) -> Ladder | None:
    """Place a ladder's measured rungs; one rung is no ladder."""
    measured = [r for r in rungs if r.speedup is not None and r.speedup.value > 0]
    if len(measured) < 2:
        return None
    tops = heights(measured)
    axis = Axis(min(1.0, *tops) * 0.97, max(1.0, *tops) * 1.03)
    starts = [1.0, *tops]
    steps = [
        Step(rung(r), axis.at(start), axis.at(top), top, r)
        for r, start, top in zip(measured, starts, tops, strict=False)
    ]
    return Ladder(axis, tuple(steps), axis.at(1.0))


@dataclass(frozen=True, slots=True)
class Share:
    """How much of its ceiling each arm of a claim reaches."""

    result: Result
    arms: tuple[tuple[str, float, Limit], ...]


def shares(results: Iterable[Result]) -> list[Share]:
    """List claims whose ceiling is known, in per cent of it; more than all of it is all."""
    return [
        Share(r, tuple((a, min(100 * r.limits[a].share, 105), r.limits[a]) for a in known))
        for r in results
        if (known := [a for a in ARMS if a in r.limits])
    ]


@dataclass(frozen=True, slots=True)
class Dot:
    """One arm on the roofline."""

    x: float
    y: float
    arm: str
    intensity: float
    rate: float
    result: Result


@dataclass(frozen=True, slots=True)
class Roof:
    """One ceiling on the roofline: a line from left to right."""

    name: str
    limit: float
    unit: str
    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """Operations a second over operations a byte: arms below the ceilings that were measured."""

    x: Axis
    y: Axis
    roofs: tuple[Roof, ...]
    dots: tuple[Dot, ...]


def roofline(results: Sequence[Result]) -> Roofline | None:
    """Place every arm that both moves bytes and computes; None where no ceiling is known."""
    limits = {lim.ceiling: lim for r in results for lim in r.limits.values() if lim.limit > 0}
    placed = [
        (r.work.flops / r.work.bytes, r.work.flops / seconds, arm, r)
        for r in results
        if r.work and r.work.bytes > 0 and r.work.flops > 0
        if r.limits and r.timing and r.timing.unit == "s"
        for arm in arms(r.timing)
        if (seconds := stats.typical(r.timing.replicates, arm)) > 0
    ]
    flat = [lim for lim in limits.values() if lim.unit == _COMPUTE]
    slant = [lim for lim in limits.values() if lim.unit == "B/s"]
    if not placed or not (flat or slant):
        return None
    at, rates = [p[0] for p in placed], [p[1] for p in placed]
    x = Axis(min(at) / 2, max(at) * 2)
    top = max([lim.limit for lim in flat] or [max(rates)])
    y = Axis(min(rates) / 2, max(top, *rates) * 1.6)
    roofs = [_flat(lim, slant, x, y) for lim in flat] + [_slant(lim, x, y) for lim in slant]
    dots = [Dot(x.at(i), _down(y, f), arm, i, f, r) for i, f, arm, r in placed]
    return Roofline(x, y, tuple(filter(None, roofs)), tuple(dots))


def _down(y: Axis, rate: float) -> float:
    return ROOF_HEIGHT * (1 - y.at(rate) / 100)


def _flat(limit: Limit, slant: Sequence[Limit], x: Axis, y: Axis) -> Roof:
    """Draw a rate of computing, from where memory would let it be reached."""
    memory = max((lim.limit for lim in slant), default=math.inf)
    start = min(max(x.low, limit.limit / memory), x.high)
    down = _down(y, limit.limit)
    return Roof(limit.ceiling, limit.limit, limit.unit, x.at(start), down, 100.0, down)


def _slant(limit: Limit, x: Axis, y: Axis) -> Roof | None:
    """Draw a rate of memory: operations a second are bytes a second times operations a byte."""
    left, right = max(x.low, y.low / limit.limit), min(x.high, y.high / limit.limit)
    if left >= right:
        return None
    down = [_down(y, limit.limit * i) for i in (left, right)]
    return Roof(limit.ceiling, limit.limit, limit.unit, x.at(left), down[0], x.at(right), down[1])
