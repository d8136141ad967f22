"""GPU activities and CUDA API calls with their times, from nsys and PyTorch's profiler."""

import gzip
import json
import math
import re
import sqlite3
import subprocess
import tempfile
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple, TypeGuard

from pytest_aiperf.device import trace
from pytest_aiperf.device.trace import Activity, Event
from pytest_aiperf.errors import CaptureFailed
from pytest_aiperf.rules.stats import covered
from pytest_aiperf.text import shorten, si

from . import gaps, injected
from .ranges import ApiCall, Range, RangeTime, enclosing, times

RANGE: Final = "aiperf"
"""Name of the NVTX range, or of the record_function, around the profiled calls."""
TOP: Final = 5  #: Maximum number of kernels, and of operators, in a profile's notes.

Figures = dict[str, tuple[float, str]]  #: A figure's name to its value and unit.


class Reading(NamedTuple):
    """What a parser reads from a profiler's file."""

    figures: Figures
    kernels: list[str]  #: Names of the kernels, in order of decreasing time.
    notes: list[str]
    ranges: tuple[RangeTime, ...] = ()  #: Time per range of the profiled program.


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a capture that is read."""

    nvtx: str = ""
    """Name of a range: only what is launched inside it counts. If empty, that is the range RANGE,
    or the whole capture if it has no such range."""
    kernel: str = ""  #: Regular expression: only kernels count in whose names it is found.


ALL: Final = Selection()  #: What the profiler recorded of the profiled calls.


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a capture recorded. Correlation ids are unique, also if it has several processes."""

    activities: list[Activity]
    calls: list[ApiCall]
    ranges: list[Range]
    main: Mapping[Hashable, Hashable]  #: The main thread of each process.
    places: Mapping[int, tuple[int, int]]
    """Process id and GPU of what an API call launched, by correlation id; empty if unknown."""
    frames: Sequence[Range] = ()  #: Functions of Python that ran; none if no stacks were recorded.
    samples: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Time and value of each sample of a GPU metric, by the name of its figure."""


_COPIES: Final = {
    1: "host to device", 2: "device to host", 8: "device to device", 10: "peer to peer",
}  # fmt: skip
"""CUPTI's number for a kind of copy (CUpti_ActivityMemcpyKind), and the kind's name."""
_HOST_COPIES: Final = ("host to device", "device to host")
"""Kinds of copies that take the time of the link to the host."""
_WAITS: Final = re.compile(
    r"cu(da)?((Ctx|Device|Event|Stream|Thread)Synchronize|Memcpy(?!\w*(Async|Peer|DtoD)))"
)
"""Names of API calls that return when the GPU has finished; nsys appends a version to some."""
_LAUNCHES: Final = re.compile(r"cu(da)?(Graph)?(Launch|Mem(cpy|set))")
"""Names of API calls that put work on a GPU."""
_GPU_METRICS: Final = {
    "sm active": "SMs Active", "sm issue": "SM Issue", "tensor active": "Tensor Active",
    "dram read": "DRAM Read", "dram write": "DRAM Write",
}  # fmt: skip
"""Figures of nsys's GPU metrics, and how the names of their metrics begin; all are percentages."""
GPU_COUNTS: Final = ("kernels", "launches", "copies")  #: Figures that count work on the GPU.
_NO_KERNELS: Final = (
    "no kernels were recorded, so GPU times are missing: the program launched work {} times, and "
    "PyTorch's profiler got none of it from CUPTI (another profiler in the same process?); use nsys"
)
_FRAME: Final = "python_function"  #: Category of the events of Python's functions.
_MODULE: Final = "nn.Module: "  #: How the frame of a module's call is named in such an event.
_PRODUCTS: Final = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_ITEM_BYTES: Final = {
    "c10::Half": 2, "c10::BFloat16": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1
}  # fmt: skip
"""Bytes per value of the types whose matrix products use tensor cores, by their name in a trace."""
_ALIGNED_BYTES: Final = 16
"""The fastest kernels need rows that begin at multiples of this many bytes: it is the size of a
thread's widest load, and TMA requires it."""
_PID_SHIFT: Final = 24  #: Lower bits of nsys's globalTid, which hold the thread id.
_PID_BITS: Final = 24  #: Next bits of nsys's globalTid, which hold the process id.
_PUSH_POP: Final = 59  #: nsys's type of the event of a range that nests within its thread.
_START_END: Final = 60  #: nsys's type of the event of a range that may end in any thread.
_NEW_DOMAIN: Final = 75  #: nsys's type of the event that names a domain of ranges.


