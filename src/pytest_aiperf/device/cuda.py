"""The CUDA device: calls timed in a graph, behind a blocking kernel, or between two events."""

import contextlib
import ctypes
import dataclasses
import gc
import math
import os
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, Final

from pytest_aiperf.errors import CannotCapture, InvalidMeasurement, UsageError
from pytest_aiperf.machine import nvml
from pytest_aiperf.machine.distributed import RankGroup
from pytest_aiperf.model import Bench, Gpu, GpuState, Mode, Trace
from pytest_aiperf.rules.validity import watched

from . import counters
from .device import (
    MAX_BLOCK_S,
    Block,
    Call,
    NoiseProbe,
    PreparedCall,
    WallBlock,
    gc_disabled,
    nothing,
    now,
    refuse_changed_counters,
    run_calls,
    seed_all,
)
from .trace import load, trace

_MAX_TRIES: Final = 5  #: Runs with ever longer blocking kernels, before a block is refused.
_MIN_BLOCKING_S: Final = 100e-6  #: Shortest spin: the host needs this long for the first launch.
_MAX_BLOCKING_S: Final = 1.0
"""Longest blocking kernel: a call that synchronizes waits this long for its end, in vain."""
_LONG_BLOCKING_S: Final = 0.05
"""After a blocking kernel of this length only one retry follows: a call that takes still longer to
enqueue most likely synchronizes."""
_UNSYNCED_SHARE: Final = 0.03
"""If the GPU works on after the end event for more than this share of the block, a call left work
on a stream that the timed stream does not wait for."""
_UNSYNCED_S: Final = 0.5e-3
"""Work that ends within this time after the end event is ignored: synchronizing takes time, too."""
_UNJOINED: Final = (
    "a call leaves work on a stream that the call's own does not wait for: end with "
    "torch.cuda.current_stream().wait_stream(side_stream)"
)
"""Error message for work that a call forks and does not join."""
_ORDER_BLOCKING_S: Final = 0.01
"""Spin time in front of the call that :meth:`CudaDevice.refuse_unordered` runs: the host enqueues
most calls completely in this time, even while CUPTI traces them."""
_MIN_STABILIZING_S: Final = 0.05
"""Shortest run of :meth:`CudaDevice.stabilize_clocks`: a GPU raises its clocks with a delay."""
_MAX_STABILIZING_S: Final = 1.0
"""Longest run of :meth:`CudaDevice.stabilize_clocks`: a power cap may keep the clock unstable."""
_LONG_CALL_S: Final = 0.2
"""A call that takes this long raises the clocks by itself. :meth:`CudaDevice.stabilize_clocks` then
makes only one call, because other claims wait meanwhile."""
_STABLE_READINGS: Final = 5  #: Consecutive readings of the SM clock that must agree.
_STABLE_SPREAD: Final = 0.02  #: Largest relative difference between these readings.
_WARM_UP_S: Final = 0.03
"""Seconds for which blocks run untimed before the first round: on H200s, memory was 11 % slower for
up to this long after a pause of some milliseconds."""
_PROMPT_S: Final = 0.5e-3
"""Two small copies and a kernel take less than this if no other process uses the GPU. If one does,
they wait for a time slice, which is assumed to be a millisecond or more; it was not measured."""
_PROMPT_CALLS: Final = 10
"""The GPU counts as idle once this many attempts in a row took less than _PROMPT_S."""
_IDLE_TIMEOUT_S: Final = 0.3  #: The GPU counts as busy if that has not happened within this time.

watched(now, __name__, "now")  # this module has a reference of its own to the function


