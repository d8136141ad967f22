"""The CUDA device on a fake torch: one queue and one host, both in virtual time."""

import contextlib
import gc
import os
import random
import sys
import warnings
from types import SimpleNamespace

import pytest

from pytest_aiperf.device import cuda as cuda_module
from pytest_aiperf.device import device as device_module
from pytest_aiperf.device.cuda import CudaDevice
from pytest_aiperf.errors import CannotCapture, InvalidMeasurement, UsageError
from pytest_aiperf.model import Gpu, GpuState, Mode
from pytest_aiperf.session import cuda_machine
from pytest_aiperf.session.cuda_machine import CudaMachine

GPU = Gpu("NVIDIA H200", "h200", "GPU-1234", "sm90", 0, 0, 141 << 30, "580")


def test_the_machine_lists_gpus_and_opens_the_host(monkeypatch):
    monkeypatch.setattr(cuda_machine.nvml, "visible", lambda: [GPU])
    assert CudaMachine().gpus() == [GPU]
    host = CudaMachine().open_device(None)
    assert (host.torch_device, host.gpu, host.telemetry()) == ("cpu", None, GpuState())


class FakeCuda:
    """A torch whose device runs ``queue`` after ``busy_until``; launches cost host time."""

    LAUNCH = 5e-6

    def __init__(self):
        self.host = 0.0
        self.busy_until = 0.0
        self.side_busy_until = 0.0
        self.activities = []
        self.unjoined = False
        self.capturing = None
        self.current = None
        self.spins = []
        self.undone = []
        self.clones = 0
        self.sync_breaks_capture = False
        self.allocated = self.most = 0
        self.collected = 0
        cuda = SimpleNamespace(
            Event=lambda enable_timing: _Event(self),
            CUDAGraph=lambda: _Graph(self),
            ExternalStream=lambda handle, device: SimpleNamespace(cuda_stream=handle),
            cudart=lambda: SimpleNamespace(cudaStreamCreate=self._create),
            default_generators=[
                SimpleNamespace(clone_state=self._clone, graphsafe_set_state=lambda state: None)
            ],
            device_count=lambda: 1,
            empty_cache=lambda: None,
            get_device_properties=lambda i: SimpleNamespace(
                L2_cache_size=60 << 20, multi_processor_count=132, uuid=("1234", "5678")[i]
            ),
            graph_pool_handle=lambda: (0, 1),
            MemPool=object,
            max_memory_allocated=lambda: self.most,
            mem_get_info=lambda: (50 << 30, 141 << 30),
            memory_allocated=lambda: self.allocated,
            reset_peak_memory_stats=self._reset_peak,
            set_device=lambda index: None,
            stream=self._stream,
            synchronize=self.synchronize,
            _sleep=self._sleep,
        )
        self.torch = SimpleNamespace(
            cuda=cuda,
            profiler=SimpleNamespace(
                profile=self._profile, ProfilerActivity=SimpleNamespace(CUDA="cuda")
            ),
            _C=SimpleNamespace(
                _cuda_endAllocateToPool=lambda *a: self.undone.append(("end", *a)),
                _cuda_releasePool=lambda *a: self.undone.append(("release", *a)),
            ),
        )

    def _create(self, address):
        cuda_module.ctypes.c_void_p.from_address(address).value = 0xABC0
        return 0

    def _clone(self):
        self.clones += 1

    def _reset_peak(self):
        self.most = self.allocated

    @contextlib.contextmanager
    def _stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def _profile(self, activities):
        assert activities == ["cuda"]
        self.activities.clear()
        results = SimpleNamespace(events=lambda: [_KinetoEvent(*a) for a in self.activities])
        yield SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))

    def _sleep(self, cycles):
        self.spins.append(cycles / 2e9)
        self.launch(cycles / 2e9)

    def launch(self, seconds):
        self.host += self.LAUNCH
        if self.capturing is not None:
            self.capturing.append(seconds)
        else:
            start = max(self.busy_until, self.host)
            self.busy_until = start + seconds
            self.activities.append((start, self.busy_until, 7))

    def launch_beside(self, seconds, *, after=0.0):
        self.host += self.LAUNCH
        start = max(self.side_busy_until, self.host, after)
        self.side_busy_until = start + seconds
        self.activities.append((start, self.side_busy_until, 13))

    def fork(self, seconds, *, joined):
        """Launch on a side stream that waits for the current one, and perhaps join it."""
        if self.capturing is not None:
            self.capturing.append(seconds)
            self.unjoined = not joined
            return
        self.launch_beside(seconds, after=self.busy_until)
        if joined:
            self.busy_until = max(self.busy_until, self.side_busy_until)

    def synchronize(self):
        if self.capturing is not None:
            self.sync_breaks_capture = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
        self.host = max(self.host, self.busy_until, self.side_busy_until)


