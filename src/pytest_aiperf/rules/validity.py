"""Checks whether a measurement is valid; each check describes the problem or returns None."""

import contextlib
import ctypes
import decimal
import functools
import gc
import logging
import math
import os
import re
import resource
import signal
import sys
import sysconfig
import threading
import time
import tracemalloc
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pytest_aiperf.errors import InvalidMeasurement, UsageError
from pytest_aiperf.model import GpuState

from . import stats

L2_SPANS = 3
"""All input sets of a cold measurement together are this many times as large as the L2. This is
also the fewest sets."""
MAX_INPUT_SETS = 256
"""Most input sets. Inputs that are so small that they need more cannot be kept cold."""
MAX_CLOCK_CHANGE = 0.05  #: Largest relative change of the SM clock across a round.
MAX_CAPPED_CLOCK_CHANGE = 0.15
"""Largest change while the power cap is active: the clock then fluctuates for both arms alike."""
POWER_CAP = 0x04  #: Clock event reason of NVML: the software power cap.

# left out as normal: power cap (0x4), idle GPU (0x1), clocks set by a user (0x2, 0x100)
_REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
MIN_IDLE_S = 3e-3
"""Work between blocks is judged only if the harness has used more CPU time than this meanwhile;
less is too short to be measured."""
MAX_BUSY_SHARE = 0.75
"""Work between blocks is refused if it takes more than this fraction of the CPU time that the
harness uses meanwhile. It may take less, because a thread may still be going to sleep."""
OTHERS_SHARE = 0.1
"""If other processes use more CPU time than this fraction of a call's time, they do a part of the
call's work."""
THROTTLED = sum(_REASONS)  #: Bit mask of the clock event reasons that invalidate a round.
_COUNTERS = ("thermal", "board_limit")

_ENVIRONMENT = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for its kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
    "TORCH_SHOW_DISPATCH_TRACE": "every operator is printed",
    "TRITON_INTERPRET": "Triton kernels run in its interpreter",
    "PYTHONDEVMODE": "Python checks itself while it runs",
    "PYTHONTRACEMALLOC": "Python traces every allocation",
}
_SET_IS_ON = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # the value 0 turns it on, too
_PROFILER_VARIABLE = re.compile(
    r"(CUDA|NVTX)_INJECTION64_PATH|(NV_(COMPUTE_)?SANITIZER|NV_NSIGHT|NSYS_PROFILING)_.+"
)
_PROFILER_LIBRARY = re.compile("sanitizer|asan|injection|nsight", re.IGNORECASE)

_FLAGS = (
    "backends.cuda.matmul.allow_tf32", "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation", "backends.cuda.preferred_blas_library",
    "backends.cuda.flash_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled", "backends.cuda.math_sdp_enabled",
    "backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32", "backends.cudnn.conv.fp32_precision",
    "get_float32_matmul_precision", "get_default_dtype", "get_num_threads",
    "get_num_interop_threads", "is_grad_enabled", "is_inference_mode_enabled",
    "are_deterministic_algorithms_enabled", "is_anomaly_enabled", "get_default_device",
    "backends.mkldnn.enabled", "backends.mkldnn.deterministic",
    "_C._len_torch_function_stack", "_C._len_torch_dispatch_stack",
)  # fmt: skip
_FOREIGN = (
    *("time.perf_counter_ns", "time.perf_counter", "time.monotonic_ns", "time.monotonic"),
    *(f"torch.cuda.Event.{name}" for name in ("record", "elapsed_time", "synchronize", "query")),
    *("torch.cuda.synchronize", "torch.cuda.stream", "torch.cuda.CUDAGraph.replay"),
)
"""Functions of Python and torch that timing relies on: no arm may replace them."""
_WATCHED: dict[str, object] = {}  #: This plugin's functions that no arm may replace, by name.

T = TypeVar("T")


def watched(function: T, module: str = "", name: str = "") -> T:
    """Register a function that times or judges, so that an arm that replaces it is detected.

    This is a decorator. A value without a name of its own needs ``module`` and ``name``.
    """
    module = module or function.__module__
    _WATCHED[f"{module}.{name or getattr(function, '__qualname__', '')}"] = function
    return function


watched(stats.comparison)

_PERSISTING_L2 = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
)  # fmt: skip
_PREFIXES = "PYTHON", "MALLOC_", "LD_"
"""Prefixes of environment variables that affect processes started by an arm."""