class CudaDevice:
    """Times calls on one GPU, on a stream that this object owns."""

    torch_device = "cuda"
    renews = False

    def __init__(self, gpu: Gpu, ranks: RankGroup | None = None) -> None:
        import torch

        self.ranks = ranks or RankGroup()
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
        self._cupy_used = False
        self._has_workspaces = False
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._copied = torch.cuda.Event(enable_timing=False)
        self._flush: Call | None = None
        self._separate_memory = torch.cuda.MemPool()
        self._unsynced_blocks = -3  # ignore the three spins below: a sanitizer may delay them
        self._failed_captures: list[object] = []
        self.blocking_s = 0.0
        """Spin time that sufficed for the last block; first guess for the next."""
        self._cycles_per_s = 1e9
        # the fastest of three, because an idle GPU starts at a low clock
        spin = min(self.timed(lambda: self._spin(0.003))[0] for _ in range(3))
        self._cycles_per_s *= 0.003 / spin
        self._unsynced_blocks = 0

    def seed(self, seed: int) -> None:
        seed_all(seed)
        if cupy := sys.modules.get("cupy"):
            # Seed existing generators; later ones read their seed from the environment. Creating
            # one here would be slow, and the claim may not use cupy at all.
            generators = getattr(cupy.random._generator, "_random_states", True)  # noqa: SLF001  no public name
            if generators:
                cupy.random.seed(seed % 2**32)
            os.environ["CUPY_SEED"] = str(seed % 2**32)

    def random_padding(self, rng: random.Random) -> object:
        small, large = rng.randrange(1, 2_048) * 512, rng.randrange(1, 32) << 21
        empty, byte = self._torch.empty, self._torch.uint8
        padding = [empty(size, dtype=byte, device=self.torch_device) for size in (small, large)]
        if self._cupy_used:
            padding += [sys.modules["cupy"].empty(size, dtype="u1") for size in (small, large)]
        return padding

    def block(self, calls: Sequence[Call], mode: Mode, keep: int = -1) -> Block:
        if mode is Mode.WALL:
            return WallBlock(calls, self.ranks, self.synchronize, self.current, keep)
        if mode is Mode.GRAPH:
            graph, kept = self._capture(calls, keep)

            def replay() -> object:
                graph.replay()
                return kept

            made = _DeviceBlock(self, [replay], mode)
            made.kept = kept
            return made
        return _DeviceBlock(self, calls, mode, keep)

    def time_in_thread(self, _prepare: Callable[[], PreparedCall]) -> float:
        return math.inf

    def estimate_s(self, call: Call) -> float:
        def ten() -> None:
            for _ in range(10):
                call()

        timed = self.time_behind_blocking_kernel
        seconds, blocking_s = timed(call, _MIN_BLOCKING_S, tries=1)
        if not blocking_s and seconds < MAX_BLOCK_S:  # else launch gaps are negligible
            seconds, _ = timed(call, 2 * _MIN_BLOCKING_S, tries=2)
        return seconds if seconds > 1e-3 else timed(ten, _MIN_BLOCKING_S, tries=3)[0] / 10

    def stabilize_clocks(self, call: Call) -> None:
        """Repeat a call until the SM clock is stable, for 0.05 s to 1 s."""
        clocks = deque([0.0], maxlen=_STABLE_READINGS)
        begun, calls, spent = now(), 1, 0.0
        with gc_disabled(), self.current():
            while not self.ranks.all(
                spent >= _MIN_STABILIZING_S and min(clocks) >= max(clocks) * (1 - _STABLE_SPREAD)
            ):
                batch = now()
                for _ in range(calls):
                    call()
                self.synchronize()
                batch_s = (now() - batch) * 1e-9
                if self.ranks.all(batch_s < 0.01):
                    calls *= 2
                clocks.append(nvml.sm_mhz(self._uuid) or 0.0)
                spent = (now() - begun) * 1e-9
                is_long = calls == 1 and batch_s > _LONG_CALL_S
                if self.ranks.all(is_long or spent > _MAX_STABILIZING_S):
                    break

    def warm_up(self, blocks: Sequence[Block]) -> None:
        begun = now()
        for runs, block in enumerate(cycle(blocks)):
            cold = runs < len(blocks) or (now() - begun) * 1e-9 < _WARM_UP_S
            if not self.ranks.all(cold):
                break
            block.run()  # the first run also finds the block's spin time

    def telemetry(self) -> GpuState:
        return nvml.telemetry(self._uuid)

    def flush(self) -> None:
        if self._flush is None:
            self._flush = counters.flusher(self)
        with self.current():
            self._flush()

    def peak_bytes(self, first: Call, second: Call) -> tuple[int, object]:
        """Return the peak bytes in torch's allocator; other allocators' memory is not counted."""
        memory = self._torch.cuda
        with self.current():
            self.synchronize()
            before, highest = memory.memory_allocated(), memory.max_memory_allocated()
            first()
            self.synchronize()
            refuse_changed_counters(memory.max_memory_allocated() >= highest)
            memory.reset_peak_memory_stats()
            result = second()
            self.synchronize()
            peak = memory.max_memory_allocated()
        return int(self.ranks.max(max(0, peak - before))), result

    held_noise_bytes = 64 << 10  # torch rounds each allocation up to 512 bytes

    def held_bytes(self) -> int:
        if not self._has_workspaces:
            self._has_workspaces = True
            self._make_workspaces()
        gc.collect()
        return int(self._torch.cuda.memory_allocated())

    def _make_workspaces(self) -> None:
        """Let cuBLAS allocate its workspaces, which would count for the arm that needs them first.

        It has one for each stream and thread: this one, and the one that runs backward passes.
        """
        for stream in (contextlib.nullcontext(), self.current()):
            with stream:
                x = self._torch.ones(64, 64, device=self.torch_device, requires_grad=True)
                (x @ x).sum().backward()
        self.synchronize()

    def load_tracer(self) -> None:
        load(lambda: self._spin(_MIN_BLOCKING_S), self)

    def trace(self, call: Call, mode: Mode, *, cold: bool) -> Callable[[], Trace | None]:
        """Trace a call with the cache state and the launch gaps of its timing."""
        flush = counters.flusher(self) if cold else None
        with self.current():
            self.synchronize()
            begun = now()
            call()
        blocking_s = _MIN_BLOCKING_S + 3 * (now() - begun) * 1e-9  # CUPTI lengthens launches
        self.synchronize()
        # all ranks must make as many calls: a rank that is early waits for the others in this one
        call_s = self.ranks.max((now() - begun) * 1e-9)

        def before() -> None:
            if flush:
                flush()
            if mode in (Mode.GRAPH, Mode.BACKLOG):
                self._spin(min(blocking_s, _LONG_BLOCKING_S))
            self.ranks.stream_barrier()

        with gc_disabled():
            return trace(call, self, before, call_s)

    def counters(self, call: Call, metrics: Sequence[str], *, cold: bool) -> Mapping[str, float]:
        flush = counters.flusher(self) if cold else None
        with gc_disabled():
            return counters.read(call, metrics, self, flush)

    def refuse_unjoined(self, call: Call) -> None:
        """Raise InvalidMeasurement if a call forks work that its own stream does not join.

        The call, which must have run before, is captured and not run: a capture knows the streams
        that the call forked from its own, however short their work is. A call that cannot be
        captured is left to :meth:`refuse_unordered`.
        """
        with contextlib.suppress(CannotCapture):
            self._capture([call], replayed=False)

    def refuse_unordered(self, call: Call) -> None:
        """Raise InvalidMeasurement if work of a call is not ordered with its own stream.

        Work of the call on another stream must start after the work that was enqueued before the
        call, and end before the work that is enqueued after it. This finds streams that never wait
        for the call's own, and calls that no graph can capture. It loads CUPTI, which slows later
        launches down: time nothing after it.
        """
        profiler = self._torch.profiler
        os.environ.setdefault("TEARDOWN_CUPTI", "0")  # restarting CUPTI breaks captured graphs
        self.synchronize()
        with (
            profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile,
            gc_disabled(),
            self.current(),
        ):
            self._spin(_ORDER_BLOCKING_S)
            call()
            self._spin(_MIN_BLOCKING_S)
            self.synchronize()
        work = sorted(
            (event.start_ns(), event.end_ns(), event.device_resource_id())
            for event in profile.profiler.kineto_results.events()
            if event.device_type().name == "CUDA" and not event.is_user_annotation()
        )
        first, own = work[0], work[0][2]  # nothing else was launched before the first spin
        last = max(event for event in work if event[2] == own)
        others = [event for event in work if event[2] != own]
        early, late = any(e[0] < first[1] for e in others), any(e[1] > last[0] for e in others)
        if not self.ranks.all(not early):
            raise InvalidMeasurement(
                "a call starts work on a stream that does not wait for the call's own: begin with "
                "side_stream.wait_stream(torch.cuda.current_stream())"
            )
        if not self.ranks.all(not late):
            raise InvalidMeasurement(_UNJOINED)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def separate_memory(self) -> contextlib.AbstractContextManager[object]:
        """Make torch allocate from a pool that timed calls do not use.

        Memory that results are copied to would be missing in the pool of the calls: one of them
        would have to wait for the driver.
        """
        return self._torch.cuda.use_mem_pool(self._separate_memory, device=self._index)  # type: ignore[no-any-return]

    def release(self) -> None:
        self.synchronize()
        gc.collect()
        self._torch.cuda.empty_cache()
        if cupy := sys.modules.get("cupy"):
            pool = cupy.get_default_memory_pool()
            self._cupy_used = self._cupy_used or bool(pool.total_bytes())
            pool.free_all_blocks()

    def is_idle(self) -> bool:
        """Return whether copies and kernels run without delay, so that no other process has work.

        While other processes have work, the GPU gives each of them some milliseconds in turn.
        """
        on_gpu = self._torch.empty(1, device=self.torch_device)
        on_host = self._torch.empty(1, pin_memory=True)
        prompt, end = 0, now() + int(_IDLE_TIMEOUT_S * 1e9)
        while prompt < _PROMPT_CALLS and now() < end:
            started = now()
            with self._torch.cuda.stream(self._stream):
                on_gpu.copy_(on_host, non_blocking=True)
                on_host.copy_(on_gpu, non_blocking=True)
                self._spin(0)
            self.synchronize()
            prompt = prompt + 1 if (now() - started) * 1e-9 < _PROMPT_S else 0
        return prompt == _PROMPT_CALLS

    def free_bytes(self) -> int:
        return int(self._torch.cuda.mem_get_info()[0])

    def noise_probe(self) -> NoiseProbe:
        torch = self._torch

        # a memory-bound call on 32 MiB: the memory layout is the largest source of noise
        def inputs(bench: Bench) -> tuple[Any, ...]:
            return (torch.randn(bench.size(1 << 23, check=1 << 10), device=self.torch_device),)

        return inputs, torch.neg

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this device's stream current in torch and, if it is loaded, in cupy."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._torch.cuda.stream(self._stream))
            if cupy := sys.modules.get("cupy"):
                if self._cupy_stream is None:
                    self._cupy_stream = cupy.cuda.Stream.from_external(self._stream)
                stack.enter_context(self._cupy_stream)
            yield

    def time_behind_blocking_kernel(
        self,
        work: Call,
        blocking_s: float,
        *,
        tries: int,
        before: Call = nothing,
        after: Call = nothing,
    ) -> tuple[float, float]:
        """Time work that the host enqueues completely while a blocking kernel spins.

        If the kernel ends too early, try again with a longer spin. Return the work's seconds on the
        device and the spin time for its next run. A spin time of 0 means that every kernel ended
        too early, so that the seconds include launch gaps.
        """
        seconds = 0.0
        for retry in range(tries):
            before()
            seconds, enqueued, blocked = self.timed(work, blocking_s, after)
            if self.ranks.all(blocked):
                return seconds, max(_MIN_BLOCKING_S, 1.5 * enqueued)
            if retry and not self.ranks.all(blocking_s < _LONG_BLOCKING_S):
                break  # twice the enqueue time did not suffice, so the call waits for the GPU
            blocking_s = min(_MAX_BLOCKING_S, 2 * max(blocking_s, enqueued))
        return seconds, 0.0

    @watched
    def timed(
        self, work: Call, blocking_s: float = 0.0, after: Call = nothing
    ) -> tuple[float, float, bool]:
        """Time work between two events, behind a kernel that spins for ``blocking_s`` seconds.

        ``after`` enqueues copies of results right behind the work, in the order of its stream: a
        wait before it would give time to work that this stream does not wait for. Return the
        seconds on the device, the host's seconds to enqueue the work, and whether the GPU was still
        blocked when everything was enqueued.
        """
        self.synchronize()
        with gc_disabled(), self.current():
            if blocking_s:
                self._spin(blocking_s)
            self.ranks.stream_barrier()
            begun = now()
            self._start.record()
            work()
            self._end.record()
            enqueued = (now() - begun) * 1e-9
            blocked = not self._start.query()
            after()
            self._copied.record()
            self._copied.synchronize()
            ended = now()
            self.synchronize()
            unsynced = self.ranks.max((now() - ended) * 1e-9)  # so all ranks fail together
        seconds = self.ranks.max(self._start.elapsed_time(self._end) * 1e-3)
        self._refuse_unsynced_work(seconds, unsynced)
        return seconds, enqueued, blocked

    def _refuse_unsynced_work(self, seconds: float, after: float) -> None:
        # three blocks in a row: the host may delay a single one
        unsynced = after > max(_UNSYNCED_SHARE * seconds, _UNSYNCED_S)
        self._unsynced_blocks = self._unsynced_blocks + 1 if unsynced else 0
        if self._unsynced_blocks == 3:
            self._unsynced_blocks = 0
            raise InvalidMeasurement(
                f"the GPU worked on for {after * 1e3:.2g} ms after the calls' own stream had "
                "ended: let that stream wait for the others that the call uses"
            )

    def _spin(self, seconds: float) -> None:
        cycles = int(seconds * self._cycles_per_s)
        self._torch.cuda._sleep(cycles)  # noqa: SLF001  no public name

    def _capture(
        self, calls: Sequence[Call], keep: int = -1, *, replayed: bool = True
    ) -> tuple[Any, object]:
        """Capture calls; return the graph and the result of the call number ``keep``."""
        torch = self._torch
        pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        kept: object = None
        failure: Exception | None = None
        unjoined = False
        self.synchronize()
        with warnings.catch_warnings(), gc_disabled(), self.current():
            # an empty graph: the calls launch on another stream, or launch nothing
            warnings.filterwarnings("error", message=".*CUDA Graph is empty")
            try:
                # calls of NCCL's watchdog thread would invalidate a global capture
                error_mode = "global" if self.ranks.count == 1 else "thread_local"
                graph.capture_begin(pool=pool, capture_error_mode=error_mode)
                with self._cupy_memory():
                    kept = run_calls(calls, keep)
            except Exception as error:  # noqa: BLE001  whatever it is, the calls cannot be captured
                failure = error
            try:
                graph.capture_end()  # even after a failure, because the stream still captures
            except Exception as error:  # noqa: BLE001  as above; the first failure is the cause
                # after a failure, the call may not have come to its join
                unjoined = failure is None and "unjoined work" in str(error)
                failure = failure or error
            try:
                if not self.ranks.all(failure is None):
                    raise CannotCapture("another rank cannot capture its calls")  # noqa: TRY301  handled like any other
                if replayed:
                    graph.replay()  # once untimed: the first launch also uploads the graph
            except Exception as error:  # noqa: BLE001  as above
                failure = failure or error
        if failure is not None:
            self._undo_failed_capture(graph, pool)
            if unjoined:
                raise InvalidMeasurement(_UNJOINED) from failure
            cause = (str(failure).splitlines() or [type(failure).__name__])[0]
            raise CannotCapture(f"a CUDA graph of {len(calls)} calls: {cause}") from failure
        self.synchronize()
        return graph, kept

    def _undo_failed_capture(self, graph: Any, pool: Any) -> None:
        """Reset the state that an invalidated capture leaves in torch.

        torch's allocator still diverts allocations to the graph's pool: end the diversion, and keep
        the graph alive, which the allocator still refers to. torch's random generator still refuses
        numbers, as in a capture: replace its state with a copy that was never captured.
        """
        torch = self._torch
        try:
            graph.pool()
        except RuntimeError:  # torch could not end the capture itself
            self._failed_captures.append(graph)
            for undo in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                with contextlib.suppress(AttributeError, RuntimeError):
                    getattr(torch._C, undo)(self._index, pool)  # noqa: SLF001  no public name
            generator = torch.cuda.default_generators[self._index]
            generator.graphsafe_set_state(generator.clone_state())
        self.synchronize()

    def _cupy_memory(self) -> Any:
        """Let cupy allocate from torch during a capture, because a torch graph keeps its memory.

        cupy's own pool would give the memory of a captured call to other arrays, but each replay
        of the graph still writes to it.
        """
        cupy = sys.modules.get("cupy")
        if cupy is None:
            return contextlib.nullcontext()
        memory, stream = self._torch.cuda, self._stream
        allocator = cupy.cuda.PythonFunctionAllocator(
            lambda size, device: int(memory.caching_allocator_alloc(size, device, stream)),
            lambda pointer, _device: memory.caching_allocator_delete(pointer),
        )
        return cupy.cuda.using_allocator(allocator.malloc)

    def _make_stream(self) -> Any:
        """Create a blocking stream: it is ordered with the legacy default stream.

        torch's own streams are not. A launcher that ignores the current stream would run
        concurrently with them: it would seem to take no time, and a graph would lack its work.
        With a blocking stream, its work is timed, and a capture of it fails.
        """
        handle = ctypes.c_void_p()
        status = self._torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))
        if int(status) or not handle.value:
            raise InvalidMeasurement(f"CUDA could not create a stream (error {int(status)})")
        return self._torch.cuda.ExternalStream(handle.value, device=self._index)

    def _find(self, gpu: Gpu) -> int:
        count = self._torch.cuda.device_count()
        for index in range(count):
            uuid = str(self._torch.cuda.get_device_properties(index).uuid)
            if count == 1 or gpu.uuid.endswith(uuid):  # a lone GPU may report another UUID
                return index
        raise UsageError(
            f"{gpu.name} ({gpu.uuid}) is none of the {count} GPUs that CUDA shows this process: "
            "set CUDA_VISIBLE_DEVICES to its UUID before anything uses CUDA"
        )


