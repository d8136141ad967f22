"""How long calls take: in a graph, behind a spinning kernel, between events, by the host."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import math
import random
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

from . import gpu as nvml
from .errors import CannotCapture, InvalidMeasurement, Misuse
from .model import Bench, Gpu, Metric, Mode, Senses

_now = time.perf_counter_ns  # held from import on, so that an arm that patches time changes nothing

SHORT = 50e-6
"""Below this a call's launch shows in its time, and a block is captured in a graph."""
LONG = 5e-3
"""Above this a call's launch cannot show, and plain events do."""
LONGEST_BLOCK = 50e-3

_SHORTEST_BLOCK: Final = MappingProxyType(
    {Mode.GRAPH: 0.5e-3, Mode.BACKLOG: 0.5e-3, Mode.PLAIN: 5e-3, Mode.WALL: 2e-3}
)
# a launch queue holds about 1,024 launches, and a call may be several of them
_MOST_CALLS: Final = MappingProxyType(
    {Mode.GRAPH: 1_000, Mode.BACKLOG: 200, Mode.PLAIN: 1_000, Mode.WALL: 100_000}
)

_TRIES = 5  # one, and four with a longer spin
_LEAST_HOLD = 100e-6
_MOST_HOLD = 1.0
_STRAY = (0.03, 0.5e-3)  # share of the block, seconds: more work than this after its end is a stray
_SETTLE = (0.3, 3.0)
_SETTLED = (5, 0.02)  # so many readings of the SM clock, within this of each other

Call = Callable[[], object]
Inputs = tuple[Any, ...]
Arm = Callable[..., object]


class Block(Protocol):
    """Calls that are timed together; ``last`` is what the last of them returned."""

    last: object

    def run(self) -> float:
        """Run all calls and return the seconds that they took together."""
        ...


class Clock(Protocol):
    """Times calls on one device."""

    gpu: Gpu | None
    device: str

    def seed(self, seed: int) -> None:
        """Seed every random generator that is loaded."""
        ...

    def pad(self, rng: random.Random) -> object:
        """Allocate random sizes, so that what is allocated next lies elsewhere; drop to free."""
        ...

    def block(self, calls: Sequence[Call], mode: Mode) -> Block:
        """Make a block; in graph mode it may raise CannotCapture. Warm every call up before."""
        ...

    def once(self, call: Call) -> float:
        """Estimate the seconds of one call, to choose a mode and a call count."""
        ...

    def settle(self, call: Call) -> None:
        """Run a call until the clocks are those of sustained work."""
        ...

    def sense(self) -> Senses:
        """Read what the device says of itself."""
        ...

    def peak(self, call: Call) -> int:
        """Return the most bytes that a call held allocated at once, beyond those before it."""
        ...

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        ...

    def release(self) -> None:
        """Give unused memory back, so that the next replicate allocates afresh."""
        ...

    def identity(self) -> tuple[Callable[[Bench], Inputs], Arm]:
        """Return inputs and an arm that show this device's noise when compared with itself."""
        ...


class Machine(Protocol):
    """Where clocks come from."""

    def gpus(self) -> Sequence[Gpu]:
        """List the GPUs without initialising CUDA."""
        ...

    def clock(self, gpu: Gpu | None) -> Clock:
        """Make the clock of a GPU, or of the host; only in the process of a claim."""
        ...


class CudaMachine:
    """The machine that runs this process."""

    def gpus(self) -> Sequence[Gpu]:
        """List the GPUs without initialising CUDA."""
        return nvml.visible()

    def clock(self, gpu: Gpu | None) -> Clock:
        """Make the clock of a GPU, or of the host; only in the process of a claim."""
        return HostClock() if gpu is None else CudaClock(gpu)


def choose_mode(metric: Metric, fast: float, slow: float) -> Mode:
    """Choose how both arms are timed, from the seconds of a call of the faster and the slower."""
    if metric is not Metric.DEVICE:
        return Mode.WALL
    if fast < SHORT:
        return Mode.GRAPH
    return Mode.BACKLOG if slow < LONG else Mode.PLAIN


def calls_per_block(mode: Mode, fast: float, slow: float) -> int:
    """Count the calls of a block: long enough for the faster arm, bearable for the slower."""
    wanted = math.ceil(_SHORTEST_BLOCK[mode] / max(fast, 1e-9))
    bearable = int(LONGEST_BLOCK / max(slow, 1e-9))
    return max(1, min(wanted, bearable, _MOST_CALLS[mode]))


