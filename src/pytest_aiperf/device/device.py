"""The protocol of a device, the choice of a timing mode, and the host as a device."""

import contextlib
import ctypes
import gc
import math
import random
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Final, Protocol

from pytest_aiperf.errors import InvalidMeasurement
from pytest_aiperf.machine.distributed import RankGroup
from pytest_aiperf.model import Bench, Gpu, GpuState, Metric, Mode, Trace
from pytest_aiperf.rules.validity import watched

# bound at import, so that an arm that patches time.perf_counter_ns changes nothing here
now = watched(time.perf_counter_ns, __name__, "now")

GRAPH_BELOW_S: Final = 50e-6
"""Calls shorter than this are captured in a graph, because launch gaps would lengthen them."""
PLAIN_ABOVE_S: Final = 20e-3
"""Calls longer than this need no blocking kernel: the time that the host adds is negligible."""
MAX_BLOCK_S: Final = 20e-3
"""Longest block with more than one call; longer blocks would leave time for fewer rounds."""
_MIN_BLOCK_S: Final = {Mode.GRAPH: 5e-4, Mode.BACKLOG: 1e-3, Mode.PLAIN: 5e-3, Mode.WALL: 2e-3}
"""Shortest block in each mode: long enough that the timer's resolution is negligible."""
_MAX_CALLS: Final = {Mode.GRAPH: 1_000, Mode.BACKLOG: 200, Mode.PLAIN: 1_000, Mode.WALL: 100_000}
"""Most calls per block. Backlog mode has the fewest: a stream's queue holds about 1,024 launches,
and one call may need several."""

UNTRACED_BYTES: Final = 8 << 20
"""The resident memory may grow by this much more than Python's tracer has seen, which pages of code
and of freed memory explain. Larger growth is memory of torch or C++."""

_MARKING: Final = 0x6165  #: Domain of Python's tracer that holds only the mark, and no memory.
_MARK_BYTES: Final = 1 << 60
"""Size of the mark, larger than all that a call can allocate: while the tracer's peak is at least
this, no call has reset the peak."""

Call = Callable[[], object]
PreparedCall = tuple[Callable[..., object], tuple[Any, ...]]  #: A function and its arguments.
NoiseProbe = tuple[Callable[[Bench], tuple[Any, ...]], Callable[..., object]]
"""An inputs function and an arm."""


def nothing() -> None:
    """Do nothing."""


class Block(Protocol):
    """Calls that are timed together."""

    keep: int  #: Number of the call whose result is kept; -1 for the last one.
    kept: object  #: The result that is kept.
    stopped: int  #: When the host's clock stopped, in ns; 0 if a GPU's times the calls.

    # Run all calls; return their total seconds. ``before`` runs ahead of each try, untimed: it may
    # change the list of calls. ``after`` runs as soon as the last call's work is enqueued on a GPU,
    # and as soon as the clock has stopped on the host: what it copies is what the clock has seen.
    def run(self, before: Call = nothing, after: Call = nothing) -> float: ...


