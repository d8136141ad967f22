"""Counters on a real GPU: known values, whatever launches the kernels, and no trace left behind."""

import pytest
import torch

from pytest_aiperf.device import counters
from pytest_aiperf.device.cuda import CudaDevice
from pytest_aiperf.device.trace import trace
from pytest_aiperf.errors import CaptureFailed
from pytest_aiperf.model import Mode

INSTRUCTIONS, READ, TOTAL = "smsp__inst_executed.sum", "dram__bytes_read.sum", "dram__bytes.sum"
FFMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"


@pytest.fixture
def cuda(gpu):
    return CudaDevice(gpu)


def instructions(cuda, call):
    return counters.read(call, [INSTRUCTIONS], cuda)[INSTRUCTIONS]


def test_an_elementwise_kernel_moves_its_bytes(cuda):
    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    values = counters.read(lambda: torch.neg(x, out=y), [READ, TOTAL], cuda)
    assert values[READ] == pytest.approx(x.nbytes, rel=0.02)
    assert values[TOTAL] == pytest.approx(x.nbytes + y.nbytes, rel=0.05)


def test_the_flusher_makes_a_call_cold(cuda):
    x = torch.randn(1 << 21, device="cuda")
    warm = counters.read(x.max, [READ], cuda)[READ]
    cold = counters.read(x.max, [READ], cuda, counters.flusher(cuda))[READ]
    assert warm < 0.1 * x.nbytes
    assert cold == pytest.approx(x.nbytes, rel=0.1)


def test_every_pass_counts_one_call(cuda):
    n, calls = 2048, []
    a = torch.randn(n, n, device="cuda")

    def product():
        calls.append(None)
        return a @ a

    # instrumented code and hardware counters cannot share a pass
    values = counters.read(product, [FFMA, INSTRUCTIONS], cuda)
    assert values[FFMA] == pytest.approx(n**3, rel=0.02)
    assert values[INSTRUCTIONS] == pytest.approx(instructions(cuda, product), rel=1e-3)
    assert len(calls) == 3 + 2


def test_kernels_of_autograd_and_of_graphs_are_counted(cuda):
    x = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    gradient = torch.randn_like(x)

    def forward():
        return torch.softmax(x, 1)

    def both():
        forward().backward(gradient)

    def backward_alone():  # in this thread
        return torch.ops.aten._softmax_backward_data(gradient, result, 1, torch.float32)

    result = forward().detach()
    x.grad = torch.zeros_like(x)  # so that each pass adds to it
    apart = sum(instructions(cuda, call) for call in (forward, backward_alone))
    addition = instructions(cuda, lambda: x.grad.add_(gradient))
    assert instructions(cuda, both) == pytest.approx(apart + addition, rel=0.02)

    with torch.no_grad(), cuda.current():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                torch.exp(gradient, out=result)
        one = instructions(cuda, lambda: torch.exp(gradient, out=result))
    assert instructions(cuda, graph.replay) == pytest.approx(10 * one, rel=1e-3)


def test_counters_and_traces_take_turns(cuda):
    a = torch.randn(1024, 1024, device="cuda")
    call = lambda: a @ a
    with cuda.current():
        call()
    block = cuda.block([call] * 10, Mode.GRAPH)
    before = instructions(cuda, call)
    assert trace(call, cuda).kernels
    assert instructions(cuda, call) == pytest.approx(before, rel=1e-3)
    assert trace(call, cuda).kernels
    assert block.run() > 0  # a graph that was captured before still runs


def test_errors_leave_the_counters_usable(cuda):
    x = torch.randn(1024, device="cuda")
    with pytest.raises(CaptureFailed, match="no counter 'launch__grid_size'"):
        counters.read(x.exp, [INSTRUCTIONS, "launch__grid_size"], cuda)
    calls = []

    def break_after_warm_up():
        calls.append(x.exp())
        if len(calls) == 2:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        counters.read(break_after_warm_up, [INSTRUCTIONS], cuda)
    assert instructions(cuda, x.exp) > 0