class _Event:
    def __init__(self, cuda):
        self.cuda, self.at = cuda, 0.0

    def record(self):
        self.at = max(self.cuda.busy_until, self.cuda.host)

    def query(self):
        return self.at <= self.cuda.host

    def synchronize(self):
        self.cuda.host = max(self.cuda.host, self.at)

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class _KinetoEvent:
    def __init__(self, start, end, stream):
        self.start_ns, self.end_ns = lambda: start * 1e9, lambda: end * 1e9
        self.device_resource_id = lambda: stream
        self.device_type = lambda: SimpleNamespace(name="CUDA")
        self.is_user_annotation = lambda: False


class _Graph:
    def __init__(self, cuda):
        self.cuda, self.kernels, self.ended = cuda, [], False

    def capture_begin(self, pool, capture_error_mode):
        assert pool == (0, 1)
        assert self.cuda.current is not None
        self.cuda.capturing = self.kernels

    def capture_end(self):
        self.cuda.capturing = None
        if self.cuda.sync_breaks_capture:
            self.cuda.sync_breaks_capture = False
            raise RuntimeError("CUDA error: operation failed due to a previous error\nmore")
        if self.cuda.unjoined:
            self.cuda.unjoined = False
            raise RuntimeError("CUDA error: capturing stream has unjoined work\nmore")
        self.ended = True
        if not self.kernels:
            warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=1)

    def pool(self):
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")

    def replay(self):
        for seconds in self.kernels:
            self.cuda.busy_until = max(self.cuda.busy_until, self.cuda.host) + seconds
        self.cuda.host += self.cuda.LAUNCH


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", fake.torch)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    for module in (device_module, cuda_module):
        monkeypatch.setattr(module, "now", lambda: round(fake.host * 1e9))
    return fake


@pytest.mark.parametrize(("slice_s", "idle"), [(2e-6, True), (1e-3, False)])
def test_a_gpu_is_idle_if_copies_and_kernels_run_at_once(cuda, slice_s, idle):
    """Where others work, too, each copy waits for their slice of time."""
    array = SimpleNamespace(copy_=lambda _, non_blocking: cuda.launch(slice_s))
    cuda.torch.empty = lambda *_, **__: array
    device = CudaDevice(GPU)
    before = cuda.host
    assert device.is_idle() is idle
    assert cuda.host - before < (0.01 if idle else 0.31)


def test_work_that_ends_soon_leaves_a_gpu_idle(cuda):
    cuda.torch.empty = lambda *_, **__: SimpleNamespace(copy_=lambda *_, **__: cuda.launch(2e-6))
    device = CudaDevice(GPU)
    cuda.busy_until = cuda.host + 0.1
    assert device.is_idle()
    assert cuda.host >= cuda.busy_until - 1e-9


def test_the_gpu_gets_the_fields_that_only_cuda_has(cuda):
    device = CudaDevice(GPU)
    assert (device.gpu.l2_bytes, device.gpu.sms, device.gpu.name) == (60 << 20, 132, GPU.name)
    assert device.torch_device == "cuda"


def test_the_device_finds_its_gpu_among_several(cuda):
    cuda.torch.cuda.device_count = lambda: 2
    selected = []
    cuda.torch.cuda.set_device = selected.append
    cuda.torch.cuda.default_generators *= 2
    CudaDevice(cuda_module.dataclasses.replace(GPU, uuid="GPU-5678"))
    assert selected == [1]
    with pytest.raises(UsageError, match="none of the 2 GPUs"):
        CudaDevice(cuda_module.dataclasses.replace(GPU, uuid="GPU-9999"))


