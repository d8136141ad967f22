"""GPU activities and CUDA API calls with their times, from nsys and PyTorch's profiler."""

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
"""Name of the NVTX range, or of the record_function, around the profiled calls."""
TOP: Final = 5  #: Maximum number of kernels, and of operators, in a profile's notes.

Figures = dict[str, tuple[float, str]]  #: A figure's name to its value and unit.
Reading = tuple[Figures, list[str], list[str]]
"""Figures, kernel names (in order of decreasing time) and notes."""

ApiCall = tuple[float, float, int]
"""Start and end of a CUDA API call in seconds, and its correlation id."""

_COPIES: Final = {
    1: "host to device", 2: "device to host", 8: "device to device", 10: "peer to peer",
}  # fmt: skip
"""CUPTI's number for a kind of copy (CUpti_ActivityMemcpyKind), and the kind's name."""


def nsys(artefact: Path, binary: str | None = None) -> Reading:
    """Read an nsys report or its SQLite export; ``binary`` is the nsys that makes the export."""
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
        raise CaptureFailed(f"{exported} is not an export of an nsys report ({error})") from error
    activities, calls = _within(ranges, activities, calls)
    if not activities:
        raise CaptureFailed(
            f"{artefact} has nothing that ran on a GPU inside the range {RANGE!r}: "
            "check that the call launches work, and that nsys traces CUDA"
        )
    return _reading(activities, calls, ranges)


def torch_trace(artefact: Path) -> Reading:
    """Read a Chrome trace of torch.profiler; the notes list operators and graph breaks."""
    content = load_json(artefact, "torch.profiler trace")
    if not isinstance(content, dict):
        raise CaptureFailed(f"{artefact} is not a torch.profiler trace: it has no events")
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
            "check that the call does its work in PyTorch or on a GPU"
        )
    figures, kernels, notes = _reading(activities, calls, ranges)
    figures["operators"] = (len(operators), "")
    if "graph_breaks" in content:
        figures["graph breaks"] = (float(content["graph_breaks"]), "")
    return figures, kernels, [*_top_operators(operators, events), *notes]


def _export(report: Path, exported: Path, binary: str | None) -> None:
    """Export an nsys report to SQLite, unless an up-to-date export exists."""
    if not report.is_file():
        raise CaptureFailed(f"nsys did not write {report}: see the log beside it")
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
    """Query a table; nsys leaves out empty tables, so a missing table has no rows."""
    exists = db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    query = f"SELECT {columns} FROM {table} {clauses}"  # noqa: S608  all are constants
    return db.execute(query, values).fetchall() if exists else []


def _nsys_activities(db: sqlite3.Connection) -> Iterator[Activity]:
    for table, columns, name in (
        ("KERNEL", "'kernel', 0", "(SELECT value FROM StringIds WHERE id = demangledName)"),
        ("MEMCPY", "copyKind, bytes", "''"),
        ("MEMSET", "'memset', bytes", "''"),
        ("GRAPH_TRACE", "'graph', 0", "''"),
    ):
        fields = f"{columns}, {name}, start, end, correlationId"
        rows = _rows(db, f"CUPTI_ACTIVITY_KIND_{table}", fields)
        for raw_kind, size, kernel, start, end, correlation in rows:
            kind = _COPIES.get(raw_kind, "other copy") if table == "MEMCPY" else raw_kind
            yield Activity(kind, kernel or "", start / 1e9, end / 1e9, correlation, size)


def load_json(artefact: Path, what: str) -> Any:
    """Read JSON that may be gzipped; ``what`` names the expected content in the error message."""
    try:
        content = artefact.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        # kernel names may contain control characters, which strict JSON forbids
        return json.loads(content, strict=False)
    except (OSError, EOFError, ValueError) as error:
        raise CaptureFailed(f"{artefact} is not a {what} ({error})") from error


def _is_inside(ranges: Collection[tuple[float, float]], moment: float) -> bool:
    return not ranges or any(start <= moment <= end for start, end in ranges)


def _within(
    ranges: Collection[tuple[float, float]], activities: list[Activity], calls: list[ApiCall]
) -> tuple[list[Activity], list[ApiCall]]:
    """Keep the API calls that start in a range, and the activities that these calls launched."""
    if not ranges:
        return activities, calls
    calls = [call for call in calls if _is_inside(ranges, call[0])]
    launched = {correlation for *_, correlation in calls}
    return [activity for activity in activities if activity.correlation in launched], calls


def _reading(
    activities: list[Activity], calls: list[ApiCall], ranges: Collection[tuple[float, float]]
) -> Reading:
    """Compute the figures that nsys and torch.profiler have in common."""
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
    """Describe the operators with the most self time on the GPU, or on the host in a tie."""
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
    """Yield each operator with its self time: its seconds without those of its callees."""
    seconds: dict[int, float] = {}  # by id(operator)
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
