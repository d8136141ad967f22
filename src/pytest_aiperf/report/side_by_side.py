"""Two runs side by side, as one HTML file."""

from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

from pytest_aiperf.model import Result
from pytest_aiperf.records import comparison
from pytest_aiperf.rules.stats import mean_call_s
from pytest_aiperf.rules.verdict import SESSIONS_APART
from pytest_aiperf.text import si

from . import charts, views
from .formatting import measured_on

MAX_RATIO: Final = 4.0
"""Ratio at which the axis ends, at the latest: a few wide intervals must not hide the others."""


def page(old: Sequence[Result], new: Sequence[Result]) -> str:
    """Return the comparison of two runs as HTML, in the order of :func:`comparison.changes`."""
    changes = comparison.changes(old, new)
    before, after = ({(r.claim, r.key): r for r in results} for results in (old, new))
    ends = [end for c in changes if c.ratio for end in (c.ratio.low, c.ratio.high) if end > 0]
    reach = min(max([1.1, *ends, *(1 / end for end in ends)]) * 1.02, MAX_RATIO)
    scale = charts.Axis(1 / reach, reach)
    rows = []
    for change in changes:
        pair = [run.get((change.claim, change.key)) for run in (before, after)]
        rows.append(
            {
                "change": change,
                "state": change.state.value,
                "bar": charts.bar(change.ratio, scale) if change.ratio else None,
                "old_speedup": pair[0] and pair[0].speedup,
                "new_speedup": pair[1] and pair[1].speedup,
                "baseline": [_figure(result, "baseline") for result in pair],
                "optimized": [_figure(result, "optimized") for result in pair],
                "codes": [result.code[:12] if result else "-" for result in pair],
            }
        )
    return views.document(
        files(__package__).joinpath("side_by_side.html").read_text(encoding="utf-8"),
        "Two runs side by side",
        [files(__package__).joinpath("table.js").read_text(encoding="utf-8")],
        rows=rows,
        scale=scale,
        band=charts.Bar(*(scale.at(v) for v in (1 - SESSIONS_APART, 1.0, 1 + SESSIONS_APART))),
        counts=Counter(change.state.value for change in changes),
        stack=comparison.stack_changes(old, new),
        runs=[
            {
                "name": name,
                "started": min((r.started[:16].replace("T", " ") for r in results), default=""),
                "machine": ", ".join(sorted({measured_on(r) for r in results})),
                "claims": len(results),
            }
            for name, results in (("old", old), ("new", new))
        ],
    )


def _figure(result: Result | None, arm: str) -> str:
    """Return the figure of an arm per call; "-" without one."""
    if result is None or arm not in charts.arms(result.timing) or result.timing is None:
        return "-"
    return si(mean_call_s(result.timing.replicates, arm), result.timing.unit)