def test_spins_are_calibrated(cuda):
    device = CudaDevice(GPU)
    device.timed(lambda: None, blocking_s=0.1)
    assert cuda.spins[-1] == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("mode", [Mode.GRAPH, Mode.BACKLOG])
def test_launch_gaps_do_not_count(cuda, mode):
    device = CudaDevice(GPU)
    block = device.block([lambda: cuda.launch(1e-6)] * 50, mode)  # launches take 5 us each
    assert block.run() == pytest.approx(50e-6, rel=1e-6)
    assert block.run() == pytest.approx(50e-6, rel=1e-6)


def test_a_new_block_is_blocked_as_long_as_the_last_one(cuda):
    device, tries = CudaDevice(GPU), []

    def many():
        for _ in range(100):
            cuda.launch(1e-6)

    for _ in range(2):
        before = len(cuda.spins)
        device.block([many], Mode.BACKLOG).run()
        tries.append(len(cuda.spins) - before)
    assert tries == [2, 1]


def test_plain_and_wall_times_include_launch_gaps(cuda):
    device = CudaDevice(GPU)
    calls = [lambda: cuda.launch(1e-3)] * 3
    assert device.block(calls, Mode.PLAIN).run() == pytest.approx(3e-3, rel=0.01)
    assert device.block(calls, Mode.WALL).run() == pytest.approx(3e-3, rel=0.01)
    short = [lambda: cuda.launch(1e-6)] * 10
    assert device.block(short, Mode.WALL).run() == pytest.approx(51e-6, rel=0.05)


@pytest.mark.parametrize("mode", list(Mode))
def test_every_call_runs_on_the_devices_stream(cuda, mode):
    device, seen = CudaDevice(GPU), []

    def call():
        seen.append(cuda.current.cuda_stream)
        cuda.launch(1e-5)
        return len(seen)

    block = device.block([call], mode)
    block.run()
    device.estimate_s(call)
    device.peak_bytes(call, call)
    assert set(seen) == {0xABC0}
    assert block.kept == 1
    assert cuda.current is None


def test_the_slowest_rank_decides_how_many_calls_are_traced(cuda, monkeypatch):
    monkeypatch.setattr(cuda_module, "trace", lambda *words: words[-1])
    device = CudaDevice(GPU)
    device.ranks.max = lambda seconds: seconds + 1
    call_s = device.trace(lambda: cuda.launch(1e-3), Mode.WALL, cold=False)
    assert call_s == pytest.approx(1.001, rel=1e-4)


def test_a_blocking_kernel_that_is_too_short_is_made_longer(cuda):
    device, slow_host = CudaDevice(GPU), 2e-3

    def call():
        cuda.host += slow_host
        cuda.launch(1e-5)

    block = device.block([call] * 10, Mode.BACKLOG)
    spins = len(cuda.spins)
    assert block.run() == pytest.approx(100e-6, rel=1e-6)
    assert 1 < len(cuda.spins) - spins <= 5
    spins = len(cuda.spins)
    assert block.run() == pytest.approx(100e-6, rel=1e-6)
    assert len(cuda.spins) - spins == 1  # the block still uses the longer spin


def test_a_call_that_synchronizes_is_refused_in_backlog(cuda):
    device = CudaDevice(GPU)

    def call():
        cuda.launch(1e-5)
        cuda.synchronize()

    block = device.block([call] * 3, Mode.BACKLOG)
    spins = len(cuda.spins)
    with pytest.raises(InvalidMeasurement, match=r'synchronizes.*metric="wall"'):
        block.run()
    assert len(cuda.spins) - spins == 5
    assert device.block([call] * 3, Mode.PLAIN).run() == pytest.approx(30e-6, rel=0.6)


def test_a_long_call_that_synchronizes_is_soon_given_up(cuda):
    device = CudaDevice(GPU)

    def call():
        cuda.launch(0.06)
        cuda.synchronize()

    spins, begun = len(cuda.spins), cuda.host
    with pytest.raises(InvalidMeasurement, match="synchronizes"):
        device.block([call], Mode.BACKLOG).run()
    assert len(cuda.spins) - spins == 2
    assert cuda.host - begun < 0.5


