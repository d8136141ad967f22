"""Results as a table on the terminal, as Markdown, and for pytest-benchmark."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Against, Outcome, Profile, Result, Verdict
from pytest_aiperf.records.results import atomic_write, benchmark, block_times
from pytest_aiperf.text import pad, si
from pytest_aiperf.text import table as columns

from . import aggregate
from .aggregate import JUDGED
from .formatting import COLUMNS, cells, clean, escape, notes, reasons, verdict

PROGRESS: Final = (
    *("{claim}", "{phase}", "{done}/{total}", "replicate {replicate}/{most}"),
    *("{ratio:.2f}x", "+-{half_width:.2%}", "{sm_mhz} MHz", "{temperature_c} C"),
)
"""Parts of the live line; a part whose figure is unknown is left out."""
MIN_NAME: Final = 24
"""Characters of a claim's name that are always shown, even if the table gets too wide."""


def table(results: Sequence[Result], width: int = 120, *, verbose: bool = False) -> list[str]:
    """Lay out the summary: claims by chapter, notes, totals.

    ``verbose`` adds each arm's diagnosis and the evidence.
    """
    shown = [r for r in results if _has_row(r)]
    groups: dict[tuple[str, str], list[list[str]]] = {}
    for result in shown:
        chapter, _, name = result.claim.rpartition("/")
        row = [f"  {name}{_mark(result)}", *cells(result)]
        groups.setdefault((result.key, chapter), []).append([clean(cell) for cell in row])
    head, *body = _columns([row for group in sorted(groups) for row in groups[group]], width)
    lines = [head] if body else []
    rows = iter(body)
    for key, chapter in sorted(groups):
        lines += [clean(f"{chapter or '.'} ({key})"), *islice(rows, len(groups[key, chapter]))]
    lines += [_fit(note, width) for note in notes(shown)]
    if verbose:
        lines += [line for result in shown for line in reasons(result)]
    lines += _not_run(results, width)
    return [*lines, totals(results)] if results else lines


def _has_row(result: Result) -> bool:
    broken = (Outcome.FAILED, Outcome.INVALID, Outcome.ERROR)
    return bool(block_times(result)) or result.outcome in broken


def _columns(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Align the rows' cells in columns; clip only names, because clipped figures would mislead."""
    rows, align = [[*COLUMNS], *rows], "".join(COLUMNS.values())
    figures = "  ".join(["", *pad(rows, align)[0][1:]])
    room = max(width - len(figures), MIN_NAME)
    return columns([[_fit(row[0], room), *row[1:]] for row in rows], align)


def _fit(text: str, width: int) -> str:
    """Clip text in the middle, to keep the test's name in front and its parameter at the end."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return f"{text[: width - 3 - tail]}...{text[len(text) - tail :]}"


def _not_run(results: Iterable[Result], width: int) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.outcome is Outcome.NOT_RUN:
            reasons.setdefault(clean(result.message), []).append(clean(result.claim))
    lines: list[str] = []
    for reason, claims in reasons.items():
        text = f"not run: {', '.join(claims)} ({reason})"
        lines += textwrap.wrap(text, max(width, 40), subsequent_indent="  ", break_long_words=False)
    return lines


def totals(results: Sequence[Result]) -> str:
    """Summarize results in one line; claims that did not run are counted but not averaged."""
    summary = aggregate.summarize(results)
    ended = [r for r in results if r.outcome not in aggregate.UNTRIED]
    counts = ", ".join(f"{n} {kind}" for kind, n in Counter(map(verdict, ended)).most_common())
    parts = [f"{summary.claims} claim{'' if summary.claims == 1 else 's'}{counts and ': '}{counts}"]
    if summary.skipped:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in summary.skipped.items())
        parts.append(f"{sum(summary.skipped.values())} skipped ({reasons})")
    if summary.not_run:
        parts.append(f"{summary.not_run} not run")
    if summary.mean is not None:
        share = f"{summary.averaged}/{summary.claims}"
        parts.append(f"geometric mean {summary.mean:.2f}x against non-naive baselines ({share})")
    if summary.share is not None:
        parts.append(f"median share of the limit {summary.share:.0%} ({summary.shares})")
    return clean("; ".join(parts))


def live_line(progress: Mapping[str, Any], width: int = 120) -> str:
    """Format the progress of a claim as one line."""
    figures = {name: value for name, value in progress.items() if value is not None}
    parts: list[str] = []
    for part in PROGRESS:
        with suppress(KeyError, ValueError):  # the figure is missing or not a number
            parts.append(part.format_map(figures))
    return _fit(clean("  ".join(parts)), width)


def markdown(results: Sequence[Result]) -> str:
    """Return the summary as GitHub Markdown: a table for each kind of GPU, notes, totals."""
    shown = [r for r in results if _has_row(r)]
    blocks: list[str] = []
    for key in sorted({r.key for r in shown}):
        rows = sorted((r for r in shown if r.key == key), key=lambda r: r.claim)
        blocks.append(f"**{escape(key)}**\n\n{grid(rows, lambda r: r.claim)}")
    asides = [*notes(shown), *_not_run(results, 10**6)]
    if asides:
        blocks.append("\n".join(f"- {escape(note)}" for note in asides))
    return "\n\n".join([*blocks, escape(totals(results))]) + "\n"


def grid(
    results: Iterable[Result], name: Callable[[Result], str], without: Collection[str] = ()
) -> str:
    """Format results as a Markdown table; ``without`` names columns to leave out."""
    kept = [i for i, column in enumerate(COLUMNS) if column not in without]
    sides = [":--" if side == "<" else "--:" for side in COLUMNS.values()]
    lines = [
        f"| {' | '.join([*COLUMNS][i] for i in kept)} |",
        f"|{'|'.join(sides[i] for i in kept)}|",
    ]
    for result in results:
        row = [f"{name(result)}{_mark(result)}", *cells(result)]
        lines.append(f"| {' | '.join(escape(row[i]) for i in kept)} |")
    return "\n".join(lines)


def _mark(result: Result) -> str:
    return " *" if result.against is Against.NAIVE else ""


def embed(path: Path, mark: str, content: str) -> None:
    """Replace the text between the marks in a document; raise UsageError if there are no marks."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    try:
        before, begun, rest = path.read_text(encoding="utf-8").partition(begin)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}; name a Markdown file") from error
    _, ended, after = rest.partition(end)
    if not begun or not ended or begin in after:
        raise UsageError(
            f"{path} does not mark where to write: put a line {begin} and a line {end} in it"
        )
    atomic_write(path, f"{before}{begin}\n\n{content}\n\n{end}{after}")


def benchmark_session_add(session: Any, results: Iterable[Result]) -> None:
    """Add timed results with a conclusive verdict to pytest-benchmark's session.

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
        if r.outcome in JUDGED and r.verdict not in (None, Verdict.INCONCLUSIVE) and block_times(r)
    ]


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
    """Lay out a claim's figures by arm, then its notes and artefacts."""
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
        lines += [_fit(f"  {arm.arm}: {clean(note)}", width) for note in arm.notes]
        lines.append(f"  {arm.arm}: {arm.artefact}")
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
