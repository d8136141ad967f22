"""Results as a table on the terminal, as Markdown, and for pytest-benchmark."""

import os
import re
import shlex
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.model import Against, Outcome, Profile, Result, Verdict
from pytest_aiperf.records.results import benchmark, block_times, dumps, is_timed
from pytest_aiperf.rules.verdict import noise_problem
from pytest_aiperf.text import si
from pytest_aiperf.text import table as columns

from . import aggregate, formatting
from .aggregate import JUDGED, verdict
from .formatting import COLUMNS, cells, clean, escape, notes, printable, reasons

PROGRESS: Final = (
    *("{number} of {count}", "{left}", "{claim}", "{phase}", "{done}/{total}"),
    *("replicate {replicate}", "of at most {most}", "{ratio:.2f}x ±{half_width:.2%}"),
    *("{sm_mhz} MHz", "{temperature_c} C"),
)
"""Parts of the live line; a part whose figure is unknown is left out."""
MAX_HALF_WIDTH: Final = 1.0
"""The live line shows a ratio only if its interval's half-width is at most this: wider ones say
nothing yet, because two replicates alone can give thousands of percent."""
DROPPED: Final = ("rate", "expected", "over first", "library", "of limit")
"""Columns to leave out of a table that is too wide, in this order."""
INDENT: Final = "    "  #: Indentation of figures below the claim's name.
COLOURS: Final = {
    "FASTER": "green", "FASTER, lost": "red", "SAME, lost": "red", "SLOWER": "red",
    "FAILED": "red", "INVALID": "red", "ERROR": "red", "INCONCLUSIVE": "yellow",
    "FASTER, undecided": "yellow", "SAME, undecided": "yellow",
}  # fmt: skip
"""Colours of verdicts and outcomes on a terminal."""
_COLOURED: Final = re.compile(f"(?<=  )({'|'.join(sorted(COLOURS, reverse=True))})(?=  |$)")
MAX_REASONED: Final = 30
"""With more claims, -v gives the reasons only for those that did not pass: a run of a chapter shows
all, and a run of the whole course would print a thousand lines."""
NOT_AVERAGED: Final = "the others have a naive baseline, no valid times or no clear verdict"
"""Which claims the geometric mean leaves out, as :func:`aggregate.summarize` computes it."""
NEXT: Final = 3  #: Number of failed claims that the proposed command runs again.


def table(results: Sequence[Result], width: int = 120, *, verbosity: int = 0) -> list[str]:
    """Lay out the summary: claims and ladders by chapter, totals, notes; failures come last.

    A ``verbosity`` of 1 keeps every column, even if the table gets too wide, and adds the reasons:
    each arm's diagnosis and the evidence, of many claims only for those that did not pass. 2 adds
    the reasons of all.
    """
    shown = [r for r in results if _has_row(r)]
    groups: dict[tuple[str, str], list[list[str]]] = {}
    for (key, _), rungs in aggregate.ladders(shown).items():
        groups.setdefault((key, aggregate.folder(rungs[0])), []).extend(_block(rungs))
    rows = [[clean(cell) for cell in row] for group in sorted(groups) for row in groups[group]]
    head, *body = _columns(rows, width, () if verbosity > 0 else DROPPED)
    lines = [line for text in _conditions(results) for line in _wrap(text, width)]
    lines += [head] if body else []
    rest = iter(body)
    for key, chapter in sorted(groups):
        lines += [clean(f"{chapter} ({key})"), *islice(rest, len(groups[key, chapter]))]
    lines = [line for row in lines for line in row.split("\n")]  # a row may have two lines
    if verbosity > 0:
        explained = shown
        if verbosity == 1 and len(shown) > MAX_REASONED:
            explained = [r for r in shown if formatting.reason(r)]
        lines += [line for result in explained for line in reasons(result)]
        if others := len(shown) - len(explained):
            lines.append(f"-vv shows the bottlenecks and the evidence of the other {others} claims")
    if results:
        lines += _wrap(totals(results), width)
    if noise := noise_problem(max((r.floor for r in results), default=0.0)):
        lines += _wrap(noise, width)
    lines += _not_run(results, width)
    for note in notes(sorted(shown, key=lambda r: r.outcome is not Outcome.PASSED)):
        lines += _wrap(note, width)
    return lines


