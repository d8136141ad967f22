"""torch compiles nothing in a check, and lets others time while it compiles in a measurement."""

import pytest
import torch

from pytest_aiperf.claim import torch_compile
from pytest_aiperf.device.device import HostDevice
from pytest_aiperf.machine.gpu_lock import GpuLock

GPU = "GPU-aaaa"


class RefusedError(Exception):
    pass


@pytest.fixture
def lease(tmp_path):
    return GpuLock([GPU], tmp_path / "locks")


@pytest.fixture
def other(tmp_path):
    """Whether another claim could have the GPU alone now."""

    def refuse(_sentence):
        raise RefusedError

    theirs = GpuLock([GPU], tmp_path / "locks", on_wait=refuse)

    def may_time():
        try:
            with theirs.exclusive_gpu():
                return True
        except RefusedError:
            return False

    return may_time


@pytest.fixture
def compiled(other):
    """A compiled function, and what its compiler saw of the lease."""
    import torch._dynamo

    torch._dynamo.reset()
    seen = []

    def backend(graph, _inputs):
        seen.append(other())
        return graph

    yield torch.compile(lambda x: x + 1, backend=backend), seen
    torch._dynamo.reset()


def test_others_may_time_while_a_claim_compiles(lease, other, compiled, tmp_path):
    call, seen = compiled
    (tmp_path / "claim.py").write_text("torch.compile(arm)")
    with torch_compile.beside(lease, HostDevice(), [tmp_path / "claim.py"]):
        with lease.shared():
            assert not other()
            assert call(torch.ones(3)).tolist() == [2, 2, 2]
            assert not other()
        assert other()
        with lease.exclusive_gpu():
            call(torch.ones(3, dtype=torch.int))
    with lease.shared():
        call(torch.ones(3, dtype=torch.double))
    assert seen == [True, False, False]  # no callback of ours is left


def test_a_claim_may_reset_the_compiler(lease, other, tmp_path):
    import torch._dynamo

    with torch_compile.beside(lease, HostDevice(), []), lease.shared():
        torch._dynamo.reset()
    assert other()


def test_who_autotunes_keeps_its_turn(lease, compiled, tmp_path):
    call, seen = compiled
    (tmp_path / "claim.py").write_text('torch.compile(arm, mode="max-autotune")')
    with torch_compile.beside(lease, HostDevice(), [tmp_path / "claim.py"]), lease.shared():
        call(torch.ones(3))
    assert seen == [False]


def test_torch_that_is_set_to_autotune_keeps_its_turn(lease, compiled, monkeypatch):
    import torch._inductor.config

    call, seen = compiled
    monkeypatch.setattr(torch._inductor.config, "max_autotune", True)
    with torch_compile.beside(lease, HostDevice(), []), lease.shared():
        call(torch.ones(3))
    assert seen == [False]


def test_who_records_graphs_keeps_its_turn(lease, other, compiled):
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    recording = CallbackTrigger.CUDAGRAPH_RECORDING
    with torch_compile.beside(lease, HostDevice(), []), lease.shared():
        with callback_handler.install_callbacks(recording, "0/0"):
            assert not other()
        assert not other()


def test_a_file_of_another_encoding_is_looked_at(lease, compiled, tmp_path):
    call, seen = compiled
    (tmp_path / "claim.cu").write_bytes(b"// \xe9: an accent of Latin-1")
    with torch_compile.beside(lease, HostDevice(), [tmp_path / "claim.cu"]), lease.shared():
        call(torch.ones(3))
    assert seen == [True]


def test_a_claim_that_is_measured_compiles_beside_others(project):
    project.tests("""
import torch
import torch._dynamo

from tests.fake_gpu import FAKE_GPU, spend
from pytest_aiperf.machine.gpu_lock import GpuLock

def refuse(why):
    raise RuntimeError(why)

def backend(graph, _inputs):
    with GpuLock([FAKE_GPU.uuid], on_wait=refuse).exclusive_gpu():
        return graph

@torch.compile(backend=backend)
def twice(x):
    return x * 2

def faster(x):
    spend(100e-6)
    return twice(torch.from_numpy(x)).numpy()

def test_faster(compare):
    compare(**usual | {"optimized": faster})
""")
    project.run("--gpu").assert_outcomes(passed=1)


def test_a_compiler_that_fails_leaves_the_turn_as_it_was(lease, other, tmp_path):
    def backend(_graph, _inputs):
        raise ZeroDivisionError

    with torch_compile.beside(lease, HostDevice(), []), lease.shared():
        with pytest.raises(Exception, match="ZeroDivisionError"):
            torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
        assert not other()


def test_a_check_compiles_nothing(compiled):
    call, seen = compiled
    with torch_compile.uncompiled():
        assert call(torch.ones(2)).tolist() == [2, 2]
    assert seen == []
