"""Results as one HTML file without external references, so that it can be read offline."""

import math
import os
import re
import statistics
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.machine import telemetry
from pytest_aiperf.machine.requirements import ranks_suffix
from pytest_aiperf.model import Error, Interval, Outcome, Result, Timing, Verdict
from pytest_aiperf.records.comparison import ratio_of, versions
from pytest_aiperf.records.results import atomic_write
from pytest_aiperf.rules.stats import mean_call_s
from pytest_aiperf.rules.verdict import SESSIONS_APART, UNDECIDED, noise_problem
from pytest_aiperf.text import si

from . import aggregate, charts, formatting, markdown, source_code, terminal, views
from .formatting import cells

MAX_CHANGES: Final = 10  #: Maximum number of changed speedups that are listed first.
_STOPPED: Final = {
    "width": "stopped when the interval was narrow",
    "seconds": "stopped when the time was up",
    "replicates": "stopped after the most replicates",
}
HEADS: Final = (
    *("claim", "verdict", "speedup", "99 % interval", "baseline", "optimized", "library"),
    *("rate", "of limit", "expected"),
)
"""Column heads of the table of claims."""
GLOSSARY: Final = {
    "claim": "One test: the optimized arm beats the baseline on the same work, on this machine.",
    "baseline": "The arm that the optimized arm is compared with, and its figure per call.",
    "optimized": "The arm that the claim is about, and its figure per call.",
    "library": "Speedup of the optimized arm over what one would otherwise call, such as cuBLAS.",
    "naive baseline": "A baseline that no competent user writes. Geometric means leave it out.",
    "ladder, rung": "A ladder is a series of optimizations of one operation; a rung is one.",
    "speedup": "How many times better the optimized arm is than the baseline; above 1 is better.",
    "99 % interval": "Range that contains the speedup with 99 % confidence: Student's t over the "
    "log-ratios of the replicates.",
    "replicate": "Rounds on new allocations with a new seed: one sample of the statistics.",
    "round, block": "A round runs the arms' blocks in a mirrored order, such as ABBA, so that "
    "drifting clocks affect all arms alike. A block is a series of calls timed together.",
    "noise floor": "Difference that a comparison of identical arms shows in this session. Smaller "
    "differences count as noise.",
    "verdict": "FASTER: the interval lies above 1 plus the noise floor. SLOWER: below 1 / (1 + the "
    "noise floor). SAME: within 2 % of 1. INCONCLUSIVE: none of these; measure for longer, or on a "
    "quieter machine. Lost: less than the claim requires. Undecided: the interval reaches what the "
    "claim requires, and its lower end does not.",
    "rate": "Work per second of the optimized arm: bytes that a call must move, or FLOPs.",
    "of limit": "Rate of the optimized arm divided by the limit that bounds it.",
    "limit": "The highest rate that this GPU reached in a micro-benchmark, for example bf16.",
    "arithmetic intensity": "Floating-point operations per byte that a call must move. Claims at "
    "low intensity are limited by bandwidth, at high intensity by arithmetic.",
    "evidence": "A measurable consequence of why the optimized arm is faster, with bounds. It "
    "holds, does not hold, or was not looked at. If the baseline meets it, too, it is a condition.",
    "expected": "The last accepted speedup on this kind of GPU, or the required one (>=). Stale: "
    "the claim's code has changed since.",
    "graph, backlog, plain": "How device time is taken: calls in one CUDA graph, calls queued "
    "behind a blocking kernel, or calls launched normally.",
}
"""The words of the report."""


