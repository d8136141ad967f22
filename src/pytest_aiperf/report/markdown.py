"""Results as Markdown: a report with each claim's explanation, and the README's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_aiperf.model import Against, Result

from . import aggregate, formatting, source_code, terminal
from .formatting import escape


def markdown(results: Sequence[Result], root: Path) -> str:
    """Return the report: a summary, then each chapter's claims."""
    parts = [terminal.markdown(results)]
    for name, claims in _by_chapter(results).items():
        parts.append(f"## {escape(name)}\n\n{_chapter(claims, root)}")
    return "\n".join(parts)


def tables(results: Sequence[Result]) -> str:
    """Return the results for the README: the totals, then one table per chapter."""
    parts = [escape(terminal.totals(results))]
    for name, claims in _by_chapter(results).items():
        keys = ", ".join(sorted({r.key for r in claims}))
        parts.append(f"### {escape(f'{name} ({keys})')}\n\n{_table(claims)}")
    if any(r.against is Against.NAIVE for r in results):
        parts.append(escape("* naive baseline: left out of the geometric mean"))
    return "\n\n".join(parts)


def _by_chapter(results: Sequence[Result]) -> Mapping[str, list[Result]]:
    chapters: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda r: (aggregate.folder(r), r.key)):
        chapters.setdefault(aggregate.folder(result), []).append(result)
    return chapters


def _chapter(results: Sequence[Result], root: Path) -> str:
    parts = []
    for (key, name), rungs in aggregate.ladders(results).items():
        paragraphs = map(escape, source_code.explanation(rungs[0].nodeid, root))
        reasons = [f"- {escape(line)}" for r in rungs for line in formatting.reasons(r)]
        heading = f"### {escape(rungs[0].title.strip() or name)}"
        claim = escape(f"{name} ({key})")
        section = [heading, claim, *paragraphs, _table(rungs), "\n".join(reasons)]
        parts.append("\n\n".join(filter(None, section)))
    return "\n\n".join(parts) + "\n"


def _table(results: Sequence[Result]) -> str:
    return terminal.grid(results, lambda r: r.claim.rpartition("/")[2], ("rate", "expected"))