def round_problem(before: GpuState, after: GpuState) -> str | None:
    """Describe what disturbed a round, given the GPU's state before and after it."""
    reasons = (before.event_reasons or 0) | (after.event_reasons or 0)
    for bit, name in _REASONS.items():
        if reasons & bit:
            return f"clock event reason {bit:#x} ({name})"
    for counter in _COUNTERS:
        if after.violations.get(counter, 0) > before.violations.get(counter, math.inf):
            name = counter.replace("_", " ")
            return f"the {name} violation counter, which increased during the round"
    if before.sm_mhz and after.sm_mhz:
        change = abs(before.sm_mhz - after.sm_mhz) / max(before.sm_mhz, after.sm_mhz)
        if change > (MAX_CAPPED_CLOCK_CHANGE if reasons & POWER_CAP else MAX_CLOCK_CHANGE):
            return f"the SM clock, which went from {before.sm_mhz} to {after.sm_mhz} MHz"
    return None


def environment_problem(environ: Mapping[str, str]) -> str | None:
    """Describe an environment variable that distorts every timing; None if none is set."""
    for name, value in sorted(environ.items()):
        if name in _ENVIRONMENT and (name == _SET_IS_ON or value not in ("", "0")):
            return f"{name}={value}: {_ENVIRONMENT[name]}; unset it to measure"
        is_preloaded = name == "LD_PRELOAD" and _PROFILER_LIBRARY.search(value)
        if is_preloaded or (value and _PROFILER_VARIABLE.fullmatch(name)):
            return f"{name}={value}: a profiler is attached; measure without it"
    return None


def tracer_problem() -> str | None:
    """Name a tracer or profiler of Python code, which slows one arm more than the other."""
    for name, tracer in _tracers().items():
        if tracer != "None":
            return (
                f"{name} is {tracer}: it runs between the lines of Python arms; measure without "
                "coverage, Python profilers and debuggers"
            )
    return None


def replaced_problem() -> str | None:
    """Name a function that timing relies on, and that a conftest.py or a test has replaced."""
    replaced = [name for name, function in _WATCHED.items() if _find(name) is not function]
    replaced += [name for name in _FOREIGN if not _is_original(name, _find(name))]
    # a timer that was replaced before this package was imported is bound in it
    timers = (function for name, function in _WATCHED.items() if name.endswith(".now"))
    replaced += [
        t for t in ("time.perf_counter_ns",) if not all(_is_original(t, f) for f in timers)
    ]
    return (
        f"{replaced[0]} was replaced; measure without the code that does so" if replaced else None
    )


def _is_original(name: str, function: Any) -> bool:
    """Whether a function of Python's ``time`` is built in, and one of torch defined by torch."""
    if name.startswith("time."):  # only C code makes built-in functions of this module
        is_builtin = isinstance(function, types.BuiltinFunctionType) and function.__self__ is time
        return is_builtin and name == f"time.{function.__name__}"
    code, torch = getattr(function, "__code__", None), sys.modules.get("torch")
    home = str(Path(getattr(torch, "__file__", None) or "").parent)
    return code is None or code.co_filename.startswith(home)


def _tracers() -> dict[str, str]:
    """Read which tracers are on; the functions that set them, by what they were given."""
    tracers: dict[str, object] = {
        "sys.settrace": sys.gettrace(),
        "sys.setprofile": sys.getprofile(),
        "threading.settrace": threading.gettrace(),
        "threading.setprofile": threading.getprofile(),
    }
    if monitoring := getattr(sys, "monitoring", None):  # Python 3.12 and newer
        tools = (monitoring.get_tool(tool) for tool in range(6))
        tracers["sys.monitoring"] = ", ".join(filter(None, tools)) or None
    return {name: repr(tracer) for name, tracer in tracers.items()}


def rotation(set_bytes: int, l2_bytes: int) -> int:
    """Return how many input sets a cold measurement rotates through."""
    if not l2_bytes:
        return L2_SPANS
    sets = math.ceil(L2_SPANS * l2_bytes / set_bytes) if set_bytes > 0 else MAX_INPUT_SETS + 1
    if sets > MAX_INPUT_SETS:
        raise UsageError(
            f"an input set of {set_bytes:,} bytes cannot be kept cold: {L2_SPANS} times the L2 "
            f"({l2_bytes:,} bytes) would take more than {MAX_INPUT_SETS} sets; "
            'declare cache="warm" or enlarge the inputs'
        )
    return max(L2_SPANS, sets)