def nsys(artifact: Path, binary: str | None = None, selection: Selection = ALL) -> Reading:
    """Read an nsys report or its SQLite export; ``binary`` is the nsys that makes the export."""
    return _nsys_reading(_nsys_timeline(artifact, binary), artifact, selection)


def nsys_by_gpu(
    artifact: Path, binary: str | None = None, selection: Selection = ALL
) -> dict[str, Reading]:
    """Read an nsys report process by process and GPU by GPU; the key names the GPU.

    The readings of a single GPU and process have the key "". GPUs on which the selected range
    launched nothing are left out, unless it launched nothing on any GPU.
    """
    timeline = _nsys_timeline(artifact, binary)
    places = sorted({*timeline.places.values()}, key=lambda place: (place[1], place[0]))
    if len(places) < 2:
        return {"": _nsys_reading(timeline, artifact, selection)}
    shared = Counter(gpu for _, gpu in places)
    readings, error = {}, None
    for process, gpu in places:
        name = f"GPU {gpu} (pid {process})" if shared[gpu] > 1 else f"GPU {gpu}"
        try:
            part = _part(timeline, process, gpu)
            readings[name] = _nsys_reading(part, artifact, selection)
        except CaptureFailed as failure:
            error = failure
    if not readings and error is not None:
        raise error
    return readings


def _part(timeline: Timeline, process: int, gpu: int) -> Timeline:
    """Return what one process did on one GPU; its API calls count to each of its GPUs."""
    place = (process, gpu)
    return replace(
        timeline,
        activities=[a for a in timeline.activities if timeline.places[a.correlation] == place],
        calls=[
            call
            for call in timeline.calls
            if _pid(call.process) == process
            and timeline.places.get(call.correlation, place) == place
        ],
        ranges=[each for each in timeline.ranges if _pid(each.process) == process],
    )


def _pid(process: Hashable) -> int:
    """Return the process id in the upper bits of a globalTid or globalPid."""
    return int(process) & ((1 << _PID_BITS) - 1) if isinstance(process, int) else 0


def _nsys_timeline(artifact: Path, binary: str | None) -> Timeline:
    exported = artifact
    if artifact.suffix != ".sqlite":
        exported = artifact.with_suffix(".sqlite")
        _export(artifact, exported, binary)
    try:
        with closing(sqlite3.connect(f"{exported.absolute().as_uri()}?mode=ro", uri=True)) as db:
            texts = dict(_rows(db, "StringIds", ("id", "value")))
            launched = list(_nsys_activities(db, texts))
            columns = ("start", "end", "correlationId", "globalTid", "nameId")
            rows = _rows(db, "CUPTI_ACTIVITY_KIND_RUNTIME", columns)
            calls = [_api_call(texts, row) for row in rows]
            ranges = list(_nsys_ranges(db, texts))
            samples = _nsys_samples(db)
    except sqlite3.Error as error:
        raise CaptureFailed(f"{exported} is not an export of an nsys report ({error})") from error
    processes = {*(call.process for call in calls), *(each.process for each in ranges)}
    return Timeline(
        activities=[activity for activity, _, _ in launched],
        calls=calls,
        ranges=ranges,
        # on Linux the main thread has the id of its process
        main={each: (each << _PID_SHIFT) | _pid(each) for each in processes if _is_int(each)},
        places={activity.correlation: (_pid(process), gpu) for activity, process, gpu in launched},
        samples=samples,
    )


def _nsys_samples(db: sqlite3.Connection) -> dict[str, list[tuple[float, float]]]:
    """Return the samples of GPU metrics, as shares; none if several GPUs were sampled.

    nsys numbers the GPUs that it samples otherwise than CUDA numbers those of a process.
    """
    metrics = _rows(db, "TARGET_INFO_GPU_METRICS", ("typeId", "metricId", "metricName"))
    names = {
        metric: figure
        for _, metric, name in metrics
        for figure, start in _GPU_METRICS.items()
        if name.startswith(start) and "%" in name
    }
    if not names or len({gpu for gpu, _, _ in metrics}) > 1:
        return {}
    selected = f"WHERE metricId IN ({', '.join(map(str, names))})"
    samples: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for at, metric, percentage in _rows(
        db, "GPU_METRICS", ("timestamp", "metricId", "value"), selected
    ):
        samples[names[metric]].append((at / 1e9, percentage / 100))
    return dict(samples)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int)


def _api_call(texts: Mapping[Any, str], row: Sequence[Any]) -> ApiCall:
    start, end, correlation, thread, name = row
    process = (thread or 0) >> _PID_SHIFT
    unique = _unique(process, correlation)
    return ApiCall(start / 1e9, end / 1e9, unique, process, thread or 0, texts.get(name, ""))


