"""Results as one HTML file that needs nothing else: no network, no second file."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import statistics
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.model import Result, Timing
from pytest_aiperf.records.history import versions
from pytest_aiperf.records.results import atomic_write
from pytest_aiperf.rules.stats import typical
from pytest_aiperf.text import short, si

from . import aggregate, charts, formatting, markdown, source_code, terminal
from .formatting import cells

INDEX: Final = "index.html"
MAX_COLORED: Final = 1 << 20
"""Characters of code that are colored: colors double its size, and a page must open fast."""

HEADS: Final = (
    "claim",
    "verdict",
    "speedup",
    "99 % interval",
    "baseline",
    "optimized",
    "library",
    "rate",
    "of limit",
    "expected",
)
"""The table's columns; sorted by what they mean, not by what they say."""


def page(
    results: Sequence[Result],
    machine: Mapping[str, Any],
    title: str,
    *,
    root: Path = Path(),
    folder: Path = Path(),
) -> str:
    """Write the report; code and explanations come from the tests' files below ``root``.

    ``machine`` is what a results file says of it; its ``commit`` may be pytest-benchmark's
    ``commit_info``. ``folder`` is where the page will lie: artefacts are linked from there.
    """
    import jinja2  # late: only reports need it

    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = hashlib.sha256(script[1].encode() if script else b"").digest()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "highlight": _highlighter(),
        "pct": lambda place: f"{place:.2f}".rstrip("0").rstrip(".") + "%",
        "px": lambda place: f"{place:.1f}",
        "figure": short,
        "si": si,
    }
    ladders = [_ladder(rungs, root, folder) for rungs in aggregate.ladders(results).values()]
    ladders.sort(key=lambda one: (one["chapter"], one["name"], one["key"]))
    rows = [row for one in ladders for row in one["rows"]]
    timed = [row for row in rows if row["result"].speedup is not None]
    axis = charts.speedup_axis(results)
    keys = sorted({r.key for r in results})
    return environment.from_string(text).render(
        title=title,
        script_hash=base64.b64encode(digest).decode(),
        facts=_facts(results, machine),
        summary=aggregate.summarise(results),
        chapters=list(dict.fromkeys(one["chapter"] for one in ladders)),
        ladders=ladders,
        rows=rows,
        timed=[(row, charts.bar(row["result"].speedup, axis)) for row in timed],
        axis_all=axis,
        percent=charts.Axis(0.0, 105.0, log=False),
        roofline=charts.roofline([row["result"] for row in rows]),
        roof_height=charts.ROOF_HEIGHT,
        shares=charts.shares([row["result"] for row in rows]),
        ids={(row["result"].key, row["result"].claim): row["id"] for row in rows},
        keys=keys,
        heads=[*HEADS, *(["on"] if len(keys) > 1 else [])],
    )


def write_report(results: Sequence[Result], machine: Mapping[str, Any], folder: Path) -> Path:
    """Write the page, and the same as Markdown, into a folder; return the page's path."""
    root = Path.cwd()
    title = "pytest-aiperf report"
    path = folder / INDEX
    atomic_write(path, page(results, machine, title, root=root, folder=folder))
    atomic_write(folder / "report.md", markdown.markdown(results, root))
    return path