_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGALRM", "SIGCHLD", "SIGPROF", "SIGSEGV", "SIGUSR1", "SIGUSR2", "SIGVTALRM")
)
_FAULTS = signal.SIGSEGV, signal.SIGBUS
_sigaction = ctypes.CDLL(None).sigaction
_SIGACTION_BYTES = 256  # more than any C library's struct has; the handler comes first
_prctl = ctypes.CDLL(None).prctl
_GET_THP_DISABLE = 42  # PR_GET_THP_DISABLE
_LIMITS = {
    number: name
    for name, number in vars(resource).items()
    if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"  # BSD's name of RLIMIT_NOFILE
}
_NUMPY_BUFFER = 8192  # elements, the default of numpy.setbufsize
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
"""Folders of the standard library and of installed packages."""


def _fault_handlers() -> list[int]:
    """Return the addresses of memory-fault handlers, which could compute memory when it is read.

    Return [] once CUDA is in use: the driver and its tools may have handlers of their own.
    """
    cuda = sys.modules.get("torch.cuda")
    if cuda and cuda.is_initialized():
        return []
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    handlers = []
    for number in _FAULTS:
        _sigaction(number, None, action)
        handlers.append(ctypes.c_size_t.from_buffer(action).value)
    return handlers


def _numpy_print_options() -> object:
    numpy = sys.modules.get("numpy")
    return numpy and numpy.get_printoptions()


def _working_folder() -> str:
    with contextlib.suppress(OSError):  # it has been removed
        return os.getcwd()  # noqa: PTH109  five times as fast as Path.cwd()
    return "removed"


def _umask() -> str:
    """Read the umask without changing it, because other threads may be creating files."""
    return _text_of("/proc/self/status").partition("Umask:")[2].partition("\n")[0].strip()


_PROCESS: dict[str, Callable[[], object]] = {
    "subnormal numbers": lambda: float("5e-320") * 0.5 != 0,
    "sys.getswitchinterval": sys.getswitchinterval,
    "gc.get_threshold": gc.get_threshold,
    "CPU affinity": lambda: sorted(os.sched_getaffinity(0)),
    "scheduling policy": lambda: os.sched_getscheduler(0),
    "nice value": lambda: os.getpriority(os.PRIO_PROCESS, 0),
    "timer slack": lambda: _text_of("/proc/self/timerslack_ns"),  # of all sleeps and timeouts
    "signal.setitimer": lambda: [any(signal.getitimer(i)) for i in range(3)],
    "signal handlers": lambda: [h for h in map(signal.getsignal, _SIGNALS) if is_foreign(h)],
    "handlers of memory faults": _fault_handlers,
    "tracemalloc": tracemalloc.is_tracing,
    "huge pages": lambda: _prctl(_GET_THP_DISABLE, 0, 0, 0, 0) != 1,
    "coroutine origins": sys.get_coroutine_origin_tracking_depth,
    "logging levels": lambda: (logging.root.level, logging.root.manager.disable),
    "decimal.getcontext": lambda: decimal.getcontext().prec,
    "numpy.set_printoptions": _numpy_print_options,
    "working folder": _working_folder,
    "umask": _umask,
    **{name: functools.partial(resource.getrlimit, i) for i, name in _LIMITS.items()},
    # some imports add a folder of their own, which costs nothing
    "hundreds of folders in sys.path": lambda: len(sys.path) // 100,
}
"""Settings of the process and of its main thread, with the functions that read them."""


_AT_START = {
    name: str(_PROCESS[name]()) for name in ("signal.setitimer", "tracemalloc", "huge pages")
}


def changed_since_start() -> list[str]:
    """Name settings that slow down any code and are not as they were when the session started."""
    changed = [name for name, state in _AT_START.items() if str(_PROCESS[name]()) != state]
    numpy = sys.modules.get("numpy")
    if numpy and numpy.getbufsize() != _NUMPY_BUFFER:
        changed.append("numpy.setbufsize")
    if numpy and is_foreign(numpy.random.get_bit_generator()):
        changed.append("numpy.random.set_bit_generator")
    if any(map(is_foreign, (*sys.meta_path, *sys.path_hooks))):
        changed.append("sys.meta_path or sys.path_hooks")
    return changed


def is_foreign(value: object) -> bool:
    """Whether a function or class is defined outside installed libraries and this package.

    For other objects, the class counts. The signal handlers of a DataLoader are not foreign.
    """
    module, code = str(getattr(value, "__module__", "")), getattr(value, "__code__", None)
    file = code.co_filename if code else getattr(sys.modules.get(module), "__file__", None) or "<C>"
    return not (module.startswith("pytest_aiperf.") or file.startswith(("<", *LIBRARIES)))


