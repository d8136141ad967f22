"""Positions on charts: x in per cent from the left, y in pixels from the top."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from pytest_aiperf.model import ARMS, Against, GpuLoad, Interval, Limit, Result, Timing
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.scores import scaling_efficiency
from pytest_aiperf.text import si

from . import aggregate

ROOF_HEIGHT: Final = 340  #: Height of the roofline chart in pixels.
SCALING_HEIGHT: Final = 180  #: Height of the chart of scaling in pixels.
LABEL_HEIGHT: Final = 15  #: Height of a limit's label in pixels.
APART: Final = (
    "Not all of these rungs were measured together: compare their ratios, not their times."
)
"""Remark about a ladder with a rung whose timing stands alone."""
FAR: Final = 1e12  #: FLOP per byte that no kernel has; its inverse as well.
DIFFERS: Final = 1.2
"""If two times of a library call or limit differ by more than this factor, they belong to different
operations: sessions differ by a few percent, and operations rarely by less than this factor."""
CHAINED: Final = "A ratio without an interval is the product of several measured ratios."
"""Remark about a ladder with a rung that was measured apart from the one before."""
LOADS: Final = {
    "utilization_percent": ("utilization", "%"), "sm_mhz": ("SM clock", "MHz"),
    "memory_mhz": ("memory clock", "MHz"), "power_w": ("power", "W"),
    "memory_used_bytes": ("memory used", "B"),
}  # fmt: skip
"""Name and unit of each field of GpuLoad."""


def arms(timing: Timing | None) -> list[str]:
    """List the arms that were measured in every round."""
    rounds = [b for r in timing.replicates for b in r.rounds] if timing else []
    return [arm for arm in ARMS if rounds and all(b.seconds.get(arm) for b in rounds)]


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic scale from ``low`` to ``high``."""

    low: float
    high: float
    log: bool = True

    def at(self, value: float) -> float:
        """Return a figure's position in per cent; outside the scale, the edge's position."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return 100 * math.log(value / self.low) / math.log(self.high / self.low)
        return 100 * (value - self.low) / (self.high - self.low)

    def ticks(self, max_count: int = 7) -> list[tuple[float, float]]:
        """List round values within the scale, each with its position."""
        return [(v, self.at(v)) for v in self._round(max_count)]

    def _round(self, max_count: int) -> list[float]:
        if not self.log or self.high < 3 * self.low:
            steps = [10.0**p * m for p in range(-6, 6) for m in (1, 2, 5)]
            step = next(s for s in steps if (self.high - self.low) / s <= max_count)
            first = math.ceil(self.low / step - 1e-9)
            last = math.floor(self.high / step + 1e-9)
            return [i * step for i in range(first, last + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for marks in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
            values = [m * 10.0**p for p in powers for m in marks]
            inside = [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]
            if len(inside) <= max_count:
                return inside
        return inside[:: math.ceil(len(inside) / max_count)]


def speedup_axis(results: Iterable[Result]) -> Axis:
    """Return a scale that contains 1 and the speedups of all results."""
    speedups = [r.speedup for r in results if r.speedup is not None]
    low = min([i.low for i in speedups if i.low > 0] + [1.0])
    high = max([i.high for i in speedups if math.isfinite(i.high)] + [2.0])
    return Axis(max(low * 0.95, 1e-3), high * 1.08)


@dataclass(frozen=True, slots=True)
class Bar:
    """Positions of an interval's bounds and value."""

    low: float
    value: float
    high: float


def bar(interval: Interval, axis: Axis) -> Bar:
    return Bar(axis.at(interval.low), axis.at(interval.value), axis.at(interval.high))


@dataclass(frozen=True, slots=True)
class Strip:
    """Positions of a claim's measured ratios on one axis."""

    axis: Axis
    band: Bar  #: Position of the claim's interval.
    replicates: tuple[float, ...]  #: Position of each replicate's ratio.
    rounds: tuple[tuple[float, int], ...]
    """Position of each round's ratio, with the index of the round's replicate."""
    one: float | None  #: Position of ratio 1; None if it is outside the axis.


