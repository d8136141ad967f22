"""The CUDA clock on a torch that is made up: one queue and one host, both in virtual time."""

import contextlib
import gc
import os
import random
import sys
import warnings
from types import SimpleNamespace

import pytest

from pytest_aiperf.device import cuda as rooms
from pytest_aiperf.device import device
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
            _C=SimpleNamespace(
                _cuda_endAllocateToPool=lambda *a: self.undone.append(("end", *a)),
                _cuda_releasePool=lambda *a: self.undone.append(("release", *a)),
            ),
        )

    def _create(self, address):
        rooms.ctypes.c_void_p.from_address(address).value = 0xABC0
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

    def _sleep(self, cycles):
        self.spins.append(cycles / 2e9)
        self.launch(cycles / 2e9)

    def launch(self, seconds):
        self.host += self.LAUNCH
        if self.capturing is not None:
            self.capturing.append(seconds)
        else:
            self.busy_until = max(self.busy_until, self.host) + seconds

    def launch_beside(self, seconds):
        self.host += self.LAUNCH
        self.side_busy_until = max(self.side_busy_until, self.host) + seconds

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
    made = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", made.torch)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    for room in (device, rooms):
        monkeypatch.setattr(room, "now", lambda: round(made.host * 1e9))
    return made


def test_the_gpu_is_completed_with_what_only_cuda_knows(cuda):
    clock = CudaDevice(GPU)
    assert (clock.gpu.l2_bytes, clock.gpu.sms, clock.gpu.name) == (60 << 20, 132, GPU.name)
    assert clock.torch_device == "cuda"


def test_the_clock_finds_its_gpu_among_several(cuda):
    cuda.torch.cuda.device_count = lambda: 2
    chosen = []
    cuda.torch.cuda.set_device = chosen.append
    cuda.torch.cuda.default_generators *= 2
    CudaDevice(rooms.dataclasses.replace(GPU, uuid="GPU-5678"))
    assert chosen == [1]
    with pytest.raises(UsageError, match="none of the 2 GPUs"):
        CudaDevice(rooms.dataclasses.replace(GPU, uuid="GPU-9999"))


def test_spins_are_calibrated(cuda):
    clock = CudaDevice(GPU)
    clock.timed(lambda: None, blocking_s=0.1)
    assert cuda.spins[-1] == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("mode", [Mode.GRAPH, Mode.BACKLOG])
def test_launch_gaps_do_not_count(cuda, mode):
    clock = CudaDevice(GPU)
    block = clock.block([lambda: cuda.launch(1e-6)] * 50, mode)  # a launch costs five times that
    assert block.run() == pytest.approx(50e-6, rel=1e-6)
    assert block.run() == pytest.approx(50e-6, rel=1e-6)


def test_a_new_block_is_held_back_as_long_as_the_latest_had_to_be(cuda):
    clock, tries = CudaDevice(GPU), []

    def many():
        for _ in range(100):
            cuda.launch(1e-6)

    for _ in range(2):
        before = len(cuda.spins)
        clock.block([many], Mode.BACKLOG).run()
        tries.append(len(cuda.spins) - before)
    assert tries == [2, 1]


def test_plain_and_wall_count_what_passes(cuda):
    clock = CudaDevice(GPU)
    calls = [lambda: cuda.launch(1e-3)] * 3
    assert clock.block(calls, Mode.PLAIN).run() == pytest.approx(3e-3, rel=0.01)
    assert clock.block(calls, Mode.WALL).run() == pytest.approx(3e-3, rel=0.01)
    short = [lambda: cuda.launch(1e-6)] * 10
    assert clock.block(short, Mode.WALL).run() == pytest.approx(51e-6, rel=0.05)


@pytest.mark.parametrize("mode", list(Mode))
def test_every_call_runs_on_the_clocks_stream(cuda, mode):
    clock, seen = CudaDevice(GPU), []

    def call():
        seen.append(cuda.current.cuda_stream)
        cuda.launch(1e-5)
        return len(seen)

    block = clock.block([call], mode)
    block.run()
    clock.estimate_s(call)
    clock.peak_bytes(call)
    assert set(seen) == {0xABC0}
    assert block.last == 1
    assert cuda.current is None