class HostClock:
    """Times calls with the host's monotonic clock, whatever the mode."""

    def __init__(self) -> None:
        self.gpu: Gpu | None = None
        self.device = "cpu"

    def seed(self, seed: int) -> None:
        """Seed random, and numpy and torch where they are loaded."""
        _seed(seed)

    def pad(self, rng: random.Random) -> object:
        """Allocate a small and a large piece of random sizes."""
        return bytearray(rng.randrange(1, 1_024) * 64), bytearray(rng.randrange(64, 8_192) * 4_096)

    def block(self, calls: Sequence[Call], mode: Mode) -> Block:  # noqa: ARG002 - one clock here
        """Make a block of calls."""
        return _WallBlock(self, calls)

    def once(self, call: Call) -> float:
        """Estimate the seconds of one call."""
        seconds = _WallBlock(self, [call]).run()
        return seconds if seconds > 1e-3 else _WallBlock(self, [call] * 10).run() / 10

    def settle(self, call: Call) -> None:
        """Run a few calls."""
        until = _now() + 200_000_000
        for _ in range(10):
            call()
            if _now() > until:
                break

    def sense(self) -> Senses:
        """Know nothing: hosts do not say."""
        return Senses()

    def peak(self, call: Call) -> int:
        """Return the most bytes that Python and numpy held at once during a call."""
        nested = tracemalloc.is_tracing()
        if not nested:
            tracemalloc.start()
        try:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            held = call()
            peak = tracemalloc.get_traced_memory()[1]
            del held
        finally:
            if not nested:
                tracemalloc.stop()
        return max(0, peak - before)

    def synchronize(self) -> None:
        """Have nothing to wait for."""

    def release(self) -> None:
        """Collect garbage."""
        gc.collect()

    def identity(self) -> tuple[Callable[[Bench], Inputs], Arm]:
        """Return a sort of 100,000 numbers: about a millisecond of memory and arithmetic."""
        import numpy as np

        def inputs(bench: Bench) -> Inputs:
            return (np.random.default_rng(bench.seed).random(bench.size(100_000, check=100)),)

        return inputs, np.sort

    def current(self) -> contextlib.AbstractContextManager[object]:
        """Have no stream to make current."""
        return contextlib.nullcontext()