def strip(result: Result) -> Strip | None:
    """Place the ratios of a claim's replicates and rounds; None if the claim has no ratios."""
    if result.timing is None or result.speedup is None:
        return None
    numerator, denominator = "baseline", "optimized"
    if result.timing.better == "higher":
        numerator, denominator = denominator, numerator
    replicates = result.timing.replicates
    try:
        ratios = [math.exp(stats.log_ratio(r, numerator, denominator)) for r in replicates]
        rounds = [
            (math.exp(stats.paired_log_ratio(b, numerator, denominator)), i)
            for i, r in enumerate(replicates)
            for b in r.rounds
        ]
    except (KeyError, ValueError):
        return None  # nothing was measured, or the figures have no ratio
    shown = [*ratios, *(ratio for ratio, _ in rounds), result.speedup.low, result.speedup.high]
    shown = [v for v in shown if 0 < v < math.inf]
    low, high = min(shown), max(shown)
    room = max((high - low) * 0.08, result.speedup.value * 0.001)
    axis = Axis(max(low - room, low / 2), high + room, log=high > 3 * low)
    one = axis.at(1.0) if axis.low < 1 < axis.high else None
    dots = tuple((axis.at(ratio), i) for ratio, i in rounds)
    return Strip(axis, bar(result.speedup, axis), tuple(axis.at(v) for v in ratios), dots, one)


@dataclass(frozen=True, slots=True)
class Step:
    """A row of a ladder's picture: its first arm, a rung, the library or a limit."""

    name: str
    figure: float | None  #: Seconds per call, or the metric's figure; None if there are several.
    height: float  #: Speedup over the ladder's first arm.
    result: Result | None = None  #: The rung's record; None if the row is no rung.
    interval: Interval | None = None  #: Interval of ``height``, if it was measured.


@dataclass(frozen=True, slots=True)
class Ladder:
    """The rungs of a ladder with their speedups over its first arm, on one axis."""

    axis: Axis
    steps: tuple[Step, ...]  #: The first arm, the rungs, then ``marks``.
    marks: tuple[Step, ...]  #: The library, and each limit as the speedup that would reach it.
    unit: str  #: Unit of the figures.
    remark: str  #: What to know about rungs that were not measured together; or empty.


def ladder(rungs: Sequence[Result], first_name: str = "first arm") -> Ladder | None:
    """Lay out a ladder's measured rungs on one axis; None if fewer than two were measured.

    If a rung was measured apart from the rung before, which it is compared with, its height is the
    product of its speedup and that rung's height. Rungs that were measured apart may be different
    operations: a library or a limit whose time differs between them is left out.
    """
    steps: list[Step] = []
    marks: dict[str, Step] = {}
    figures: dict[str, list[float]] = {}  # of each mark, one per rung
    first = aggregate.first_arm_s(rungs)
    unit, apart = "", first is None
    for r in rungs:
        if not r.ladder or not r.timing or not r.speedup or r.speedup.value <= 0:
            continue
        if "optimized" not in arms(r.timing):
            continue
        unit, replicates = r.timing.unit, r.timing.replicates
        chained = not r.first and r.against is Against.PREVIOUS_RUNG and bool(steps)
        interval = None if chained else r.first or r.speedup
        height = interval.value if interval else steps[-1].height * r.speedup.value
        figure = stats.mean_call_s(replicates, "optimized")
        steps.append(Step(aggregate.rung_name(r), figure, height, r, interval))
        apart = apart or aggregate.own_first_arm_s(r) != first
        if r.library and r.library.value > 0 and "library" in arms(r.timing):
            library = stats.mean_call_s(replicates, "library")
            marks["library"] = Step("library", library, height / r.library.value)
            figures.setdefault("library", []).append(library)
        limit = r.limits.get("optimized")
        if limit and limit.share > 0 and unit == "s":
            name = f"limit: {limit.ceiling}"
            marks[name] = Step(name, figure * limit.share, height / limit.share)
            figures.setdefault(name, []).append(figure * limit.share)
    if len(steps) < 2:
        return None
    if apart:
        marks = {k: v for k, v in marks.items() if max(figures[k]) < DIFFERS * min(figures[k])}
    intervals = [step.interval for step in steps if step.interval]
    ends = [end for i in intervals for end in (i.low, i.high) if 0 < end < math.inf]
    ends += [1.0, *(step.height for step in (*steps, *marks.values()))]
    axis = Axis(min(ends) * 0.97, max(ends) * 1.03)
    rows = (Step(first_name, first, 1.0), *steps, *marks.values())
    remarks = [APART] * apart + [CHAINED] * (len(intervals) < len(steps))
    return Ladder(axis, rows, tuple(marks.values()), unit, " ".join(remarks))


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure of a GPU over a run, on an axis from 0 to its highest value."""

    name: str
    text: str  #: Its mean and highest value.
    points: str  #: Points of an SVG polyline; both coordinates run from 0 to 100.


def telemetry(samples: Sequence[tuple[float, GpuLoad]]) -> list[Curve]:
    """Draw the figures of a GPU over a run, without those that it does not report."""
    begin, end = samples[0][0], samples[-1][0]
    seconds_per_unit = max(end - begin, 1e-9) / 100
    curves = []
    for field, (name, unit) in LOADS.items():
        values = [(at, v) for at, load in samples if (v := getattr(load, field)) is not None]
        highest = max((value for _, value in values), default=0.0)
        if highest <= 0:
            continue
        points = []
        for _, group in groupby(values, lambda each: (each[0] - begin) // seconds_per_unit):
            at, value = map(statistics.fmean, zip(*group, strict=True))
            place = (at - begin) / seconds_per_unit, 100 * (1 - value / highest)
            points.append("{:.1f},{:.1f}".format(*place))
        mean = si(statistics.fmean(value for _, value in values), unit, 3)
        text = f"mean {mean}, highest {si(highest, unit, 3)}"
        curves.append(Curve(name, text, " ".join(points)))
    return curves


@dataclass(frozen=True, slots=True)
class Dot:
    """One arm on the roofline chart."""

    x: float
    y: float
    arm: str
    intensity: float  #: Floating-point operations per byte.
    rate: float  #: Floating-point operations per second.


@dataclass(frozen=True, slots=True)
class Roof:
    """One limit on the roofline chart: a line from (x1, y1) to (x2, y2)."""

    limit: Limit
    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True, slots=True)
class Label:
    """The names of one or more limits; the text ends at (x, y)."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Roofline:
    """A chart of FLOP/s over FLOP per byte, with arms as dots and measured limits as lines."""

    x: Axis
    y: Axis
    roofs: tuple[Roof, ...]
    labels: tuple[Label, ...]
    claims: tuple[tuple[Result, tuple[Dot, ...]], ...]  #: The arms of each claim.