def _unique(process: int, correlation: int | None) -> int:
    """Make a correlation id, which counts from 1 in every process, unique in the capture."""
    return (process << 32) | (correlation or 0)


def _nsys_ranges(db: sqlite3.Connection, texts: Mapping[Any, str]) -> Iterator[Range]:
    """Yield all NVTX ranges; the name of one in a domain is "DOMAIN:NAME", as nsys prints it."""
    columns = ("start", "end", "text", "textId", "eventType", "globalTid", "domainId")
    rows = _rows(db, "NVTX_EVENTS", columns)
    domains = {
        ((thread or 0) >> _PID_SHIFT, domain): text or texts.get(text_id, "")
        for _, _, text, text_id, kind, thread, domain in rows
        if kind == _NEW_DOMAIN
    }
    for start, end, text, text_id, kind, thread, domain in rows:
        if kind not in (None, _PUSH_POP, _START_END) or (kind is None and end is None):
            continue  # a mark
        process = (thread or 0) >> _PID_SHIFT
        prefix = f"{named}:" if (named := domains.get((process, domain))) else ""
        name = f"{prefix}{text if text is not None else texts.get(text_id, '')}"
        seconds = math.inf if end is None else end / 1e9
        nested = None if kind != _PUSH_POP or name == RANGE else thread
        yield Range(name, start / 1e9, seconds, process, nested)


def _nsys_reading(timeline: Timeline, artifact: Path, selection: Selection) -> Reading:
    selected = _select(timeline, artifact, selection)
    if not selected.activities:
        what = "nothing that ran on a GPU"
        if selection.kernel and timeline.activities:
            what = f"no kernel with {selection.kernel!r} in its name"
        is_ranged = _windows(timeline, selection)
        where = f" inside the range {selection.nvtx or RANGE!r}" if is_ranged else ""
        raise CaptureFailed(
            f"{artifact} has {what}{where}: "
            "check that the call launches work, and that nsys traces CUDA"
        )
    return _reading(selected, _windows(timeline, selection))


def torch_trace(artifact: Path, selection: Selection = ALL) -> Reading:
    """Read a Chrome trace of torch.profiler; the notes list operators and graph breaks."""
    content = load_json(artifact, "torch.profiler trace")
    if not isinstance(content, dict):
        raise CaptureFailed(f"{artifact} is not a torch.profiler trace: it has no events")
    try:
        events = trace.events(content.get("traceEvents", ()))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CaptureFailed(f"{artifact} is not a torch.profiler trace ({error!r})") from error
    ranges = [
        Range(e.name, e.start, e.end, thread=None if e.name == RANGE else e.thread)
        for e in events
        # torch.compile marks a dozen phases of each compilation
        if (e.category == "user_annotation" and "compile_id=" not in e.name)
        or (e.category == _FRAME and e.name.startswith(_MODULE))
    ]
    calls = [
        ApiCall(e.start, e.end, e.args.get("correlation", 0), thread=e.thread, name=e.name)
        for e in events
        if e.category in ("cuda_runtime", "cuda_driver")
    ]
    # on Linux the main thread has the id of its process
    threads = (e.thread for e in events if e.thread[0] == e.thread[1])
    main: dict[Hashable, Hashable] = {0: next(threads, None)}
    frames = [Range(e.name, e.start, e.end, 0, e.thread) for e in events if e.category == _FRAME]
    timeline = Timeline(trace.activities(events), calls, ranges, main, {}, frames)
    selected = _select(timeline, artifact, selection)
    windows = _windows(timeline, selection)
    is_inside = _is_inside(windows)
    operators = [e for e in events if e.category == "cpu_op" and is_inside(e.start)]
    if not (selected.activities or operators):
        where = f" inside the range {selection.nvtx or RANGE!r}" if windows else ""
        raise CaptureFailed(
            f"{artifact} has no operators and no kernels{where}: "
            "the call uses neither PyTorch nor a GPU; --profile=perf shows what the CPU does"
        )
    figures, kernels, notes, rows = _reading(selected, windows)
    missing: list[str] = []
    launched = sum(1 for call in calls if _LAUNCHES.match(call.name))
    if launched and not timeline.activities:
        for name in GPU_COUNTS:  # they are unknown, and not 0
            del figures[name]
        missing = [_NO_KERNELS.format(launched)]
    figures["operators"] = (len(operators), "")
    for name in injected.COMPILER_FIGURES:
        if name in content:
            figures[name.replace("_", " ")] = (float(content[name]), "")
    advice = _misaligned(operators) if selected.activities else []
    notes = [*missing, *_top_operators(operators, events), *advice, *notes]
    return Reading(figures, kernels, notes, rows)


