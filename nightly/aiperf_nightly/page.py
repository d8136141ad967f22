"""The page that draws every claim of a history, night by night."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby, pairwise
from typing import Any, Final

from pytest_aiperf.report import views
from pytest_aiperf.report.charts import Axis
from pytest_aiperf.rules.verdict import SESSIONS_APART
from pytest_aiperf.text import si

from . import history
from .history import Night, Point, Step

MAX_DRAWN: Final = 90
"""Maximum number of nights that are drawn, about three months: older ones change no decision."""

HEIGHT: Final = 110
"""Height of a chart in pixels."""


@dataclass(frozen=True, slots=True)
class Series:
    """One claim's speedups, or one sentinel's seconds per call."""

    claim: str
    points: tuple[Point, ...]
    steps: tuple[Step, ...]
    unit: str
    id: str

    @property
    def last(self) -> Point:
        return self.points[-1]

    def text(self, value: float) -> str:
        return si(value, self.unit) if self.unit else f"{value:.4g}x"


@dataclass(frozen=True, slots=True)
class Mark:
    """A night on a chart; positions are percentages from the left and from the bottom."""

    point: Point
    left: float
    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Part:
    """The nights of one epoch, as points of SVG shapes in a square of 100 by 100."""

    line: str
    band: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart of one series."""

    y: Axis
    width: float  #: Width of a night.
    marks: tuple[Mark, ...]
    parts: tuple[Part, ...]
    epochs: tuple[float, ...]  #: Where another epoch begins.
    steps: tuple[tuple[float, Step], ...]  #: Where a lasting change begins.


def page(histories: Sequence[Sequence[Night]]) -> str:
    """Return the page as HTML; each history is of one kind of GPU and has at least one night."""
    return views.document(
        files(__package__).joinpath("page.html").read_text(encoding="utf-8"),
        "History of the claims",
        gpus=[_gpu(nights) for nights in histories],
        height=HEIGHT,
        apart=SESSIONS_APART,
    )


def _gpu(nights: Sequence[Night]) -> dict[str, Any]:
    """Lay out a history: claims that changed, largest change first; the others; sentinels."""
    steps = history.change_points(nights)
    key, drawn = nights[-1].key, nights[-MAX_DRAWN:]
    place = {id(night): i for i, night in enumerate(drawn)}

    def charts(*, sentinels: bool) -> list[tuple[Series, Picture]]:
        listed = []
        for claim, points in history.courses(nights, sentinels=sentinels).items():
            if shown := tuple(p for p in points if id(p.night) in place):
                own = tuple(s for s in steps if s.claim == claim and not sentinels)
                kind = "seconds" if sentinels else "speedup"
                series = Series(claim, shown, own, "s" * sentinels, f"{key}/{kind}/{claim}")
                listed.append((series, _picture(series, place)))
        return sorted(listed, key=lambda each: (-_size(each[0]), each[0].claim))

    claims = charts(sentinels=False)
    return {
        "key": key,
        "nights": nights,
        "drawn": len(drawn),
        "void": sum(bool(night.void) for night in nights),
        "epochs": [
            (b.started[:10], a.epoch, b.epoch) for a, b in pairwise(nights) if a.epoch != b.epoch
        ],
        "changed": [each for each in claims if _size(each[0])],
        "steady": [each for each in claims if not _size(each[0])],
        "sentinels": charts(sentinels=True),
    }


def _size(series: Series) -> float:
    """Return the size of a claim's largest change as a log-ratio; 0 without a change."""
    last = series.last
    outside = [last.value / last.band.median] if last.band and last.is_outside else []
    return max((abs(math.log(r)) for r in (*outside, *(s.ratio for s in series.steps))), default=0)


def _picture(series: Series, place: Mapping[int, int]) -> Picture:
    bands = [point.band for point in series.points if point.band]
    ends = [point.value for point in series.points if not point.night.void]  # void: at the edge
    ends = [*ends, *(end for band in bands for end in (band.low, band.high))] or [series.last.value]
    axis = Axis(min(ends) * 0.99, max(ends) * 1.01, log=max(ends) > 3 * min(ends))
    width = 100 / len(place)
    marks = []
    for point in series.points:
        left = width * place[id(point.night)]
        marks.append(
            Mark(point, left, left + width / 2, axis.at(point.value), _describe(series, point))
        )
    epochs = [list(marks) for _, marks in groupby(marks, lambda mark: mark.point.night.epoch)]
    begun = {id(step.night): step for step in series.steps}
    return Picture(
        axis,
        width,
        tuple(marks),
        tuple(_part(epoch, axis) for epoch in epochs),
        tuple(epoch[0].left for epoch in epochs[1:]),
        tuple((m.left, begun[id(m.point.night)]) for m in marks if id(m.point.night) in begun),
    )


def _part(marks: Sequence[Mark], axis: Axis) -> Part:
    banded = [(mark.x, mark.point.band) for mark in marks if mark.point.band]
    line = [(mark.x, mark.y) for mark in marks if not mark.point.night.void]
    low = [(x, axis.at(band.low)) for x, band in banded]
    high = [(x, axis.at(band.high)) for x, band in banded]
    return Part(_points(line), _points([*low, *reversed(high)]))


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.2f},{100 - y:.2f}" for x, y in places)


def _describe(series: Series, point: Point) -> str:
    night, band = point.night, point.band
    lines = [f"{night.started[:16].replace('T', ' ')}: {series.text(point.value)}"]
    if band:
        low, median, high = (series.text(v) for v in (band.low, band.median, band.high))
        lines.append(f"band {low} to {high}, median {median}")
    lines += [f"void: {night.void}"] if night.void else []
    return "\n".join([*lines, night.epoch])
