"""What ran on the GPU and when, from the reports of nsys and of PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.errors import CaptureFailed
from pytest_aiperf.rules.stats import covered

RANGE: Final = "aiperf"
"""The NVTX range, or record_function, that a captured call stands in."""
TOP: Final = 5
"""How many kernels and operators are told of."""

Figures = dict[str, tuple[float, str]]
"""A figure's name to its value and unit."""
Reading = tuple[Figures, list[str], list[str]]
"""Figures, kernels (the longest-running first) and notes."""

_LAUNCH: Final = re.compile(r"cu(da)?(GraphLaunch|Launch(?!HostFunc))")
_COPIES: Final = {
    1: "host to device",
    2: "device to host",
    8: "device to device",
    10: "peer to peer",
}
_TORCH_COPIES: Final = {"HtoD": 1, "DtoH": 2, "DtoD": 8, "PtoP": 10}


@dataclass(frozen=True, slots=True)
class Item:
    """Something that ran on the GPU (seconds): "kernel", "graph", "memset" or a kind of copy."""

    kind: str
    name: str
    start: float
    end: float
    cause: int
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the CUDA API (seconds); items name the call that caused them."""

    name: str
    start: float
    end: float
    cause: int


def nsys(artefact: Path, binary: str | None = None) -> Reading:
    """Read an nsys report: its sqlite export, or the report itself where ``binary`` exports it."""
    exported = artefact
    if artefact.suffix != ".sqlite":
        exported = artefact.with_suffix(".sqlite")
        _export(artefact, exported, binary)
    try:
        with closing(sqlite3.connect(f"{exported.absolute().as_uri()}?mode=ro", uri=True)) as db:
            items, calls = list(_nsys_items(db)), list(_nsys_calls(db))
            ranges = [
                (start / 1e9, end / 1e9)
                for start, end in _rows(
                    db,
                    "NVTX_EVENTS",
                    "SELECT start, end FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId"
                    " WHERE coalesce(text, value) = ? AND end IS NOT NULL",
                    RANGE,
                )
            ]
    except sqlite3.Error as error:
        raise CaptureFailed(f"{exported} is no export of an nsys report ({error})") from error
    items, calls = _within(ranges, items, calls)
    if not items:
        raise CaptureFailed(
            f"{artefact} has nothing that ran on a GPU inside the range {RANGE!r}: "
            "see that the call launches work, and that nsys traces CUDA"
        )
    figures, kernels, notes = _figures(items, calls)
    if ranges:
        figures["range"] = (covered(ranges), "s")
    return figures, kernels, notes


def torch_trace(artefact: Path) -> Reading:
    """Read a Chrome trace of torch.profiler; figures of operators too, and graph breaks if told."""
    trace = _load(artefact)
    events = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X" and "cat" in e]
    ranges = [_times(e) for e in events if e["cat"] == "user_annotation" and e.get("name") == RANGE]
    items = [item for e in events if (item := _torch_item(e))]
    calls = [
        Call(e["name"], *_times(e), e.get("args", {}).get("correlation", 0))
        for e in events
        if e["cat"] in ("cuda_runtime", "cuda_driver")
    ]
    items, calls = _within(ranges, items, calls)
    operators = [e for e in events if e["cat"] == "cpu_op" and _inside(ranges, _times(e)[0])]
    if not (items or operators):
        raise CaptureFailed(
            f"{artefact} has no operators and no kernels inside the range {RANGE!r}: "
            "see that the call does its work in PyTorch or on a GPU"
        )
    figures, kernels, notes = _figures(items, calls)
    figures["operators"] = (len(operators), "")
    if "graph_breaks" in trace:
        figures["graph breaks"] = (float(trace["graph_breaks"]), "")
    if ranges:
        figures["range"] = (covered(ranges), "s")
    return figures, kernels, [*_top_operators(operators, events), *notes]


def _export(report: Path, exported: Path, binary: str | None) -> None:
    """Export an nsys report, unless that was done since it was written."""
    if not report.is_file():
        raise CaptureFailed(f"nsys wrote no {report}: see its own output beside it")
    if exported.is_file() and exported.stat().st_mtime_ns >= report.stat().st_mtime_ns:
        return
    if binary is None:
        raise CaptureFailed(f"{report} cannot be read without nsys: install Nsight Systems")
    command = [binary, "export", "--type=sqlite", "--force-overwrite=true"]
    done = subprocess.run(
        [*command, f"--output={exported}", str(report)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not exported.is_file():
        said = " ".join((done.stderr or done.stdout).split())[-200:]
        raise CaptureFailed(
            f"nsys could not export {report} ({said}): is it older than the report?"
        )


def _rows(db: sqlite3.Connection, table: str, query: str, *values: object) -> list[Any]:
    """Query a table; nsys leaves out those that would be empty."""
    there = db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    return db.execute(query, values).fetchall() if there else []


def _nsys_items(db: sqlite3.Connection) -> Iterator[Item]:
    for kind, what, name in (
        ("KERNEL", "'kernel', 0", "(SELECT value FROM StringIds WHERE id = demangledName)"),
        ("MEMCPY", "copyKind, bytes", "''"),
        ("MEMSET", "'memset', bytes", "''"),
        ("GRAPH_TRACE", "'graph', 0", "''"),
    ):
        table = f"CUPTI_ACTIVITY_KIND_{kind}"
        query = f"SELECT {what}, {name}, start, end, correlationId FROM {table}"  # noqa: S608  ours
        for is_a, size, named, start, end, cause in _rows(db, table, query):
            is_a = _COPIES.get(is_a, "other copy") if isinstance(is_a, int) else is_a  # noqa: PLW2901
            yield Item(is_a, named or "", start / 1e9, end / 1e9, cause, size)


def _nsys_calls(db: sqlite3.Connection) -> Iterator[Call]:
    table = "CUPTI_ACTIVITY_KIND_RUNTIME"
    query = f"SELECT value, start, end, correlationId FROM {table} JOIN StringIds ON id = nameId"  # noqa: S608  ours
    for name, start, end, cause in _rows(db, table, query):
        yield Call(name, start / 1e9, end / 1e9, cause)


def _load(artefact: Path) -> Mapping[str, Any]:
    try:
        content = artefact.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        # kernels' names may hold what strict JSON would escape
        trace = json.loads(content, strict=False)
    except (OSError, EOFError, ValueError) as error:
        raise CaptureFailed(f"{artefact} is no trace of torch.profiler ({error})") from error
    if not isinstance(trace, dict):
        raise CaptureFailed(f"{artefact} is no trace of torch.profiler: it has no events")
    return trace


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start / 1e6, (start + float(event.get("dur", 0))) / 1e6


def _torch_item(event: Mapping[str, Any]) -> Item | None:
    name, told = event.get("name", ""), event.get("args", {})
    if event["cat"] == "gpu_memcpy":  # "Memcpy HtoD (Pinned -> Device)"
        kind = _COPIES.get(_TORCH_COPIES.get(name[7:11], 0), "other copy")
    elif event["cat"] in ("kernel", "gpu_memset"):
        kind = event["cat"].removeprefix("gpu_")
    else:
        return None
    return Item(kind, name, *_times(event), told.get("correlation", 0), told.get("bytes", 0))


def _inside(ranges: Collection[tuple[float, float]], moment: float) -> bool:
    return not ranges or any(start <= moment <= end for start, end in ranges)


def _within(
    ranges: Collection[tuple[float, float]], items: list[Item], calls: list[Call]
) -> tuple[list[Item], list[Call]]:
    """Keep the calls made inside the ranges and what they caused: the GPU may run it later."""
    if not ranges:
        return items, calls
    calls = [call for call in calls if _inside(ranges, call.start)]
    causes = {call.cause for call in calls}
    return [item for item in items if item.cause in causes], calls


def _figures(items: list[Item], calls: list[Call]) -> Reading:
    """Count and add up what both profilers tell of."""
    kernels = [item for item in items if item.kind == "kernel"]
    copies = [item for item in items if item.kind in (*_COPIES.values(), "other copy")]
    figures: Figures = {
        "kernels": (len(kernels), ""),
        "launches": (sum(bool(_LAUNCH.match(call.name)) for call in calls), ""),
        "copies": (len(copies), ""),
        "api time": (covered((c.start, c.end) for c in calls), "s"),
    }
    for kind in ("graph", "memset"):
        if count := sum(item.kind == kind for item in items):
            figures[f"{kind}s"] = (count, "")
    moved: dict[str, int] = defaultdict(int)
    for copy in copies:
        moved[copy.kind] += copy.bytes
    figures |= {f"{kind} bytes": (size, "B") for kind, size in moved.items()}
    if items:
        span = max(item.end for item in items) - min(item.start for item in items)
        busy = covered((item.start, item.end) for item in items)
        figures |= {"span": (span, "s"), "busy": (busy, "s"), "gaps": (span - busy, "s")}
        figures["gap share"] = ((span - busy) / span if span else 0.0, "share")
    seconds: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        seconds[kernel.name] += kernel.end - kernel.start
    longest = sorted(seconds, key=lambda name: -seconds[name])
    return figures, longest, [f"{name}: {seconds[name] * 1e6:.1f} us" for name in longest[:TOP]]


def _top_operators(operators: list[Any], events: list[Any]) -> list[str]:
    """Tell of the operators with the most time of their own: the GPU's, else the host's."""
    device: dict[int, float] = defaultdict(float)
    for event in events:
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            start, end = _times(event)
            device[event.get("args", {}).get("External id", -1)] += end - start
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for event, own in _own_seconds(operators):
        row = rows[event["name"]]
        row[0] += device.get(event.get("args", {}).get("External id", 0), 0.0)
        row[1] += own
        row[2] += 1
    top = sorted(rows.items(), key=lambda item: (-item[1][0], -item[1][1]))[:TOP]
    return [
        f"{name}: {gpu * 1e6:.1f} us on the GPU, {host * 1e6:.1f} us on the host, {calls:.0f} calls"
        for name, (gpu, host, calls) in top
    ]


def _own_seconds(operators: list[Any]) -> Iterator[tuple[Any, float]]:
    """Yield each operator with its seconds less those of the operators that it called."""
    threads = defaultdict(list)
    for event in operators:
        threads[event.get("pid"), event.get("tid")].append((*_times(event), event))
    for events in threads.values():
        events.sort(key=lambda timed: (timed[0], -timed[1]))
        own = [end - start for start, end, _ in events]
        callers: list[int] = []
        for k, (start, end, _) in enumerate(events):
            while callers and events[callers[-1]][1] <= start:
                callers.pop()
            if callers:
                own[callers[-1]] -= end - start
            callers.append(k)
        yield from zip((event for _, _, event in events), own, strict=True)
