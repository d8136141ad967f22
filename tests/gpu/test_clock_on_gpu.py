"""The CUDA clock on a real GPU: its modes agree, and what it must refuse it refuses."""

import random
import statistics
import time

import pytest
import torch

from pytest_aiperf.device.cuda import CudaClock
from pytest_aiperf.errors import CannotCapture, InvalidMeasurement
from pytest_aiperf.model import Mode


@pytest.fixture
def ours(gpu):
    return CudaClock(gpu)


@pytest.fixture
def copy(ours):
    """Copy 400 MiB: about 200 us on an H200."""
    source = torch.randn(100 << 20, device="cuda")
    target = torch.empty_like(source)
    call = lambda: target.copy_(source)
    ours.settle(call)
    return call


def seconds(clock, call, mode, calls=20):
    block = clock.block([call] * calls, mode)
    block.run()
    return statistics.median(block.run() for _ in range(7)) / calls


def test_the_gpu_is_described(gpu, ours):
    assert ours.gpu.l2_bytes > 1 << 20
    assert ours.gpu.sms == gpu.sms  # NVML's count of cores agrees with CUDA
    senses = ours.sense()
    assert senses.sm_mhz
    assert senses.event_reasons is not None


def test_graph_backlog_and_plain_agree(gpu, ours, copy):
    times = {mode: seconds(ours, copy, mode) for mode in (Mode.GRAPH, Mode.BACKLOG, Mode.PLAIN)}
    for time_ in times.values():
        assert time_ == pytest.approx(times[Mode.GRAPH], rel=0.03, abs=2e-6), times
    assert ours.once(copy) == pytest.approx(times[Mode.GRAPH], rel=0.03, abs=4e-6)
    assert seconds(ours, copy, Mode.WALL) >= times[Mode.GRAPH] * 0.99


def test_the_launch_of_a_tiny_kernel_is_left_out(gpu, ours):
    x = torch.zeros(1, device="cuda")
    call = lambda: x.add_(1)
    ours.settle(call)
    graph = seconds(ours, call, Mode.GRAPH, 500)
    assert graph < 2.5e-6
    assert ours.once(call) < 5e-6 < seconds(ours, call, Mode.WALL, 500)


def test_a_graph_leaves_what_its_last_call_returned(gpu, ours):
    x, y = torch.ones(1_000, device="cuda"), torch.full((1_000,), 5.0, device="cuda")
    block = ours.block([lambda: x + 1, lambda: y * 2], Mode.GRAPH)
    block.last.fill_(float("nan"))
    y.fill_(7)
    block.run()
    assert block.last.tolist() == [14.0] * 1_000


def test_a_synchronising_call_cannot_be_captured_and_all_works_afterwards(gpu, ours, copy):
    x = torch.ones(1_000, device="cuda")
    before = seconds(ours, copy, Mode.GRAPH)
    for _ in range(3):
        with pytest.raises(CannotCapture, match="graph of 2 calls: "):
            ours.block([lambda: x + 1, lambda: x.sum().item()], Mode.GRAPH)
    assert torch.randn(1_000, device="cuda").std().item() == pytest.approx(1, abs=0.2)
    dropped = ours.block([lambda: torch.nn.functional.dropout(x)], Mode.GRAPH)
    dropped.run()
    first = dropped.last.clone()
    dropped.run()
    assert not torch.equal(first, dropped.last)
    assert seconds(ours, copy, Mode.GRAPH) == pytest.approx(before, rel=0.03)
    ours.release()


def test_a_call_that_raises_cannot_be_captured_and_all_works_afterwards(gpu, ours, copy):
    def call():
        copy()
        raise KeyError("shape")

    with pytest.raises(CannotCapture, match="shape"):
        ours.block([call], Mode.GRAPH)
    assert torch.randn(1_000, device="cuda").std().item() == pytest.approx(1, abs=0.2)
    assert seconds(ours, copy, Mode.GRAPH) > 0


def test_a_synchronising_call_is_refused_in_backlog(gpu, ours, copy):
    def call():
        copy()
        torch.cuda.synchronize()

    with pytest.raises(InvalidMeasurement, match="synchronises"):
        ours.block([call] * 5, Mode.BACKLOG).run()
    assert seconds(ours, call, Mode.PLAIN, 5) > 0


def test_work_on_the_default_stream_is_timed_and_not_captured(gpu, ours, copy):
    def call():
        with torch.cuda.stream(torch.cuda.default_stream()):
            copy()

    with pytest.raises(CannotCapture):
        ours.block([call] * 5, Mode.GRAPH)
    assert seconds(ours, call, Mode.BACKLOG) == pytest.approx(
        seconds(ours, copy, Mode.BACKLOG), rel=0.1
    )


def test_work_that_is_not_joined_is_refused(gpu, ours):
    beside = torch.cuda.Stream()

    def call():
        with torch.cuda.stream(beside):
            torch.cuda._sleep(40_000_000)  # 20 ms

    block = ours.block([call], Mode.PLAIN)
    with pytest.raises(InvalidMeasurement, match="worked on for"):
        for _ in range(3):
            block.run()


def test_cupy_is_on_the_clocks_stream_and_its_captured_memory_is_the_graphs(gpu, ours):
    import cupy

    a = cupy.random.standard_normal(1 << 24).astype("f4")
    call = lambda: cupy.sqrt(a * a + 1) - a
    ours.settle(call)
    expected = cupy.asnumpy(call())
    times = {m: seconds(ours, call, m) for m in (Mode.GRAPH, Mode.BACKLOG, Mode.PLAIN)}
    for time_ in times.values():
        assert time_ == pytest.approx(times[Mode.GRAPH], rel=0.05, abs=4e-6), times
    first, second = (ours.block([call] * 3, Mode.GRAPH) for _ in range(2))
    others = [cupy.full(1 << 24, 9, dtype="f4") for _ in range(6)]
    first.run()
    second.run()
    first.run()
    assert all((other == 9).all() for other in others)
    for block in (first, second):
        assert (cupy.asnumpy(block.last) == expected).all()


def test_peak_counts_what_a_call_holds_at_once(gpu, ours):
    kept = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")

    def call():
        first = torch.empty(96 << 20, dtype=torch.uint8, device="cuda")
        del first
        return torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

    assert ours.peak(call) == 96 << 20
    assert kept.numel() == 1 << 26


def test_what_is_allocated_is_no_longer_free(gpu, ours):
    before = ours.free()
    kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert before - ours.free() == pytest.approx(kept.nbytes, rel=0.1)


def test_pads_move_what_is_allocated_next(gpu, ours):
    addresses = set()
    for seed in range(8):
        ours.release()
        pad = ours.pad(random.Random(seed))
        addresses.add(torch.empty(1 << 10, device="cuda").data_ptr())
        del pad
    assert len(addresses) > 4


def test_settling_ends_within_its_bounds(gpu, ours, copy):
    begun = time.perf_counter()
    ours.settle(copy)
    assert 0.05 <= time.perf_counter() - begun < 3.5
