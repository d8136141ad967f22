"""Results as Markdown: a report with each claim's explanation, and tables without them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pytest_aiperf.model import Against, Result
from pytest_aiperf.records.comparison import Change, State
from pytest_aiperf.text import si
from pytest_aiperf.text import table as columns

from . import aggregate, charts, formatting, source_code, terminal
from .formatting import clean, escape

BAR: Final = 40  #: Characters of the longest bar in a ladder's picture.


def markdown(results: Sequence[Result], root: Path) -> str:
    """Return the report: a summary, then each chapter's claims."""
    parts = [terminal.markdown(results)]
    for name, claims in _by_chapter(results).items():
        parts.append(f"## {escape(name)}\n\n{_chapter(claims, root)}")
    return "\n".join(parts)


def tables(results: Sequence[Result]) -> str:
    """Return the totals, then one table per chapter."""
    parts = [escape(line) for line in (terminal.totals(results), *formatting.hosts(results))]
    for name, claims in _by_chapter(results).items():
        keys = ", ".join(sorted({r.key for r in claims}))
        parts.append(f"### {escape(f'{name} ({keys})')}\n\n{_table(claims)}")
    if any(r.against is Against.NAIVE for r in results):
        parts.append(escape("* naive baseline: left out of the geometric mean"))
    if unseen := [r.claim for r in results if formatting.not_looked_at(r)]:
        parts.append(escape(f"Claims with evidence that was not looked at: {', '.join(unseen)}"))
    return "\n\n".join(parts)


def comparison(changes: Sequence[Change], stack: Sequence[str], counts: str) -> str:
    """Return a comparison of two runs for a pull request: what changed, without what did not."""
    rows = [
        [change.state, change.claim, change.key, str(change.ratio or "-"), change.why]
        for change in changes
        if change.state is not State.SAME
    ]
    lines = [f"**{escape(counts)}**", ""]
    if rows:
        lines += ["| state | claim | GPU | new / old speedup | note |", "|:--|:--|:--|--:|:--|"]
        lines += [f"| {' | '.join(map(escape, row))} |" for row in rows]
    return "\n".join([*lines, "", *(f"- {escape(line)}" for line in stack)]).strip() + "\n"


def _by_chapter(results: Sequence[Result]) -> Mapping[str, list[Result]]:
    chapters: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda r: (aggregate.folder(r), r.host, r.key)):
        chapters.setdefault(aggregate.folder(result), []).append(result)
    return chapters


def _chapter(results: Sequence[Result], root: Path) -> str:
    parts = []
    for (key, name), rungs in aggregate.ladders(results).items():
        paragraphs = map(escape, source_code.explanation(rungs[0].nodeid, root))
        reasons = [f"- {escape(line)}" for r in rungs for line in formatting.reasons(r)]
        heading = f"### {escape(rungs[0].title.strip() or name)}"
        claim = escape(f"{name} ({key})")
        section = [heading, claim, *paragraphs, _picture(rungs), _table(rungs), "\n".join(reasons)]
        parts.append("\n\n".join(filter(None, section)))
    return "\n\n".join(parts) + "\n"


def _picture(rungs: Sequence[Result]) -> str:
    """Draw the speedups over a ladder's first arm; empty if fewer than two rungs were measured."""
    if (ladder := charts.ladder(rungs)) is None:
        return ""
    highest = max(step.height for step in ladder.steps)
    rows = [
        (
            clean(step.name),
            si(step.figure, ladder.unit) if step.figure else "",
            f"{step.height:.2f}x",
            "#" * max(1, round(BAR * step.height / highest)),
        )
        for step in ladder.steps
    ]
    # indented code, which no name can end
    lines = [f"    {line}" for line in columns(rows, "<>><")]
    return "\n".join([*lines, *(["", ladder.remark] if ladder.remark else [])])


def _table(results: Sequence[Result]) -> str:
    return terminal.grid(results, lambda r: aggregate.short_name(r.claim), ("rate", "expected"))