def test_a_call_that_synchronizes_cannot_be_captured_and_torchs_state_is_reset(cuda):
    device = CudaDevice(GPU)
    with pytest.raises(
        CannotCapture, match=r"graph of 1 calls: CUDA error: operation not permitted when.*ing$"
    ):
        device.block([cuda.synchronize], Mode.GRAPH)
    assert cuda.undone == [("end", 0, (0, 1)), ("release", 0, (0, 1))]
    assert cuda.clones == 1
    block = device.block([lambda: cuda.launch(1e-5)], Mode.GRAPH)
    assert block.run() == pytest.approx(1e-5)


def test_a_call_that_fails_while_captured_ends_the_capture(cuda):
    device = CudaDevice(GPU)

    def call():
        cuda.launch(1e-5)
        raise KeyError("shape")

    with pytest.raises(CannotCapture, match="shape") as caught:
        device.block([call], Mode.GRAPH)
    assert isinstance(caught.value.__cause__, KeyError)
    assert cuda.capturing is None
    assert cuda.undone == []  # torch has ended this capture itself: nothing to reset


def test_work_on_a_stream_that_is_not_captured_is_no_graph(cuda):
    device = CudaDevice(GPU)
    with pytest.raises(CannotCapture, match="Graph is empty"):
        device.block([lambda: cuda.launch_beside(1e-5)], Mode.GRAPH)


def test_work_that_outlives_its_stream_is_refused(cuda):
    device = CudaDevice(GPU)
    unsynced = device.block([lambda: cuda.launch_beside(20e-3)], Mode.BACKLOG)
    with pytest.raises(InvalidMeasurement, match="worked on for 20 ms"):
        for _ in range(3):
            unsynced.run()
    once_late = device.block([lambda: cuda.launch(1e-3)], Mode.BACKLOG)
    assert [once_late.run() for _ in range(5)] == [pytest.approx(1e-3)] * 5


def synchronizing(cuda, call):
    """Return the call, which no graph can capture any more."""

    def synchronised():
        cuda.synchronize()
        call()

    return synchronised


def test_forked_work_that_is_not_joined_is_refused_however_short(cuda):
    device = CudaDevice(GPU)

    def call(joined):
        cuda.launch(1e-5)
        cuda.fork(1e-9, joined=joined)

    runs = len(cuda.activities)
    device.refuse_unjoined(lambda: call(joined=True))
    with pytest.raises(InvalidMeasurement, match="does not wait for: end with"):
        device.refuse_unjoined(lambda: call(joined=False))
    assert len(cuda.activities) == runs  # captured, never run
    with pytest.raises(InvalidMeasurement, match="does not wait for: end with"):
        device.block([lambda: call(joined=False)], Mode.GRAPH)
    assert cuda.undone  # the failed capture was undone before the error was raised
    device.refuse_unjoined(synchronizing(cuda, lambda: call(joined=False)))


def test_a_failure_before_the_join_is_not_taken_for_a_missing_join(cuda):
    def call():
        cuda.fork(1e-5, joined=False)
        raise KeyError("shape")

    with pytest.raises(CannotCapture, match="shape"):
        CudaDevice(GPU).block([call], Mode.GRAPH)


def test_work_that_is_not_ordered_with_the_calls_stream_is_refused(cuda):
    device = CudaDevice(GPU)

    def check(call):
        device.refuse_unordered(call)
        device.refuse_unordered(synchronizing(cuda, call))

    check(lambda: cuda.launch(1e-3))
    check(lambda: cuda.fork(1e-3, joined=True))
    with pytest.raises(InvalidMeasurement, match="begin with side_stream"):
        device.refuse_unordered(lambda: cuda.launch_beside(1e-9))
    unjoined = lambda: cuda.fork(1e-3, joined=False)
    for call in (unjoined, synchronizing(cuda, unjoined)):
        with pytest.raises(InvalidMeasurement, match="end with"):
            device.refuse_unordered(call)


