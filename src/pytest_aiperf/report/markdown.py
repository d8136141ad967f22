"""Chapters in Markdown: pages from the claims' own words, and the README's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_aiperf.model import Against, Result

from . import aggregate, formatting, source_code, terminal
from .formatting import escape


def markdown(results: Sequence[Result], root: Path) -> str:
    """Write all of it as one text: the summary, then chapter by chapter."""
    parts = [terminal.markdown(results)]
    for name, mine in _by_chapter(results).items():
        parts.append(f"## {escape(name)}\n\n{_chapter(mine, root)}")
    return "\n".join(parts)


def tables(results: Sequence[Result]) -> str:
    """Write the README's part: the totals, then a table a chapter."""
    parts = [escape(terminal.totals(results))]
    for name, mine in _by_chapter(results).items():
        keys = ", ".join(sorted({r.key for r in mine}))
        parts.append(f"### {escape(f'{name} ({keys})')}\n\n{_table(mine)}")
    if any(r.against is Against.NAIVE for r in results):
        parts.append(escape("* naive baseline: left out of the geometric mean"))
    return "\n\n".join(parts)


def _by_chapter(results: Sequence[Result]) -> Mapping[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda r: (aggregate.folder(r), r.key)):
        found.setdefault(aggregate.folder(result), []).append(result)
    return found


def _chapter(results: Sequence[Result], root: Path) -> str:
    parts = []
    for (key, name), rungs in aggregate.ladders(results).items():
        told = source_code.source(rungs[0].nodeid, root)
        order = {one: i for i, one in enumerate(told.rungs)}
        ordered = sorted(rungs, key=lambda r: order.get(aggregate.rung(r), len(order)))
        said = [escape(paragraph) for paragraph in told.explanation]
        why = [f"- {escape(line)}" for r in ordered for line in formatting.reasons(r)]
        head = f"### {escape(rungs[0].title.strip() or name)}"
        shown = [head, escape(f"{name} ({key})"), *said, _table(ordered), "\n".join(why)]
        parts.append("\n\n".join(filter(None, shown)))
    return "\n\n".join(parts) + "\n"


def _table(results: Sequence[Result]) -> str:
    return terminal.grid(results, lambda r: r.claim.rpartition("/")[2], ("rate", "expected"))
