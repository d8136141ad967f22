"""A check compiles nothing; while a measured claim compiles, other claims may be timed."""

import pytest
import torch

from pytest_aiperf.claim import torch_compile
from pytest_aiperf.device.device import HostDevice
from pytest_aiperf.machine.gpu_lock import GpuLock

GPU = "GPU-aaaa"


class RefusedError(Exception):
    pass


@pytest.fixture
def lock(tmp_path):
    return GpuLock([GPU], tmp_path / "locks", pausable=True)


@pytest.fixture
def other(tmp_path):
    """Return a function: whether another claim could be timed now without pausing this one."""

    def refuse(_sentence):
        raise RefusedError

    theirs = GpuLock([GPU], tmp_path / "locks", on_wait=refuse)

    def may_time():
        if [*(tmp_path / "locks").glob(f"gpu-{GPU}.preparing/*")]:
            return False
        try:
            with theirs.exclusive_gpu():
                return True
        except RefusedError:
            return False

    return may_time


@pytest.fixture
def compiled(other):
    """A compiled function, and a list: per compilation, whether another claim could be timed."""
    import torch._dynamo

    torch._dynamo.reset()
    seen = []

    def backend(graph, _inputs):
        seen.append(other())
        return graph

    yield torch.compile(lambda x: x + 1, backend=backend), seen
    torch._dynamo.reset()


def test_others_can_time_while_a_claim_compiles(lock, other, compiled, tmp_path):
    call, seen = compiled
    (tmp_path / "claim.py").write_text("torch.compile(arm)")
    with torch_compile.suspend_while_compiling(lock, HostDevice(), [tmp_path / "claim.py"]):
        with lock.shared():
            assert not other()
            assert call(torch.ones(3)).tolist() == [2, 2, 2]
            assert not other()
        assert other()
        with lock.exclusive_gpu():
            call(torch.ones(3, dtype=torch.int))
    with lock.shared():
        call(torch.ones(3, dtype=torch.double))
    assert seen == [True, False, False]  # False: the lock is exclusive; the context has ended


def test_a_claim_may_reset_the_compiler(lock, other, tmp_path):
    import torch._dynamo

    with torch_compile.suspend_while_compiling(lock, HostDevice(), []), lock.shared():
        torch._dynamo.reset()
    assert other()


def test_a_claim_that_mentions_autotune_keeps_the_lock(lock, compiled, tmp_path):
    call, seen = compiled
    (tmp_path / "claim.py").write_text('torch.compile(arm, mode="max-autotune")')
    with (
        torch_compile.suspend_while_compiling(lock, HostDevice(), [tmp_path / "claim.py"]),
        lock.shared(),
    ):
        call(torch.ones(3))
    assert seen == [False]


def test_autotuning_keeps_the_lock(lock, compiled, monkeypatch):
    import torch._inductor.config

    call, seen = compiled
    monkeypatch.setattr(torch._inductor.config, "max_autotune", True)
    with torch_compile.suspend_while_compiling(lock, HostDevice(), []), lock.shared():
        call(torch.ones(3))
    assert seen == [False]


def test_recording_graphs_keeps_the_lock(lock, other, compiled):
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    recording = CallbackTrigger.CUDAGRAPH_RECORDING
    with torch_compile.suspend_while_compiling(lock, HostDevice(), []), lock.shared():
        with callback_handler.install_callbacks(recording, "0/0"):
            assert not other()
        assert not other()


def test_a_file_of_another_encoding_is_searched(lock, compiled, tmp_path):
    call, seen = compiled
    (tmp_path / "claim.cu").write_bytes(b"// \xe9: an accent of Latin-1")
    with (
        torch_compile.suspend_while_compiling(lock, HostDevice(), [tmp_path / "claim.cu"]),
        lock.shared(),
    ):
        call(torch.ones(3))
    assert seen == [True]


def test_a_measured_claim_suspends_the_lock_while_it_compiles(project):
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


def test_a_compiler_that_fails_leaves_the_lock_as_it_was(lock, other, tmp_path):
    def backend(_graph, _inputs):
        raise ZeroDivisionError

    with torch_compile.suspend_while_compiling(lock, HostDevice(), []), lock.shared():
        with pytest.raises(Exception, match="ZeroDivisionError"):
            torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
        assert not other()


def test_a_check_compiles_nothing(compiled):
    call, seen = compiled
    with torch_compile.uncompiled():
        assert call(torch.ones(2)).tolist() == [2, 2]
    assert seen == []