def test_a_hold_that_is_too_short_is_made_longer(cuda):
    clock, slow_host = CudaDevice(GPU), 2e-3

    def call():
        cuda.host += slow_host
        cuda.launch(1e-5)

    block = clock.block([call] * 10, Mode.BACKLOG)
    spins = len(cuda.spins)
    assert block.run() == pytest.approx(100e-6, rel=1e-6)
    assert 1 < len(cuda.spins) - spins <= 5
    spins = len(cuda.spins)
    assert block.run() == pytest.approx(100e-6, rel=1e-6)
    assert len(cuda.spins) - spins == 1  # it is remembered


def test_a_call_that_synchronises_is_refused_in_backlog(cuda):
    clock = CudaDevice(GPU)

    def call():
        cuda.launch(1e-5)
        cuda.synchronize()

    block = clock.block([call] * 3, Mode.BACKLOG)
    spins = len(cuda.spins)
    with pytest.raises(InvalidMeasurement, match=r'synchronises.*metric="wall"'):
        block.run()
    assert len(cuda.spins) - spins == 5
    assert clock.block([call] * 3, Mode.PLAIN).run() == pytest.approx(30e-6, rel=0.6)


def test_a_long_call_that_synchronises_is_soon_given_up(cuda):
    clock = CudaDevice(GPU)

    def call():
        cuda.launch(0.06)
        cuda.synchronize()

    spins, begun = len(cuda.spins), cuda.host
    with pytest.raises(InvalidMeasurement, match="synchronises"):
        clock.block([call], Mode.BACKLOG).run()
    assert len(cuda.spins) - spins == 2
    assert cuda.host - begun < 0.5


def test_a_call_that_synchronises_cannot_be_captured_and_torch_is_mended(cuda):
    clock = CudaDevice(GPU)
    with pytest.raises(
        CannotCapture, match=r"graph of 1 calls: CUDA error: operation not permitted when.*ing$"
    ):
        clock.block([cuda.synchronize], Mode.GRAPH)
    assert cuda.undone == [("end", 0, (0, 1)), ("release", 0, (0, 1))]
    assert cuda.clones == 1
    block = clock.block([lambda: cuda.launch(1e-5)], Mode.GRAPH)
    assert block.run() == pytest.approx(1e-5)


def test_a_call_that_fails_while_captured_ends_the_capture(cuda):
    clock = CudaDevice(GPU)

    def call():
        cuda.launch(1e-5)
        raise KeyError("shape")

    with pytest.raises(CannotCapture, match="shape") as caught:
        clock.block([call], Mode.GRAPH)
    assert isinstance(caught.value.__cause__, KeyError)
    assert cuda.capturing is None
    assert cuda.undone == []  # torch ended this capture in order: nothing to mend


def test_work_on_a_stream_that_is_not_captured_is_no_graph(cuda):
    clock = CudaDevice(GPU)
    with pytest.raises(CannotCapture, match="Graph is empty"):
        clock.block([lambda: cuda.launch_beside(1e-5)], Mode.GRAPH)


def test_work_that_outlives_its_stream_is_refused(cuda):
    clock = CudaDevice(GPU)
    stray = clock.block([lambda: cuda.launch_beside(20e-3)], Mode.BACKLOG)
    with pytest.raises(InvalidMeasurement, match="worked on for 20 ms"):
        for _ in range(3):
            stray.run()
    once_late = clock.block([lambda: cuda.launch(1e-3)], Mode.BACKLOG)
    assert [once_late.run() for _ in range(5)] == [pytest.approx(1e-3)] * 5


