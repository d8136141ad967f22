"""Claims that prepare share a GPU; a claim that is timed has it alone, and pauses them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine import gpu_lock, pausing
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


def test_a_writer_enters_as_soon_as_the_last_reader_leaves(claim):
    slow = claim("shared")
    assert slow.enters
    waiting = claim("exclusive_gpu")
    assert waiting.waits
    slow.release()
    assert waiting.acquires


def test_queued_writers_run_back_to_back(claim):
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


def test_a_process_that_cannot_be_paused_keeps_its_locks(claim, tmp_path):
    lock = GpuLock([A], tmp_path / "locks")
    with lock.shared():
        lock.suspend(pytest.fail)
        gpu = claim("exclusive_gpu")
        assert gpu.waits
        lock.resume()
    assert gpu.acquires


class Preparing:
    """A claim that can be paused: it leads a session, prepares, and has started two processes.

    It suspends its lock, resumes it, and ends when it is told to. With ``first``, it only uses the
    host at first, and takes this lock when it is told to.
    """

    def __init__(self, folder, first=None):
        self.events, events = os.pipe()
        commands, self.commands = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            lock = GpuLock([A], folder, on_wait=lambda _: os.write(events, b"w"), pausable=True)
            with lock.use_host() if first else lock.shared():
                for leads in (False, True):
                    child = os.fork()
                    if child == 0:
                        if leads:
                            os.setsid()  # as nvcc and its like do
                        arm_parent_death()
                        time.sleep(300)
                        os._exit(0)
                    os.write(events, child.to_bytes(4, "little"))
                if first:
                    os.read(commands, 1)
                    with getattr(lock, first)():
                        os.write(events, b"+")
                        os.read(commands, 1)
                    os.write(events, b"-")
                for step in (lambda: lock.suspend(lambda: None), lock.resume):
                    os.read(commands, 1)
                    step()
                    os.write(events, b"+")
                os.read(commands, 1)
            os.write(events, b"-")
            os.read(commands, 1)
            os._exit(0)
        self.children = [int.from_bytes(os.read(self.events, 4), "little") for _ in range(2)]

    def states(self):
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in (self.pid, *self.children)]
        return "".join(stat.rpartition(") ")[2][0] for stat in stats)

    def runs_again(self):
        end = time.monotonic() + 60
        while "T" in self.states() and time.monotonic() < end:
            time.sleep(0.01)
        return "T" not in self.states()

    def steps(self):
        os.write(self.commands, b"r")
        return os.read(self.events, 1)

    def kill(self):
        for pid in (self.pid, *self.children):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.fixture
def preparing(tmp_path, request):
    started = Preparing(tmp_path / "locks", getattr(request, "param", None))
    yield started
    started.kill()


def ended(other):
    other.release()
    return other.next_event() == "-"


@pytest.mark.parametrize("scope", ["exclusive_gpu", "exclusive_host"])
def test_a_claim_that_is_timed_pauses_those_that_prepare(claim, preparing, tmp_path, scope):
    for _ in range(3):
        timed = claim(scope)
        assert timed.enters
        assert preparing.states() == "TTT"
        assert ended(timed)
        assert preparing.runs_again()
    assert [preparing.steps() for _ in range(3)] == [b"+", b"+", b"-"]
    assert not list((tmp_path / "locks").glob("*.preparing/*")), "no registration is left"
    assert claim(scope).enters
    assert "T" not in preparing.states(), "it has ended to prepare"


def test_a_process_with_any_name_may_run_beside_claims(preparing, tmp_path):
    """Linux cuts a name after 15 bytes, here in the middle of a character."""
    pid = os.fork()
    if pid == 0:
        arm_parent_death()
        Path("/proc/self/comm").write_bytes("プログラム".encode()[:14])
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(pid, os.WUNTRACED)  # until it has its name
        with GpuLock([A], tmp_path / "locks").exclusive_gpu():
            assert preparing.states() == "TTT"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_process_that_may_not_be_stopped_keeps_no_other_stopped(preparing, tmp_path, monkeypatch):
    """As one that a claim has started with sudo."""
    kill, (first, _) = os.kill, sorted(preparing.children)
    monkeypatch.setattr(pausing, "STOP_TIMEOUT_S", 0.1)

    def refuse(pid, signum):
        if pid == first:
            raise PermissionError
        kill(pid, signum)

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", refuse)
        with GpuLock([A], tmp_path / "locks").exclusive_gpu():
            assert preparing.states().count("T") == 2
    assert preparing.runs_again()


def test_claims_on_other_gpus_are_not_paused(claim, preparing):
    timed = claim("exclusive_gpu", B)
    assert timed.enters
    assert "T" not in preparing.states()
    assert ended(timed)
    assert claim("exclusive_host", B).enters
    assert preparing.states() == "TTT"


def test_a_suspended_claim_is_paused_for_the_host_only(claim, preparing):
    assert preparing.steps() == b"+"
    gpu = claim("exclusive_gpu")
    assert gpu.enters
    assert "T" not in preparing.states()
    os.write(preparing.commands, b"r")  # resumes
    assert os.read(preparing.events, 1) == b"w"
    assert ended(gpu)
    assert os.read(preparing.events, 1) == b"+"
    host = claim("exclusive_host", B)
    assert host.enters
    assert preparing.states() == "TTT"


@pytest.mark.parametrize("preparing", ["shared", "exclusive_gpu", "exclusive_host"], indirect=True)
def test_a_claim_is_paused_for_the_host_between_its_locks(claim, preparing, tmp_path):
    def is_paused():
        other = claim("exclusive_host", B)
        assert other.enters
        states = preparing.states()
        assert ended(other)
        assert preparing.runs_again()
        return states == "TTT"

    assert is_paused()
    gpu = claim("exclusive_gpu")
    assert gpu.enters
    assert "T" not in preparing.states(), "without a lock it uses no GPU"
    assert ended(gpu)
    assert [preparing.steps(), preparing.steps()] == [b"+", b"-"]
    assert is_paused()
    assert [preparing.steps() for _ in range(3)] == [b"+", b"+", b"-"]
    assert not list((tmp_path / "locks").glob("*.preparing/*")), "no registration is left"


@pytest.mark.parametrize("preparing", ["exclusive_host"], indirect=True)
def test_a_claim_that_is_timed_does_not_pause_itself(claim, preparing):
    assert preparing.steps() == b"+"
    assert "T" not in preparing.states()
    waiting = claim("exclusive_host", B)
    assert waiting.waits
    os.write(preparing.commands, b"r")  # leaves its lock
    assert waiting.acquires
    assert preparing.states() == "TTT"
    assert ended(waiting)
    assert os.read(preparing.events, 1) == b"-"


def test_a_process_that_a_claim_has_started_pauses_neither_itself_nor_the_claim(tmp_path):
    """As a profiled process does, which takes a lock of its own."""
    events, write = os.pipe()
    claim = os.fork()
    if claim == 0:
        os.setsid()
        with GpuLock([A], tmp_path / "locks", pausable=True).use_host():
            if os.fork() == 0:
                os.setsid()
                arm_parent_death()
                with GpuLock([], tmp_path / "locks").exclusive_host():
                    os.write(write, b"+")
                os._exit(0)
            os.wait()
            os.write(write, b"-")
        os._exit(0)
    try:
        for expected in (b"+", b"-"):
            assert select.select([events], [], [], 60)[0], "a process was stopped"
            assert os.read(events, 1) == expected
    finally:
        os.kill(claim, signal.SIGKILL)
        os.waitpid(claim, 0)
        os.close(events)
        os.close(write)


def test_what_a_claim_has_for_itself_is_told(tmp_path):
    told = []
    lock = GpuLock([A], tmp_path / "locks", on_alone=told.append)
    with lock.shared():
        assert told == []
    with lock.exclusive_gpu():
        assert told == ["GPU"]
    with pytest.raises(ZeroDivisionError), lock.exclusive_host():
        raise ZeroDivisionError
    assert told == ["GPU", "", "host", ""]


def test_a_claim_does_not_begin_to_prepare_beside_one_that_is_timed(claim, tmp_path):
    timed = claim("exclusive_host", B)
    assert timed.enters
    waits = []

    def on_wait(message):
        waits.append(message)
        threading.Timer(0.2, timed.release).start()

    with GpuLock([A], tmp_path / "locks", on_wait, pausable=True).shared():
        assert waits == ["waiting for the host, which another claim holds"]
        assert timed.next_event() == "-"


def test_a_claim_on_two_gpus_is_not_paused(claim, tmp_path):
    with GpuLock([A, B], tmp_path / "locks", pausable=True).shared():
        assert claim("exclusive_gpu", A).waits


def test_paused_claims_go_on_after_the_one_that_paused_them_was_killed(claim, preparing, tmp_path):
    host = claim("exclusive_host")
    assert host.enters
    assert preparing.states() == "TTT"
    gpu_lock.continue_paused(tmp_path / "locks")
    assert preparing.states() == "TTT", "a claim that still has the host keeps them paused"
    host.kill()
    assert preparing.states() == "TTT"
    gpu_lock.continue_paused(tmp_path / "locks")
    assert preparing.runs_again()


def test_the_next_claim_that_is_timed_continues_those_that_a_killed_one_had_paused(
    claim, preparing, tmp_path
):
    killed = claim("exclusive_gpu")
    assert killed.enters
    following = claim("exclusive_gpu")
    assert following.waits
    killed.kill()
    assert following.acquires
    gpu_lock.continue_paused(tmp_path / "locks")
    assert preparing.states() == "TTT", "the next one needs them paused"
    assert ended(following)
    assert preparing.runs_again()


@pytest.mark.parametrize(("answers", "expected"), [([True], 0), ([False, False, True], 2)])
def test_paused_claims_continue_for_a_while_if_the_gpu_is_busy(
    preparing, tmp_path, answers, expected
):
    states = []
    lock = GpuLock([A], tmp_path / "locks")

    def is_idle():
        states.append(preparing.states())
        return answers[len(states) - 1]

    lock.is_idle = is_idle
    started = time.monotonic()
    with lock.exclusive_gpu():
        assert preparing.states() == "TTT"
    assert states == ["TTT"] * len(answers)
    assert time.monotonic() - started >= expected * pausing.BREATH_S


def test_a_gpu_that_others_use_does_not_delay_a_claim_for_ever(preparing, tmp_path, monkeypatch):
    monkeypatch.setattr(pausing, "BREATH_S", 0.001)
    lock = GpuLock([A], tmp_path / "locks")
    lock.is_idle = lambda: False
    with lock.exclusive_gpu():
        assert preparing.states() == "TTT"


def test_nobody_asks_whether_the_gpu_is_idle_if_no_claim_was_paused(tmp_path):
    lock = GpuLock([A], tmp_path / "locks")
    lock.is_idle = pytest.fail
    with lock.exclusive_gpu():
        pass


def test_an_exclusive_lock_is_not_suspended(claim, tmp_path):
    lock = GpuLock([A], tmp_path / "locks")
    lock.suspend(pytest.fail)
    lock.resume()
    with lock.exclusive_gpu():
        lock.suspend(pytest.fail)
        assert claim("shared").waits
        lock.resume()


def test_a_lock_that_is_not_suspended_is_not_resumed(tmp_path):
    lock = GpuLock([A], tmp_path / "locks", on_wait=pytest.fail, pausable=True)

    def fault():
        raise RuntimeError

    def registered():
        return {file.parent.name for file in (tmp_path / "locks").glob("*.preparing/*")}

    both = {"host.preparing", f"gpu-{A}.preparing"}
    with lock.shared():
        assert registered() == both
        with pytest.raises(RuntimeError):
            lock.suspend(fault)
        lock.resume()
        assert registered() == both
        lock.suspend(lambda: None)
        lock.suspend(pytest.fail)
        assert registered() == {"host.preparing"}
        lock.resume()
        assert registered() == both
    assert not registered()


def test_resuming_waits_for_a_writer(claim, tmp_path):
    calls = []

    def on_wait(message):
        calls.append(message)
        threading.Timer(0.2, other.release).start()

    lock = GpuLock(
        [A], tmp_path / "locks", on_wait, on_acquired=lambda: calls.append("on"), pausable=True
    )
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


def test_openmp_starts_no_threads_while_a_claim_on_a_gpu_shares_the_host(tmp_path):
    def started(scope):
        """Return how many threads a sum starts; OpenMP has a pool per thread that uses it."""
        torch.set_num_threads(2)
        numbers = torch.empty(2**20)
        with scope:
            before = set(Path("/proc/self/task").iterdir())
            numbers.sum()
            return len(set(Path("/proc/self/task").iterdir()) - before)

    lock = GpuLock([A], tmp_path / "locks", threads=1)
    scopes = [lock.shared, lock.exclusive_gpu, lock.exclusive_host]
    scopes.append(GpuLock([A], tmp_path / "locks").shared)  # there are no other workers
    assert [_in_thread(started, scope()) for scope in scopes] == [0, 1, 1, 1]


def _in_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


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
