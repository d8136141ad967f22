"""What one call does on the GPU, as CUPTI sees it: launches, kernels, copies, and when."""

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

MOST_NAMES: Final = 16

_COPIES: Final = ("gpu_memcpy", "gpu_memset")


def trace(call: Callable[[], object], clock: Any) -> Trace | None:
    """Watch one warmed call on the clock's stream; None when nothing of it ran on the GPU.

    CUPTI sees every library of the process. It stays loaded and slows launches down: no time is
    measured after it.
    """
    import torch

    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # a captured graph does not survive its return
    kinds = torch.profiler.ProfilerActivity
    # without the step before, CUPTI's own start would fall into the call
    steps = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with warnings.catch_warnings(), clock.current():
        warnings.simplefilter("ignore")  # it tells of what was not asked for
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA], schedule=steps) as profiler:
            call()
            clock.synchronize()
            profiler.step()
            call()
            clock.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            written = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    return read(written["traceEvents"])


def read(events: Iterable[Mapping[str, Any]]) -> Trace | None:
    """Sum up the events of a Chrome trace, which count in microseconds."""
    items = [e for e in events if e.get("cat") in ("kernel", *_COPIES)]
    if not items:
        return None
    kernels = [e for e in items if e["cat"] == "kernel"]
    # what the host launches, a graph too, has one number, which all that it runs carry
    launches = {e.get("args", {}).get("correlation", -i) for i, e in enumerate(items)}
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in items]
    longest: Counter[str] = Counter()
    for kernel in kernels:
        longest[kernel["name"]] += kernel["dur"]
    return Trace(
        launches=len(launches),
        kernels=len(kernels),
        copies=len(items) - len(kernels),
        busy=covered(spans) * 1e-6,  # streams run beside each other
        span=(max(end for _, end in spans) - min(begin for begin, _ in spans)) * 1e-6,
        names=tuple(name for name, _ in longest.most_common(MOST_NAMES)),
    )
