"""Trace one call on the GPU through CUPTI: launches, kernels, copies and their times."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.model import Trace
from pytest_aiperf.rules.stats import covered

MAX_NAMES: Final = 16
"""Kernel names in a trace: those of the longest total time, so that records stay small."""


def trace(call: Callable[[], object], device: Any) -> Trace | None:
    """Trace one warmed-up call on the device's stream; None if nothing of it ran on the GPU.

    CUPTI sees every library of the process. It stays loaded and slows launches down: time nothing
    after a trace.
    """
    import torch

    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # a captured graph does not survive its return
    kinds = torch.profiler.ProfilerActivity
    # a warm-up step, or CUPTI's start would fall into the call
    steps = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with warnings.catch_warnings(), device.current():
        warnings.simplefilter("ignore")  # the profiler warns about options that are not used here
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


def read(events: Iterable[Mapping[str, Any]]) -> Trace | None:
    """Sum up the events of a Chrome trace, whose times are in microseconds."""
    items = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not items:
        return None
    kernels = [e for e in items if e["cat"] == "kernel"]
    # all work of one launch, a graph's too, has the launch's correlation id
    launches = {e.get("args", {}).get("correlation", -i) for i, e in enumerate(items)}
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in items]
    total_us: Counter[str] = Counter()
    for kernel in kernels:
        total_us[kernel["name"]] += kernel["dur"]
    return Trace(
        launches=len(launches),
        kernels=len(kernels),
        copies=len(items) - len(kernels),
        busy=covered(spans) * 1e-6,  # work of several streams overlaps
        span=(max(end for _, end in spans) - min(begin for begin, _ in spans)) * 1e-6,
        names=tuple(name for name, _ in total_us.most_common(MAX_NAMES)),
    )
