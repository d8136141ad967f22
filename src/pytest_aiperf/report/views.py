"""Charts, tables and code of results as HTML, for the report and for pages of other tools.

Every function returns a piece of HTML with the class ``aiperf``; it needs :func:`style` once per
page, and works without a script. With :func:`script`, a mark shows its figures on touch and on
keyboard focus, too. Colors follow the CSS property ``color-scheme``: light, dark, or as the
browser prefers.

``link`` is a function from a result to the URL of the claim's section, or to "" for no link.
A function returns empty Markup if the results lack the figures that it shows.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_aiperf.model import ARMS, Evidence, Result
from pytest_aiperf.rules.stats import mean_call_s
from pytest_aiperf.text import short, si

from . import aggregate, charts, formatting, source_code

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

Link = Callable[[Result], str]
"""From a result to the URL of the claim's section, or to "" for no link."""

PERCENT: Final = charts.Axis(0.0, 105.0, log=False)  #: Scale of shares of a limit.


def nowhere(_: Result) -> str:
    """Return "": the marks of a chart link to nothing."""
    return ""


def style() -> str:
    """Return the CSS of all views; its rules apply to elements with the class ``aiperf`` only."""
    return files(__package__).joinpath("views.css").read_text(encoding="utf-8")


def script() -> str:
    """Return the script that shows the figures of marks; the content of a ``<script>``."""
    return files(__package__).joinpath("views.js").read_text(encoding="utf-8")


@cache
def environment() -> "Environment":
    """Return the Jinja environment of the views and pages; templates escape all values."""
    import jinja2  # imported late: only reports need it

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("pytest_aiperf", "report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {
        "breakable": _breakable,
        "figure": short,
        "mark": lambda verdict: verdict.partition(",")[2],  # "lost" and "undecided" are classes
        "prose": _prose,
        "pct": lambda place: f"{place:.2f}".rstrip("0").rstrip(".") + "%",
        "px": lambda place: f"{place:.1f}",
        "si": si,
    }
    return made


def document(template: str, title: str, scripts: Sequence[str] = (), **context: object) -> str:
    """Return a page that extends ``base.html``, with the style and the script of the views.

    ``template`` is the text of a Jinja template with a block ``body``. A content security policy
    allows the page no requests, and no scripts but these.
    """
    from markupsafe import Markup

    scripts = (script(), *scripts)
    hashes = [hashlib.sha256(text.encode()).digest() for text in scripts]
    return (
        environment()
        .from_string(template)
        .render(
            title=title,
            style=Markup(style()),  # noqa: S704  a file of the package
            scripts=[Markup(text) for text in scripts],  # noqa: S704  files of packages
            digests=[base64.b64encode(digest).decode() for digest in hashes],
            **context,
        )
    )


def _view(macro: str, *arguments: object, tag: str = "div") -> "Markup":
    from markupsafe import Markup

    module: Any = environment().get_template("views.html").module
    html = getattr(module, macro)(*arguments)
    return Markup("<{0} class=aiperf>{1}</{0}>").format(Markup(tag), html)  # noqa: S704  a constant


def _breakable(text: str) -> "Markup":
    """Allow a line break in a claim's name before its parameters and after separators."""
    from markupsafe import Markup, escape

    html = re.sub(r"(?<=[/_])(?=\w)|(?=\[)", "<wbr>", str(escape(text)))
    return Markup(html)  # noqa: S704  the text is escaped


def _prose(text: str) -> "Markup":
    """Show what a docstring has between backticks as code."""
    from markupsafe import Markup, escape

    html = re.sub(r"(`+)([^`]+)\1", r'<code class="mono">\2</code>', str(escape(text)))
    return Markup(html)  # noqa: S704  the text is escaped


def kind(result: Result) -> str:
    """Return a claim's verdict or outcome in lower case, as its CSS class has it."""
    return aggregate.verdict_or_outcome(result).lower().replace("_", "-")


def arms_text(result: Result) -> str:
    """Return the arms' figures, such as ``baseline 2.000 ms, optimized 1.000 ms``."""
    timing = result.timing
    return ", ".join(
        f"{arm} {si(mean_call_s(timing.replicates, arm), timing.unit)}"
        for arm in charts.arms(timing)
        if timing
    )


def speedups(results: Sequence[Result], link: Link = nowhere) -> "Markup":
    """Draw the speedup of each claim with its 99 % interval, one row per claim, by folder."""
    measured = [r for r in results if r.speedup]
    axis = charts.speedup_axis(measured)
    rows = [
        {
            "result": r,
            "id": link(r).removeprefix("#"),
            "href": link(r),
            "folder": aggregate.folder(r),
            "name": aggregate.short_name(r.claim),
            "kind": kind(r),
            "verdict": aggregate.verdict(r),
            "times": arms_text(r),
            "bar": charts.bar(r.speedup, axis),
        }
        for r in measured
        if r.speedup
    ]
    return _view("speedups", rows, axis) if rows else _nothing()


def ladder(
    rungs: Sequence[Result], link: Link = nowhere, first_name: str = "first arm"
) -> "Markup":
    """Draw the rungs of one ladder, with its library arm and limits, over its first arm.

    ``rungs`` are the results of one ladder on one kind of GPU, as :func:`aggregate.ladders` groups
    them. At least two rungs must have been measured. ``first_name`` is the name of the first arm.
    """
    picture = charts.ladder(rungs, first_name)
    if picture is None:
        return _nothing()
    hrefs = [link(step.result) if step.result else "" for step in picture.steps]
    return _view("ladder", picture, hrefs)


