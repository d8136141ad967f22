"""Traces one call on the GPU through CUPTI: API calls, kernels, copies and their times."""

import json
import math
import os
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.model import Trace
from pytest_aiperf.rules.stats import covered

MAX_NAMES: Final = 64
"""Most kernel names in a trace, to keep records small; those with the longest times are kept."""
CALLS: Final = 3
"""Number of traced calls; the one with the median span is returned. A single call may be disturbed
by the pause in which the profiler starts to record."""
LONG_CALL_S: Final = 0.2
"""If a call takes longer than this, only one is traced, and clocks are not stabilized before it:
the pause hardly matters then, and traces of many thousand kernels take long to write and to read.
"""
RANGE: Final = "aiperf"  #: Name of the event that marks a traced call.
_DIRECTIONS: Final = {
    "HtoD": "host to device", "DtoH": "device to host",
    "DtoD": "device to device", "PtoP": "peer to peer",
}  # fmt: skip
"""Kind of a copy, by the abbreviation in its event's name."""
_HOST_MEMORY: Final = {"Pageable": " (pageable)", "Pinned": " (pinned)"}
"""Suffix of a copy's kind, by the kind of host memory in its event's name."""


def load(call: Callable[[], object], device: Any) -> None:
    """Load CUPTI by tracing a short call; the trace itself is not read.

    CUPTI stays loaded and slows later launches down: time nothing after this.
    """
    import torch

    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # restarting CUPTI breaks captured graphs
    kinds = torch.profiler.ProfilerActivity
    with warnings.catch_warnings(), device.current():
        warnings.simplefilter("ignore")  # about profiler options that this code does not set
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]):
            call()
            device.synchronize()


def trace(
    call: Callable[[], object],
    device: Any,
    before: Callable[[], object] = lambda: None,
    call_s: float = 0.0,
) -> Callable[[], Trace | None]:
    """Trace warmed-up calls on the device's stream; return a function that reads the trace.

    Writing and reading a trace takes long and needs no GPU. The function returns None if the call
    uses no GPU. ``before`` runs untraced before each traced call: it puts caches and the queue of
    the stream into the state in which the claim is timed. A call takes about ``call_s`` seconds.
    CUPTI traces the launches of all libraries in the process. Time nothing after a trace, see
    :func:`load`.
    """
    import torch

    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # restarting CUPTI breaks captured graphs
    kinds = torch.profiler.ProfilerActivity
    is_long = call_s >= LONG_CALL_S
    # CUPTI starts in the warm-up step, before the traced calls
    steps = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with warnings.catch_warnings(), device.current():
        warnings.simplefilter("ignore")  # about profiler options that this code does not set
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA], schedule=steps) as profiler:
            # in this step, because starting CUPTI lets the GPU idle, and its clocks drop
            if not is_long:
                device.stabilize_clocks(call)
            profiler.step()
            for _ in range(1 if is_long else CALLS):
                before()
                with torch.profiler.record_function(RANGE):
                    call()
                device.synchronize()

    # now, because the next trace or count of this process discards this one's activities
    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name) / "trace.json"
    profiler.export_chrome_trace(str(file))

    def reading() -> Trace | None:
        with folder:
            content = json.loads(file.read_text(encoding="utf-8", errors="replace"))
        return read(content["traceEvents"])

    return reading


@dataclass(frozen=True, slots=True)
class Event:
    """A complete event of a Chrome trace; times are seconds after the trace's first event."""

    category: str
    name: str
    start: float
    end: float
    thread: tuple[object, object]  #: Ids of the process and the thread.
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Activity:
    """Work on the GPU; times are in seconds."""

    kind: str  #: "kernel", "graph", "memset", or the direction of a copy such as "host to device".
    name: str
    start: float
    end: float
    correlation: int
    """Id of the host's API call that caused it; all kernels of a graph launch share one id."""
    bytes: int = 0
    grid: int = 0  #: Blocks of a kernel; 0 if unknown.

    @property
    def is_copy(self) -> bool:
        return self.kind not in ("kernel", "graph", "memset")


