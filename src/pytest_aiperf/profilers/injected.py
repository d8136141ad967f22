"""Records what a Python process does in PyTorch, without a change of its program.

`capture` copies this file to a folder on PYTHONPATH, under the name sitecustomize.py: every Python
process of the profiled command then runs it when it starts. The interpreter may be another one than
that of pytest-aiperf, so this file imports nothing of the package, and works from Python 3.9 on.

Recording starts when PyTorch initializes CUDA, or where there is no GPU after `import torch`, and
ends with the process. A process that does nothing in PyTorch, such as torchrun itself, leaves no
file.
"""

from __future__ import annotations

import atexit
import csv
import importlib.util
import json
import os
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

VARIABLE = "PYTEST_AIPERF_RECORD"
"""Environment variable with the settings, as JSON: "hook" is "torch" or "memory", "folder" is where
files are written, "preset" is that of the tool, "range" is the range that counts, or "", and
"steps" are the first step of the optimizer to record, from 0, and the one after the last, or empty.
"""
COMPILER_FIGURES = ("graph_breaks", "recompilations")
"""Names in a trace's metadata of counts by torch.compile since the start of the process."""
OPERATORS = ".operators.csv"  #: Suffix of the table of all operators.
_OPERATOR_FIGURES = {
    "count": "calls",
    "self_device_time_total": "GPU self us", "device_time_total": "GPU total us",
    "self_cpu_time_total": "host self us", "cpu_time_total": "host total us",
    "self_device_memory_usage": "GPU self bytes", "self_cpu_memory_usage": "host self bytes",
    "flops": "operations",
}  # fmt: skip
"""PyTorch's figures of an operator, and the heads of their columns in the table of operators."""


