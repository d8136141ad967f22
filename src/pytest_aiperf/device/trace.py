"""Traces one call on the GPU through CUPTI: launches, kernels, copies and their times."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.model import Trace
from pytest_aiperf.rules.stats import covered

MAX_NAMES: Final = 16
"""Most kernel names in a trace, to keep records small; those with the longest times are kept."""
_DIRECTIONS: Final = {
    "HtoD": "host to device", "DtoH": "device to host",
    "DtoD": "device to device", "PtoP": "peer to peer",
}  # fmt: skip
"""Kind of a copy, by the abbreviation in its event's name."""


def trace(call: Callable[[], object], device: Any) -> Trace | None:
    """Trace one warmed-up call on the device's stream; None if the call uses no GPU.

    CUPTI traces the launches of all libraries in the process. It stays loaded and slows later
    launches down: time nothing after a trace.
    """
    import torch

    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # restarting CUPTI breaks captured graphs
    kinds = torch.profiler.ProfilerActivity
    # CUPTI starts in the warm-up step, before the traced call
    steps = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with warnings.catch_warnings(), device.current():
        warnings.simplefilter("ignore")  # about profiler options that this code does not set
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA], schedule=steps) as profiler:
            call()
            device.synchronize()
            profiler.step()
            call()
            device.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            content = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    return read(content["traceEvents"])


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
        size = event.args.get("bytes", 0)
        work.append(Activity(kind, event.name, event.start, event.end, cause, size))
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
    """Summarize the GPU activity in a Chrome trace; None if the trace has none."""
    work = activities(events(content))
    if not work:
        return None
    kernels = sum(activity.kind == "kernel" for activity in work)
    busy, span = busy_and_span(work)
    names = tuple(kernel_seconds(work))[:MAX_NAMES]
    return Trace(launches(work), kernels, len(work) - kernels, busy, span, names)