def events(content: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Read the complete events of a Chrome trace, whose times are in microseconds."""
    complete = [e for e in content if e.get("ph") == "X" and "cat" in e]
    # relative to the first event: a float of seconds since boot would round a kernel's time
    first = min((float(e["ts"]) for e in complete), default=0.0)
    parsed = []
    for e in complete:
        start = float(e["ts"]) - first
        end, thread = start + float(e.get("dur", 0)), (e.get("pid"), e.get("tid"))
        name, args = e.get("name", ""), e.get("args", {})
        parsed.append(Event(e["cat"], name, start * 1e-6, end * 1e-6, thread, args))
    return parsed


def activities(events: Iterable[Event]) -> list[Activity]:
    """Return the kernels, copies and memsets among the events of a trace."""
    work = []
    for number, event in enumerate(events):
        if event.category == "gpu_memcpy":  # "Memcpy HtoD (Pinned -> Device)"
            kind = _DIRECTIONS.get(event.name[7:11], "other copy")
        elif event.category in ("kernel", "gpu_memset"):
            kind = event.category.removeprefix("gpu_")
        else:
            continue
        cause = event.args.get("correlation", ~number)
        size, grid = event.args.get("bytes", 0), math.prod(event.args.get("grid", (0,)))
        work.append(Activity(kind, event.name, event.start, event.end, cause, size, grid))
    return work


def launches(activities: Iterable[Activity]) -> int:
    """Count the host's API calls that put work on the GPU: kernels, graphs, copies, memsets."""
    return len({activity.correlation for activity in activities})


def kernel_seconds(activities: Iterable[Activity]) -> dict[str, float]:
    """Add up the time of each kernel name; the longest comes first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for activity in activities:
        if activity.kind == "kernel":
            seconds[activity.name] += activity.end - activity.start
    # rounded, so that times that differ only by rounding errors keep their order
    return dict(sorted(seconds.items(), key=lambda item: -round(item[1], 12)))


def busy_and_span(activities: Collection[Activity]) -> tuple[float, float]:
    """Return the seconds with at least one activity, and those from first start to last end."""
    busy = covered((a.start, a.end) for a in activities)  # work on several streams may overlap
    return busy, max(a.end for a in activities) - min(a.start for a in activities)


def read(content: Iterable[Mapping[str, Any]]) -> Trace | None:
    """Summarize the traced call with the median time on the GPU; None if none used the GPU.

    A trace in which no calls are marked is that of a single call.
    """
    recorded = events(content)
    work = activities(recorded)
    api = {
        event.args.get("correlation"): event.start
        for event in recorded
        if event.category in ("cuda_runtime", "cuda_driver")
    }
    calls = sorted(
        (e.start, e.end) for e in recorded if e.category == "user_annotation" and e.name == RANGE
    ) or [(-math.inf, math.inf)]
    traces = []
    for (start, end), (following, _) in pairwise([*calls, (math.inf, math.inf)]):
        # CUPTI does not trace every API of the driver. Work whose API call is unknown is found by
        # its own time, which is before the next call: the host waits for the GPU between calls.
        of_call = [
            activity
            for activity in work
            if start
            <= api.get(activity.correlation, activity.start)
            < (end if activity.correlation in api else following)
        ]
        if of_call:
            api_calls = sum(start <= begun < end for begun in api.values())
            traces.append(_summary(of_call, api_calls if api else None))
    return sorted(traces, key=lambda t: t.span)[len(traces) // 2] if traces else None


def _summary(work: Sequence[Activity], api_calls: int | None) -> Trace:
    """Summarize the GPU activity of one call."""
    seconds = dict(list(kernel_seconds(work).items())[:MAX_NAMES])
    counts, grids, copied = Counter[str](), Counter[str](), Counter[str]()
    for activity in work:
        if activity.kind == "kernel":
            counts[activity.name] += 1
            grids[activity.name] = max(grids[activity.name], activity.grid)
        elif activity.is_copy:
            memory = (suffix for kind, suffix in _HOST_MEMORY.items() if kind in activity.name)
            copied[activity.kind + next(memory, "")] += activity.bytes
    busy, span = busy_and_span(work)
    running = [(activity.start, activity.end) for activity in work if activity.kind == "kernel"]
    copying = [(activity.start, activity.end) for activity in work if activity.is_copy]
    kernels = counts.total()
    return Trace(
        launches=launches(work),
        kernels=kernels,
        copies=len(work) - kernels,
        busy=busy,
        span=span,
        names=tuple(seconds),
        counts=tuple(counts[name] for name in seconds),
        grids=tuple(grids[name] for name in seconds),
        seconds=tuple(seconds.values()),
        total=sum(activity.end - activity.start for activity in work),
        copying=covered(copying),
        hidden=covered(copying) + covered(running) - covered([*copying, *running]),
        copied=dict(copied),
        api_calls=api_calls,
    )