def test_once_leaves_launch_gaps_out_where_it_can(cuda):
    clock, seen = CudaDevice(GPU), []

    def call(seconds):
        seen.append(seconds)
        cuda.launch(seconds)

    assert clock.estimate_s(lambda: call(3e-3)) == pytest.approx(3e-3, rel=0.01)
    assert len(seen) == 1
    assert clock.estimate_s(lambda: call(2e-6)) == pytest.approx(2e-6, rel=0.01)
    assert len(seen) == 1 + 1 + 10  # too short for one: the events themselves cost some of it

    def synchronising():
        cuda.launch(2e-3)
        cuda.synchronize()

    assert clock.estimate_s(synchronising) == pytest.approx(2e-3, rel=0.01)


def test_peak_is_what_torch_held_beyond_what_it_had(cuda):
    clock = CudaDevice(GPU)
    cuda.allocated, cuda.most = 1_000, 9_000

    def call():
        cuda.most = max(cuda.most, cuda.allocated + 250)

    assert clock.peak_bytes(call) == 250


@pytest.mark.parametrize(
    ("clocks", "seconds"),
    [
        ([1980] * 99, 0.063),
        ([*range(1000, 1980, 40), *[1980] * 99], 0.41),  # it rises for 25 readings of 16 ms
        (None, 1.0),  # it never holds still
    ],
)
def test_settling_waits_for_a_steady_clock(cuda, monkeypatch, clocks, seconds):
    clock, readings = CudaDevice(GPU), iter(clocks or [1980, 1700] * 999)
    monkeypatch.setattr(rooms.nvml, "sm_mhz", lambda uuid: next(readings))
    begun = cuda.host

    def call():
        assert not gc.isenabled()  # a graph that is collected would spoil one being captured
        cuda.launch(1e-3)

    clock.stabilize_clocks(call)
    assert cuda.host - begun == pytest.approx(seconds, rel=0.15)


def test_waking_keeps_the_gpu_at_work_for_a_while(cuda):
    clock = CudaDevice(GPU)
    ran = []

    def block(name, seconds):
        return clock.block([lambda: (ran.append(name), cuda.launch(seconds))], Mode.PLAIN)

    begun = cuda.host
    clock.warm_up([block("short", 1e-3), block("other", 1e-3)])
    assert 0.03 <= cuda.host - begun < 0.04
    assert ran[:3] == ["short", "other", "short"]
    ran.clear()
    clock.warm_up([block("long", 0.1), block("other", 0.1)])
    assert ran == ["long", "other"]  # once at least


def test_free_memory_is_the_drivers(cuda):
    assert CudaDevice(GPU).free_bytes() == 50 << 30


def test_a_block_runs_again_behind_no_spin_and_is_waited_for(cuda):
    clock, ran = CudaDevice(GPU), []
    block = clock.block([lambda: ran.append(1) or cuda.launch(1e-3) or 7], Mode.BACKLOG)
    spins = len(cuda.spins)
    block.run_untimed()
    assert (len(ran), block.last, len(cuda.spins) - spins) == (1, 7, 0)
    assert cuda.host >= cuda.busy_until


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
    clock = CudaDevice(GPU)
    entered.clear()
    block = clock.block([lambda: cuda.launch(1e-5)], Mode.GRAPH)
    assert entered == [0xABC0]
    ((allocate, free),) = allocators
    assert allocate(512, 0) == 512
    free(77, 0)
    assert freed == [77]
    block.run()
    assert len(entered) == 2
    assert len(allocators) == 1  # only captured memory must be the graph's


def test_a_cupy_that_nobody_uses_costs_nothing(cuda, monkeypatch):
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
    monkeypatch.setattr(rooms, "seed_all", lambda _: None)
    monkeypatch.setattr(cuda.torch, "empty", lambda *_, **__: None, raising=False)
    monkeypatch.setattr(cuda.torch, "uint8", None, raising=False)
    clock = CudaDevice(GPU)

    def replicate(seed):
        clock.release()
        clock.seed(seed)
        clock.random_padding(random.Random(seed))

    replicate(1)
    assert (seeds, pads, os.environ["CUPY_SEED"]) == ([], [], "1")  # whoever begins has this seed
    states[0], pool.total_bytes = "made", lambda: 512
    replicate(2)
    assert (seeds, len(pads)) == ([2], 2)
    pool.total_bytes = lambda: 0  # all of it is free between replicates
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
