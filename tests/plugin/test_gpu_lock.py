"""Claims that prepare share a GPU, one that is timed has it alone, and each gets its turn."""

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
from threadpoolctl import threadpool_info, threadpool_limits

from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine import gpu_lock
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.machine.isolation import arm_parent_death

A, B = "GPU-aaaa", "GPU-bbbb"


class Claim:
    """Another process, which takes one turn and stays in it until told to leave."""

    def __init__(self, folder, turn, gpus=(A,), forks=False):
        self.said, said = os.pipe()
        told, self.told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                theirs = GpuLock(
                    gpus,
                    folder,
                    on_wait=lambda _: os.write(said, b"w"),
                    on_acquired=lambda: os.write(said, b"t"),
                )
                with getattr(theirs, turn)():
                    os.write(said, b"+")
                    if forks and os.fork() == 0:
                        arm_parent_death()
                        time.sleep(300)  # outlives the turn, with a copy of every handle
                    os.read(told, 1)
                os.write(said, b"-")
                os.read(told, 1)
            finally:
                os._exit(0)
        os.close(said)
        os.close(told)

    def hears(self, seconds=10.0):
        poll = select.poll()
        poll.register(self.said, select.POLLIN)
        return os.read(self.said, 1).decode() if poll.poll(seconds * 1000) else ""

    def leave(self):
        os.write(self.told, b"l")

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    @property
    def waits(self):
        return self.hears() == "w" and self.hears(0.05) == ""

    @property
    def enters(self):
        return self.hears() == "+"

    @property
    def gets_its_turn(self):
        return self.hears() == "t" and self.hears() == "+"


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(gpu_lock, "WRITER_GRACE_S", 0.0)


@pytest.fixture
def claim(tmp_path):
    claims = []

    def start(turn, *gpus, **more):
        claims.append(Claim(tmp_path / "locks", turn, gpus or (A,), **more))
        return claims[-1]

    yield start
    for one in claims:
        os.close(one.told)
        os.close(one.said)
        with contextlib.suppress(ProcessLookupError):
            one.kill()


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
    one = claim(*first)
    assert one.enters
    two = claim(*second)
    assert two.waits
    one.leave()
    assert two.gets_its_turn


def test_a_killed_holder_frees_its_lease(claim):
    one = claim("exclusive_host")
    assert one.enters
    two = claim("exclusive_gpu")
    assert two.waits
    one.kill()
    assert two.gets_its_turn


def test_a_process_that_the_holder_forked_does_not_keep_the_lease(claim):
    one = claim("exclusive_gpu", forks=True)
    assert one.enters
    one.leave()
    assert one.hears() == "-"
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
    early.leave()
    assert waiting.gets_its_turn
    assert late.hears(0.05) == ""
    waiting.leave()
    assert late.gets_its_turn


def test_who_wants_to_time_lets_others_prepare_for_a_while(claim, monkeypatch):
    monkeypatch.setattr(gpu_lock, "WRITER_GRACE_S", 1.0)
    slow = claim("shared")
    assert slow.enters
    waiting = claim("exclusive_gpu")
    assert waiting.waits
    assert claim("shared").enters
    time.sleep(1.2)
    late = claim("shared")
    assert late.waits
    assert waiting.hears(0.05) == ""


@pytest.mark.parametrize("patience", [0.0, 30.0])
def test_the_patient_time_as_soon_as_nobody_prepares(claim, monkeypatch, patience):
    monkeypatch.setattr(gpu_lock, "WRITER_GRACE_S", patience)
    slow = claim("shared")
    assert slow.enters
    waiting = claim("exclusive_gpu")
    assert waiting.waits
    slow.leave()
    assert waiting.gets_its_turn


@pytest.mark.parametrize("patience", [0.0, 30.0])
def test_who_times_follows_upon_another(claim, monkeypatch, patience):
    monkeypatch.setattr(gpu_lock, "WRITER_GRACE_S", patience)
    first = claim("exclusive_gpu")
    assert first.enters
    reader = claim("shared")
    assert reader.waits
    second = claim("exclusive_gpu")
    assert second.waits
    first.leave()
    assert second.gets_its_turn
    assert reader.hears(0.05) == ""
    second.leave()
    assert reader.gets_its_turn


