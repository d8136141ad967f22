"""Results and comparisons as CSV, one row per claim."""

import csv
import io
from collections.abc import Iterable, Sequence

from pytest_aiperf.model import Interval, Result
from pytest_aiperf.records.comparison import Change
from pytest_aiperf.records.results import block_times
from pytest_aiperf.rules import stats

from .aggregate import verdict_or_outcome
from .formatting import clean

_RATIO = ("ratio", "low", "high")


def results(listed: Iterable[Result]) -> str:
    """Return the ratio, verdict and times of each result; a cell without a figure is empty.

    The columns baseline and optimized are the mean of one call, in the column unit.
    """
    rows: list[Sequence[object]] = [
        ("claim", "gpu", "outcome", "verdict", *_RATIO, "library_ratio", "metric", "unit",
         "baseline", "optimized", "limit", "share_of_limit", "run", "message"),
    ]  # fmt: skip
    for r in listed:
        timing, limit = r.timing, r.limits.get("optimized")
        figures: list[object] = ["", "", "", ""]
        if timing and block_times(r):
            calls = (stats.mean_call_s(timing.replicates, arm) for arm in ("baseline", "optimized"))
            figures = [timing.metric, timing.unit, *calls]
        rows.append((
            r.claim, r.key, r.outcome, verdict_or_outcome(r), *_ends(r.speedup),
            r.library.value if r.library else "", *figures,
            *((limit.ceiling, limit.share) if limit else ("", "")), r.run, r.message,
        ))  # fmt: skip
    return _csv(rows)


def changes(listed: Iterable[Change]) -> str:
    """Return the state of each claim in a comparison, and the new ratio divided by the old one."""
    rows: list[Sequence[object]] = [("claim", "gpu", "state", *_RATIO, "note")]
    rows += [(c.claim, c.key, c.state, *_ends(c.ratio), c.why) for c in listed]
    return _csv(rows)


def _ends(ratio: Interval | None) -> tuple[object, object, object]:
    return (ratio.value, ratio.low, ratio.high) if ratio else ("", "", "")


def _csv(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def _cell(value: object) -> object:
    """Return a number as it is, and text so that no spreadsheet takes it for a formula."""
    if isinstance(value, (int, float)):
        return value
    text = clean(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
