"""Claims that prepare share a GPU; a claim that is timed has it alone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine import gpu_lock
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.machine.isolation import arm_parent_death

A, B = "GPU-aaaa", "GPU-bbbb"


class Claim:
    """Another process, which enters one lock scope and stays in it until released."""

    def __init__(self, folder, scope, gpus=(A,), forks=False):
        self.events, events = os.pipe()
        commands, self.commands = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                other = GpuLock(
                    gpus,
                    folder,
                    on_wait=lambda _: os.write(events, b"w"),
                    on_acquired=lambda: os.write(events, b"t"),
                )
                with getattr(other, scope)():
                    parent = os.getpid()
                    if forks and os.fork() == 0:
                        arm_parent_death(parent=parent)
                        time.sleep(300)  # outlives the scope, with copies of its file descriptors
                        os._exit(0)
                    os.write(events, b"+")
                    os.read(commands, 1)
                os.write(events, b"-")
                os.read(commands, 1)
            finally:
                os._exit(0)
        os.close(events)
        os.close(commands)

    def next_event(self, seconds=60.0):
        poll = select.poll()
        poll.register(self.events, select.POLLIN)
        return os.read(self.events, 1).decode() if poll.poll(seconds * 1000) else ""

    def release(self):
        os.write(self.commands, b"r")

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    @property
    def waits(self):
        return self.next_event() == "w" and self.next_event(0.05) == ""

    @property
    def enters(self):
        return self.next_event() == "+"

    @property
    def acquires(self):
        return self.next_event() == "t" and self.next_event() == "+"


@pytest.fixture(autouse=True)
def no_grace_period(monkeypatch):
    monkeypatch.setattr(gpu_lock, "WRITER_GRACE_S", 0.0)


@pytest.fixture
def claim(tmp_path):
    claims = []

    def start(scope, *gpus, **more):
        claims.append(Claim(tmp_path / "locks", scope, gpus or (A,), **more))
        return claims[-1]

    yield start
    for process in claims:
        os.close(process.commands)
        os.close(process.events)
        with contextlib.suppress(ProcessLookupError):
            process.kill()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("shared",), ("shared",)),
        (("shared", A), ("exclusive_gpu", B)),
        (("exclusive_gpu", A), ("exclusive_gpu", B)),
        (("exclusive_gpu", A), ("shared", B)),
    ],
)
def test_these_share(claim, first, second):
    assert claim(*first).enters
    assert claim(*second).enters


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("shared", A), ("exclusive_gpu", A)),
        (("exclusive_gpu", A), ("shared", A)),
        (("exclusive_gpu", A), ("exclusive_gpu", A)),
        (("exclusive_gpu", A, B), ("exclusive_gpu", B)),
        (("exclusive_host", A), ("shared", B)),
        (("exclusive_host", A), ("exclusive_gpu", B)),
        (("exclusive_host", A), ("exclusive_host", B)),
        (("shared", A), ("exclusive_host", B)),
    ],
)
def test_these_exclude_each_other(claim, first, second):
    holder = claim(*first)
    assert holder.enters
    waiter = claim(*second)
    assert waiter.waits
    holder.release()
    assert waiter.acquires


def test_a_killed_holder_releases_its_lock(claim):
    holder = claim("exclusive_host")
    assert holder.enters
    waiter = claim("exclusive_gpu")
    assert waiter.waits
    holder.kill()
    assert waiter.acquires


def test_a_process_that_the_holder_forked_does_not_keep_the_lock(claim):
    holder = claim("exclusive_gpu", forks=True)
    assert holder.enters
    holder.release()
    assert holder.next_event() == "-"
    assert claim("exclusive_gpu").enters


@pytest.mark.parametrize(
    ("reader", "writer"), [("shared", "exclusive_gpu"), ("shared", "exclusive_host")]
)
def test_readers_that_keep_coming_do_not_starve_a_writer(claim, reader, writer):
    early = claim(reader)
    assert early.enters
    waiting = claim(writer)
    assert waiting.waits
    late = claim(reader)
    assert late.waits
    early.release()
    assert waiting.acquires
    assert late.next_event(0.05) == ""
    waiting.release()
    assert late.acquires


def test_a_writer_admits_readers_during_the_grace_period(claim, monkeypatch):
    monkeypatch.setattr(gpu_lock, "WRITER_GRACE_S", 300.0)
    assert claim("shared").enters
    assert claim("exclusive_gpu").waits
    assert claim("shared").enters


def test_a_writer_admits_no_reader_after_the_grace_period(claim, monkeypatch):
    monkeypatch.setattr(gpu_lock, "WRITER_GRACE_S", 0.2)
    assert claim("shared").enters
    waiting = claim("exclusive_gpu")
    assert waiting.waits
    end = time.monotonic() + 60
    while claim("shared").enters:
        assert time.monotonic() < end
    assert waiting.next_event(0.05) == ""


@pytest.mark.parametrize("grace_s", [0.0, 30.0])
def test_a_writer_enters_as_soon_as_the_last_reader_leaves(claim, monkeypatch, grace_s):
    monkeypatch.setattr(gpu_lock, "WRITER_GRACE_S", grace_s)
    slow = claim("shared")
    assert slow.enters
    waiting = claim("exclusive_gpu")
    assert waiting.waits
    slow.release()
    assert waiting.acquires


@pytest.mark.parametrize("grace_s", [0.0, 30.0])
def test_queued_writers_run_back_to_back(claim, monkeypatch, grace_s):
    monkeypatch.setattr(gpu_lock, "WRITER_GRACE_S", grace_s)
    first = claim("exclusive_gpu")
    assert first.enters
    reader = claim("shared")
    assert reader.waits
    second = claim("exclusive_gpu")
    assert second.waits
    first.release()
    assert second.acquires
    assert reader.next_event(0.05) == ""
    second.release()
    assert reader.acquires


def test_a_suspended_lock_of_a_process_that_cannot_be_paused_keeps_the_host(claim, tmp_path):
    calls = []
    lock = GpuLock(
        [A], tmp_path / "locks", on_wait=calls.append, on_acquired=lambda: calls.append("on")
    )
    with lock.shared():
        gpu = claim("exclusive_gpu")
        assert gpu.waits
        lock.suspend(lambda: calls.append("first"))
        assert gpu.acquires
        gpu.release()
        assert gpu.next_event() == "-"
        host = claim("exclusive_host")
        assert host.waits
        lock.resume()
        assert calls == ["first"]
    assert host.acquires


class Compiler:
    """A claim that compiles: it leads a session, suspends its lock, and starts a process."""

    def __init__(self, folder):
        self.events, events = os.pipe()
        commands, self.commands = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            lock = GpuLock([A], folder, on_wait=lambda _: os.write(events, b"w"), pausable=True)
            with lock.shared():
                lock.suspend(lambda: None)
                child = os.fork()
                if child == 0:
                    arm_parent_death()
                    time.sleep(300)
                    os._exit(0)
                os.write(events, child.to_bytes(4, "little"))
                os.read(commands, 1)
                lock.resume()
                os.write(events, b"+")
                os.read(commands, 1)
            os._exit(0)
        self.child = int.from_bytes(os.read(self.events, 4), "little")

    def states(self):
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in (self.pid, self.child)]
        return "".join(stat.rpartition(") ")[2][0] for stat in stats)

    def runs_again(self):
        end = time.monotonic() + 60
        while "T" in self.states() and time.monotonic() < end:
            time.sleep(0.01)
        return "T" not in self.states()


@pytest.fixture
def compiler(tmp_path):
    started = Compiler(tmp_path / "locks")
    yield started
    os.killpg(started.pid, signal.SIGKILL)
    os.waitpid(started.pid, 0)


def test_a_claim_that_needs_the_host_alone_pauses_compilers(claim, compiler, tmp_path):
    host = claim("exclusive_host")
    assert host.enters
    assert compiler.states() == "TT"
    host.release()
    assert host.next_event() == "-"
    assert compiler.runs_again()
    os.write(compiler.commands, b"r")
    assert os.read(compiler.events, 1) == b"+"
    assert not list((tmp_path / "locks").glob("compiling-*")), "no file is left"


def test_other_claims_do_not_pause_compilers(claim, compiler):
    for kind in ("shared", "exclusive_gpu"):
        other = claim(kind)
        assert other.enters
        assert "T" not in compiler.states()
        other.release()
        assert other.next_event() == "-"


def test_a_compiler_that_is_done_waits_for_the_host(claim, compiler):
    host = claim("exclusive_host")
    assert host.enters
    os.write(compiler.commands, b"r")
    host.release()
    assert os.read(compiler.events, 1) in b"w+"  # it may find the lock free by then
    assert host.next_event() == "-"
    assert not claim("exclusive_host").next_event(0.2).startswith("+")


def test_compilers_go_on_after_the_claim_that_paused_them_was_killed(claim, compiler, tmp_path):
    host = claim("exclusive_host")
    assert host.enters
    assert compiler.states() == "TT"
    gpu_lock.continue_compilers(tmp_path / "locks")
    assert compiler.states() == "TT", "a claim that still has the host keeps them paused"
    host.kill()
    assert compiler.states() == "TT"
    gpu_lock.continue_compilers(tmp_path / "locks")
    assert compiler.runs_again()


@pytest.mark.parametrize(
    ("writer", "pausable"), [("exclusive_gpu", False), ("exclusive_host", True)]
)
def test_a_claim_that_prepares_gives_way(claim, tmp_path, writer, pausable):
    calls = []
    lock = GpuLock([A], tmp_path / "locks", on_wait=calls.append, pausable=pausable)
    with lock.shared():
        lock.give_way(pytest.fail)  # to nobody
        other = claim(writer)
        assert other.waits

        def let_in():
            calls.append("first")
            threading.Timer(0.2, other.release).start()

        lock.give_way(let_in)
        assert calls[0] == "first"
        assert calls[1].startswith("waiting for ")
        assert other.acquires
        assert other.next_event() == "-"
        assert claim("shared").enters
        assert claim(writer).waits, "the claim holds its shared locks again"


def test_a_lock_that_is_not_shared_gives_no_way(claim, tmp_path):
    lock = GpuLock([A], tmp_path / "locks")
    lock.give_way(pytest.fail)
    with lock.exclusive_gpu():
        assert claim("exclusive_gpu").waits
        lock.give_way(pytest.fail)


def test_an_exclusive_lock_is_not_suspended(claim, tmp_path):
    lock = GpuLock([A], tmp_path / "locks")
    lock.suspend(pytest.fail)
    lock.resume()
    with lock.exclusive_gpu():
        lock.suspend(pytest.fail)
        assert claim("shared").waits
        lock.resume()


def test_a_lock_that_is_not_suspended_is_not_resumed(claim, tmp_path):
    lock = GpuLock([A], tmp_path / "locks", on_wait=pytest.fail)  # fail instead of waiting forever

    def fault():
        raise RuntimeError

    with lock.shared():
        other = claim("exclusive_gpu")
        assert other.waits  # it holds the gate, and a resumed lock would wait there
        with pytest.raises(RuntimeError):
            lock.suspend(fault)
        lock.resume()
        lock.suspend(lambda: None)
        lock.suspend(pytest.fail)
        assert other.acquires


def test_resuming_waits_for_a_writer(claim, tmp_path):
    calls = []

    def on_wait(message):
        calls.append(message)
        threading.Timer(0.2, other.release).start()

    lock = GpuLock([A], tmp_path / "locks", on_wait, on_acquired=lambda: calls.append("on"))
    with lock.shared():
        lock.suspend(lambda: None)
        other = claim("exclusive_gpu")
        assert other.enters
        lock.resume()
    assert calls == [f"waiting for GPU {A}, which another claim holds", "on"]
    assert 0.1 < lock.waited_s < 60


def test_without_a_wait_no_time_is_waited(tmp_path):
    lock = GpuLock([A], tmp_path / "locks")
    with lock.shared():
        pass
    with lock.exclusive_host():
        pass
    assert lock.waited_s == 0


def test_a_wait_is_reported_once(claim):
    first = claim("exclusive_gpu", A)
    assert first.enters
    second = claim("exclusive_gpu", B)
    assert second.enters
    both = claim("exclusive_gpu", A, B)
    assert both.waits
    first.release()
    assert both.next_event(0.05) == ""
    second.release()
    assert both.acquires


def test_opposite_orders_do_not_deadlock(tmp_path):
    pids = []
    for gpus in ((A, B), (B, A)):
        pids.append(os.fork())
        if pids[-1] == 0:
            other = GpuLock(gpus, tmp_path / "locks")
            for _ in range(300):
                with other.exclusive_gpu():
                    pass
            os._exit(0)
    end = time.monotonic() + 60
    left = set(pids)
    while left and time.monotonic() < end:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not left


def test_the_message_names_the_resource(claim, tmp_path):
    holder = claim("exclusive_gpu")
    assert holder.enters

    def wait(message):
        raise InterruptedError(message)

    refuses = GpuLock([A], tmp_path / "locks", on_wait=wait)
    sentence = f"waiting for GPU {A}, which another claim holds"
    with pytest.raises(InterruptedError, match=sentence), refuses.exclusive_gpu():
        pass
    holder.release()
    assert holder.next_event() == "-"
    assert claim("exclusive_host").enters  # a process that gave up waiting holds nothing


def test_a_held_lock_is_not_entered_again(tmp_path):
    lock = GpuLock([A, A], tmp_path / "locks")
    again = pytest.raises(UsageError, match="leave its with block")
    with lock.shared(), again, lock.exclusive_gpu():
        pass
    with lock.exclusive_host():
        pass
    with lock.shared():
        pass


def test_the_folder_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv(gpu_lock.VARIABLE, str(tmp_path / "a" / "b"))
    with GpuLock(["MIG-GPU-x/1/0"]).shared():
        pass
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert all(p.stat().st_mode & 0o077 == 0 for p in (tmp_path / "a" / "b").iterdir())
    monkeypatch.delenv(gpu_lock.VARIABLE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert gpu_lock.default_folder() == tmp_path / f"pytest-aiperf-locks-{os.geteuid()}"


def linked(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "plant",
    [
        linked,
        lambda folder: folder.symlink_to("nowhere"),
        lambda folder: folder.write_text(""),
        lambda folder: folder.mkdir(mode=0o755),
    ],
    ids=["link", "dangling link", "file", "open to others"],
)
def test_a_planted_folder_is_refused(tmp_path, plant):
    plant(tmp_path / "locks")
    with pytest.raises(UsageError, match=gpu_lock.VARIABLE):
        GpuLock([A], tmp_path / "locks")


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "locks").mkdir(mode=0o700)
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    with pytest.raises(UsageError, match="yours alone"):
        GpuLock([A], tmp_path / "locks")


def test_a_planted_lock_file_is_not_followed(tmp_path):
    lock = GpuLock([A], tmp_path / "locks")
    (tmp_path / "locks" / "host.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"), lock.shared():
        pass
    assert not (tmp_path / "precious").exists()


def test_sharing_the_host_limits_the_threads(tmp_path):
    def threads():
        return {pool["user_api"]: pool["num_threads"] for pool in threadpool_info()}

    np.linalg.norm(np.ones(2))  # loads NumPy's BLAS
    torch.ones(2).sum()  # and this torch's OpenMP
    host, gpu = (GpuLock(uuids, tmp_path / "locks", threads=1) for uuids in ([], [A]))
    with threadpool_limits(2):
        all_threads = {"blas": 2, "openmp": 2}
        with host.shared():
            assert threads() == {"blas": 1, "openmp": 1}
        with gpu.shared():
            assert threads() == {"blas": 1, "openmp": 2}, "compiled functions depend on OpenMP's"
        for exclusive in (host.exclusive_host, gpu.exclusive_gpu, gpu.exclusive_host):
            with exclusive():
                assert threads() == all_threads
        with GpuLock([], tmp_path / "locks").shared():
            assert threads() == all_threads


def test_a_claim_on_a_gpu_compiles_a_function_once(tmp_path):
    compiled = []

    @torch.compile(backend=lambda module, _: compiled.append(module) or module.forward)
    def add(x):
        return x + 1

    lock = GpuLock([A], tmp_path / "locks", threads=1)
    with threadpool_limits(2):
        for scope in (lock.shared, lock.exclusive_gpu, lock.exclusive_host):
            with scope():
                add(torch.ones(2))
    assert len(compiled) == 1
