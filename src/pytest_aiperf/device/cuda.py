"""How long calls take on a GPU: in a graph, behind a spinning kernel, between events."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from typing import Any

from pytest_aiperf.errors import CannotCapture, InvalidMeasurement, UsageError
from pytest_aiperf.limits import ceilings
from pytest_aiperf.machine import nvml
from pytest_aiperf.machine.distributed import RankGroup
from pytest_aiperf.model import Bench, Gpu, GpuState, Mode, Trace
from pytest_aiperf.rules import validity

from .device import (
    LONGEST_BLOCK,
    Block,
    Call,
    Device,
    HostDevice,
    Machine,
    NoiseProbe,
    WallBlock,
    now,
    seed_all,
    undisturbed,
)
from .trace import trace

_TRIES = 5  # one, and four with a longer spin
_LEAST_HOLD = 100e-6
_MOST_HOLD = 1.0
_LONG_HOLD = 0.05
_STRAY = (0.03, 0.5e-3)  # share of the block, seconds: more work than this after its end is a stray
_LEAST_SETTLING = 0.05
_MOST_SETTLING = 1.0
_WAKING = 0.03  # memory was 11 % slower for up to 30 ms after a pause of some ms, on H200s
_SETTLED = (5, 0.02)  # so many readings of the SM clock, within this of each other


validity.watched(now, __name__, "now")  # this module's own reference


class CudaMachine:
    """The machine that runs this process."""

    def gpus(self) -> Sequence[Gpu]:
        return nvml.visible()

    def open_device(self, gpu: Gpu | None, ranks: RankGroup | None = None) -> Device:
        return HostDevice(ranks) if gpu is None else CudaDevice(gpu, ranks)


def measurable_gpus(machine: Machine) -> Sequence[Gpu]:
    """List the GPUs; raise where there is none, or where this process cannot time them."""
    gpus = machine.gpus()
    if not gpus:
        raise UsageError(f"there is no NVIDIA GPU to measure here: {nvml.absence()}")
    if find_spec("torch") is None:
        raise UsageError("torch is missing: pip install 'pytest-aiperf[gpu]'")
    if problem := validity.environment_problem(os.environ):
        raise InvalidMeasurement(problem)
    return gpus


class CudaDevice:
    """Times calls on one GPU, all of them on one stream of its own."""

    torch_device = "cuda"

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
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._strays = -3  # the three spins below are no calls: a sanitizer may hold them up
        self._broken_off: list[object] = []
        self.latest_hold = 0.0
        """Seconds to hold a block back, as the latest had to be: a new one will be much like it."""
        self._cycles_per_s = 1e9
        # the fastest of three: the first finds the GPU asleep
        spin = min(self.timed(lambda: self._spin(0.003))[0] for _ in range(3))
        self._cycles_per_s *= 0.003 / spin
        self._strays = 0

    def seed(self, seed: int) -> None:
        seed_all(seed)
        if cupy := sys.modules.get("cupy"):
            # other tests imported it, most likely, and a generator takes long to make: nobody's is
            # made here, and one that somebody makes has this seed
            made = getattr(cupy.random._generator, "_random_states", True)  # noqa: SLF001  no public name
            if made:
                cupy.random.seed(seed % 2**32)
            os.environ["CUPY_SEED"] = str(seed % 2**32)

    def random_padding(self, rng: random.Random) -> object:
        small, large = rng.randrange(1, 2_048) * 512, rng.randrange(1, 32) << 21
        empty, byte = self._torch.empty, self._torch.uint8
        pads = [empty(size, dtype=byte, device=self.torch_device) for size in (small, large)]
        if self._cupy_used:
            pads += [sys.modules["cupy"].empty(size, dtype="u1") for size in (small, large)]
        return pads

    def block(self, calls: Sequence[Call], mode: Mode) -> Block:
        if mode is Mode.WALL:
            return WallBlock(calls, self.ranks, self.synchronize, self.current)
        if mode is Mode.GRAPH:
            graph, last = self._capture(calls)

            def replay() -> object:
                graph.replay()
                return last

            return _DeviceBlock(self, [replay], mode, last)
        return _DeviceBlock(self, calls, mode)

    def estimate_s(self, call: Call) -> float:
        def ten() -> None:
            for _ in range(10):
                call()

        seconds, hold = self.held_back(call, _LEAST_HOLD, tries=1)
        if not hold and seconds < LONGEST_BLOCK:  # gaps in a longer call choose nothing
            seconds, _ = self.held_back(call, 2 * _LEAST_HOLD, tries=2)
        return seconds if seconds > 1e-3 else self.held_back(ten, _LEAST_HOLD, tries=3)[0] / 10

    def stabilize_clocks(self, call: Call) -> None:
        """Run a call for 0.05 s at least and 1 s at most, until the SM clock holds still."""
        readings, apart = _SETTLED
        clocks = deque([0.0], maxlen=readings)
        begun, calls, spent = now(), 1, 0.0
        with undisturbed(), self.current():
            while not self.ranks.all(
                spent >= _LEAST_SETTLING and min(clocks) >= max(clocks) * (1 - apart)
            ):
                batch = now()
                for _ in range(calls):
                    call()
                self.synchronize()
                if self.ranks.all(now() - batch < 10_000_000):
                    calls *= 2
                clocks.append(nvml.sm_mhz(self._uuid) or 0.0)
                spent = (now() - begun) * 1e-9
                if self.ranks.all(spent > _MOST_SETTLING):
                    break

    def warm_up(self, blocks: Sequence[Block]) -> None:
        begun = now()
        for ran, block in enumerate(cycle(blocks)):
            waking = ran < len(blocks) or (now() - begun) * 1e-9 < _WAKING
            if not self.ranks.all(waking):
                break
            block.run()  # a first run finds how long to hold back, too

    def telemetry(self) -> GpuState:
        return nvml.telemetry(self._uuid)

    def peak_bytes(self, call: Call) -> int:
        """Return what torch's allocator held at most: that of a library of its own is not seen."""
        memory = self._torch.cuda
        with self.current():
            self.synchronize()
            before = memory.memory_allocated()
            memory.reset_peak_memory_stats()
            held = call()
            self.synchronize()
            peak = memory.max_memory_allocated()
            del held
        return int(self.ranks.max(max(0, peak - before)))

    def trace(self, call: Call) -> Trace | None:
        with undisturbed():
            return trace(call, self)

    def ceilings(self, say: Callable[[str], object]) -> Mapping[str, float]:
        assert self.gpu is not None
        # other ranks may know their GPU's already, and would not take part in these blocks
        return ceilings.known(self if self.ranks.count == 1 else CudaDevice(self.gpu), say=say)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def release(self) -> None:
        self.synchronize()
        gc.collect()
        self._torch.cuda.empty_cache()
        if cupy := sys.modules.get("cupy"):
            pool = cupy.get_default_memory_pool()
            self._cupy_used = self._cupy_used or bool(pool.total_bytes())
            pool.free_all_blocks()

    def free_bytes(self) -> int:
        return int(self._torch.cuda.mem_get_info()[0])

    def noise_probe(self) -> NoiseProbe:
        torch = self._torch

        # a pass over 32 MiB: bound by memory, whose layout is the largest noise
        def inputs(bench: Bench) -> tuple[Any, ...]:
            return (torch.randn(bench.size(1 << 23, check=1 << 10), device=self.torch_device),)

        return inputs, torch.neg

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this clock's stream the current one of torch and, where it is loaded, of cupy."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._torch.cuda.stream(self._stream))
            if cupy := sys.modules.get("cupy"):
                if self._cupy_stream is None:
                    self._cupy_stream = cupy.cuda.Stream.from_external(self._stream)
                stack.enter_context(self._cupy_stream)
            yield

    def held_back(self, work: Call, hold: float, *, tries: int) -> tuple[float, float]:
        """Time work that is all enqueued while a kernel spins; try longer spins where it is not.

        Return the seconds on the device and how long to spin the next time: 0 when no spin was
        long enough, and the seconds contain launch gaps.
        """
        seconds = 0.0
        for longer in range(tries):
            seconds, enqueued, held = self.timed(work, hold)
            if self.ranks.all(held):
                return seconds, max(_LEAST_HOLD, 1.5 * enqueued)
            if longer and not self.ranks.all(hold < _LONG_HOLD):
                break  # twice what it took before: it waits for the GPU, and would for any spin
            hold = min(_MOST_HOLD, 2 * max(hold, enqueued))
        return seconds, 0.0

    @validity.watched
    def timed(self, work: Call, hold: float = 0.0) -> tuple[float, float, bool]:
        """Time work between two events, behind a kernel that spins for ``hold`` seconds.

        Return the seconds on the device, those that the host took to enqueue, and whether the
        GPU was still held back when all was enqueued.
        """
        self.synchronize()
        with undisturbed(), self.current():
            if hold:
                self._spin(hold)
            self.ranks.stream_barrier()
            begun = now()
            self._start.record()
            work()
            self._end.record()
            enqueued = (now() - begun) * 1e-9
            held = not self._start.query()
            self._end.synchronize()
            ended = now()
            self.synchronize()
            after = self.ranks.max((now() - ended) * 1e-9)  # a stray is one for all ranks
        seconds = self.ranks.max(self._start.elapsed_time(self._end) * 1e-3)
        self._refuse_strays(seconds, after)
        return seconds, enqueued, held

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
        self._torch.cuda._sleep(cycles)  # noqa: SLF001  torch's own tests need it too: no public name

    def _capture(self, calls: Sequence[Call]) -> tuple[Any, object]:
        torch = self._torch
        pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        last: object = None
        failure: Exception | None = None
        self.synchronize()
        with warnings.catch_warnings(), undisturbed(), self.current():
            # an empty graph means that the calls work on a stream which was not captured
            warnings.filterwarnings("error", message=".*CUDA Graph is empty")
            try:
                # NCCL's watchdog, a thread of its own, would break off a global capture
                errors = "global" if self.ranks.count == 1 else "thread_local"
                graph.capture_begin(pool=pool, capture_error_mode=errors)
                with self._cupy_memory():
                    for call in calls:
                        last = call()
            except Exception as error:  # noqa: BLE001  whatever it is, it cannot be captured
                failure = error
            try:
                graph.capture_end()  # after a failure too: the stream must stop capturing
            except Exception as error:  # noqa: BLE001  as above; the first failure is the cause
                failure = failure or error
            try:
                if not self.ranks.all(failure is None):
                    raise CannotCapture("another rank cannot capture its calls")  # noqa: TRY301  ends as any
                graph.replay()  # the first launch also uploads the graph
            except Exception as error:  # noqa: BLE001  as above
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
            self._broken_off.append(graph)
            for undo in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                with contextlib.suppress(AttributeError, RuntimeError):
                    getattr(torch._C, undo)(self._index, pool)  # noqa: SLF001  no public name
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
        memory, stream = self._torch.cuda, self._stream
        allocator = cupy.cuda.PythonFunctionAllocator(
            lambda size, device: int(memory.caching_allocator_alloc(size, device, stream)),
            lambda pointer, _device: memory.caching_allocator_delete(pointer),
        )
        made: contextlib.AbstractContextManager[object] = cupy.cuda.using_allocator(
            allocator.malloc
        )
        return made

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
        for index in range(count):
            uuid = str(self._torch.cuda.get_device_properties(index).uuid)
            if count == 1 or gpu.uuid.endswith(uuid):  # one: whatever it calls itself
                return index
        raise UsageError(
            f"{gpu.name} ({gpu.uuid}) is none of the {count} GPUs that CUDA shows this process; "
            "set CUDA_VISIBLE_DEVICES to its UUID before anything uses CUDA"
        )


class _DeviceBlock:
    """From the first kernel's start to the last one's end."""

    def __init__(
        self, clock: CudaDevice, calls: Sequence[Call], mode: Mode, last: object = None
    ) -> None:
        self._clock, self._calls = clock, calls
        known = max(_LEAST_HOLD + 20e-6 * len(calls), clock.latest_hold)
        self._hold = 0.0 if mode is Mode.PLAIN else known
        self.last = last

    def run(self) -> float:
        if not self._hold:
            return self._clock.timed(self._work)[0]
        seconds, hold = self._clock.held_back(self._work, self._hold, tries=_TRIES)
        if hold:
            self._hold = hold
            self._clock.latest_hold = hold
            return seconds
        raise InvalidMeasurement(
            f"the GPU ran dry while {len(self._calls)} calls were enqueued: a call synchronises, "
            "or costs more host time than the GPU can be held back; take the synchronisation out, "
            'or claim metric="wall" (what the caller waits)'
        )

    def run_untimed(self) -> None:
        self._clock.synchronize()
        with undisturbed(), self._clock.current():
            self._work()
        self._clock.synchronize()

    def _work(self) -> None:
        for call in self._calls:
            self.last = call()
