"""Chapters in Markdown: pages from the claims' own words, and the README's tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pytest_aiperf.errors import Misuse
from pytest_aiperf.model import Against, Result
from pytest_aiperf.records.results import atomic_write

from . import report, sources, summary
from .report import cells, escape

BEGIN, END = "<!-- results -->", "<!-- /results -->"
SUMMARY: Final = "summary.md"

_HEAD: Final = (
    "| claim | baseline | optimized | ratio [99 % interval] | library | of limit | verdict |",
    "|:--|--:|--:|--:|--:|--:|:--|",
)


def pages(results: Sequence[Result], root: Path) -> dict[str, str]:
    """Write a file for the summary, and one for each chapter with its claims explained."""
    found = {SUMMARY: report.markdown(results)}
    for name, mine in _by_chapter(results).items():
        safe = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip(".-") or "claims"
        found[f"{safe}.md"] = f"# {escape(name)}\n\n{_chapter(mine, root)}"
    return found


def markdown(results: Sequence[Result], root: Path) -> str:
    """Write all of it as one text: the summary, then chapter by chapter."""
    parts = [report.markdown(results)]
    for name, mine in _by_chapter(results).items():
        parts.append(f"## {escape(name)}\n\n{_chapter(mine, root)}")
    return "\n".join(parts)


def tables(results: Sequence[Result]) -> str:
    """Write the README's part: the totals, then a table a chapter."""
    parts = [escape(report.totals(results))]
    for name, mine in _by_chapter(results).items():
        keys = ", ".join(sorted({r.key for r in mine}))
        parts.append(f"### {escape(f'{name} ({keys})')}\n\n{_table(mine)}")
    if any(r.against is Against.NAIVE for r in results):
        parts.append(escape("* naive baseline: left out of the geometric mean"))
    return "\n\n".join(parts)


def embedded(text: str, results: Sequence[Result], where: str) -> str:
    """Put the tables between a document's marks; Misuse where it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after:
        raise Misuse(
            f"{where} has no place for the tables: put a line {BEGIN} and a line {END} "
            "around it, once each"
        )
    return f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}"


def embed(path: Path, results: Sequence[Result]) -> None:
    """Bring a document's tables up to date."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Misuse(f"cannot read {path}: {error}; name a Markdown file") from error
    atomic_write(path, embedded(text, results, str(path)))


def _by_chapter(results: Sequence[Result]) -> Mapping[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda r: (summary.chapter(r), r.key)):
        found.setdefault(summary.chapter(result), []).append(result)
    return found


def _chapter(results: Sequence[Result], root: Path) -> str:
    parts = []
    for (key, name), rungs in summary.ladders(results).items():
        told = sources.source(rungs[0].nodeid, root)
        order = {one: i for i, one in enumerate(told.rungs)}
        ordered = sorted(rungs, key=lambda r: order.get(summary.rung(r), len(order)))
        said = [escape(paragraph) for paragraph in told.explanation]
        why = [f"- {escape(line)}" for r in ordered for line in report.reasons(r)]
        head = f"### {escape(rungs[0].title.strip() or name)}"
        shown = [head, escape(f"{name} ({key})"), *said, _table(ordered), "\n".join(why)]
        parts.append("\n\n".join(filter(None, shown)))
    return "\n\n".join(parts) + "\n"


def _table(results: Sequence[Result]) -> str:
    lines = list(_HEAD)
    for result in results:
        baseline, optimized, ratio, library, _, limit, verdict, _ = cells(result)
        mark = " *" if result.against is Against.NAIVE else ""
        name = f"{result.claim.rpartition('/')[2]}{mark}"
        shown = (name, baseline, optimized, ratio, library, limit, verdict)
        lines.append(f"| {' | '.join(map(escape, shown))} |")
    return "\n".join(lines)