def roofline(results: Sequence[Result], link: Link = nowhere) -> "Markup":
    """Draw the arms of judged claims with known bytes and FLOPs below the limits measured there."""
    chart = charts.roofline(results)
    if chart is None:
        return _nothing()
    return _view("roofline", chart, charts.ROOF_HEIGHT, [link(r) for r, _ in chart.claims])


def scaling(by_ranks: Mapping[int, Result], link: Link = nowhere) -> "Markup":
    """Draw the rate of each arm of one claim over its number of ranks, with the efficiency beside.

    ``by_ranks`` are the results of the claim on one kind of GPU, as :func:`aggregate.by_ranks`
    groups them.
    """
    chart = charts.scaling(by_ranks)
    hrefs = [link(result) for result in by_ranks.values()]
    return _view("scaling", chart, list(by_ranks), charts.SCALING_HEIGHT, hrefs)


def shares(results: Sequence[Result], link: Link = nowhere) -> "Markup":
    """Draw the rate of each arm of judged claims as a percentage of the limit that bounds it."""
    rows = [
        {
            "result": r,
            "id": link(r).removeprefix("#"),
            "href": link(r),
            "limits": [
                {
                    "arm": arm,
                    "limit": r.limits[arm],
                    "percent": 100 * r.limits[arm].share,
                    "place": PERCENT.at(100 * r.limits[arm].share),
                }
                for arm in ARMS
                if arm in r.limits
            ],
        }
        for r in results
        if r.outcome in aggregate.JUDGED
    ]
    rows = [row for row in rows if row["limits"]]
    return _view("shares", rows, PERCENT) if rows else _nothing()


def replicates(result: Result) -> "Markup":
    """Draw the ratio of every replicate and round of one claim, with the 99 % interval."""
    strip = charts.strip(result)
    return _view("replicates", strip, kind(result)) if strip else _nothing()


def evidence(results: Sequence[Result]) -> "Markup":
    """Tabulate the evidence of one claim or of a ladder's rungs.

    A row has the evidence with its bounds, the figures of both arms with their unit, and whether it
    holds.
    """
    tones = {"holds": "good", "does not hold": "bad"}
    rows = [
        {
            "rung": aggregate.rung_name(result) if len(results) > 1 else "",
            "stated": formatting.stated(each.evidence),
            "baseline": _figure(each.baseline_value, each.evidence),
            "optimized": _figure(each.value, each.evidence),
            "state": formatting.state(each),
            "tone": tones.get(formatting.state(each), "soft"),
            "where": each.where,
        }
        for result in results
        for each in result.evidence
    ]
    return _view("evidence", rows) if rows else _nothing()


def _figure(value: float | None, piece: Evidence) -> str:
    return "-" if value is None else formatting.amount(value, piece)


def code(result: Result, root: Path, address: str = "") -> "Markup":
    """Show the code of the baseline and the optimized arm side by side, differences marked.

    Code that both arms use is shown once, folded. ``root`` is the project's folder, from which the
    files are read: files that have changed since the run are left out. ``address`` is the
    repository's URL for links to the lines, as :func:`source_code.repository` returns it.
    """
    by_arm = source_code.arms(result, root)
    shown = {arm: by_arm[arm] for arm in ("baseline", "optimized") if arm in by_arm}
    if not shown:
        return _nothing()
    difference = source_code.difference(*(shown.get(arm, ()) for arm in ("baseline", "optimized")))
    panes = []
    for arm, mark, lines in (
        ("baseline", "cut", [line for line, _, _ in difference.rows]),
        ("optimized", "add", [line for _, line, _ in difference.rows]),
    ):
        if own := [line for line in lines if line and line.number]:
            marks = [mark * (differs and len(shown) > 1) for _, _, differs in difference.rows]
            files = dict.fromkeys(line.file for line in own)
            places = [source_code.place([x for x in own if x.file == f], address) for f in files]
            panes.append({"arm": arm, "places": places, "lines": _pane(lines, marks)})
    shared = _pane(difference.shared, [""] * len(difference.shared))
    return _view("code", panes, shared, sum(line.number > 0 for line in difference.shared))


def _pane(
    lines: Sequence[source_code.Line | None], marks: Sequence[str]
) -> list[dict[str, object]]:
    from markupsafe import Markup

    html = source_code.highlight([line for line in lines if line])
    rows: list[dict[str, object]] = []
    for line, mark in zip(lines, marks, strict=True):
        if line is None:
            rows.append({"number": 0, "mark": "fill", "html": ""})
        elif line.number:
            text = Markup(html[line])  # noqa: S704  Pygments escapes the text
            rows.append({"number": line.number, "mark": mark, "html": text})
        else:
            rows.append({"number": 0, "mark": "file" * bool(line.text), "html": line.text})
    if (omitted := len(rows) - source_code.MAX_LINES) > 0:
        rows[-omitted:] = [{"number": 0, "mark": "file", "html": f"... {omitted} more lines"}]
    return rows


def _nothing() -> "Markup":
    from markupsafe import Markup

    return Markup()