class Device(Protocol):
    """A device that runs and times calls."""

    gpu: Gpu | None  #: None on the host.
    # Whether each block gets new values. Not on a GPU: writing them between blocks changes what the
    # caches hold, and leaves it idle. There, replicates and one lone call per arm have new values.
    renews: bool
    torch_device: str  #: Name of the device in torch: ``cuda`` or ``cpu``.
    ranks: RankGroup  #: Processes that measure the same claim.

    def seed(self, seed: int) -> None: ...
    def synchronize(self) -> None: ...
    def telemetry(self) -> GpuState: ...
    # Allocate a random size to shift later allocations; deleting the result frees it.
    def random_padding(self, rng: random.Random) -> object: ...
    # Make a block of calls that are warmed up; graph mode may raise CannotCapture.
    def block(self, calls: Sequence[Call], mode: Mode, keep: int = -1) -> Block: ...
    # Raise InvalidMeasurement if work of a call is not ordered with its stream: before timing by
    # a capture, after timing by a trace. The call must have run before.
    def refuse_unjoined(self, call: Call) -> None: ...
    def refuse_unordered(self, call: Call) -> None: ...
    # Estimate the seconds per call, to choose the mode and the calls per block.
    def estimate_s(self, call: Call) -> float: ...
    # Return the seconds of a call by a thread, whose call stack does not show this package;
    # infinite on a GPU, where a thread has another stream. ``prepare`` returns function and
    # arguments.
    def time_in_thread(self, prepare: Callable[[], PreparedCall]) -> float: ...
    # Repeat a call until the device's clocks are those of sustained work.
    def stabilize_clocks(self, call: Call) -> None: ...
    # Run blocks untimed, each at least once, until the device has recovered from being idle.
    def warm_up(self, blocks: Sequence[Block]) -> None: ...
    # Evict what the caches hold, if calls on cold inputs follow.
    def flush(self) -> None: ...
    # Return the peak bytes of the second call, plus those that the first call keeps, and the result
    # of the second call. Memory that the first call needs and frees does not count.
    def peak_bytes(self, first: Call, second: Call) -> tuple[int, object]: ...
    # Return the bytes that are allocated once no garbage is left. They may grow by up to
    # ``held_noise_bytes`` without a call that keeps memory.
    def held_bytes(self) -> int: ...

    held_noise_bytes: int

    # Load the library that traces calls, which takes up to a second. Time nothing later.
    def load_tracer(self) -> None: ...
    # Trace one warmed-up call in the state in which it was timed. Return a function that reads the
    # trace, which needs no device; it returns None on the host.
    def trace(self, call: Call, mode: Mode, *, cold: bool) -> Callable[[], Trace | None]: ...
    # Read hardware counters over one call, by name of the metric; empty on the host.
    def counters(
        self, call: Call, metrics: Sequence[str], *, cold: bool
    ) -> Mapping[str, float]: ...
    # Allocate memory for copies of results from a pool that timed calls do not use.
    def separate_memory(self) -> contextlib.AbstractContextManager[object]: ...
    # Free cached memory, so that the next replicate allocates anew.
    def release(self) -> None: ...
    # Return whether nobody else uses the device: its work would delay that of this process.
    def is_idle(self) -> bool: ...
    # Return the device memory that no process has allocated.
    def free_bytes(self) -> int: ...
    # Return inputs and an arm; comparing this arm with itself shows the device's noise.
    def noise_probe(self) -> NoiseProbe: ...


def choose_mode(metric: Metric, fastest_s: float) -> Mode:
    """Choose the mode of all arms from the seconds per call of the fastest arm."""
    if metric is not Metric.DEVICE:
        return Mode.WALL
    if fastest_s < GRAPH_BELOW_S:
        return Mode.GRAPH
    return Mode.BACKLOG if fastest_s < PLAIN_ABOVE_S else Mode.PLAIN


def calls_per_block(mode: Mode, fastest_s: float, slowest_s: float) -> int:
    """Return the calls per block: the fastest arm sets the minimum, the slowest the maximum."""
    enough = math.ceil(_MIN_BLOCK_S[mode] / max(fastest_s, 1e-9))
    affordable = int(MAX_BLOCK_S / max(slowest_s, 1e-9))
    return max(1, min(enough, affordable, _MAX_CALLS[mode]))