def _facts(results: Sequence[Result], machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say what the results were measured on."""
    gpus = {r.gpu.name: r.gpu for r in results if r.gpu}
    stack = versions(results)
    stack.pop("GPU", None)  # told with its size
    rounds = [
        b for r in results if r.timing and r.gpu for rep in r.timing.replicates for b in rep.rounds
    ]
    clocks = [b.sm_mhz for b in rounds if b.sm_mhz]
    commit, known = machine.get("commit"), machine.get("gpus")
    commit = commit if isinstance(commit, Mapping) else {}
    known = known if isinstance(known, list) else []
    days = sorted({r.started[:10] for r in results if r.started})
    floors = {
        kind: [r.floor for r in results if r.floor and r.host is host]
        for kind, host in (("GPU", False), ("host", True))
    }
    said = {
        "GPU": ", ".join(
            f"{g.name} ({g.sms} SMs, {g.memory_bytes / 2**30:.0f} GiB)" for g in gpus.values()
        )
        or ", ".join(str(g.get("name")) for g in known if isinstance(g, Mapping)),
        "driver": stack.pop("driver", ""),
        "CUDA": stack.pop("cuda", ""),
        **stack,
        "SM clock": f"{statistics.median(clocks):.0f} MHz ({min(clocks)} to {max(clocks)})"
        if clocks
        else "",
        "power cap": formatting.capped(rounds),
        "noise floor": ", ".join(
            f"{max(known):.2%} {kind}" for kind, known in floors.items() if known
        ),
        "commit": f"{str(commit.get('id', ''))[:12]}{' (changed)' * bool(commit.get('dirty'))}",
        "measured": " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "",
        "mode": "quick" if any(r.quick for r in results) else "",
    }
    return [(name, value) for name, value in said.items() if value]


def _ladder(rungs: Sequence[Result], root: Path, folder: Path) -> dict[str, Any]:
    """Collect what the page shows of one test: its words once, and each of its claims."""
    first = rungs[0]
    return {
        "name": first.claim.partition("[")[0],
        "chapter": aggregate.folder(first),
        "key": first.key,
        "title": first.title,
        "explanation": source_code.explanation(first.nodeid, root),
        "where": first.nodeid.partition("::")[0],
        "stairs": charts.ladder(rungs),
        "rows": [_row(result, root, folder) for result in rungs],
    }


def _row(result: Result, root: Path, folder: Path) -> dict[str, Any]:
    """Collect what the page shows of one claim."""
    baseline, optimized, _, library, rate, limit, verdict, expected = cells(result)
    timing = result.timing
    arms = charts.arms(timing)
    reached = result.limits.get("optimized")
    return {
        "result": result,
        "id": _anchor(f"{result.key}-{result.claim}"),
        "chapter": aggregate.folder(result),
        "name": result.claim.rpartition("/")[2],
        "verdict": verdict,
        "kind": verdict.partition(",")[0].lower().replace("_", "-"),
        "cells": (
            (f"{result.speedup.value:.2f}x" if result.speedup else "-", _value(result.speedup)),
            (_limits(result), result.speedup.low if result.speedup else 0.0),
            (baseline, _typical(timing, "baseline")),
            (optimized, _typical(timing, "optimized")),
            (library, _value(result.library)),
            (rate, formatting.rate(result)[0]),
            (limit, reached.share if reached else 0.0),
        ),
        "expected": expected,
        "times": [(a, si(_typical(timing, a), timing.unit)) for a in arms if timing],
        "rate": rate,
        "limit": limit,
        "how": _how(timing),
        "also": [
            (also.metric.value, arm, si(_typical(also, arm), also.unit))
            for also in result.also
            for arm in charts.arms(also)
        ],
        "agreement": max(
            result.agreement, key=lambda e: e.error / e.allowed if e.allowed else 0.0, default=None
        ),
        "evidence": [(f, formatting.claimed(f.evidence)) for f in result.evidence],
        "profiles": _profiles(result, folder),
        "strip": charts.strip(result),
        "code": source_code.arms(result, root),
    }


def _anchor(name: str) -> str:
    """Name a place in the page; the digest keeps names apart that differ in signs only."""
    plain = re.sub(r"\W+", "-", name, flags=re.ASCII).strip("-")
    return f"{plain}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:6]}"


def _typical(timing: Timing | None, arm: str) -> float:
    return typical(timing.replicates, arm) if timing and arm in charts.arms(timing) else 0.0


def _value(interval: Any) -> float:
    return interval.value if interval else 0.0


def _limits(result: Result) -> str:
    between = result.speedup
    return f"{between.low:.3f} to {between.high:.3f}" if between else "-"


def _how(timing: Timing | None) -> str:
    if timing is None:
        return ""
    rounds = sum(len(r.rounds) for r in timing.replicates)
    said = [
        f"{timing.metric} timed as {timing.mode}",
        f"{timing.calls} call{'s' * (timing.calls != 1)} a block",
        f"{timing.cache} cache, {timing.sets} input set{'s' * (timing.sets != 1)}",
        f"{len(timing.replicates)} replicates, {rounds} rounds",
    ]
    return "; ".join([*said, f"stopped by {timing.stopped}"] if timing.stopped else said)


def _profiles(result: Result, folder: Path) -> list[dict[str, Any]]:
    """Lay out figures by tool: a row a figure, a column an arm."""
    found = []
    for tool in dict.fromkeys(p.tool for p in result.profiles):
        mine = [p for p in result.profiles if p.tool == tool]
        rows = list(terminal.seen(mine))
        links = [(p.arm, p.artefact, _link(p.artefact, folder), p.notes) for p in mine]
        found.append({"tool": tool, "arms": [p.arm for p in mine], "rows": rows, "links": links})
    return found


def _link(artefact: str, folder: Path) -> str:
    """Point at a file from the page's folder; what is no path of a file gets no link."""
    if not artefact or "\0" in artefact or urllib.parse.urlsplit(artefact).scheme:
        return ""
    path = os.path.relpath(artefact, folder)
    return urllib.parse.quote(f"./{path}")


def _highlighter() -> Callable[[source_code.Code], Any]:
    """Return the filter that colors code; code beyond MAX_COLORED characters stays plain."""
    colored = 0

    def highlight(code: source_code.Code) -> Any:
        nonlocal colored
        from markupsafe import Markup, escape

        colored += len(code.text)
        if colored > MAX_COLORED:
            return escape(code.text)
        return Markup(source_code.highlight(code))  # noqa: S704  Pygments escapes the text

    return highlight