def next_steps(results: Sequence[Result], pytest_command: str, root: Path, file: Path) -> list[str]:
    """Return the commands that a user is likely to need after a run.

    ``pytest_command`` measures as the run did, ``root`` is pytest's root folder, and ``file`` has
    the results.
    """
    failed = [r for r in results if r.outcome not in (Outcome.PASSED, *aggregate.UNTRIED)]
    lines = []
    if failed:
        tests = (r.nodeid.partition("::") for r in failed[:NEXT])
        ids = [f"{os.path.relpath(root / path)}{colons}{test}" for path, colons, test in tests]
        more = f"  # and {len(failed) - NEXT} more" if len(failed) > NEXT else ""
        what = "profile" if "--profile=" in pytest_command else "measure"
        lines.append(f"{what} again:  {pytest_command} -v {printable(shlex.join(ids))}{more}")
    command = shlex.join(["python", "-m", "pytest_aiperf", "report", os.path.relpath(file)])
    return [*lines, f"write a report: {command}"]


def write(reporter: Any, lines: Iterable[str]) -> None:
    """Write lines to pytest's terminal, with verdicts in color unless colors are off."""
    for line in lines:
        if line.startswith("noisy: "):
            reporter.write_line(line, yellow=True)
            continue
        for part in _COLOURED.split(line):
            reporter.write(part, **{COLOURS[part]: True} if part in COLOURS else {})
        reporter.write("\n")


def _has_row(result: Result) -> bool:
    broken = (Outcome.FAILED, Outcome.INVALID, Outcome.ERROR)
    return bool(block_times(result)) or result.outcome in broken


def _block(rungs: Sequence[Result]) -> Iterator[list[str]]:
    """Yield the rows of a ladder's block, or of the claims of a test without rungs.

    The block's head shows the time of the ladder's first arm. A rung leaves out the time of its
    baseline if that is the first arm, or the rung before: then a row above shows it.
    """
    if not rungs[0].ladder or len(rungs) == 1:
        yield from ([f"  {aggregate.short_name(r.claim)}{_mark(r)}", *cells(r)] for r in rungs)
        return
    first_s = aggregate.first_arm_s(rungs)
    unit = next((r.timing.unit for r in rungs if r.timing), "")
    first = si(first_s, unit) if first_s else ""
    yield [f"  {aggregate.short_name(rungs[0].ladder)}", first, *[""] * (len(COLUMNS) - 2)]
    above = {first}
    for rung in rungs:
        baseline, optimized, *others = cells(rung)
        known = first and baseline in above
        yield [
            f"    {aggregate.rung_name(rung)}{_mark(rung)}",
            *("" if known else baseline, optimized, *others),
        ]
        above = {first, optimized}


def _columns(rows: Sequence[Sequence[str]], width: int, dropped: Sequence[str]) -> list[str]:
    """Align the rows' cells in columns, in one line per row or, if that is too wide, in two.

    Columns in ``dropped`` are left out if they are empty. If the lines do not fit, the others are
    left out one by one: two of them before names get lines of their own, the rest after that. Names
    and figures are never clipped, because a clipped name cannot be searched for and a clipped
    figure misleads.
    """
    used = _used(rows)
    empty = [name for name in dropped if name not in used]
    dropped = [name for name in dropped if name in used]
    for count in range(min(len(dropped), 2) + 1):
        lines = columns(*_select(rows, [*empty, *dropped[:count]]))
        if max(map(len, lines)) <= width:
            return lines
    for count in range(len(dropped) + 1):
        table, align = _select(rows, [*empty, *dropped[:count]])
        figures = [INDENT + line for line in columns([row[1:] for row in table], align[1:])]
        if max(map(len, figures)) <= width:
            break
    names = ["", *(f"{row[0]}\n" for row in rows)]
    return [f"{name}{line}".rstrip() for name, line in zip(names, figures, strict=True)]


