"""The CUDA device on a real GPU: its modes agree, and it refuses calls that it cannot time."""

import random
import statistics
import time

import pytest
import torch

from pytest_aiperf.device.cuda import CudaDevice
from pytest_aiperf.errors import CannotCapture, InvalidMeasurement
from pytest_aiperf.model import Mode


@pytest.fixture
def cuda(gpu):
    return CudaDevice(gpu)


@pytest.fixture
def copy(cuda):
    """Return a call that copies 400 MiB, which takes about 200 us on an H200."""
    source = torch.randn(100 << 20, device="cuda")
    target = torch.empty_like(source)
    call = lambda: target.copy_(source)
    cuda.stabilize_clocks(call)
    return call


def seconds(cuda, call, mode, calls=20):
    """Return the seconds per call: the median of seven blocks."""
    block = cuda.block([call] * calls, mode)
    block.run()
    return statistics.median(block.run() for _ in range(7)) / calls


def test_the_gpu_is_described(gpu, cuda):
    assert cuda.gpu.l2_bytes > 1 << 20
    assert cuda.gpu.sms == gpu.sms  # NVML's core count agrees with CUDA
    state = cuda.telemetry()
    assert state.sm_mhz
    assert state.event_reasons is not None


def test_graph_backlog_and_plain_agree(gpu, cuda, copy):
    times = {mode: seconds(cuda, copy, mode) for mode in (Mode.GRAPH, Mode.BACKLOG, Mode.PLAIN)}
    for measured in times.values():
        assert measured == pytest.approx(times[Mode.GRAPH], rel=0.03, abs=2e-6), times
    assert cuda.estimate_s(copy) == pytest.approx(times[Mode.GRAPH], rel=0.03, abs=4e-6)
    assert seconds(cuda, copy, Mode.WALL) >= times[Mode.GRAPH] * 0.99


def test_the_launch_of_a_tiny_kernel_is_left_out(gpu, cuda):
    x = torch.zeros(1, device="cuda")
    call = lambda: x.add_(1)
    cuda.stabilize_clocks(call)
    graph = seconds(cuda, call, Mode.GRAPH, 500)
    assert graph < 2.5e-6
    assert cuda.estimate_s(call) < 5e-6 < seconds(cuda, call, Mode.WALL, 500)


def test_a_graph_leaves_what_its_last_call_returned(gpu, cuda):
    x, y = torch.ones(1_000, device="cuda"), torch.full((1_000,), 5.0, device="cuda")
    block = cuda.block([lambda: x + 1, lambda: y * 2], Mode.GRAPH)
    block.kept.fill_(float("nan"))
    y.fill_(7)
    block.run()
    assert block.kept.tolist() == [14.0] * 1_000


def test_a_synchronizing_call_cannot_be_captured_and_all_works_afterwards(gpu, cuda, copy):
    x = torch.ones(1_000, device="cuda")
    before = seconds(cuda, copy, Mode.GRAPH)
    for _ in range(3):
        with pytest.raises(CannotCapture, match="graph of 2 calls: "):
            cuda.block([lambda: x + 1, lambda: x.sum().item()], Mode.GRAPH)
    assert torch.randn(1_000, device="cuda").std().item() == pytest.approx(1, abs=0.2)
    dropped = cuda.block([lambda: torch.nn.functional.dropout(x)], Mode.GRAPH)
    dropped.run()
    first = dropped.kept.clone()
    dropped.run()
    assert not torch.equal(first, dropped.kept)
    assert seconds(cuda, copy, Mode.GRAPH) == pytest.approx(before, rel=0.03)
    cuda.release()


def test_a_call_that_raises_cannot_be_captured_and_all_works_afterwards(gpu, cuda, copy):
    def call():
        copy()
        raise KeyError("shape")

    with pytest.raises(CannotCapture, match="shape"):
        cuda.block([call], Mode.GRAPH)
    assert torch.randn(1_000, device="cuda").std().item() == pytest.approx(1, abs=0.2)
    assert seconds(cuda, copy, Mode.GRAPH) > 0


def test_a_synchronizing_call_is_refused_in_backlog(gpu, cuda, copy):
    def call():
        copy()
        torch.cuda.synchronize()

    with pytest.raises(InvalidMeasurement, match="synchronizes"):
        cuda.block([call] * 5, Mode.BACKLOG).run()
    assert seconds(cuda, call, Mode.PLAIN, 5) > 0


def test_work_on_the_default_stream_is_timed_and_not_captured(gpu, cuda, copy):
    def call():
        with torch.cuda.stream(torch.cuda.default_stream()):
            copy()

    with pytest.raises(CannotCapture):
        cuda.block([call] * 5, Mode.GRAPH)
    assert seconds(cuda, call, Mode.BACKLOG) == pytest.approx(
        seconds(cuda, copy, Mode.BACKLOG), rel=0.1
    )


def test_work_that_is_not_joined_is_refused(gpu, cuda):
    side_stream = torch.cuda.Stream()

    def call():
        with torch.cuda.stream(side_stream):
            torch.cuda._sleep(40_000_000)  # 20 ms

    block = cuda.block([call], Mode.PLAIN)
    with pytest.raises(InvalidMeasurement, match="worked on for"):
        for _ in range(3):
            block.run()


def test_cupy_is_on_the_devices_stream_and_its_captured_memory_is_the_graphs(gpu, cuda):
    import cupy

    a = cupy.random.standard_normal(1 << 24).astype("f4")
    call = lambda: cupy.sqrt(a * a + 1) - a
    cuda.stabilize_clocks(call)
    expected = cupy.asnumpy(call())
    times = {m: seconds(cuda, call, m) for m in (Mode.GRAPH, Mode.BACKLOG, Mode.PLAIN)}
    for measured in times.values():
        assert measured == pytest.approx(times[Mode.GRAPH], rel=0.05, abs=4e-6), times
    first, second = (cuda.block([call] * 3, Mode.GRAPH) for _ in range(2))
    others = [cupy.full(1 << 24, 9, dtype="f4") for _ in range(6)]
    first.run()
    second.run()
    first.run()
    assert all((other == 9).all() for other in others)
    for block in (first, second):
        assert (cupy.asnumpy(block.kept) == expected).all()


def test_the_peak_counts_memory_that_is_held_at_once(gpu, cuda):
    outside = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")

    def call():
        first = torch.empty(96 << 20, dtype=torch.uint8, device="cuda")
        del first
        return torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

    assert cuda.peak_bytes(call, call)[0] == 96 << 20
    assert outside.numel() == 1 << 26


def test_allocated_memory_is_no_longer_free(gpu, cuda):
    before = cuda.free_bytes()
    buffer = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert before - cuda.free_bytes() == pytest.approx(buffer.nbytes, rel=0.1)


def test_padding_moves_later_allocations(gpu, cuda):
    addresses = set()
    for seed in range(8):
        cuda.release()
        padding = cuda.random_padding(random.Random(seed))
        addresses.add(torch.empty(1 << 10, device="cuda").data_ptr())
        del padding
    assert len(addresses) > 4


def test_stabilizing_ends_within_its_bounds(gpu, cuda, copy):
    start = time.perf_counter()
    cuda.stabilize_clocks(copy)
    assert 0.05 <= time.perf_counter() - start < 3.5