def _export(report: Path, exported: Path, binary: str | None) -> None:
    """Export an nsys report to SQLite, unless an up-to-date export exists."""
    if not report.is_file():
        raise CaptureFailed(f"nsys did not write {report}: see the log beside it")
    if exported.is_file() and exported.stat().st_mtime_ns >= report.stat().st_mtime_ns:
        return
    if binary is None:
        raise CaptureFailed(f"{report} cannot be read without nsys: install Nsight Systems")
    try:
        # elsewhere at first: nsys may leave a part of an export, which would pass for a whole one
        with tempfile.TemporaryDirectory(prefix=".export-", dir=exported.parent) as scratch:
            whole = Path(scratch, exported.name)
            options = ("--type=sqlite", "--force-overwrite=true", f"--output={whole}")
            command = [binary, "export", *options, str(report)]
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False
            )
            if done.returncode or not whole.is_file():
                output = " ".join((done.stderr or done.stdout).split())[-200:]
                raise CaptureFailed(
                    f"nsys could not export {report} ({output}): is it older than the report?"
                )
            whole.replace(exported)
    except OSError as error:
        raise CaptureFailed(f"{report} cannot be exported: {error}") from error


def _rows(db: sqlite3.Connection, table: str, columns: Sequence[str], where: str = "") -> list[Any]:
    """Read columns of a table.

    nsys leaves out empty tables, so a missing table has no rows. A column that this version of nsys
    does not export is None in every row.
    """
    present = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
    fields = [each if each in present else "NULL" for each in columns]
    query = f"SELECT {', '.join(fields)} FROM {table} {where}"  # noqa: S608  all are constants
    return db.execute(query).fetchall() if present else []


def _nsys_activities(
    db: sqlite3.Connection, texts: Mapping[Any, str]
) -> Iterator[tuple[Activity, int, int]]:
    """Yield each activity with its process and its GPU."""
    columns = ("start", "end", "correlationId", "globalPid", "deviceId")
    for table, kind in (
        ("KERNEL", "kernel"), ("MEMCPY", ""), ("MEMSET", "memset"), ("GRAPH_TRACE", "graph"),
    ):  # fmt: skip
        more = ("copyKind", "bytes", "demangledName")
        rows = _rows(db, f"CUPTI_ACTIVITY_KIND_{table}", (*columns, *more))
        for start, end, correlation, pid, gpu, copy_kind, size, name in rows:
            process = (pid or 0) >> _PID_SHIFT
            yield (
                Activity(
                    kind or _COPIES.get(copy_kind, "other copy"),
                    texts.get(name, ""),
                    start / 1e9,
                    end / 1e9,
                    _unique(process, correlation),
                    size or 0,
                ),
                process,
                gpu or 0,
            )


def load_json(artifact: Path, what: str) -> Any:
    """Read JSON that may be gzipped; ``what`` names the expected content in the error message."""
    try:
        content = artifact.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        # kernel names may contain control characters, which strict JSON forbids
        return json.loads(content, strict=False)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise CaptureFailed(f"{artifact} is not a {what} ({error})") from error


def _is_inside(windows: Collection[Range]) -> Callable[[float], bool]:
    """Return a function that tests whether a moment is in a window; true without windows."""
    starts: list[float] = []
    ends: list[float] = []
    for each in sorted(windows, key=lambda window: window.start):
        if ends and each.start <= ends[-1]:
            ends[-1] = max(ends[-1], each.end)
        else:
            starts.append(each.start)
            ends.append(each.end)

    def test(moment: float) -> bool:
        index = bisect_right(starts, moment) - 1
        return not starts or (index >= 0 and moment <= ends[index])

    return test


def _windows(timeline: Timeline, selection: Selection) -> list[Range]:
    """Return the ranges to which a selection is limited; none if it has no limits."""
    return [each for each in timeline.ranges if each.name == (selection.nvtx or RANGE)]


