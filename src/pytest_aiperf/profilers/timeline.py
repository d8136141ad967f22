"""GPU activities of one call and their times, from reports of nsys and PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
import sqlite3
import subprocess
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.device import trace
from pytest_aiperf.device.trace import Activity, Event
from pytest_aiperf.errors import CaptureFailed
from pytest_aiperf.rules.stats import covered
from pytest_aiperf.text import si

RANGE: Final = "aiperf"
"""Name of the NVTX range, or of the record_function, around a captured call."""
TOP: Final = 5  #: Kernels and operators that a profile's notes list.

Figures = dict[str, tuple[float, str]]  #: Value and unit of each figure by its name.
Reading = tuple[Figures, list[str], list[str]]
"""Figures, kernels (the longest-running first) and notes."""

ApiCall = tuple[float, float, int]
"""Start and end of a call of the CUDA API in seconds, and its correlation id."""

_COPIES: Final = {
    1: "host to device", 2: "device to host", 8: "device to device", 10: "peer to peer",
}  # fmt: skip
"""Kinds of copies by CUPTI's number."""


def nsys(artefact: Path, binary: str | None = None) -> Reading:
    """Read an nsys report: its sqlite export, or the report itself where ``binary`` exports it."""
    exported = artefact
    if artefact.suffix != ".sqlite":
        exported = artefact.with_suffix(".sqlite")
        _export(artefact, exported, binary)
    try:
        with closing(sqlite3.connect(f"{exported.absolute().as_uri()}?mode=ro", uri=True)) as db:
            activities = list(_nsys_activities(db))
            rows = _rows(db, "CUPTI_ACTIVITY_KIND_RUNTIME", "start, end, correlationId")
            calls = [(start / 1e9, end / 1e9, correlation) for start, end, correlation in rows]
            named = "LEFT JOIN StringIds ON id = textId WHERE coalesce(text, value) = ?"
            rows = _rows(db, "NVTX_EVENTS", "start, end", f"{named} AND end IS NOT NULL", RANGE)
            ranges = [(start / 1e9, end / 1e9) for start, end in rows]
    except sqlite3.Error as error:
        raise CaptureFailed(f"{exported} is no export of an nsys report ({error})") from error
    activities, calls = _within(ranges, activities, calls)
    if not activities:
        raise CaptureFailed(
            f"{artefact} has nothing that ran on a GPU inside the range {RANGE!r}: "
            "see that the call launches work, and that nsys traces CUDA"
        )
    return _reading(activities, calls, ranges)


def torch_trace(artefact: Path) -> Reading:
    """Read a Chrome trace of torch.profiler, with its operators and graph breaks."""
    content = load_json(artefact, "trace of torch.profiler")
    if not isinstance(content, dict):
        raise CaptureFailed(f"{artefact} is no trace of torch.profiler: it has no events")
    events = trace.events(content.get("traceEvents", ()))
    ranges = [
        (e.start, e.end) for e in events if e.category == "user_annotation" and e.name == RANGE
    ]
    calls = [
        (e.start, e.end, e.args.get("correlation", 0))
        for e in events
        if e.category in ("cuda_runtime", "cuda_driver")
    ]
    activities, calls = _within(ranges, trace.activities(events), calls)
    operators = [e for e in events if e.category == "cpu_op" and _is_inside(ranges, e.start)]
    if not (activities or operators):
        raise CaptureFailed(
            f"{artefact} has no operators and no kernels inside the range {RANGE!r}: "
            "see that the call does its work in PyTorch or on a GPU"
        )
    figures, kernels, notes = _reading(activities, calls, ranges)
    figures["operators"] = (len(operators), "")
    if "graph_breaks" in content:
        figures["graph breaks"] = (float(content["graph_breaks"]), "")
    return figures, kernels, [*_top_operators(operators, events), *notes]


