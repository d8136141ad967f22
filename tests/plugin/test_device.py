"""The choice of modes and call counts, and the host as a device."""

import gc
import mmap
import random
import sys
import time
from types import SimpleNamespace

import pytest

from pytest_aiperf.device import device as device_module
from pytest_aiperf.device.device import HostDevice, calls_per_block, choose_mode
from pytest_aiperf.model import Bench, Metric, Mode

# ---- timing mode and calls per block


@pytest.mark.parametrize(
    ("metric", "fastest", "mode"),
    [
        (Metric.DEVICE, 1e-6, Mode.GRAPH),
        (Metric.DEVICE, 49e-6, Mode.GRAPH),
        (Metric.DEVICE, 51e-6, Mode.BACKLOG),
        (Metric.DEVICE, 19e-3, Mode.BACKLOG),
        (Metric.DEVICE, 21e-3, Mode.PLAIN),
        (Metric.WALL, 1e-6, Mode.WALL),
        (Metric.SCORE, 1e-6, Mode.WALL),
    ],
)
def test_the_mode_follows_from_the_fastest_arm(metric, fastest, mode):
    assert choose_mode(metric, fastest) is mode


@pytest.mark.parametrize(
    ("mode", "fast", "slow", "calls"),
    [
        (Mode.GRAPH, 10e-6, 12e-6, 50),  # a block of half a millisecond
        (Mode.GRAPH, 0.1e-6, 0.2e-6, 1_000),  # the maximum
        (Mode.GRAPH, 10e-6, 5e-3, 4),  # the slower arm's block stays within 20 ms
        (Mode.GRAPH, 10e-6, 1.0, 1),
        (Mode.GRAPH, 0.0, 0.0, 1_000),
        (Mode.BACKLOG, 60e-6, 70e-6, 17),
        (Mode.BACKLOG, 1e-6, 1e-6, 200),  # a launch queue holds no more
        (Mode.PLAIN, 6e-3, 7e-3, 1),
        (Mode.PLAIN, 1e-3, 6e-3, 3),
        (Mode.WALL, 100e-6, 200e-6, 20),  # a block of two milliseconds
        (Mode.WALL, 1.0, 2.0, 1),
    ],
)
def test_the_call_count_suits_both_arms(mode, fast, slow, calls):
    assert calls_per_block(mode, fast, slow) == calls


# ---- the host


@pytest.fixture
def ticks(monkeypatch):
    """Replace the host's timer with one that only calls advance."""
    now = SimpleNamespace(ns=0)
    monkeypatch.setattr(device_module, "now", lambda: now.ns)
    return now


@pytest.mark.parametrize("mode", list(Mode))
def test_the_host_times_all_calls_and_keeps_one_result(ticks, mode):
    def call(ns):
        ticks.ns += ns
        return ns

    calls = [lambda: call(2_000), lambda: call(3_000), lambda: call(4_000)]
    for keep, kept in ((-1, 4_000), (0, 2_000), (1, 3_000)):
        block = HostDevice().block(calls, mode, keep)
        assert block.run() == pytest.approx(9e-6)
        assert block.kept == kept


def test_what_surrounds_a_block_is_not_timed(ticks):
    ran = []

    def call(name, ns):
        ran.append(name)
        ticks.ns += ns

    calls = []
    block = HostDevice().block(calls, Mode.WALL)
    before = lambda: (call("before", 500), calls.append(lambda: call("call", 2_000)))
    assert block.run(before, lambda: call("after", 700)) == pytest.approx(2e-6)
    assert ran == ["before", "call", "after"]
    assert ticks.ns == 3_200


def test_no_call_sees_by_its_caller_that_its_result_is_kept():
    def call():
        frame, seen = sys._getframe(1), []
        while frame is not None and frame.f_code.co_name != "run":
            seen.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        callers.append(seen)

    callers = []
    HostDevice().block([call] * 3, Mode.WALL, 1).run()
    assert callers[0] == callers[1] == callers[2]


def test_an_estimate_repeats_a_call_that_is_too_short(ticks):
    seen = []

    def call(ns):
        seen.append(ns)
        ticks.ns += ns

    assert HostDevice().estimate_s(lambda: call(500)) == pytest.approx(500e-9)
    assert len(seen) == 11
    assert HostDevice().estimate_s(lambda: call(2_000_000)) == pytest.approx(2e-3)
    assert len(seen) == 12


