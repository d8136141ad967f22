"""Results as one HTML file without external references, so that it can be read offline."""

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
from pytest_aiperf.records.comparison import versions
from pytest_aiperf.records.results import atomic_write
from pytest_aiperf.rules.stats import mean_call_s
from pytest_aiperf.text import short, si

from . import aggregate, charts, formatting, markdown, source_code, terminal
from .formatting import cells

MAX_COLORED: Final = 1 << 20
"""Maximum characters of code to color: colors double the code's size, which slows the page."""
HEADS: Final = (
    *("claim", "verdict", "speedup", "99 % interval", "baseline", "optimized", "library"),
    *("rate", "of limit", "expected"),
)
"""Column heads of the table of claims."""


def page(
    results: Sequence[Result],
    machine: Mapping[str, Any],
    title: str,
    *,
    root: Path = Path(),
    folder: Path = Path(),
) -> str:
    """Return the report as HTML, with code and explanations from the files below ``root``.

    ``machine`` describes the machine as in a results file; its ``commit`` may be pytest-benchmark's
    ``commit_info``. Links to profilers' files are relative to ``folder``, where the page is
    written.
    """
    import jinja2  # imported late: only reports need it

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
    ladders.sort(key=lambda ladder: (ladder["chapter"], ladder["name"], ladder["key"]))
    rows = [row for ladder in ladders for row in ladder["rows"]]
    timed = [row for row in rows if row["result"].speedup]
    axis = charts.speedup_axis(results)
    keys = sorted({r.key for r in results})
    return environment.from_string(text).render(
        title=title,
        script_hash=base64.b64encode(digest).decode(),
        facts=_facts(results, machine),
        summary=aggregate.summarize(results),
        chapters=list(dict.fromkeys(ladder["chapter"] for ladder in ladders)),
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
    """Write the page and its Markdown version into a folder; return the page's path."""
    root, path = Path.cwd(), folder / "index.html"
    atomic_write(path, page(results, machine, "pytest-aiperf report", root=root, folder=folder))
    atomic_write(folder / "report.md", markdown.markdown(results, root))
    return path


def _facts(results: Sequence[Result], machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the hardware, software and settings of the results as pairs of name and value."""
    gpus = {r.gpu.name: r.gpu for r in results if r.gpu}
    stack = versions(results)
    stack.pop("GPU", None)  # shown below, together with its properties
    rounds = [
        b for r in results if r.timing and r.gpu for rep in r.timing.replicates for b in rep.rounds
    ]
    clocks = [b.sm_mhz for b in rounds if b.sm_mhz]
    commit, listed = machine.get("commit"), machine.get("gpus")
    commit = commit if isinstance(commit, Mapping) else {}
    listed = listed if isinstance(listed, list) else []
    days = sorted({r.started[:10] for r in results if r.started})
    floors = {
        kind: [r.floor for r in results if r.floor and r.host is host]
        for kind, host in (("GPU", False), ("host", True))
    }
    facts = {
        "GPU": ", ".join(
            f"{g.name} ({g.sms} SMs, {g.memory_bytes / 2**30:.0f} GiB)" for g in gpus.values()
        )
        or ", ".join(str(g.get("name")) for g in listed if isinstance(g, Mapping)),
        "driver": stack.pop("driver", ""),
        "CUDA": stack.pop("cuda", ""),
        **stack,
        "SM clock": f"{statistics.median(clocks):.0f} MHz ({min(clocks)} to {max(clocks)})"
        if clocks
        else "",
        "power cap": formatting.capped(rounds),
        "noise floor": ", ".join(
            f"{max(values):.2%} {kind}" for kind, values in floors.items() if values
        ),
        "commit": f"{str(commit.get('id', ''))[:12]}{' (changed)' * bool(commit.get('dirty'))}",
        "measured": " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "",
        "mode": "quick" if any(r.quick for r in results) else "",
    }
    return [(name, value) for name, value in facts.items() if value]


def _ladder(rungs: Sequence[Result], root: Path, folder: Path) -> dict[str, Any]:
    """Collect the contents of a ladder's or test's article: its docstring, and its claims."""
    first = rungs[0]
    return {
        "name": first.ladder or first.claim.partition("[")[0],
        "chapter": aggregate.folder(first),
        "key": first.key,
        "title": first.title,
        "explanation": source_code.explanation(first.nodeid, root),
        "where": first.nodeid.partition("::")[0],
        "picture": charts.ladder(rungs),
        "rows": [_row(result, root, folder) for result in rungs],
    }


def _row(result: Result, root: Path, folder: Path) -> dict[str, Any]:
    """Collect the contents of one claim's section and table row."""
    baseline, optimized, _, _, library, rate, limit, verdict, expected = cells(result)
    timing, speedup = result.timing, result.speedup
    of_limit = result.limits.get("optimized")
    return {
        "result": result,
        "id": _anchor(f"{result.key}-{result.claim}"),
        "chapter": aggregate.folder(result),
        "name": result.claim.rpartition("/")[2],
        "verdict": verdict,
        "kind": verdict.partition(",")[0].lower().replace("_", "-"),
        "cells": (
            (f"{speedup.value:.2f}x", speedup.value) if speedup else ("-", 0.0),
            (f"{speedup.low:.3f} to {speedup.high:.3f}", speedup.low) if speedup else ("-", 0.0),
            (baseline, _mean_or_0(timing, "baseline")),
            (optimized, _mean_or_0(timing, "optimized")),
            (library, result.library.value if result.library else 0.0),
            (rate, formatting.rate(result)[0]),
            (limit, of_limit.share if of_limit else 0.0),
        ),
        "expected": expected,
        "times": [
            (a, si(_mean_or_0(timing, a), timing.unit)) for a in charts.arms(timing) if timing
        ],
        "rate": rate,
        "how": _how(timing),
        "reason": formatting.reason(result),
        "also": [
            (also.metric.value, arm, si(_mean_or_0(also, arm), also.unit))
            for also in result.also
            for arm in charts.arms(also)
        ],
        "agreement": max(
            result.agreement, key=lambda e: e.error / e.allowed if e.allowed else 0.0, default=None
        ),
        "evidence": [
            (f, formatting.state(f), formatting.stated(f.evidence), formatting.figures(f))
            for f in result.evidence
        ],
        "profiles": _profiles(result, folder),
        "strip": charts.strip(result),
        "code": source_code.arms(result, root),
    }


def _anchor(name: str) -> str:
    """Return an HTML id; its digest distinguishes names that differ only in punctuation."""
    plain = re.sub(r"\W+", "-", name, flags=re.ASCII).strip("-")
    return f"{plain}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:6]}"


def _mean_or_0(timing: Timing | None, arm: str) -> float:
    return mean_call_s(timing.replicates, arm) if timing and arm in charts.arms(timing) else 0.0


def _how(timing: Timing | None) -> str:
    if timing is None:
        return ""
    rounds = sum(len(r.rounds) for r in timing.replicates)
    parts = [
        f"{timing.metric} timed as {timing.mode}",
        f"{'/'.join(str(n) for n in dict.fromkeys(timing.calls.values()))} calls per block",
        f"{timing.cache} cache, {timing.sets} input set{'s' * (timing.sets != 1)}",
        f"{len(timing.replicates)} replicates, {rounds} rounds",
    ]
    return "; ".join([*parts, f"stopped by {timing.stopped}"] if timing.stopped else parts)


def _profiles(result: Result, folder: Path) -> list[dict[str, Any]]:
    """Lay out one table per tool: a row per figure, a column per arm."""
    tables = []
    for tool in dict.fromkeys(p.tool for p in result.profiles):
        arms = [p for p in result.profiles if p.tool == tool]
        rows = list(terminal.figures_by_arm(arms))
        links = [(p.arm, p.artefact, _link(p.artefact, folder), p.notes) for p in arms]
        tables.append({"tool": tool, "arms": [p.arm for p in arms], "rows": rows, "links": links})
    return tables


def _link(artefact: str, folder: Path) -> str:
    """Return a link to a file, relative to the page's folder; empty if ``artefact`` is a URL."""
    if not artefact or "\0" in artefact or urllib.parse.urlsplit(artefact).scheme:
        return ""
    return urllib.parse.quote(f"./{os.path.relpath(artefact, folder)}")


def _highlighter() -> Callable[[source_code.Code], Any]:
    """Return a Jinja filter that colors code until it has colored MAX_COLORED characters."""
    colored = 0

    def highlight(code: source_code.Code) -> Any:
        nonlocal colored
        from markupsafe import Markup, escape

        colored += len(code.text)
        if colored > MAX_COLORED:
            return escape(code.text)
        return Markup(source_code.highlight(code))  # noqa: S704  Pygments escapes the text

    return highlight