@pytest.mark.parametrize("host", [False, True])
def test_who_lets_go_of_the_gpus_keeps_the_host(claim, tmp_path, host):
    told = []
    ours = GpuLock(
        [A], tmp_path / "locks", on_wait=told.append, on_acquired=lambda: told.append("on")
    )
    with ours.shared():
        theirs = claim("exclusive_host" if host else "exclusive_gpu")
        assert theirs.waits
        ours.suspend(lambda: told.append("first"))
        assert theirs.hears(0.1) == ("" if host else "t")
        if not host:
            assert theirs.enters
            theirs.leave()
            assert theirs.hears() == "-"
        ours.resume()
        assert told == ["first"]
        other = claim("exclusive_gpu")
        assert other.waits
    assert theirs.gets_its_turn if host else other.gets_its_turn


def test_who_has_the_gpus_alone_does_not_let_go(claim, tmp_path):
    ours = GpuLock([A], tmp_path / "locks")
    ours.suspend(pytest.fail)
    ours.resume()
    with ours.exclusive_gpu():
        ours.suspend(pytest.fail)
        assert claim("shared").waits
        ours.resume()


def test_what_was_not_let_go_is_not_taken_twice(claim, tmp_path):
    ours = GpuLock([A], tmp_path / "locks", on_wait=pytest.fail)  # or it would wait for ever

    def fault():
        raise RuntimeError

    with ours.shared():
        theirs = claim("exclusive_gpu")
        assert theirs.waits  # and holds the gate, which a second lock would have to pass
        with pytest.raises(RuntimeError):
            ours.suspend(fault)
        ours.resume()
        ours.suspend(lambda: None)
        ours.suspend(pytest.fail)
        assert theirs.gets_its_turn


def test_taking_back_waits_for_who_times(claim, tmp_path):
    told = []
    ours = GpuLock(
        [A], tmp_path / "locks", on_wait=told.append, on_acquired=lambda: told.append("on")
    )
    with ours.shared():
        ours.suspend(lambda: None)
        theirs = claim("exclusive_gpu")
        assert theirs.enters
        timer = threading.Timer(0.2, theirs.leave)
        timer.start()
        ours.resume()
        timer.join()
    assert told == [f"waiting for GPU {A}, which another claim has", "on"]
    assert 0.1 < ours.waited_s < 60


def test_who_waits_for_nobody_has_waited_no_time(tmp_path):
    ours = GpuLock([A], tmp_path / "locks")
    with ours.shared():
        pass
    with ours.exclusive_host():
        pass
    assert ours.waited_s == 0


def test_waiting_is_told_once(claim):
    one = claim("exclusive_gpu", A)
    assert one.enters
    two = claim("exclusive_gpu", B)
    assert two.enters
    both = claim("exclusive_gpu", A, B)
    assert both.waits
    one.leave()
    assert both.hears(0.05) == ""
    two.leave()
    assert both.gets_its_turn


def test_opposite_orders_do_not_deadlock(tmp_path):
    pids = []
    for gpus in ((A, B), (B, A)):
        pids.append(os.fork())
        if pids[-1] == 0:
            theirs = GpuLock(gpus, tmp_path / "locks")
            for _ in range(300):
                with theirs.exclusive_gpu():
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


def test_the_sentence_names_what_is_waited_for(claim, tmp_path):
    one = claim("exclusive_gpu")
    assert one.enters

    def wait(sentence):
        raise InterruptedError(sentence)

    refuses = GpuLock([A], tmp_path / "locks", on_wait=wait)
    said = f"waiting for GPU {A}, which another claim has"
    with pytest.raises(InterruptedError, match=said), refuses.exclusive_gpu():
        pass
    one.leave()
    assert one.hears() == "-"
    assert claim("exclusive_host").enters  # who gave up waiting holds nothing


def test_a_held_lease_is_not_entered_again(tmp_path):
    ours = GpuLock([A, A], tmp_path / "locks")
    again = pytest.raises(UsageError, match="leave its with block")
    with ours.shared(), again, ours.exclusive_gpu():
        pass
    with ours.exclusive_host():
        pass
    with ours.shared():
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
    ours = GpuLock([A], tmp_path / "locks")
    (tmp_path / "locks" / "host.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"), ours.shared():
        pass
    assert not (tmp_path / "precious").exists()


def test_who_shares_the_host_uses_so_many_threads(tmp_path):
    def threads():
        return {pool["num_threads"] for pool in threadpool_info()}

    np.linalg.norm(np.ones(2))  # its BLAS is loaded
    ours = GpuLock([A], tmp_path / "locks", threads=1)
    with threadpool_limits(2):
        with ours.shared():
            assert threads() == {1}
        for alone in (ours.exclusive_gpu, ours.exclusive_host):
            with alone():
                assert threads() == {2}
        with GpuLock([A], tmp_path / "locks").shared():
            assert threads() == {2}