class CudaClock:
    """Times calls on one GPU, all of them on one stream of its own."""

    device = "cuda"

    def __init__(self, gpu: Gpu) -> None:
        import torch

        self._torch: Any = torch
        self._index = self._find(gpu)
        torch.cuda.set_device(self._index)
        properties = torch.cuda.get_device_properties(self._index)
        self.gpu: Gpu | None = dataclasses.replace(
            gpu, l2_bytes=properties.L2_cache_size, sms=properties.multi_processor_count
        )
        self._uuid = gpu.uuid
        self._stream = self._make_stream()
        self._cupy_stream: Any = None
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._strays = 0
        self._failed: list[object] = []
        self._cycles_per_s = 1e9
        # the fastest of three: the first finds the GPU asleep
        spin = min(self.timed(lambda: self._spin(0.02))[0] for _ in range(3))
        self._cycles_per_s *= 0.02 / spin

    def seed(self, seed: int) -> None:
        """Seed random, torch, and numpy and cupy where they are loaded."""
        _seed(seed)
        if cupy := sys.modules.get("cupy"):
            cupy.random.seed(seed % 2**32)

    def pad(self, rng: random.Random) -> object:
        """Allocate a small and a large piece of random sizes."""
        small, large = rng.randrange(1, 2_048) * 512, rng.randrange(1, 32) << 21
        empty, byte = self._torch.empty, self._torch.uint8
        pads = [empty(size, dtype=byte, device=self.device) for size in (small, large)]
        if cupy := sys.modules.get("cupy"):
            pads += [cupy.empty(size, dtype="u1") for size in (small, large)]
        return pads

    def block(self, calls: Sequence[Call], mode: Mode) -> Block:
        """Make a block; in graph mode capture it, or raise CannotCapture."""
        if mode is Mode.WALL:
            return _WallBlock(self, calls)
        if mode is Mode.GRAPH:
            graph, last = self._capture(calls)
            return _DeviceBlock(self, [graph.replay], mode, last)
        return _DeviceBlock(self, calls, mode)

    def once(self, call: Call) -> float:
        """Estimate the seconds of one call, without its launch gaps where that can be."""
        seconds = self._estimate(call)
        return seconds if seconds > 1e-3 else self._estimate(call, 10)

    def settle(self, call: Call) -> None:
        """Run a call for 0.3 s at least and 3 s at most, until the SM clock holds still."""
        begun, calls, clocks = _now(), 1, list[int]()
        with self.current():
            while True:
                batch = _now()
                for _ in range(calls):
                    call()
                self.synchronize()
                if _now() - batch < 20_000_000:
                    calls *= 2
                spent = (_now() - begun) * 1e-9
                clocks.append(self.sense().sm_mhz or 0)
                recent = clocks[-_SETTLED[0] :]
                still = min(recent) >= max(recent) * (1 - _SETTLED[1])
                if spent > _SETTLE[1]:
                    return
                if spent > _SETTLE[0] and len(recent) == _SETTLED[0] and still:
                    return

    def sense(self) -> Senses:
        """Read what the GPU says of itself."""
        return nvml.sense(self._uuid)

    def peak(self, call: Call) -> int:
        """Return the most bytes of torch's allocator that a call held beyond those before it."""
        memory = self._torch.cuda
        with self.current():
            self.synchronize()
            before = memory.memory_allocated()
            memory.reset_peak_memory_stats()
            held = call()
            self.synchronize()
            peak = memory.max_memory_allocated()
            del held
        return max(0, int(peak - before))

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        self._torch.cuda.synchronize()

    def release(self) -> None:
        """Collect garbage and empty the caches of torch's and cupy's allocators."""
        self.synchronize()
        gc.collect()
        self._torch.cuda.empty_cache()
        if cupy := sys.modules.get("cupy"):
            cupy.get_default_memory_pool().free_all_blocks()

    def identity(self) -> tuple[Callable[[Bench], Inputs], Arm]:
        """Return a pass over 32 MiB: bound by memory, whose layout is the largest noise."""
        torch = self._torch

        def inputs(bench: Bench) -> Inputs:
            return (torch.randn(bench.size(1 << 23, check=1 << 10), device=self.device),)

        return inputs, torch.neg

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this clock's stream the current one of torch and, where it is loaded, of cupy."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._torch.cuda.stream(self._stream))
            if cupy := sys.modules.get("cupy"):
                if self._cupy_stream is None:
                    # the older name warns where the newer one exists
                    made = getattr(cupy.cuda.Stream, "from_external", None)
                    self._cupy_stream = (
                        made(self._stream)
                        if made and hasattr(self._stream, "__cuda_stream__")
                        else cupy.cuda.ExternalStream(self._stream.cuda_stream, self._index)
                    )
                stack.enter_context(self._cupy_stream)
            yield

    def timed(self, work: Call, hold: float = 0.0) -> tuple[float, float, bool]:
        """Time work between two events, behind a kernel that spins for ``hold`` seconds.

        Return the seconds on the device, those that the host took to enqueue, and whether the
        GPU was still held back when all was enqueued.
        """
        self.synchronize()
        with _undisturbed(), self.current():
            if hold:
                self._spin(hold)
            begun = _now()
            self._start.record()
            work()
            self._end.record()
            enqueued = (_now() - begun) * 1e-9
            held = not self._start.query()
            self._end.synchronize()
            ended = _now()
            self.synchronize()
            after = (_now() - ended) * 1e-9
        seconds = self._start.elapsed_time(self._end) * 1e-3
        self._refuse_strays(seconds, after)
        return seconds, enqueued, held

    def _estimate(self, call: Call, calls: int = 1) -> float:
        seconds, hold = 0.0, _LEAST_HOLD
        for _ in range(3):
            seconds, enqueued, held = self.timed(_all([call] * calls), hold)
            if held:
                break
            hold = min(_MOST_HOLD, 2 * max(hold, enqueued))
        return seconds / calls

    def _capture(self, calls: Sequence[Call]) -> tuple[Any, object]:
        torch = self._torch
        pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        last: object = None
        failure: Exception | None = None
        self.synchronize()
        with warnings.catch_warnings(), _undisturbed(), self.current():
            # an empty graph means that the calls work on a stream which was not captured
            warnings.filterwarnings("error", message=".*CUDA Graph is empty")
            try:
                graph.capture_begin(pool=pool)
                with self._cupy_memory():
                    for call in calls:
                        last = call()
            except Exception as error:  # noqa: BLE001 - whatever it is, it cannot be captured
                failure = error
            try:
                graph.capture_end()  # after a failure too: the stream must stop capturing
                if failure is None:
                    graph.replay()  # the first launch also uploads the graph
            except Exception as error:  # noqa: BLE001 - as above; the first failure is the cause
                failure = failure or error
        if failure is not None:
            self._mend(graph, pool)
            cause = (str(failure).splitlines() or [type(failure).__name__])[0]
            raise CannotCapture(f"a CUDA graph of {len(calls)} calls: {cause}") from failure
        self.synchronize()
        return graph, last

    def _mend(self, graph: Any, pool: Any) -> None:
        """Undo what a capture that broke off leaves behind in torch.

        Its allocator would go on asking the graph which allocations to divert, so the diversion
        is ended and the graph kept for good; and its generator would refuse every random number
        as if the capture were still on, so it gets a copy of its state that was never captured.
        """
        torch = self._torch
        try:
            graph.pool()
        except RuntimeError:  # torch knows of no orderly end
            self._failed.append(graph)
            for undo in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                with contextlib.suppress(AttributeError, RuntimeError):
                    getattr(torch._C, undo)(self._index, pool)  # noqa: SLF001 - no public name
            generator = torch.cuda.default_generators[self._index]
            generator.graphsafe_set_state(generator.clone_state())
        self.synchronize()

    def _cupy_memory(self) -> contextlib.AbstractContextManager[object]:
        """While capturing let cupy allocate from torch, whose graphs own their memory.

        From cupy's own pool the memory of a captured call would be handed out again while the
        graph still writes to it.
        """
        cupy = sys.modules.get("cupy")
        if cupy is None:
            return contextlib.nullcontext()
        torch_cuda, stream = self._torch.cuda, self._stream

        def allocate(size: int, device: int) -> int:
            return int(torch_cuda.caching_allocator_alloc(size, device, stream))

        def free(pointer: int, _device: int) -> None:
            torch_cuda.caching_allocator_delete(pointer)

        allocator = cupy.cuda.PythonFunctionAllocator(allocate, free)
        made: contextlib.AbstractContextManager[object] = cupy.cuda.using_allocator(
            allocator.malloc
        )
        return made

    def _refuse_strays(self, seconds: float, after: float) -> None:
        # three in a row: a host that was held up once is no stray
        share, least = _STRAY
        self._strays = self._strays + 1 if after > max(share * seconds, least) else 0
        if self._strays == 3:
            self._strays = 0
            raise InvalidMeasurement(
                f"the GPU worked on for {after * 1e3:.2g} ms after the calls' own stream had "
                "ended: let that stream wait for the others that the call uses"
            )

    def _spin(self, seconds: float) -> None:
        cycles = int(seconds * self._cycles_per_s)
        self._torch.cuda._sleep(cycles)  # noqa: SLF001 - torch's own tests need it too: no public name

    def _make_stream(self) -> Any:
        """Create a stream that orders itself with the legacy default stream.

        torch's own streams do not: a launcher that forgot its stream would run beside the clock,
        seem to take no time, and be left out of a graph. On this one it is timed, and refused in
        a capture.
        """
        handle = ctypes.c_void_p()
        status = self._torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))
        if int(status) or not handle.value:
            raise InvalidMeasurement(f"CUDA could not create a stream (error {int(status)})")
        return self._torch.cuda.ExternalStream(handle.value, device=self._index)

    def _find(self, gpu: Gpu) -> int:
        count = self._torch.cuda.device_count()
        if count == 1:
            return 0
        for index in range(count):
            uuid = str(self._torch.cuda.get_device_properties(index).uuid)
            if gpu.uuid.removeprefix("GPU-") == uuid.removeprefix("GPU-"):
                return index
        raise Misuse(
            f"{gpu.name} ({gpu.uuid}) is none of the {count} GPUs that CUDA shows this process; "
            "set CUDA_VISIBLE_DEVICES to its UUID before anything uses CUDA"
        )