class _TorchFinder:
    """Calls a function once PyTorch has been imported; until then it is in sys.meta_path."""

    def __init__(self, imported: Callable[[Any], object]) -> None:
        self._imported = imported

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec: ModuleSpec | None = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # a program may only ask whether torch is installed
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._imported(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader only
        return spec


def has_gpu() -> bool:
    """Return whether a GPU is visible, without CUDA: a process may initialize it after a fork."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return not hidden and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))


def _when_used(torch: Any, start: Callable[[], object]) -> None:
    """Call ``start`` when CUDA is initialized: earlier, programs may still choose their GPUs."""
    if not has_gpu():
        start()
        return
    initialise = torch.cuda._lazy_init
    is_started: list[bool] = []

    def lazy_init() -> None:
        initialise()
        # this is called again while CUDA is being initialized: torch then checks the GPUs, say
        if torch.cuda.is_initialized() and not is_started:
            is_started.append(True)
            start()

    torch.cuda._lazy_init = lazy_init


def _file_name() -> str:
    """Name a process's files by its rank; those of further processes and programs by their pid."""
    multiprocessing: Any = sys.modules.get("multiprocessing")
    is_worker = multiprocessing is not None and multiprocessing.parent_process() is not None
    rank = os.environ.get("RANK", "")
    return f"pid{os.getpid()}" if is_worker or not rank else rank


def _record_trace(settings: dict[str, Any], torch: Any) -> Callable[[], object]:
    """Record operators, CUDA API calls and kernels; return a function that writes the trace.

    At the latest, the end of the process writes it, or that of another thread than the main one.
    """
    deep, on_gpu = settings["preset"] != "minimal", torch.cuda.is_initialized()
    kinds = torch.profiler.ProfilerActivity
    profile = torch.profiler.profile(
        activities=[kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU],
        record_shapes=deep,
        profile_memory=deep,
        with_stack=settings["preset"] == "deep_dive",
        with_flops=deep,
    )
    process, thread = os.getpid(), threading.get_ident()
    with warnings.catch_warnings():
        # torch warns that a profiler with a schedule keeps its last cycle only; this one has none
        warnings.filterwarnings("ignore", ".*Profiler clears events")
        profile.start()

    is_done: list[bool] = []

    def finish() -> None:
        if os.getpid() != process or is_done:
            return  # a fork: the process that started to record has the trace
        is_done.append(True)
        if threading.get_ident() != thread:
            _warn("PyTorch was first used in another thread than the main one, which did not end")
            return
        if on_gpu:
            torch.cuda.synchronize()
        add_compiler_figures(profile)
        profile.stop()
        if profile.profiler.kineto_results.events():
            stem = f"{settings['folder']}/{_file_name()}"
            profile.export_chrome_trace(f"{stem}.pt.trace.json")
            if settings["preset"] == "operators":
                write_operators(profile.events(), Path(f"{stem}{OPERATORS}"), settings["range"])

    atexit.register(_guarded(finish))
    if threading.current_thread() is not threading.main_thread():
        _thread.end = _ThreadEnd(_guarded(finish))
    return finish


_thread = threading.local()


class _ThreadEnd:
    """Calls a function in the thread that made this object, at the end of that thread.

    PyTorch's profiler belongs to the thread that started it. If that ends before the profiler is
    stopped, the process crashes.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __del__(self) -> None:
        self._function()


def _record_steps(settings: dict[str, Any], torch: Any) -> None:
    """Record a trace of some steps of the optimizer whose step ends first."""
    first, end = settings["steps"]
    ended = 0
    counted: Any = None  # the optimizer whose steps are counted
    finish: Callable[[], object] | None = None

    def step_ended(optimizer: Any, *_: object) -> None:
        nonlocal ended, counted, finish
        counted = counted or optimizer
        if optimizer is not counted:
            return
        ended += 1
        if ended == first:
            finish = _record_trace(settings, torch)
        elif ended == end and finish is not None:
            finish()

    optim: Any = importlib.import_module("torch.optim.optimizer")
    optim.register_optimizer_step_post_hook(_guarded(step_ended))
    if not first:

        def start() -> None:
            nonlocal finish
            finish = _record_trace(settings, torch)

        _when_used(torch, _guarded(start))


def write_operators(events: Any, file: Path, window: str = "") -> None:
    """Write a row per operator and input shapes, the longest first.

    With ``window``, only operators within ranges of this name count. Shapes, bytes and operations
    are known with the preset "operators" only, and operations only of matrix products,
    convolutions, additions and multiplications.
    """
    from torch.autograd import DeviceType
    from torch.autograd.profiler_util import FunctionEventAvg

    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    windows = [event.time_range for event in on_host if window and event.name == window]
    rows: defaultdict[tuple[str, str], Any] = defaultdict(FunctionEventAvg)
    for event in on_host:
        start = event.time_range.start
        is_inside = not window or any(each.start <= start <= each.end for each in windows)
        # a range of the program, or a step of the profiler, is no operator
        if is_inside and not getattr(event, "is_user_annotation", False):
            rows[event.name, str(event.input_shapes or "")].add(event)

    def own_time(key: tuple[str, str]) -> tuple[float, float]:
        return rows[key].self_device_time_total, rows[key].self_cpu_time_total

    with file.open("w", newline="", encoding="utf-8") as out:
        table = csv.writer(out)
        table.writerow(["operator", "input shapes", *_OPERATOR_FIGURES.values()])
        for key in sorted(rows, key=own_time, reverse=True):
            table.writerow([*key, *(getattr(rows[key], name) for name in _OPERATOR_FIGURES)])


def add_compiler_figures(profile: Any) -> None:
    """Add what torch.compile has done in this process to a trace, as COMPILER_FIGURES."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    breaks = sum(dynamo.counters["graph_break"].values()) if dynamo else 0
    compilations = dynamo.get_compilation_metrics() if dynamo else ()
    # torch before 2.5 does not record the reason
    again = sum(bool(getattr(each, "recompile_reason", None)) for each in compilations)
    # a branch on the value of a tensor is not in the counter; the code after it is a function
    names = [str(getattr(each, "co_name", "")) for each in compilations]
    breaks = max(breaks, sum(name.startswith("torch_dynamo_resume_in") for name in names))
    for name, value in zip(COMPILER_FIGURES, (breaks, again)):  # noqa: B905  works in Python 3.9
        profile.add_metadata_json(name, str(value))


def _record_memory(settings: dict[str, Any], torch: Any) -> None:
    """Record the caching allocator, and write a snapshot and its figures."""
    if not torch.cuda.is_initialized():
        return
    process, memory = os.getpid(), torch.cuda.memory
    memory._record_memory_history(stacks="all" if settings["preset"] == "deep_dive" else "python")

    def finish() -> None:
        stats = memory.memory_stats()
        if os.getpid() != process or not stats.get("allocation.all.allocated"):
            return
        file = Path(settings["folder"], f"{_file_name()}.json")
        memory._dump_snapshot(str(file.with_suffix(".pickle")))
        figures = {
            "peak": stats["allocated_bytes.all.peak"],
            "allocated": stats["allocated_bytes.all.current"],
            "allocations": stats["allocation.all.allocated"],
            "reserved": stats["reserved_bytes.all.peak"],
            "inactive split": stats["inactive_split_bytes.all.current"],
        }
        file.write_text(json.dumps(figures))

    atexit.register(_guarded(finish))


def _guarded(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function that reports an error and does not raise it: the program goes on."""

    def run(*args: Any) -> object:
        try:
            return function(*args)
        except Exception as error:
            _warn(f"{type(error).__name__}: {error}")
            return None

    return run


def _warn(text: str) -> None:
    sys.stderr.write(f"pytest-aiperf could not record process {os.getpid()}: {text}\n")


def _run_other_sitecustomize() -> None:
    """Run the sitecustomize.py that this file hides, if there is one."""
    folder = Path(__file__).resolve().parent
    this, paths = sys.modules.pop("sitecustomize", None), sys.path[:]
    sys.path[:] = [path for path in paths if Path(path or ".").resolve() != folder]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.path[:] = paths
        if this is not None:
            sys.modules.setdefault("sitecustomize", this)


def _install() -> None:
    settings = json.loads(os.environ[VARIABLE])
    record: Any = {"torch": _record_trace, "memory": _record_memory}[settings["hook"]]

    def imported(torch: Any) -> None:
        if settings["steps"]:
            _record_steps(settings, torch)
            return
        _when_used(torch, _guarded(lambda: record(settings, torch)))

    sys.meta_path.insert(0, _TorchFinder(_guarded(imported)))


if __name__ == "sitecustomize":
    try:
        _run_other_sitecustomize()  # Python reports its error, and goes on
    finally:
        if VARIABLE in os.environ:
            _install()