def _used(rows: Sequence[Sequence[str]]) -> set[str]:
    """Return the names of the columns that have a figure."""
    return {name for name, *cells in zip(COLUMNS, *rows, strict=True) if {*cells} - {"", "-"}}


def _select(rows: Sequence[Sequence[str]], without: Collection[str]) -> tuple[list[list[str]], str]:
    """Return the head and the rows without some columns, and without an empty "over first"."""
    used = _used(rows)
    kept = [
        i
        for i, name in enumerate(COLUMNS)
        if name not in without and (name in used or name != "over first")
    ]
    align = "".join([*COLUMNS.values()][i] for i in kept)
    return [[row[i] for i in kept] for row in ([*COLUMNS], *rows)], align


def _fit(text: str, width: int) -> str:
    """Clip text in the middle, to keep the test's name in front and its parameter at the end."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return f"{text[: width - 3 - tail]}...{text[len(text) - tail :]}"


def _conditions(results: Iterable[Result]) -> list[str]:
    """Return a line for each option that changed the conditions of the run."""
    texts = (clean(f"--{k}: {text}") for r in results for k, text in r.conditions.items())
    return [*dict.fromkeys(texts)]


def _not_run(results: Iterable[Result], width: int) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.outcome is Outcome.NOT_RUN:
            reasons.setdefault(clean(result.message), []).append(clean(result.claim))
    lines: list[str] = []
    for reason, claims in reasons.items():
        lines += _wrap(f"not run: {', '.join(claims)} ({reason})", width)
    return lines


def _wrap(text: str, width: int) -> list[str]:
    # an id is not broken, so that it can be copied
    return textwrap.wrap(text, max(width, 40), subsequent_indent="  ", break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def totals(results: Sequence[Result]) -> str:
    """Summarize results in one line; claims that did not run are counted but not averaged."""
    summary = aggregate.summarize(results)
    kinds = {re.sub(", (.*)", r" (\1)", kind): n for kind, n in summary.by_verdict.items()}
    counts = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    failed = f", {summary.failed} failed" if summary.failed else ""
    number = f"{summary.claims} claim{'' if summary.claims == 1 else 's'}{failed}"
    parts = [f"{number}{counts and ': '}{counts}"]
    if summary.skipped:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in summary.skipped.items())
        parts.append(f"{sum(summary.skipped.values())} skipped ({reasons})")
    if summary.not_run:
        parts.append(f"{summary.not_run} not run")
    if summary.mean is not None:
        some = f" over {summary.averaged} of {summary.claims} claims ({NOT_AVERAGED})"
        left_out = some if summary.averaged < summary.claims else ""
        parts.append(f"geometric mean {summary.mean:.2f}x{left_out}")
    if summary.share is not None:
        claims = "1 claim" if summary.shares == 1 else f"{summary.shares} claims"
        parts.append(f"median share of the limit {summary.share:.0%} ({claims})")
    return clean("; ".join(parts))


def live_line(progress: Mapping[str, Any], width: int = 120) -> str:
    """Format the progress of a claim as one line; if it is too long, leave out its last figures."""
    figures = {name: value for name, value in progress.items() if value is not None}
    with suppress(TypeError):
        if figures.get("half_width", 0.0) > MAX_HALF_WIDTH:
            del figures["half_width"]
    line = ""
    for part in PROGRESS:
        with suppress(KeyError, ValueError):  # the figure is missing or not a number
            text = clean(part.format_map(figures))
            if line and len(line) + 2 + len(text) > width:
                break
            line += f"{'  ' if line else ''}{text}"
    return _fit(line, width)


def markdown(results: Sequence[Result]) -> str:
    """Return the summary as GitHub Markdown: a table for each kind of GPU, notes, totals."""
    shown = [r for r in results if _has_row(r)]
    blocks = [escape(text) for text in (*_conditions(results), *formatting.hosts(shown))]
    for key in sorted({r.key for r in shown}):
        rows = sorted(
            (r for r in shown if r.key == key), key=lambda r: (r.ladder or r.claim, r.rung_index)
        )
        blocks.append(f"**{escape(key)}**\n\n{grid(rows, lambda r: r.claim)}")
    asides = [*notes(shown), *_not_run(results, 10**6)]
    if asides:
        blocks.append("\n".join(f"- {escape(note)}" for note in asides))
    return "\n\n".join([*blocks, escape(totals(results))]) + "\n"


def grid(
    results: Sequence[Result], name: Callable[[Result], str], without: Collection[str] = ()
) -> str:
    """Format results as a Markdown table; ``without`` names columns to leave out."""
    rows = [
        [escape(cell) for cell in (f"{name(result)}{_mark(result)}", *cells(result))]
        for result in results
    ]
    (head, *body), align = _select(rows, without)
    sides = [":--" if side == "<" else "--:" for side in align]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(sides)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def _mark(result: Result) -> str:
    return " *" if result.against is Against.NAIVE else ""


def benchmark_session_add(session: Any, results: Iterable[Result]) -> None:
    """Add results with times and a conclusive verdict to pytest-benchmark's session.

    ``session`` is what pytest-benchmark registers as "pytest-benchmark", or None. Call this before
    pytest-benchmark's session finishes, on the controller if there are xdist workers: then
    --benchmark-json, -save, -autosave, -compare and -histogram work. Pytest-benchmark's table is
    switched off if it would only repeat this plugin's.
    """
    if session is None:
        return
    wants_table = session.compare or session.compare_fail or session.histogram or session.verbose
    if not session.benchmarks and not wants_table:
        session.quiet = True
    session.benchmarks += [
        benchmark(r)
        for r in results
        if r.outcome in JUDGED and r.verdict not in (None, Verdict.INCONCLUSIVE) and is_timed(r)
    ]


def github_action_benchmark(results: Iterable[Result]) -> str:
    """Return ratios in the format customBiggerIsBetter of github-action-benchmark."""
    rows = [
        {
            "name": f"{r.claim} ({r.key})",
            "unit": "x",
            "value": r.speedup.value,
            "range": f"[{r.speedup.low:.3f}, {r.speedup.high:.3f}]",
            "extra": verdict(r),
        }
        for r in results
        if r.outcome in JUDGED and r.speedup
    ]
    return dumps(rows, "report", indent=1) + "\n"


def profiles(results: Iterable[Result], width: int = 120) -> list[str]:
    """Lay out each claim's profile, then the diagnosis of its arms."""
    lines = []
    for r in results:
        if r.profiles:
            lines += profile(r.claim, r.profiles, width)
            # not clipped to the width, because a diagnosis ends with advice
            lines += [f"  {arm}: {clean(diagnosis)}" for arm, diagnosis in r.diagnosis.items()]
    return lines


