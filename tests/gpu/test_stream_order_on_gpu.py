"""Work on side streams is timed only if the call's own stream starts it and waits for it."""

import os

import pytest
import torch

from pytest_aiperf.device.cuda import CudaDevice
from pytest_aiperf.errors import InvalidMeasurement
from pytest_aiperf.model import Mode

SIZES = (1 << 14, 1 << 22, 1 << 27)  # 2 us to 300 us: timed in a graph and as backlog


@pytest.fixture
def cuda(gpu):
    return CudaDevice(gpu)


def halves(n, *, waits=True, joined=True, before=lambda: None):
    """Return a call that doubles one half of an array on its own stream, the other beside it."""
    side = torch.cuda.Stream()
    x, out = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")

    def call():
        before()
        own = torch.cuda.current_stream()
        if waits:
            side.wait_stream(own)
        with torch.cuda.stream(side):
            torch.mul(x[: n // 2], 2, out=out[: n // 2])
        torch.mul(x[n // 2 :], 2, out=out[n // 2 :])
        if joined:
            own.wait_stream(side)
        return out

    return call


def warmed_up(cuda, call):
    cuda.block([call] * 3, Mode.WALL).run()
    return call


@pytest.mark.parametrize("n", SIZES)
def test_half_of_the_work_left_on_a_side_stream_is_refused(gpu, cuda, n):
    call = warmed_up(cuda, halves(n, joined=False))
    with pytest.raises(InvalidMeasurement, match="does not wait for: end with"):
        cuda.refuse_unjoined(call)
    with pytest.raises(InvalidMeasurement, match="does not wait for: end with"):
        cuda.block([call] * 3, Mode.GRAPH)
    assert torch.randn(1_000, device="cuda").std().item() == pytest.approx(1, abs=0.2)
    honest = warmed_up(cuda, halves(n))
    cuda.refuse_unjoined(honest)
    assert cuda.block([honest] * 3, Mode.GRAPH).run() > 0  # captures work as before


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("before", [lambda: None, torch.cuda.synchronize])
def test_work_that_starts_too_early_is_refused(gpu, cuda, n, before):
    call = warmed_up(cuda, halves(n, waits=False, before=before))
    if before is torch.cuda.synchronize:  # then the order is the host's
        cuda.refuse_unordered(call)
        return
    with pytest.raises(InvalidMeasurement, match="begin with side_stream"):
        cuda.refuse_unordered(call)


def test_work_left_by_a_call_that_no_graph_can_capture_is_refused(gpu, cuda):
    own_wait = lambda: torch.cuda.current_stream().synchronize()
    side = torch.cuda.Stream()
    x = torch.randn(1 << 26, device="cuda")

    def call():
        own_wait()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return x * 2

    warmed_up(cuda, call)
    cuda.refuse_unjoined(call)  # no capture, no verdict
    with pytest.raises(InvalidMeasurement, match="does not wait for: end with"):
        cuda.refuse_unordered(call)


def test_cupy_is_looked_at_too(gpu, cuda):
    import cupy

    side, x = cupy.cuda.Stream(non_blocking=True), cupy.ones(1 << 20, dtype="f4")

    def call(joined):
        own = cupy.cuda.get_current_stream()
        side.wait_event(own.record())
        with side:
            out = x * 2
        if joined:
            own.wait_event(side.record())
        return out

    cuda.refuse_unjoined(warmed_up(cuda, lambda: call(joined=True)))
    with pytest.raises(InvalidMeasurement, match="does not wait for: end with"):
        cuda.refuse_unjoined(warmed_up(cuda, lambda: call(joined=False)))
    cuda.refuse_unordered(lambda: call(joined=True))


def joined_by_an_event():
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    x = torch.randn(1 << 22, device="cuda")

    def call():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = x * 2
            done.record()
        done.wait()
        return out

    return call


def awaited_by_the_host():
    side = torch.cuda.Stream()
    x = torch.randn(1 << 22, device="cuda")

    def call():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = x * 2
        side.synchronize()
        return out

    return call


def prefetched():
    """Wait for an event before it is recorded, as calls that prefetch do."""
    side, used = torch.cuda.Stream(), torch.cuda.Event()
    host = torch.randn(4, 1 << 20).pin_memory()
    buffer, out = torch.empty(1 << 20, device="cuda"), torch.empty(4, 1 << 20, device="cuda")

    def call():
        own = torch.cuda.current_stream()
        side.wait_stream(own)
        for batch, result in zip(host, out, strict=True):
            with torch.cuda.stream(side):
                side.wait_event(used)
                buffer.copy_(batch, non_blocking=True)
            own.wait_stream(side)
            torch.mul(buffer, 2, out=result)
            used.record()
        return out

    return call


def a_graph_with_two_branches():
    inner = halves(1 << 20)
    graph = torch.cuda.CUDAGraph()
    inner()
    with torch.cuda.graph(graph):
        inner()
    return graph.replay


def compiled():
    x = torch.randn(1 << 22, device="cuda")
    call = torch.compile(lambda x: torch.relu(x * 2).sum())
    return lambda: call(x)


def a_collective():
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl", rank=0, world_size=1)
    x = torch.randn(1 << 22, device="cuda")

    def call():
        work = dist.all_reduce(x, async_op=True)
        y = x.new_ones(1 << 20) * 2
        work.wait()
        return y

    return call


HONEST = [
    lambda: halves(1 << 22),
    joined_by_an_event,
    awaited_by_the_host,
    prefetched,
    a_graph_with_two_branches,
    compiled,
    a_collective,
]


@pytest.mark.parametrize("make", HONEST, ids=lambda make: make.__name__)
def test_honest_side_streams_pass(gpu, cuda, make):
    call = warmed_up(cuda, make())
    cuda.refuse_unjoined(call)
    cuda.refuse_unordered(call)
    warmed_up(cuda, call)  # it still runs