def _export(report: Path, exported: Path, binary: str | None) -> None:
    """Export an nsys report, unless the export is newer than the report."""
    if not report.is_file():
        raise CaptureFailed(f"nsys wrote no {report}: see its own output beside it")
    if exported.is_file() and exported.stat().st_mtime_ns >= report.stat().st_mtime_ns:
        return
    if binary is None:
        raise CaptureFailed(f"{report} cannot be read without nsys: install Nsight Systems")
    options = ("--type=sqlite", "--force-overwrite=true", f"--output={exported}")
    command = [binary, "export", *options, str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not exported.is_file():
        output = " ".join((done.stderr or done.stdout).split())[-200:]
        raise CaptureFailed(
            f"nsys could not export {report} ({output}): is it older than the report?"
        )


def _rows(
    db: sqlite3.Connection, table: str, columns: str, clauses: str = "", *values: object
) -> list[Any]:
    """Query a table; nsys leaves out tables that would be empty."""
    exists = db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    query = f"SELECT {columns} FROM {table} {clauses}"  # noqa: S608  constants
    return db.execute(query, values).fetchall() if exists else []


def _nsys_activities(db: sqlite3.Connection) -> Iterator[Activity]:
    for kind, columns, name in (
        ("KERNEL", "'kernel', 0", "(SELECT value FROM StringIds WHERE id = demangledName)"),
        ("MEMCPY", "copyKind, bytes", "''"),
        ("MEMSET", "'memset', bytes", "''"),
        ("GRAPH_TRACE", "'graph', 0", "''"),
    ):
        fields = f"{columns}, {name}, start, end, correlationId"
        rows = _rows(db, f"CUPTI_ACTIVITY_KIND_{kind}", fields)
        for copy_kind, size, kernel, start, end, correlation in rows:
            what = _COPIES.get(copy_kind, "other copy") if kind == "MEMCPY" else copy_kind
            yield Activity(what, kernel or "", start / 1e9, end / 1e9, correlation, size)


def load_json(artefact: Path, what: str) -> Any:
    """Read JSON that may be compressed; ``what`` names the kind of artefact for the error."""
    try:
        content = artefact.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        # names of kernels may contain characters that strict JSON escapes
        return json.loads(content, strict=False)
    except (OSError, EOFError, ValueError) as error:
        raise CaptureFailed(f"{artefact} is no {what} ({error})") from error


def _is_inside(ranges: Collection[tuple[float, float]], moment: float) -> bool:
    return not ranges or any(start <= moment <= end for start, end in ranges)


def _within(
    ranges: Collection[tuple[float, float]], activities: list[Activity], calls: list[ApiCall]
) -> tuple[list[Activity], list[ApiCall]]:
    """Keep the calls made inside the ranges and what they caused: the GPU may run it later."""
    if not ranges:
        return activities, calls
    calls = [call for call in calls if _is_inside(ranges, call[0])]
    causes = {correlation for *_, correlation in calls}
    return [activity for activity in activities if activity.correlation in causes], calls


def _reading(
    activities: list[Activity], calls: list[ApiCall], ranges: Collection[tuple[float, float]]
) -> Reading:
    """Count and add up what both profilers record."""
    copies = [activity for activity in activities if activity.is_copy]
    counts = Counter(activity.kind for activity in activities)
    figures: Figures = {
        "kernels": (counts["kernel"], ""),
        "launches": (trace.launches(activities), ""),
        "copies": (len(copies), ""),
        "api time": (covered((start, end) for start, end, _ in calls), "s"),
    }
    figures |= {f"{kind}s": (counts[kind], "") for kind in ("graph", "memset") if counts[kind]}
    moved: Counter[str] = Counter()
    for copy in copies:
        moved[copy.kind] += copy.bytes
    figures |= {f"{kind} bytes": (size, "B") for kind, size in moved.items()}
    if activities:
        busy, span = trace.busy_and_span(activities)
        figures |= {"span": (span, "s"), "busy": (busy, "s"), "gaps": (span - busy, "s")}
        figures["gap share"] = ((span - busy) / span if span else 0.0, "share")
    if ranges:
        figures["range"] = (covered(ranges), "s")
    seconds = trace.kernel_seconds(activities)
    notes = [f"{name}: {si(s, 's')}" for name, s in list(seconds.items())[:TOP]]
    return figures, list(seconds), notes


def _top_operators(operators: Collection[Event], events: Iterable[Event]) -> list[str]:
    """Note the operators with the most time of their own on the GPU, then on the host."""
    by_id: defaultdict[int, float] = defaultdict(float)
    for event in events:
        if event.category in ("kernel", "gpu_memcpy", "gpu_memset"):
            by_id[event.args.get("External id", -1)] += event.end - event.start
    gpu: defaultdict[str, float] = defaultdict(float)
    host: defaultdict[str, float] = defaultdict(float)
    calls = Counter(operator.name for operator in operators)
    for operator, seconds in _self_seconds(operators):
        gpu[operator.name] += by_id.get(operator.args.get("External id", 0), 0.0)
        host[operator.name] += seconds
    top = sorted(calls, key=lambda name: (-gpu[name], -host[name]))[:TOP]
    return [
        f"{name}: {si(gpu[name], 's')} on the GPU, {si(host[name], 's')} on the host, "
        f"{calls[name]} calls"
        for name in top
    ]


def _self_seconds(operators: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each operator with its seconds less those of the operators that it called."""
    seconds: dict[int, float] = {}  # by id()
    ordered = sorted(operators, key=lambda o: (str(o.thread), o.start, -o.end))
    callers: list[Event] = []
    for operator in ordered:
        while callers and (
            callers[-1].thread != operator.thread or callers[-1].end <= operator.start
        ):
            callers.pop()
        seconds[id(operator)] = operator.end - operator.start
        if callers:
            seconds[id(callers[-1])] -= operator.end - operator.start
        callers.append(operator)
    return ((operator, seconds[id(operator)]) for operator in ordered)