class _DeviceBlock:
    """Calls timed on the GPU, from the first kernel's start to the last one's end."""

    def __init__(
        self, device: CudaDevice, calls: Sequence[Call], mode: Mode, keep: int = -1
    ) -> None:
        self._device, self._calls = device, calls
        self.keep = keep
        self.kept: object = None
        self.stopped = 0
        blocking_s = max(_MIN_BLOCKING_S + 20e-6 * len(calls), device.blocking_s)
        self._blocking_s = 0.0 if mode is Mode.PLAIN else blocking_s

    def run(self, before: Call = nothing, after: Call = nothing) -> float:
        device = self._device
        if not self._blocking_s:
            before()
            return device.timed(self._work, after=after)[0]
        seconds, blocking_s = device.time_behind_blocking_kernel(
            self._work, self._blocking_s, tries=_MAX_TRIES, before=before, after=after
        )
        if blocking_s:
            self._blocking_s = device.blocking_s = blocking_s
            return seconds
        raise InvalidMeasurement(
            f"the GPU ran idle while {len(self._calls)} calls were enqueued: a call synchronizes, "
            "or needs more host time than the GPU can be kept blocked; remove the "
            'synchronization, or claim metric="wall" (the time that a caller waits)'
        )

    def _work(self) -> None:
        self.kept = None  # frees it, as later calls free what earlier ones returned
        self.kept = run_calls(self._calls, self.keep)