def roofline(results: Sequence[Result]) -> Roofline | None:
    """Place every arm with known bytes and FLOPs; None without such an arm or a limit.

    Claims that were not judged are left out.
    """
    results = [r for r in results if r.outcome in aggregate.JUDGED]
    limits = {lim.ceiling: lim for r in results for lim in r.limits.values() if lim.limit > 0}
    points = [
        (r, each)
        for r in results
        if (each := [point for point in _points(r) if 1 / FAR < point[0] < FAR])
    ]
    flat = [lim for lim in limits.values() if lim.unit == "FLOP/s"]
    slant = [lim for lim in limits.values() if lim.unit == "B/s"]
    if not points or not (flat or slant):
        return None
    intensities, rates = zip(*[p[:2] for _, each in points for p in each], strict=True)
    x = Axis(min(intensities) / 2, max(intensities) * 2)
    top = max([lim.limit for lim in flat] or [max(rates)])
    y = Axis(min(rates) / 2, max(top, *rates) * 1.6)
    roofs = [_flat(lim, slant, x, y) for lim in flat] + [_slant(lim, x, y) for lim in slant]
    drawn = tuple(filter(None, roofs))
    claims = tuple(
        (r, tuple(Dot(x.at(i), _down(y, f), arm, i, f) for i, f, arm in each)) for r, each in points
    )
    return Roofline(x, y, drawn, tuple(_labels(drawn)), claims)


def _points(result: Result) -> list[tuple[float, float, str]]:
    """Return FLOP per byte, FLOP/s and name of each arm; none if one of them is unknown."""
    work, timing = result.work, result.timing
    if not (work and work.bytes > 0 and work.flops > 0 and result.limits):
        return []
    if timing is None or timing.unit != "s":
        return []
    times = {arm: stats.mean_call_s(timing.replicates, arm) for arm in arms(timing)}
    return [(work.flops / work.bytes, work.flops / s, arm) for arm, s in times.items() if s > 0]