def page(
    results: Sequence[Result],
    machine: Mapping[str, Any],
    title: str,
    *,
    root: Path = Path(),
    folder: Path = Path(),
    data: Sequence[Path] = (),
    address: str = "",
) -> str:
    """Return the report as HTML, with code and explanations from the files below ``root``.

    ``machine`` describes the machine as in a results file; its ``commit`` may be pytest-benchmark's
    ``commit_info``. Links to ``data``, the results files, and to profilers' files are relative to
    ``folder``, where the page is written. ``address`` is the repository's URL for links to source
    lines, as from :func:`source_code.repository`.
    """
    ids = _ids(results)

    def link(result: Result) -> str:
        return "#" + urllib.parse.quote(ids[result.key, result.claim])

    ladders = [
        _ladder(rungs, ids, root, folder, address) for rungs in aggregate.ladders(results).values()
    ]
    ladders.sort(key=lambda ladder: (ladder["chapter"], ladder["name"], ladder["key"]))
    rows = [row for ladder in ladders for row in ladder["rows"]]
    shown = [row["result"] for row in rows]
    chapters = dict.fromkeys(ladder["chapter"] for ladder in ladders)
    files_of_runs = [path.with_name(telemetry.FILE) for path in data]
    loads = [
        load for file in files_of_runs if file.exists() for load in telemetry.read(file).items()
    ]
    keys = sorted({r.key for r in results})
    return views.document(
        files(__package__).joinpath("page.html").read_text(encoding="utf-8"),
        title,
        [files(__package__).joinpath("table.js").read_text(encoding="utf-8")],
        facts=_facts(results, machine),
        warnings=list(_warnings(results)),
        data=[(path.name, _link(str(path), folder)) for path in data],
        summary=aggregate.summarize(results),
        first=_first(rows),
        chapters=[(name, [x for x in ladders if x["chapter"] == name]) for name in chapters],
        rows=rows,
        speedups=views.speedups(shown, link),
        roofline=views.roofline(shown, link),
        shares=views.shares(shown, link),
        scaling=[
            (next(iter(ranks.values())).claim, views.scaling(ranks, link))
            for ranks in aggregate.by_ranks(shown)
        ],
        loads=[(gpu, curves) for gpu, samples in loads if (curves := charts.telemetry(samples))],
        glossary=GLOSSARY,
        keys=keys,
        heads=[*HEADS, *(["on"] if len(keys) > 1 else [])],
    )


def _ids(results: Sequence[Result]) -> dict[tuple[str, str], str]:
    """Return the HTML id of each result: its claim, with the machine if it has several results."""
    count = Counter(r.claim for r in results)
    names = {
        (r.key, r.claim): f"{r.claim}@{r.key}" if count[r.claim] > 1 else r.claim for r in results
    }
    return {each: re.sub(r"\s", "_", name) for each, name in names.items()}


def _first(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str, str]]:
    """List what to look at first: failures, claims without a clear verdict, biggest changes."""
    order = (Outcome.ERROR, Outcome.INVALID, Outcome.FAILED, Outcome.PASSED)
    listed, changed = [], []
    for row in rows:
        result = row["result"]
        if result.outcome not in order:
            continue
        reason = row["reason"].partition("\n")[0]
        if result.outcome is not Outcome.PASSED:
            undecided = aggregate.is_undecided(result)
            kind = "undecided" if undecided else result.outcome.value.lower()
            rank = len(order) if undecided else order.index(result.outcome)
            listed.append((rank, (row, kind, reason.removeprefix(UNDECIDED))))
        elif result.verdict is Verdict.INCONCLUSIVE:
            listed.append((len(order), (row, row["kind"], reason or str(result.speedup))))
        elif (ratio := _change(result)) is not None:
            kind = "improved" if ratio.value > 1 else "regressed"
            text = f"{result.speedup.value:.3f}x, expected {row['expected']}: a ratio of {ratio}"
            changed.append((abs(math.log(ratio.value)), (row, kind, text)))
    listed.sort(key=lambda each: each[0])
    changed.sort(key=lambda each: -each[0])
    return [each for _, each in (*listed, *changed[:MAX_CHANGES])]


def _change(result: Result) -> Interval | None:
    """Return the speedup over the accepted one; None if two accepted runs may differ as much."""
    expectation = result.expectation
    if not (expectation and expectation.recorded and result.speedup) or expectation.stale:
        return None
    recorded = expectation.recorded
    ratio = ratio_of(result.speedup, Interval(*recorded.speedup))
    reaches_least = result.speedup.high >= recorded.least * (1 - SESSIONS_APART)
    is_same = ratio.low <= 1 + SESSIONS_APART and (
        ratio.high >= 1 - SESSIONS_APART or reaches_least
    )
    return None if is_same else ratio


def _warnings(results: Sequence[Result]) -> Iterator[str]:
    for name, host in (("GPU", False), ("host", True)):
        floor = max((r.floor for r in results if r.host is host), default=0.0)
        if problem := noise_problem(floor):
            yield f"Noisy {name}: {problem.removeprefix('noisy: ')}."


def write_report(
    results: Sequence[Result], machine: Mapping[str, Any], folder: Path, data: Sequence[Path] = ()
) -> Path:
    """Write the page and its Markdown version into a folder; return the page's path.

    ``data`` are the results files that the page links to.
    """
    root, path = Path.cwd(), folder / "index.html"
    title, address = "pytest-aiperf report", source_address(root, machine)
    text = page(results, machine, title, root=root, folder=folder, data=data, address=address)
    atomic_write(path, text)
    atomic_write(folder / "report.md", markdown.markdown(results, root))
    return path