def test_an_estimate_leaves_launch_gaps_out_if_it_can(cuda):
    device, seen = CudaDevice(GPU), []

    def call(seconds):
        seen.append(seconds)
        cuda.launch(seconds)

    assert device.estimate_s(lambda: call(3e-3)) == pytest.approx(3e-3, rel=0.01)
    assert len(seen) == 1
    assert device.estimate_s(lambda: call(2e-6)) == pytest.approx(2e-6, rel=0.01)
    assert len(seen) == 1 + 1 + 10  # repeated, because events add time to a short call

    def synchronizing():
        cuda.launch(2e-3)
        cuda.synchronize()

    assert device.estimate_s(synchronizing) == pytest.approx(2e-3, rel=0.01)


def test_the_peak_does_not_count_earlier_allocations(cuda):
    device = CudaDevice(GPU)
    cuda.allocated, cuda.most = 1_000, 9_000

    def call():
        cuda.most = max(cuda.most, cuda.allocated + 250)

    assert device.peak_bytes(call, call)[0] == 250


def test_the_peak_counts_what_the_first_call_keeps(cuda):
    device = CudaDevice(GPU)
    cuda.allocated = 1_000

    def first():
        cuda.most = cuda.allocated + 5_000
        cuda.allocated += 40

    def second():
        cuda.most = max(cuda.most, cuda.allocated + 250)
        return "result"

    assert device.peak_bytes(first, second) == (290, "result")


def test_a_call_that_resets_the_peak_is_refused(cuda):
    device = CudaDevice(GPU)
    cuda.allocated, cuda.most = 1_000, 9_000

    def call():
        cuda.most = max(cuda.most, cuda.allocated + 250)
        cuda._reset_peak()

    with pytest.raises(InvalidMeasurement, match="reset or stopped a counter of memory"):
        device.peak_bytes(call, call)


@pytest.mark.parametrize(
    ("clocks", "seconds"),
    [
        ([1980] * 99, 0.063),
        ([*range(1000, 1980, 40), *[1980] * 99], 0.41),  # rises for 25 readings, 16 ms apart
        (None, 1.0),  # the clock never becomes stable
    ],
)
def test_stabilizing_waits_for_a_steady_clock(cuda, monkeypatch, clocks, seconds):
    device, readings = CudaDevice(GPU), iter(clocks or [1980, 1700] * 999)
    monkeypatch.setattr(cuda_module.nvml, "sm_mhz", lambda uuid: next(readings))
    begun = cuda.host

    def call():
        assert not gc.isenabled()  # destroying a graph would invalidate a capture in progress
        cuda.launch(1e-3)

    device.stabilize_clocks(call)
    assert cuda.host - begun == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(("call_s", "count"), [(0.3, 1), (0.15, 7)])
def test_stabilizing_runs_a_long_call_once(cuda, monkeypatch, call_s, count):
    device, readings, ran = CudaDevice(GPU), iter([1980, 1700] * 99), []
    monkeypatch.setattr(cuda_module.nvml, "sm_mhz", lambda uuid: next(readings))
    device.stabilize_clocks(lambda: (ran.append(1), cuda.launch(call_s)))
    assert len(ran) == count


def test_warming_up_keeps_the_gpu_busy_for_a_while(cuda):
    device = CudaDevice(GPU)
    ran = []

    def block(name, seconds):
        return device.block([lambda: (ran.append(name), cuda.launch(seconds))], Mode.PLAIN)

    begun = cuda.host
    device.warm_up([block("short", 1e-3), block("other", 1e-3)])
    assert 0.03 <= cuda.host - begun < 0.04
    assert ran[:3] == ["short", "other", "short"]
    ran.clear()
    device.warm_up([block("long", 0.1), block("other", 0.1)])
    assert ran == ["long", "other"]  # even a block longer than the warm-up runs once