def _select(timeline: Timeline, artifact: Path, selection: Selection) -> Timeline:
    """Keep the API calls that start in the selected range, and what these calls launched."""
    windows = _windows(timeline, selection)
    if selection.nvtx and not windows:
        names = ", ".join(dict.fromkeys(each.name for each in timeline.ranges)) or "none"
        raise CaptureFailed(
            f"{artifact} has no range {selection.nvtx!r}: its ranges are {names[:300]}"
        )
    activities, calls, ranges = timeline.activities, timeline.calls, timeline.ranges
    if windows:
        around = enclosing(calls, windows, timeline.main)
        calls = [call for call, inside in zip(calls, around, strict=True) if inside]
        launched = {call.correlation for call in calls}
        activities = [each for each in activities if each.correlation in launched]
        is_inside = _is_inside(windows)
        ranges = [each for each in ranges if is_inside(each.start)]
    if selection.kernel:
        pattern = re.compile(selection.kernel)
        activities = [a for a in activities if a.kind == "kernel" and pattern.search(a.name)]
    return replace(timeline, activities=activities, calls=calls, ranges=ranges)


def _reading(timeline: Timeline, windows: Sequence[Range]) -> Reading:
    """Compute the figures that nsys and torch.profiler have in common."""
    activities, calls = timeline.activities, timeline.calls
    copies = [activity for activity in activities if activity.is_copy]
    counts = Counter(activity.kind for activity in activities)
    figures: Figures = {
        "kernels": (counts["kernel"], ""),
        "launches": (trace.launches(activities), ""),
        "copies": (len(copies), ""),
        "api time": (covered((call.start, call.end) for call in calls), "s"),
    }
    if waits := sum(1 for call in calls if _WAITS.match(call.name)):
        figures["synchronizations"] = (waits, "")
    figures |= {f"{kind}s": (counts[kind], "") for kind in ("graph", "memset") if counts[kind]}
    moved: Counter[str] = Counter()
    for copy in copies:
        moved[copy.kind] += copy.bytes
    figures |= {f"{kind} bytes": (size, "B") for kind, size in moved.items()}
    if host := [(copy.start, copy.end) for copy in copies if copy.kind in _HOST_COPIES]:
        figures["host copy time"] = (covered(host), "s")
    if activities:
        busy, span = trace.busy_and_span(activities)
        figures |= {"span": (span, "s"), "busy": (busy, "s"), "gaps": (span - busy, "s")}
        figures["gap share"] = ((span - busy) / span if span else 0.0, "share")
        if seconds := gaps.long_seconds(activities):
            figures["long gaps"] = (seconds, "s")
        first, end = min(a.start for a in activities), max(a.end for a in activities)
        for name, samples in timeline.samples.items():
            if shares := [share for at, share in samples if first <= at <= end]:
                figures[name] = (fmean(shares), "share")
    if windows:
        last = max([*(a.end for a in activities), *(call.end for call in calls)], default=0.0)
        ended = ((each.start, each.end if each.end < math.inf else last) for each in windows)
        figures["range"] = (covered(ended), "s")
    by_kernel = trace.kernel_seconds(activities)
    notes = [f"{shorten(name)}: {si(s, 's')}" for name, s in list(by_kernel.items())[:TOP]]
    named = [each for each in timeline.ranges if each.name != RANGE]
    rows = times(activities, calls, named, timeline.main)
    notes += gaps.describe(activities, calls, timeline.frames or named, timeline.main)
    return Reading(figures, list(by_kernel), notes, rows)


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
    on_gpu = {name: f"{si(gpu[name], 's')} on the GPU, " if by_id else "" for name in top}
    return [
        f"{name}: {on_gpu[name]}{si(host[name], 's')} on the host, {calls[name]} calls"
        for name in top
    ]


def _misaligned(operators: Iterable[Event]) -> list[str]:
    """Describe the matrix products whose rows are misaligned for tensor cores.

    Traces without shapes and strides have none: deep_dive records them.
    """
    calls: Counter[tuple[str, int, int]] = Counter()
    for operator in operators:
        inputs = zip(
            operator.args.get("Input type", ()),
            operator.args.get("Input Dims", ()),
            operator.args.get("Input Strides", ()),
            strict=False,
        )
        for dtype, sizes, strides in inputs if operator.name in _PRODUCTS else ():
            fitting = _ALIGNED_BYTES // _ITEM_BYTES.get(dtype, _ALIGNED_BYTES)
            matrix = zip(sizes[-2:], strides[-2:], strict=False) if len(sizes) > 1 else ()
            row = max((stride for size, stride in matrix if size > 1), default=1)
            if row > 1 and row % fitting:
                calls[f"{operator.name} of {sizes}", row, fitting] += 1
    return [
        f"{product}, {count} calls: a row has {row} values, {row % fitting} more than a multiple "
        f"of {fitting}, so rows are misaligned for tensor cores: pad it to {row - row % -fitting}"
        for (product, row, fitting), count in calls.most_common(TOP)
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