def source_address(root: Path, machine: Mapping[str, Any]) -> str:
    """Return the repository's URL for links to source lines, at the commit that was measured."""
    commit = machine.get("commit")
    known = isinstance(commit, Mapping) and not commit.get("dirty") and commit.get("id")
    return source_code.repository(root, str(known) if known else "HEAD")


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
    cpu = machine.get("cpu")
    cpu = cpu if isinstance(cpu, Mapping) else {}
    kinds = Counter(r.key for r in results)
    facts = {
        "GPU": ", ".join(
            f"{g.name} ({g.sms} SMs, {g.memory_bytes / 2**30:.0f} GiB)" for g in gpus.values()
        )
        or ", ".join(str(g.get("name")) for g in listed if isinstance(g, Mapping)),
        "CPU": stack.pop("processor", "")
        or ", ".join(
            str(each)
            for each in (cpu.get("brand_raw"), cpu.get("count") and f"{cpu['count']} logical CPUs")
            if each
        ),
        "claims on": ", ".join(f"{key} ({n})" for key, n in kinds.items()) * (len(kinds) > 1),
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


def _ladder(
    rungs: Sequence[Result],
    ids: Mapping[tuple[str, str], str],
    root: Path,
    folder: Path,
    address: str,
) -> dict[str, Any]:
    """Collect the contents of a ladder's or test's article: its docstring, and its claims."""
    first = rungs[0]
    rows = [_row(result, ids[result.key, result.claim], root, folder, address) for result in rungs]
    hrefs = {row["result"].claim: row["href"] for row in rows}
    where = first.nodeid.partition("::")[0]
    return {
        "name": first.ladder or first.claim.partition("[")[0],
        "chapter": aggregate.folder(first),
        "key": first.key,
        "title": first.title,
        "explanation": source_code.explanation(first.nodeid, root),
        "where": where,
        "url": address and address + urllib.parse.quote(where),
        "picture": views.ladder(rungs, lambda result: hrefs[result.claim]),
        "rows": rows,
    }


def _row(result: Result, name: str, root: Path, folder: Path, address: str) -> dict[str, Any]:
    """Collect the contents of one claim's section and table row; ``name`` is its HTML id."""
    baseline, optimized, _, _, library, rate, limit, verdict, expected = cells(result)
    timing, speedup = result.timing, result.speedup
    of_limit = result.limits.get("optimized")
    ranks = ranks_suffix(result.nodeid).strip("[]")
    ranks = f" --{ranks}" if ranks else ""
    return {
        "result": result,
        "id": name,
        "href": "#" + urllib.parse.quote(name),
        "chapter": aggregate.folder(result),
        "verdict": verdict,
        "kind": views.kind(result),
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
        "command": f"pytest {'--cpu' if result.host else '--gpu'}{ranks} '{result.nodeid}'",
        "reason": formatting.reason(result),
        "also": [
            (also.metric.value, arm, si(_mean_or_0(also, arm), also.unit))
            for also in result.also
            for arm in charts.arms(also)
        ],
        "agreement": _agreement(result),
        "evidence": views.evidence([result]),
        "profiles": _profiles(result, folder),
        "strip": views.replicates(result),
        "code": views.code(result, root, address),
    }


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
    return "; ".join([*parts, *filter(None, [_STOPPED.get(timing.stopped)])])


def _agreement(result: Result) -> Error | None:
    """Return the optimized arm's error that is the largest part of what is allowed."""
    errors = [error for error in result.agreement if error.arm == "optimized"]
    return max(errors, key=lambda e: e.error / e.allowed if e.allowed else 0.0, default=None)


def _profiles(result: Result, folder: Path) -> list[dict[str, Any]]:
    """Lay out one table per tool: a row per figure, a column per arm."""
    tables = []
    for tool in dict.fromkeys(p.tool for p in result.profiles):
        arms = [p for p in result.profiles if p.tool == tool]
        rows = list(terminal.figures_by_arm(arms))
        links = [(p.arm, p.artifact, _link(p.artifact, folder), p.notes) for p in arms]
        tables.append({"tool": tool, "arms": [p.arm for p in arms], "rows": rows, "links": links})
    return tables


def _link(artifact: str, folder: Path) -> str:
    """Return a link to a file, relative to the page's folder; empty if ``artifact`` is a URL."""
    if not artifact or "\0" in artifact or urllib.parse.urlsplit(artifact).scheme:
        return ""
    return urllib.parse.quote(f"./{os.path.relpath(artifact, folder)}")