def profile(title: str, arms: Sequence[Profile], width: int = 120) -> list[str]:
    """Lay out a claim's figures by arm, then its notes and artifacts."""
    by_arm = {arm.arm: arm for arm in arms}
    pair = "baseline" in by_arm and "optimized" in by_arm
    rows = [[arms[0].tool, *by_arm, *(["ratio"] if pair else [])]]
    for name, values in figures_by_arm(arms):
        rows.append([f"  {name}", *values])
        if pair:
            old, new = (by_arm[arm].figures.get(name) for arm in ("baseline", "optimized"))
            rows[-1].append(f"{new / old:.3g}x" if old and new is not None else "-")
    lines = [title, *columns(rows)]
    for arm in arms:
        for note in arm.notes:
            lines += _wrap(f"  {arm.arm}: {clean(note)}", width)
        lines.append(f"  {arm.arm}: {arm.artifact}")
    return [clean(line) for line in lines]


def figures_by_arm(arms: Sequence[Profile]) -> Iterator[tuple[str, list[str]]]:
    """Yield each figure's name with its value for every arm."""
    for name in dict.fromkeys(name for arm in arms for name in arm.figures):
        yield name, [_figure(arm, name) for arm in arms]


def _figure(arm: Profile, name: str) -> str:
    value, unit = arm.figures.get(name), arm.units.get(name, "")
    if value is None:
        return "-"
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:.0f}" if not unit and value.is_integer() else si(value, unit)