def _text_of(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace").strip()
    return ""


def _libraries() -> dict[str, object]:
    """Read the settings of libraries that are loaded and have functions for them."""
    settings: dict[str, object] = {}
    if numpy := sys.modules.get("numpy"):
        settings["numpy.getbufsize"] = numpy.getbufsize()
        settings["numpy.geterr"] = sorted(numpy.geterr().items())
        settings["numpy.random.get_bit_generator"] = type(numpy.random.get_bit_generator())
    for library in _thread_pools(len(sys.modules)):
        settings[f"threads of {Path(library.filepath).name}"] = library.num_threads
    return settings


@functools.lru_cache(maxsize=1)
def _thread_pools(_modules: int) -> list[Any]:
    """Return the libraries whose threads threadpoolctl counts, if it is installed.

    They are looked up anew, which takes milliseconds, after more modules have been imported.
    """
    try:
        import threadpoolctl
    except ImportError:
        return []
    controllers: list[Any] = threadpoolctl.ThreadpoolController().lib_controllers
    return controllers


def flags() -> dict[str, str]:
    """Read the global settings that no arm may change; those of torch only if it is loaded.

    A variable that is empty counts as unset, because all readers of these variables do so: code
    that saves a variable and sets it again may leave an empty one.
    """
    settings = {
        name: value
        for name, value in os.environ.items()
        if value and (name in _VARIABLES or name.startswith(_PREFIXES))
    } | _tracers()
    settings |= {name: str(read()) for name, read in _PROCESS.items()}
    settings |= {name: str(value) for name, value in _libraries().items()}
    if torch := sys.modules.get("torch"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reading some of these names warns of deprecation
            settings |= {f"torch.{name}": _flag(torch, name) for name in _FLAGS} | _carve_out(torch)
    names = (*_FOREIGN, *_WATCHED)
    # the address, because another object may have the same repr
    found = {name: value for name in names if (value := _find(name))}
    return settings | {name: f"{value!r} at {id(value):#x}" for name, value in found.items()}


def changed_flags(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """List each setting that differs, as ``name: before -> after``."""
    return [
        f"{name}: {before.get(name, 'unset')} -> {after.get(name, 'unset')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
        # a setting of a module that was loaded in between has no earlier value
        and not ("." in name and (name not in before or name not in after))
    ]


class IdleTime:
    """Finds work that goes on between the blocks, while the harness draws new values.

    Only Python's threads and child processes count. OpenMP's threads are left out, because they
    spin for a while in case more work comes.
    """

    def __init__(self) -> None:
        self._seconds = self._busy_s = 0.0
        self._start: tuple[float, dict[str, float], set[str]] | None = None

    def begins(self) -> None:
        self._start = time.thread_time(), *_background()

    def ends(self) -> None:
        if self._start is not None:
            begun, before, ran = self._start
            spent = time.thread_time() - begun
            after, runs = _background()
            self._seconds += spent
            self._busy_s += sum(s - before[name] for name, s in after.items() if name in before)
            self._busy_s += spent * len(ran & runs)
            self._start = None

    def refuse_work(self) -> None:
        """Raise InvalidMeasurement if threads or children worked while no call did."""
        if self._seconds > MIN_IDLE_S and self._busy_s > MAX_BUSY_SHARE * self._seconds:
            raise InvalidMeasurement(
                "threads or processes that the arms started were busy between calls, for "
                f"{self._busy_s:.2g} s, and slow other arms down: a call must end what it starts"
            )


class OtherProcesses:
    """Measures whether processes that this one started do a part of the work of ``with`` blocks."""

    def __init__(self) -> None:
        self._seconds = self._busy_s = 0.0

    def __enter__(self) -> Self:
        self._seconds -= time.monotonic()
        self._busy_s -= _cpu_s_of_started()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds += time.monotonic()
        self._busy_s += _cpu_s_of_started()

    def do_work(self) -> bool:
        return self._busy_s > OTHERS_SHARE * self._seconds


def _cpu_s_of_started() -> float:
    """Return the CPU seconds of processes that this one has started, in steps of about 10 ms."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = sum(int(count) for status in _statuses() for count in status[11:15])
    return ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def faults_of_started() -> int:
    """Return the page faults of processes that this one has started."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = sum(int(count) for status in _statuses() for count in status[7:11])
    return ended.ru_minflt + ended.ru_majflt + running


def _statuses() -> Iterator[Sequence[str]]:
    """Yield the fields of /proc/PID/stat, from the state on, of the started processes."""
    for process in _started():
        with contextlib.suppress(OSError):  # it has just ended
            yield _status(process)


def _status(process: str) -> Sequence[str]:
    # a process may have a name in any encoding, and the kernel cuts it after 15 bytes
    text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


def _background() -> tuple[dict[str, float], set[str]]:
    """Return the CPU seconds of Python's other threads, and the started processes that run.

    The CPU time of a running process may be known only as of the last tick of its core.
    """
    seconds: dict[str, float] = {}
    running: set[str] = set()
    for ident in sys._current_frames():  # noqa: SLF001  threading does not know all threads
        if ident != threading.get_ident():
            with contextlib.suppress(OSError):  # it has just ended
                seconds[str(ident)] = time.clock_gettime(time.pthread_getcpuclockid(ident))
    for process in _started():
        with contextlib.suppress(OSError):  # it has just ended
            running.update([process] * (_status(process)[0] == "R"))
    return seconds, running


def _started() -> set[str]:
    """Return the processes that this one and its descendants have started, if there are any."""
    own_pid, started = str(os.getpid()), set()
    todo = {own_pid} if _has_children() else set()
    if os.getsid(0) == os.getpid():  # the parent of a claim's process adopts its orphans
        siblings = _children(str(os.getppid())) - {own_pid}
        todo |= {pid for pid in siblings if _session(pid) == own_pid}
        started |= todo - {own_pid}
    while todo:
        children = _children(todo.pop())
        todo |= children - started
        started |= children
    return started


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children(process: str) -> set[str]:
    """Return the children of all threads of a process."""
    pids: set[str] = set()
    with contextlib.suppress(OSError):  # another system, or the process has just ended
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                pids.update((task / "children").read_text().split())
    return pids


def _session(process: str) -> str:
    try:
        return str(os.getsid(int(process)))
    except OSError:  # it has just ended
        return ""


def extras() -> dict[str, int]:
    """Count events that warmed-up calls never cause: kernel loads, compiles, driver allocations."""
    counts = {"Triton, which loaded kernels": len(_triton_loads())}
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        counts["torch.compile, which compiled"] = dynamo.counters["frames"]["total"]
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda and cuda.is_initialized():
        grown = cuda.memory_stats().get("num_device_alloc", 0)
        counts["torch's allocator, which asked the driver for memory"] = grown
    return counts


def extra_problem(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """Describe an event of :func:`extras` that occurred during a round."""
    grown = [name for name, count in after.items() if count > before.get(name, count)]
    return f"{grown[0]} during the round (warmed-up calls of one shape do not)" if grown else None


@functools.cache
def _triton_loads() -> list[None]:
    """Return a list that grows with each kernel that Triton loads from now on."""
    loads: list[None] = []
    hooks = getattr(sys.modules.get("triton.knobs"), "runtime", None)
    chain = getattr(hooks, "kernel_load_end_hook", None)
    if chain is not None:
        chain.add(lambda *_, **__: loads.append(None))
    return loads


def _find(name: str) -> object:
    module, *parts = name.split(".")
    while module in sys.modules and parts and f"{module}.{parts[0]}" in sys.modules:
        module = f"{module}.{parts.pop(0)}"
    value: Any = sys.modules.get(module)
    for part in parts:
        value = getattr(value, part, None)
    return value


def _carve_out(torch: Any) -> dict[str, str]:
    """Read how many bytes of the L2 this CUDA context reserves for persisting accesses."""
    cuda, size = getattr(torch, "cuda", None), ctypes.c_size_t()
    if cuda is None or not cuda.is_initialized():
        return {}
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {}
    failed = driver.cuCtxGetLimit(ctypes.byref(size), _PERSISTING_L2)
    return {} if failed else {"torch.cuda.persisting_l2_bytes": str(size.value)}


def _flag(torch: Any, name: str) -> str:
    value = torch
    try:
        for part in name.split("."):
            value = getattr(value, part)
        setting = str(value() if callable(value) else value)
    except (AttributeError, RuntimeError) as error:
        # torch lacks the setting, or refuses because an arm mixed old and new precision settings
        return f"unreadable ({type(error).__name__})"
    if setting == "none" and name.endswith("fp32_precision"):  # torch.backends decides
        inherited = str(getattr(torch.backends, "fp32_precision", "none"))
        return "ieee" if inherited == "none" else inherited
    return setting