class HostDevice:
    """Times calls with the host's monotonic clock in every mode."""

    gpu: Gpu | None = None
    torch_device = "cpu"
    renews = True

    def __init__(self, ranks: RankGroup | None = None) -> None:
        self.ranks = ranks or RankGroup()

    def seed(self, seed: int) -> None:
        seed_all(seed)

    def random_padding(self, rng: random.Random) -> object:
        return bytearray(rng.randrange(1, 1_024) * 64), bytearray(rng.randrange(64, 8_192) * 4_096)

    def block(self, calls: Sequence[Call], mode: Mode, keep: int = -1) -> Block:  # noqa: ARG002  one timer for all modes
        return WallBlock(calls, self.ranks, keep=keep)

    def estimate_s(self, call: Call) -> float:
        seconds = WallBlock([call], self.ranks).run()
        return seconds if seconds > 1e-3 else WallBlock([call] * 10, self.ranks).run() / 10

    def time_in_thread(self, prepare: Callable[[], PreparedCall]) -> float:
        seconds = [math.inf]
        # a copy of the function, so that a call stack shows another file
        run = FunctionType(_append_seconds.__code__.replace(co_filename="<call>"), {})
        thread = threading.Thread(target=run, args=(*prepare(), now, seconds))
        thread.start()
        thread.join()
        return min(seconds)

    def stabilize_clocks(self, call: Call) -> None:
        until = now() + 200_000_000
        for _ in range(10):
            call()
            if not self.ranks.all(now() < until):
                break

    def refuse_unjoined(self, call: Call) -> None: ...
    def refuse_unordered(self, call: Call) -> None: ...
    def warm_up(self, blocks: Sequence[Block]) -> None: ...
    def synchronize(self) -> None: ...

    def telemetry(self) -> GpuState:
        return GpuState()

    def flush(self) -> None: ...

    def peak_bytes(self, first: Call, second: Call) -> tuple[int, object]:
        """Return the peak that Python's tracer has seen, or that of the process if it is larger.

        The tracer knows the arrays of numpy to the byte, but not those of torch and C++. The
        process's resident memory includes them, and also pages of code and of freed memory.
        """
        _free_unused()  # else memory left by earlier code could be freed or reused in the calls
        highest, resident = _resident_bytes()
        tracemalloc.start()
        try:
            mark = bytearray(1)
            track = ctypes.pythonapi.PyTraceMalloc_Track
            track(_MARKING, ctypes.c_void_p(id(mark)), ctypes.c_size_t(_MARK_BYTES))
            ctypes.pythonapi.PyTraceMalloc_Untrack(_MARKING, ctypes.c_void_p(id(mark)))
            first()
            refuse_changed_counters(
                tracemalloc.get_traced_memory()[1] >= _MARK_BYTES,
                _resident_bytes()[0] > highest - UNTRACED_BYTES,
            )
            _free_unused()
            tracemalloc.reset_peak()
            _reset_resident_peak()
            result = second()
            _, traced = tracemalloc.get_traced_memory()
            grown = _resident_bytes()[0] - resident
            refuse_changed_counters(tracemalloc.get_object_traceback(mark) is not None)
        finally:
            tracemalloc.stop()
        peak = grown if grown > traced + UNTRACED_BYTES else traced
        return int(self.ranks.max(peak)), result

    held_noise_bytes = UNTRACED_BYTES

    def held_bytes(self) -> int:
        """Return the bytes that malloc has handed out, plus those of mappings that can be shared.

        Without glibc's mallinfo2, only the mappings count.
        """
        gc.collect()
        with contextlib.suppress(AttributeError):
            mallinfo = ctypes.CDLL(None).mallinfo2
            mallinfo.restype = _MallInfo
            info = mallinfo()
            # mapped, and in use on the heap
            return int(info.hblkhd + info.uordblks) + _shared_bytes()
        return _shared_bytes()

    def load_tracer(self) -> None: ...

    def trace(self, *_call: object, **_state: object) -> Callable[[], Trace | None]:
        return lambda: None  # no GPU to trace

    def counters(self, *_call: object, **_state: object) -> Mapping[str, float]:
        return {}

    def separate_memory(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def release(self) -> None:
        gc.collect()

    def is_idle(self) -> bool:
        return True  # paused processes do nothing on the host

    def free_bytes(self) -> int:
        return 0  # never called: only claims and limits of GPUs need device memory

    def noise_probe(self) -> NoiseProbe:
        import numpy as np

        # 100,000 numbers: about a millisecond per call
        def inputs(bench: Bench) -> tuple[Any, ...]:
            return (np.random.default_rng(bench.seed).random(bench.size(100_000, check=100)),)

        return inputs, np.sort


def _append_seconds(
    call: Callable[..., object],
    args: tuple[Any, ...],
    now: Callable[[], int],
    seconds: list[float],
) -> None:
    begun = now()
    try:
        call(*args)
    except BaseException:  # noqa: BLE001  some arms only work in the main thread
        return
    seconds.append((now() - begun) * 1e-9)


@dataclass(eq=False)
class WallBlock:
    """Calls timed by the host's clock, from an empty queue of the device to an empty queue."""

    calls: Sequence[Call]  #: The calls, in order.
    ranks: RankGroup  #: Processes that start together; the slowest one's time counts.
    drain: Call = nothing  #: Waits until the device's queue is empty.
    current: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Makes the timed stream current."""

    keep: int = -1
    kept: object = None
    stopped: int = 0

    @watched
    def run(self, before: Call = nothing, after: Call = nothing) -> float:
        self.kept = None  # frees it, as later calls free what earlier ones returned
        with gc_disabled(), self.current():
            before()
            self.drain()
            self.ranks.barrier()
            begun = now()
            self.kept = run_calls(self.calls, self.keep)
            self.drain()
            self.stopped = now()
            after()
        return self.ranks.max((self.stopped - begun) * 1e-9)


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def run_calls(calls: Sequence[Call], keep: int) -> object:
    """Run calls, and return the result of the one that has the number ``keep``.

    Other results live until the next one is there, as in a caller's variable. All calls are made
    from one line, so none sees there whether its result is the kept one.
    """
    split = keep % len(calls) + 1
    kept: list[object] = []
    last = None
    for part in (calls[:split], calls[split:]):
        for call in part:
            last = call()
        kept.append(last)
    return kept[0]


def _free_unused() -> None:
    """Collect garbage, and return freed memory that malloc keeps to the operating system."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def refuse_changed_counters(*are_kept: bool) -> None:
    """Raise InvalidMeasurement if a call has reset or stopped a counter of memory."""
    if not all(are_kept):
        raise InvalidMeasurement(
            "a call has reset or stopped a counter of memory, so its peak is unknown: call neither "
            "functions of tracemalloc that do so, nor reset_peak_memory_stats, and leave "
            "/proc/self/clear_refs alone"
        )


def grown_bytes(call: Call) -> tuple[int, object]:
    """Return the largest growth of the resident memory during a call, and the call's result.

    No tracer runs, because the call could notice it. The growth is smaller if malloc still keeps
    free memory.
    """
    _free_unused()
    _, before = _resident_bytes()
    _reset_resident_peak()
    result = call()
    return _resident_bytes()[0] - before, result


def _reset_resident_peak() -> None:
    """Make the current size of the resident memory its peak."""
    Path("/proc/self/clear_refs").write_text("5")


def _resident_bytes() -> tuple[int, int]:
    """Return the peak and the current size of this process's resident memory."""
    peak, size = _status("VmHWM", "VmRSS")
    return peak, size


def _shared_bytes() -> int:
    """Return the resident bytes that lie in no file and can be shared with other processes."""
    return sum(_status("RssShmem"))


def _status(*names: str) -> Iterator[int]:
    """Yield sizes of this process in bytes, as Linux reports them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return (int(status[name].split()[0]) << 10 for name in names)


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection, which would lengthen a block of an arm at random."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def seed_all(seed: int) -> None:
    """Seed random, and numpy and torch if they are loaded."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # faster than torch.manual_seed, which takes 2 ms
            torch.cuda.manual_seed_all(seed)
