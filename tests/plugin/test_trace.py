"""The GPU activity of one call is read from CUPTI's events."""

from contextlib import nullcontext

import pytest

from pytest_aiperf.device.trace import CALLS, MAX_NAMES, RANGE, load, read, trace
from pytest_aiperf.model import Mode


def item(name, begin, took, correlation, cat="kernel", **args):
    return {
        "ph": "X", "cat": cat, "name": name, "ts": begin, "dur": took,
        "args": {"correlation": correlation, "stream": 7} | args,
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
    kernels = [item(f"k{i}", 10.0 * i, 1.0 + i % 50, i) for i in range(100)]
    assert read(kernels).names[:2] == ("k49", "k99")
    assert len(read(kernels).names) == MAX_NAMES


def test_counts_and_grids_are_those_of_the_names():
    found = read(
        [
            item("short", 0.0, 1.0, 1, grid=[8, 2, 1]),
            item("long", 1.0, 9.0, 2),  # a kernel in a graph has no grid
            item("short", 10.0, 1.0, 3, grid=[4, 1, 1]),
        ]
    )
    assert found.names == ("long", "short")
    assert (found.counts, found.grids) == ((1, 2), (0, 16))
    assert found.seconds == pytest.approx((9e-6, 2e-6))


def test_overlap_and_copies_by_direction():
    found = read(
        [
            item("k", 0.0, 10.0, 1),
            item("k", 5.0, 10.0, 2),
            item("Memcpy HtoD (Pinned -> Device)", 12.0, 6.0, 3, "gpu_memcpy", bytes=100),
            item("Memcpy HtoD (Pinned -> Device)", 20.0, 1.0, 4, "gpu_memcpy", bytes=50),
            item("Memcpy HtoD (Pageable -> Device)", 21.0, 1.0, 7, "gpu_memcpy", bytes=3),
            item("Memcpy DtoH (Device -> Pinned)", 21.0, 2.0, 5, "gpu_memcpy", bytes=7),
            item("Memcpy DtoD (Device -> Device)", 22.0, 1.0, 8, "gpu_memcpy", bytes=11),
            item("Memset (Device)", 30.0, 1.0, 6, "gpu_memset", bytes=9),
        ]
    )
    assert found.total == pytest.approx(32e-6)
    assert found.busy == pytest.approx(22e-6)
    assert found.copying == pytest.approx(9e-6)
    assert found.hidden == pytest.approx(3e-6)
    assert found.copied == {
        "host to device (pinned)": 150,
        "host to device (pageable)": 3,
        "device to host (pinned)": 7,
        "device to device": 11,
    }
    assert found.api_calls is None


def marked(begin, took):
    return item(RANGE, begin, took, 0, "user_annotation")


def test_only_work_that_the_marked_calls_launch_counts():
    found = read(
        [
            launch("cudaLaunchKernel", 0.0, 1),  # evicts the L2, and ends after the call has begun
            item("flush", 5.0, 20.0, 1),
            marked(10.0, 10.0),
            launch("cudaLaunchKernel", 11.0, 2),
            launch("cudaEventRecord", 16.0, 3),
            item("own", 25.0, 2.0, 2),
            item("launched by an API that is not traced", 40.0, 3.0, 4),
            launch("cudaDeviceSynchronize", 21.0, 5),
            launch("cudaLaunchKernel", 50.0, 6),  # evicts the L2 for the next call
            item("flush", 52.0, 20.0, 6),
        ]
    )
    assert found.names == ("launched by an API that is not traced", "own")
    assert found.api_calls == 2


def test_the_call_with_the_median_span_is_returned():
    spans = (50.0, 10.0, 12.0)
    content = []
    for i, took in enumerate(spans):
        begin = 100.0 * i
        content += [
            marked(begin, 5.0), launch("cudaLaunchKernel", begin, i), item("k", begin + 1, took, i)
        ]  # fmt: skip
    assert read(content).span == pytest.approx(12e-6)
    assert read(content).kernels == 1


@pytest.mark.parametrize("events", [[], [launch("cudaDeviceSynchronize", 0.0, 1)]])
def test_nothing_on_the_gpu_is_no_trace(events):
    assert read(events) is None


class OnCpu:
    """A device whose calls run on the CPU, so that CUPTI records no activity."""

    def __init__(self):
        self.log = []

    def current(self):
        return nullcontext()

    def synchronize(self):
        self.log.append("synchronize")

    def stabilize_clocks(self, call):
        self.log.append("warm up")
        call()

    def call(self):
        self.log.append("call")


@pytest.mark.parametrize(("call_s", "calls"), [(0.0, CALLS), (1.0, 1)])
def test_calls_are_traced_after_a_warm_up_each_in_the_state_of_the_timing(call_s, calls):
    device = OnCpu()
    assert trace(device.call, device, lambda: device.log.append("before"), call_s)() is None
    warm_up = ["warm up", "call"] if calls == CALLS else []
    assert device.log == [*warm_up, *["before", "call", "synchronize"] * calls]


def test_traces_are_read_after_later_ones():
    device = OnCpu()
    load(device.call, device)
    assert device.log == ["call", "synchronize"]
    traces = [trace(device.call, device) for _ in range(2)]
    assert [read_trace() for read_trace in traces] == [None, None]


@pytest.mark.parametrize("kernels", [1, 3])
def test_the_fake_device_counts_each_spend_as_a_kernel(kernels):
    from tests.fake_gpu import FAKE_GPU, FakeDevice, spend

    def call():
        for _ in range(kernels):
            spend(1e-5)

    took = pytest.approx(kernels * 1e-5)
    found = FakeDevice(FAKE_GPU).trace(call, Mode.PLAIN, cold=True)()
    assert (found.kernels, found.busy, found.span, found.total) == (kernels, took, took, took)
    assert found.counts == (kernels,)
    assert FakeDevice(None).trace(call, Mode.PLAIN, cold=True)() is None