def _labels(roofs: Sequence[Roof]) -> Iterator[Label]:
    """Name each limit, left of its line; limits close to each other share a label."""
    for unit, along in (("FLOP/s", 0.0), ("B/s", 0.7)):
        places = [
            (r.y1 + along * (r.y2 - r.y1), r.x1 + along * (r.x2 - r.x1), r.limit)
            for r in roofs
            if r.limit.unit == unit
        ]
        group: list[tuple[float, float, Limit]] = []
        for place in sorted(places, key=lambda place: place[0]):
            if group and place[0] - group[-1][0] > LABEL_HEIGHT:
                yield _label(group)
                group = []
            group.append(place)
        if group:
            yield _label(group)


def _label(group: Sequence[tuple[float, float, Limit]]) -> Label:
    text = ", ".join(f"{limit.ceiling} {si(limit.limit, limit.unit)}" for _, _, limit in group)
    return Label(min(x for _, x, _ in group), group[0][0], text)


def _down(y: Axis, rate: float) -> float:
    return ROOF_HEIGHT * (1 - y.at(rate) / 100)


def _flat(limit: Limit, slant: Sequence[Limit], x: Axis, y: Axis) -> Roof:
    """Place a compute limit; it begins at the ridge, where it meets the memory limit."""
    memory = max((lim.limit for lim in slant), default=math.inf)
    start = min(max(x.low, limit.limit / memory), x.high)
    down = _down(y, limit.limit)
    return Roof(limit, x.at(start), down, 100.0, down)


def _slant(limit: Limit, x: Axis, y: Axis) -> Roof | None:
    """Place a memory limit: its FLOP/s are bytes per second times FLOP per byte."""
    left, right = max(x.low, y.low / limit.limit), min(x.high, y.high / limit.limit)
    if left >= right:
        return None
    down = [_down(y, limit.limit * i) for i in (left, right)]
    return Roof(limit, x.at(left), down[0], x.at(right), down[1])


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """An arm in one number of ranks."""

    ranks: int
    seconds: float  #: Seconds per call.
    efficiency: float  #: Rate per rank, divided by that in the smallest number of ranks.
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """A chart of rate over number of ranks; rates are relative to the smallest number."""

    y: Axis
    ranks: tuple[tuple[Result, float], ...]  #: Results by ascending number, each with its x.
    ideal: tuple[float, float]  #: y of the smallest and the largest number, if scaling is linear.
    curves: Mapping[str, tuple[ScalingPoint, ...]]  #: Points of each arm.
    is_weak: bool  #: Whether the work per rank is unknown and taken as constant.


def scaling(by_ranks: Mapping[int, Result]) -> Scaling:
    """Place the arms of one claim in several numbers of ranks.

    The work of a call is that of all ranks: the number of ranks times ``work``, which is about
    one rank. Without ``work``, each rank is taken to do the same work in every number of ranks.
    """
    least, most = min(by_ranks), max(by_ranks)
    timings = {n: result.timing for n, result in by_ranks.items() if result.timing}
    works = {n: _amount(result) for n, result in by_ranks.items()}
    is_weak = not all(works.values())
    seconds, efficiency = {}, {}
    for arm in ARMS:
        if all(arm in arms(timing) for timing in timings.values()):
            seconds[arm] = {n: stats.mean_call_s(t.replicates, arm) for n, t in timings.items()}
            rates = {n: n * (1.0 if is_weak else works[n]) / s for n, s in seconds[arm].items()}
            efficiency[arm] = scaling_efficiency(rates)
    heights = [e * n / least for each in efficiency.values() for n, e in each.items()]
    x = Axis(least / 1.1, most * 1.1)
    y = Axis(min([1.0, *heights]) / 1.1, max([most / least, *heights]) * 1.1)

    def point(arm: str, n: int) -> ScalingPoint:
        share = efficiency[arm][n]
        return ScalingPoint(n, seconds[arm][n], share, x.at(n), down(share * n / least))

    def down(height: float) -> float:
        return SCALING_HEIGHT * (1 - y.at(height) / 100)

    return Scaling(
        y,
        tuple((result, x.at(n)) for n, result in by_ranks.items()),
        (down(1.0), down(most / least)),
        {arm: tuple(point(arm, n) for n in timings) for arm in seconds},
        is_weak,
    )


def _amount(result: Result) -> float:
    """Return the FLOPs, or else the bytes, of one rank's call; 0 if unknown."""
    return (result.work.flops or result.work.bytes) if result.work else 0.0
