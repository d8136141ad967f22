"""The GPU activity of one call is read from CUPTI's events."""

from contextlib import nullcontext

import pytest

from pytest_aiperf.device.trace import MAX_NAMES, read, trace
from pytest_aiperf.model import Trace


def item(name, begin, took, correlation, cat="kernel"):
    return {
        "ph": "X", "cat": cat, "name": name, "ts": begin, "dur": took,
        "args": {"correlation": correlation, "stream": 7},
    }  # fmt: skip


def launch(name, at, correlation):
    return item(name, at, 4.0, correlation, "cuda_runtime")


def test_launches_kernels_copies_and_gaps():
    found = read(
        [
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
            launch("cudaLaunchKernel", 100.0, 1),
            item("void short(int)", 110.0, 2.0, 1),
            launch("cudaMemcpyAsync", 112.0, 2),
            item("Memcpy DtoD (Device -> Device)", 115.0, 3.0, 2, "gpu_memcpy"),
            launch("cuLaunchKernelEx", 116.0, 3),
            item("long", 117.0, 8.0, 3),
            item("Memset (Device)", 130.0, 1.0, 4, "gpu_memset"),
            launch("cudaDeviceSynchronize", 131.0, 5),
        ]
    )
    assert found.busy == pytest.approx(13e-6)  # the copy and the long kernel overlap by 1 us
    assert found.span == pytest.approx(21e-6)
    assert (found.launches, found.kernels, found.copies) == (4, 2, 2)
    assert found.names == ("long", "void short(int)")


def test_a_graph_is_one_launch_however_many_kernels_it_runs():
    nodes = [item(f"node{i % 2}", 10.0 + 3 * i, 1.0, 1) for i in range(200)]
    found = read([launch("cudaGraphLaunch", 0.0, 1), *nodes])
    assert (found.launches, found.kernels) == (1, 200)
    assert found.busy == pytest.approx(200e-6)
    assert found.span == pytest.approx(598e-6)


def test_names_are_the_longest_running_and_few():
    kernels = [item(f"k{i}", 10.0 * i, 1.0 + i % 30, i) for i in range(60)]
    assert read(kernels).names[:2] == ("k29", "k59")
    assert len(read(kernels).names) == MAX_NAMES


@pytest.mark.parametrize("events", [[], [launch("cudaDeviceSynchronize", 0.0, 1)]])
def test_nothing_on_the_gpu_is_no_trace(events):
    assert read(events) is None


class OnCpu:
    """A device whose calls run on the CPU, so that CUPTI records no activity."""

    def __init__(self):
        self.calls = 0

    def current(self):
        return nullcontext()

    def synchronize(self):
        pass

    def call(self):
        self.calls += 1


def test_one_warmed_up_call_is_traced_and_without_activity_there_is_no_trace():
    clock = OnCpu()
    assert trace(clock.call, clock) is None
    assert clock.calls == 2


@pytest.mark.parametrize("kernels", [1, 3])
def test_the_fake_device_counts_each_spend_as_a_kernel(kernels):
    from tests.fake_gpu import FAKE_GPU, FakeDevice, spend

    def call():
        for _ in range(kernels):
            spend(1e-5)

    took = kernels * 1e-5
    assert FakeDevice(FAKE_GPU).trace(call) == Trace(kernels, kernels, 0, took, took)
    assert FakeDevice(None).trace(call) is None