def test_free_memory_is_the_drivers(cuda):
    assert CudaDevice(GPU).free_bytes() == 50 << 30


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.BACKLOG, Mode.GRAPH])
def test_results_are_copied_before_anything_is_waited_for(cuda, mode):
    """Work that the calls' stream does not wait for is not in the copies."""
    device, waits = CudaDevice(GPU), []
    block = device.block([lambda: cuda.launch(1e-3)], mode)
    block.run()
    seconds = block.run(after=lambda: waits.append(cuda.busy_until - cuda.host))
    assert waits[0] > 0.5e-3
    assert seconds == pytest.approx(1e-3, rel=0.01)


def test_each_try_of_a_block_has_new_values(cuda):
    device, ran = CudaDevice(GPU), []

    def call():
        ran.append("call")
        cuda.host += 20e-3
        cuda.launch(1e-5)

    block = device.block([call], Mode.BACKLOG)
    block.run(before=lambda: ran.append("new values"))
    assert len(ran) > 2  # the first spin was too short
    assert ran[::2] == ["new values"] * (len(ran) // 2)


def test_cold_caches_are_flushed_by_one_buffer(cuda, monkeypatch):
    device, flushed = CudaDevice(GPU), []
    made = lambda of: flushed.append("made") or (lambda: flushed.append("read"))
    monkeypatch.setattr(cuda_module.counters, "flusher", made)
    device.flush()
    device.flush()
    assert flushed == ["made", "read", "read"]


def test_cupy_joins_the_stream_and_captures_into_torchs_memory(cuda, monkeypatch):
    entered, allocators, freed = [], [], []

    @contextlib.contextmanager
    def entering(name):
        entered.append(name)
        yield

    def entering_again(name):
        return _Reentrant(lambda: entering(name))

    cupy_cuda = SimpleNamespace(
        Stream=SimpleNamespace(from_external=lambda s: entering_again(s.cuda_stream)),
        PythonFunctionAllocator=lambda a, f: SimpleNamespace(malloc=(a, f)),
        using_allocator=lambda malloc: contextlib.nullcontext(allocators.append(malloc)),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cupy_cuda))
    cuda.torch.cuda.caching_allocator_alloc = lambda size, device, stream: size + device
    cuda.torch.cuda.caching_allocator_delete = freed.append
    device = CudaDevice(GPU)
    entered.clear()
    block = device.block([lambda: cuda.launch(1e-5)], Mode.GRAPH)
    assert entered == [0xABC0]
    ((allocate, free),) = allocators
    assert allocate(512, 0) == 512
    free(77, 0)
    assert freed == [77]
    block.run()
    assert len(entered) == 2
    assert len(allocators) == 1  # torch's allocator is used during capture only


def test_an_unused_cupy_allocates_nothing(cuda, monkeypatch):
    pool = SimpleNamespace(total_bytes=lambda: 0, free_all_blocks=lambda: None)
    states, seeds, pads = {}, [], []
    cupy = SimpleNamespace(
        random=SimpleNamespace(
            seed=seeds.append, _generator=SimpleNamespace(_random_states=states)
        ),
        empty=lambda size, dtype: pads.append(size),
        get_default_memory_pool=lambda: pool,
        cuda=SimpleNamespace(
            Stream=SimpleNamespace(from_external=lambda _: contextlib.nullcontext())
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("CUPY_SEED", "0")
    monkeypatch.setattr(cuda_module, "seed_all", lambda _: None)
    monkeypatch.setattr(cuda.torch, "empty", lambda *_, **__: None, raising=False)
    monkeypatch.setattr(cuda.torch, "uint8", None, raising=False)
    device = CudaDevice(GPU)

    def replicate(seed):
        device.release()
        device.seed(seed)
        device.random_padding(random.Random(seed))

    replicate(1)
    assert (seeds, pads, os.environ["CUPY_SEED"]) == ([], [], "1")  # for generators created later
    states[0], pool.total_bytes = "made", lambda: 512
    replicate(2)
    assert (seeds, len(pads)) == ([2], 2)
    pool.total_bytes = lambda: 0  # the pool was emptied between replicates
    replicate(3)
    assert (seeds, len(pads)) == ([2, 3], 4)


class _Reentrant:
    def __init__(self, make):
        self.make = make

    def __enter__(self):
        self.made = self.make()
        return self.made.__enter__()

    def __exit__(self, *args):
        return self.made.__exit__(*args)