def test_stabilizing_the_host_is_a_few_calls_and_never_long(ticks):
    seen = []

    def call(ns):
        seen.append(ns)
        ticks.ns += ns

    HostDevice().stabilize_clocks(lambda: call(1_000))
    assert len(seen) == 10
    HostDevice().stabilize_clocks(lambda: call(150_000_000))
    assert len(seen) == 12


def test_a_patched_timer_changes_nothing(monkeypatch):
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    assert HostDevice().estimate_s(lambda: sum(range(1_000))) > 0


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_within_a_block(enabled):
    seen = []

    def failing():
        seen.append(gc.isenabled())
        raise KeyError

    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        HostDevice().block([lambda: seen.append(gc.isenabled())], Mode.WALL).run()
        with pytest.raises(KeyError):
            HostDevice().block([failing], Mode.WALL).run()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == [False, False]


def test_the_peak_of_the_host_is_the_memory_that_a_call_holds_at_once():
    kept = bytearray(1 << 20)

    def call():
        first = bytearray(3 << 20)
        del first
        return bytearray(2 << 20)

    peak, result = HostDevice().peak_bytes(call, call)
    assert peak == pytest.approx(3 << 20, abs=64 << 10)
    assert len(result) == 2 << 20
    assert HostDevice().peak_bytes(list, list)[0] < 64 << 10
    assert len(kept) == 1 << 20


def test_the_peak_of_the_host_includes_what_the_first_call_keeps():
    kept = []

    def first():
        temporary = bytearray(8 << 20)
        kept.append(bytearray(5 << 20))
        return temporary

    peak, _ = HostDevice().peak_bytes(first, lambda: bytearray(1 << 20))
    assert peak == pytest.approx(6 << 20, abs=64 << 10)


def test_the_peak_of_the_host_includes_memory_that_python_does_not_trace():
    torch = pytest.importorskip("torch")
    size = 64 << 20
    peak, _ = HostDevice().peak_bytes(list, lambda: torch.ones(size // 4))
    assert peak == pytest.approx(size, rel=0.1)


def test_the_peak_of_the_host_includes_memory_that_was_freed_before():
    torch = pytest.importorskip("torch")
    size = 64 << 20
    kept = torch.ones(8, size // 32)  # malloc takes tensors of this size from its heap from now on
    del kept
    freed = [torch.ones(size // 16) for _ in range(8)]
    last = freed[-1]  # keeps the heap from shrinking
    del freed
    peak, _ = HostDevice().peak_bytes(list, lambda: torch.ones(size // 4))
    assert peak == pytest.approx(size, rel=0.1)
    assert len(last) == size // 16


def test_shared_maps_are_held_memory():
    size = 32 << 20
    before = HostDevice().held_bytes()
    with mmap.mmap(-1, size) as kept:
        kept.write(bytes(size))
        assert HostDevice().held_bytes() - before == pytest.approx(size, rel=0.1)
    assert HostDevice().held_bytes() - before < size / 10


def test_padding_differs_and_follows_its_generator():
    def sizes(rng):
        return [len(piece) for piece in HostDevice().random_padding(rng)]

    rng = random.Random(1)
    first, second = sizes(rng), sizes(rng)
    assert first != second
    assert sizes(random.Random(1)) == first


def test_seeding_reaches_every_loaded_generator():
    import numpy as np
    import torch

    def draw():
        return random.random(), np.random.random(), torch.rand(1).item()  # noqa: NPY002 - the global generator is seeded, too

    HostDevice().seed(2**40 + 3)
    first = draw()
    HostDevice().seed(2**40 + 3)
    assert draw() == first
    HostDevice().seed(4)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_seeding_loads_nothing(monkeypatch):
    for name in ("numpy", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    HostDevice().seed(1)
    assert not {"numpy", "torch"} & sys.modules.keys()


def test_the_hosts_noise_probe_can_be_compared_with_itself():
    inputs, arm = HostDevice().noise_probe()
    (full,), (small,) = (inputs(Bench("cpu", 1, full=f)) for f in (True, False))
    assert (len(full), len(small)) == (100_000, 100)
    assert (arm(small)[1:] >= arm(small)[:-1]).all()