class _WallBlock:
    """What the caller waits, from an empty queue to an empty queue."""

    def __init__(self, clock: HostClock | CudaClock, calls: Sequence[Call]) -> None:
        self._clock = clock
        self._calls = calls
        self.last: object = None

    def run(self) -> float:
        clock = self._clock
        with _undisturbed(), clock.current():
            clock.synchronize()
            begun = _now()
            for call in self._calls:
                self.last = call()
            clock.synchronize()
            return (_now() - begun) * 1e-9


class _DeviceBlock:
    """From the first kernel's start to the last one's end."""

    def __init__(
        self, clock: CudaClock, calls: Sequence[Call], mode: Mode, last: object = None
    ) -> None:
        self._clock = clock
        self._calls = calls
        self._captured = mode is Mode.GRAPH
        self._hold = 0.0 if mode is Mode.PLAIN else _LEAST_HOLD + 20e-6 * len(calls)
        self.last = last

    def run(self) -> float:
        if not self._hold:
            return self._clock.timed(self._work)[0]
        for _ in range(_TRIES):
            seconds, enqueued, held = self._clock.timed(self._work, self._hold)
            if held:
                self._hold = max(_LEAST_HOLD, 2 * enqueued)
                return seconds
            self._hold = min(_MOST_HOLD, 2 * max(self._hold, enqueued))
        raise InvalidMeasurement(
            f"the GPU ran dry while {len(self._calls)} calls were enqueued: a call synchronises, "
            "or costs more host time than the GPU can be held back; take the synchronisation out, "
            'or claim metric="wall" (what the caller waits)'
        )

    def _work(self) -> None:
        if self._captured:
            self._calls[0]()
            return
        for call in self._calls:
            self.last = call()


def _all(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    # a collection in mid-block would be the arm's only by chance
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _seed(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
