"""A claim that goes wrong affects no other claim and leaves no process behind.

Each fault is injected once per run, or 20 times with ``--hypothesis-profile=long``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine import isolation
from pytest_aiperf.machine.isolation import Channel, ProcessExit, describe, supervise
from pytest_aiperf.rules import validity

SIGNALS = ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGKILL", "SIGTERM"]

if settings.get_current_profile_name() == "long":

    @pytest.fixture(autouse=True, params=range(20))
    def again():
        """Repeat each test."""


def gone(*pids: int, within: float = 60) -> bool:
    """Wait until none of the processes runs, except as a zombie; return whether that happened."""
    end = time.monotonic() + within
    while any(map(runs, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def sleeper() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid


def daemon(leave=os.setsid) -> int:
    """Start a process that leaves the claim's group and session, and whose parent ends."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        leave()
        if (pid := os.fork()) == 0:
            time.sleep(300)
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.wait()
    return int(os.read(reader, 20))


def run(work, *, deadline_s=30.0, on_message=lambda _: None, grace_s=0.2) -> ProcessExit:
    before = set(isolation._children())  # other tests in this process may have started some
    try:
        return supervise(work, deadline_s=deadline_s, on_message=on_message, grace_s=grace_s)
    finally:
        assert set(isolation._children()) <= before, "no child is left, not even a zombie"


# How a claim begins and ends


def traced(frame, event, arg):
    return traced


def test_tracers_are_off_in_a_claim_and_stay_on_outside():
    def work(channel):
        tracers = [m.gettrace() for m in (sys, threading)]
        tracers += [m.getprofile() for m in (sys, threading)]
        channel.send("result", tracers=[tracer is not None for tracer in tracers])

    before = sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()
    try:
        for module in (sys, threading):
            module.settrace(traced)
            module.setprofile(traced)
        ended = run(work)
        outside = sys.gettrace()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        threading.settrace(before[2])
        threading.setprofile(before[3])
    assert ended.messages[0]["tracers"] == [False] * 4
    assert outside is traced


def test_processes_that_a_claim_has_started_are_known():
    def work(channel):
        pids = [sleeper(), daemon(leave=lambda: None)]
        known = validity._started()
        channel.send("result", known=[str(pid) in known for pid in pids], all=len(known))

    assert run(work).messages[0] == {"kind": "result", "known": [True, True], "all": 2}


def test_tools_of_sys_monitoring_are_freed(monkeypatch):
    tools, events, callbacks = {1: "coverage"}, {1: 33}, {}
    monitoring = SimpleNamespace(
        get_tool=tools.get,
        set_events=events.__setitem__,
        register_callback=lambda tool, event, call: callbacks.update({(tool, event): call}),
        free_tool_id=tools.pop,
        DISABLE="disable",
    )
    monkeypatch.setattr(sys, "monitoring", monitoring, raising=False)
    for module in (sys, threading):
        monkeypatch.setattr(module, "settrace", lambda _: None)
        monkeypatch.setattr(module, "setprofile", lambda _: None)
    isolation.turn_off_tracers()
    assert (tools, events) == ({}, {1: 0})
    assert sorted(callbacks) == [(1, 1 << event) for event in range(10)]
    assert callbacks[1, 32]("code", 7) == "disable"  # else LINE stays on where it was set


def test_messages_come_in_order_and_the_transient_ones_are_not_kept():
    def work(channel):
        channel.send("working", phase="build")
        channel.send("progress", ratio=1.5)
        channel.send("report", pid=os.getpid())
        channel.send("result", values=[1.0, None, "ü\n"], nested={"a": True})

    received: list[dict] = []
    ended = run(work, on_message=received.append)
    assert [m["kind"] for m in received] == ["working", "progress", "report", "result"]
    assert [m.pop("stopped_s") for m in received] == [0] * 4
    assert list(ended.messages) == received[2:]
    assert received[2]["pid"] != os.getpid()
    assert received[3] == {"kind": "result", "values": [1.0, None, "ü\n"], "nested": {"a": True}}
    assert (ended.status, ended.code) == ("exited", 0)
    assert ended.peak_rss_bytes > 2**20
    assert ended.seconds > 0


def test_an_exception_comes_back_with_its_traceback():
    def work(channel):
        raise ZeroDivisionError("of all things")

    ended = run(work)
    (crash,) = ended.messages
    assert crash["kind"] == "crash"
    assert "in work" in crash["text"]
    assert (ended.status, ended.code) == ("exited", 1)
    assert describe(ended).endswith("ZeroDivisionError: of all things")


def test_sys_exit_is_a_crash_as_any_exception():
    assert describe(run(lambda channel: sys.exit(0))).endswith("SystemExit: 0")


@pytest.mark.parametrize("code", [0, 3])
def test_leaving_early_is_not_a_result(code):
    ended = run(lambda channel: os._exit(code))
    assert (ended.messages, ended.status, ended.code) == ((), "exited", code)
    assert f"exit code {code} without a result" in describe(ended)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_costs_that_claim_only(name):
    def work(channel):
        channel.send("report", before=True)
        os.kill(os.getpid(), signal.Signals[name])
        time.sleep(30)

    ended = run(work)
    assert (ended.status, ended.code) == ("signalled", signal.Signals[name])
    assert ended.messages == ({"kind": "report", "before": True},)
    assert f"killed by {name}" in describe(ended)
    assert run(lambda channel: channel.send("result")).messages == ({"kind": "result"},)


def test_ctrl_c_is_for_the_parent_to_decide():
    def work(channel):
        os.killpg(0, signal.SIGINT)
        channel.send("result")

    assert run(work).messages == ({"kind": "result"},)


# The deadline


@pytest.fixture
def run_past_deadline(monkeypatch):
    """Return a variant of ``run``: the deadline passes when the claim sends its first message."""
    late_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s)
    monkeypatch.setattr(isolation, "time", clock)

    def run_late(work, grace_s=60.0):
        def receive(message):
            nonlocal late_s
            late_s = 1000.0

        return run(work, deadline_s=500.0, on_message=receive, grace_s=grace_s)

    return run_late


def test_a_claim_that_ignores_sigterm_is_killed_after_the_grace(run_past_deadline):
    def work(channel):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        channel.send("report", pids=[os.getpid(), sleeper()])
        time.sleep(300)

    ended = run_past_deadline(work, grace_s=0.2)
    assert (ended.status, ended.code) == ("timeout", signal.SIGKILL)
    assert gone(*ended.messages[0]["pids"], within=0)
    assert describe(ended).startswith("exceeded its deadline of 500 s")


def test_a_claim_may_end_politely_within_the_grace(run_past_deadline):
    def work(channel):
        signal.signal(signal.SIGTERM, lambda *_: channel.send("report", polite=True) or os._exit(7))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        channel.send("progress")  # holds a lock that the signal's handler needs
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        time.sleep(300)

    ended = run_past_deadline(work)
    assert (ended.status, ended.code) == ("timeout", 7)
    assert ended.messages == ({"kind": "report", "polite": True},)


def test_where_a_claim_crashed_or_hung_is_in_its_own_stderr(capfd, run_past_deadline):
    def hung(channel):
        channel.send("progress")
        time.sleep(300)

    def crashed(channel):
        os.kill(os.getpid(), signal.SIGSEGV)

    assert run_past_deadline(hung).code == signal.SIGTERM
    assert "in hung" in capfd.readouterr().err
    assert run(crashed).code == signal.SIGSEGV
    assert "in crashed" in capfd.readouterr().err


def test_waiting_does_not_count(run_past_deadline):
    def work(channel):
        channel.send("waiting")
        channel.send("waiting")
        time.sleep(0.5)
        channel.send("working")
        channel.send("result")

    ended = run_past_deadline(work)
    assert (ended.status, ended.messages) == ("exited", ({"kind": "result"},))


def test_a_claim_that_is_often_stopped_while_pytest_is_busy_is_reported_whole():
    """With the changes of its state before it, its report takes more than 64 bytes."""
    reader, writer = os.pipe()

    def work(channel):
        channel.send("begin")
        claim = os.getpid()
        if os.fork() == 0:
            for _ in range(31):
                for signum in (signal.SIGSTOP, signal.SIGCONT):
                    os.kill(claim, signum)
                    time.sleep(0.01)
            os.write(writer, b"+")
            os._exit(0)
        os.wait()

    def on_message(_):
        os.read(reader, 1)
        time.sleep(0.3)  # until the supervisor has reported

    ended = supervise(work, deadline_s=60, on_message=on_message)
    assert (ended.status, ended.code) == ("exited", 0)
    assert ended.peak_rss_bytes > 1 << 20
    os.close(reader)
    os.close(writer)


def test_the_time_for_which_a_claim_is_stopped_does_not_count():
    stopped_s = []

    def on_message(message):
        stopped_s.append(message["stopped_s"])
        if message["kind"] == "stop me":
            os.kill(message["pid"], signal.SIGSTOP)
            threading.Timer(1.5, os.kill, (message["pid"], signal.SIGCONT)).start()

    def work(channel):
        channel.send("stop me", pid=os.getpid())
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            time.sleep(0.01)
        channel.send("result")

    ended = isolation.supervise(work, deadline_s=2.0, on_message=on_message)
    assert (ended.status, ended.code) == ("exited", 0)
    assert stopped_s[0] == 0
    assert stopped_s[-1] == pytest.approx(1.5, abs=0.5)


def test_a_claim_that_is_stopped_while_it_waits_loses_that_time_once(monkeypatch):
    """Its own time does not count the wait."""
    now = 100.0
    with monkeypatch.context() as patch:
        patch.setattr(isolation.time, "monotonic", lambda: now)
        deadline = isolation._Deadline(60.0, grace_s=2.0)
        deadline.update("waiting")
        for state in (isolation._STOPPED, isolation._CONTINUED):
            deadline.note_state(state)
            now += 10.0
        assert deadline.stopped_s == 0
        deadline.update("working")
        deadline.note_state(isolation._STOPPED)
        now += 5.0
        assert deadline.stopped_s == 5
        deadline.note_state(isolation._STOPPED)  # it continued for a moment
        now += 1.0
        deadline.note_state(isolation._CONTINUED)
        assert (deadline.stopped_s, deadline.left()) == (6, 60)


def test_a_claim_that_nobody_continues_ends():
    ended = run(lambda _: os.kill(os.getpid(), signal.SIGSTOP), deadline_s=0.5, grace_s=0.1)
    assert (ended.status, ended.code) == ("timeout", signal.SIGKILL)


def test_the_deadline_is_what_is_left_of_the_time_at_work(monkeypatch):
    now = 100.0
    with monkeypatch.context() as patch:
        patch.setattr(isolation.time, "monotonic", lambda: now)
        deadline = isolation._Deadline(60.0, grace_s=2.0)
        now = 120.0
        deadline.update("waiting")
        assert deadline.left() is None
        now = 1000.0
        deadline.update("working")
        now = 1030.0
        deadline.update("working")  # repeated: does not restart the clock
        deadline.update("result")
        left = [deadline.left()]
        now = 1041.0
        left.append(deadline.left())
        orders = [deadline.next_command()]
        deadline.update("waiting")  # after the deadline: ignored
        left.append(deadline.left())
        orders += [deadline.next_command(), deadline.next_command()]
    assert left == [10.0, 0.0, 2.0]
    assert orders == [b"T", b"K", b""]
    assert deadline.exceeded
    assert deadline.stuck


def test_a_claim_that_works_again_meets_its_deadline():
    def work(channel):
        channel.send("waiting")
        channel.send("working")
        time.sleep(300)

    assert run(work, deadline_s=0.5).status == "timeout"


def test_a_claim_that_even_sigkill_does_not_end_is_given_up(monkeypatch, run_past_deadline):
    monkeypatch.setattr(isolation, "KILL_TIMEOUT_S", 0.2)

    def work(channel):
        os.kill(os.getppid(), signal.SIGSTOP)  # the supervisor can no longer report an end
        channel.send("report", pid=os.getpid())
        time.sleep(300)

    ended = run_past_deadline(work, grace_s=0.1)
    assert ended.status == "stuck"
    assert gone(ended.messages[0]["pid"])
    assert "did not die of SIGKILL" in describe(ended)


def test_a_claim_does_not_outlive_its_supervisor():
    def work(channel):
        channel.send("report", pid=os.getpid())
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(300)

    ended = run(work)
    assert ended.status == "interrupted"
    assert gone(ended.messages[0]["pid"])
    assert "killed from outside" in describe(ended)


# What a claim starts


@pytest.mark.parametrize("start", [sleeper, daemon])
def test_what_a_claim_leaves_behind_is_killed(start):
    ended = run(lambda channel: channel.send("report", pid=start()))
    assert gone(ended.messages[0]["pid"], within=0)
    assert (ended.status, ended.code) == ("exited", 0)


def test_processes_that_replace_each_other_do_not_escape():
    def relay():
        end = time.monotonic() + 120  # stops the relay if this test fails
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)

    def work(channel):
        if os.fork() == 0:
            relay()
        channel.send("result")

    assert run(work).seconds < 60


def test_a_thread_does_not_keep_a_claim_alive():
    def work(channel):
        threading.Thread(target=time.sleep, args=(300,)).start()
        channel.send("result")

    assert run(work).seconds < 60


def test_processes_of_others_are_left_alone():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        supervise(lambda channel: daemon(), deadline_s=30, on_message=lambda _: None)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_that_the_claim_forks_neither_reports_nor_returns():
    def work(channel):
        for fails in (True, False):
            if (pid := os.fork()) == 0:
                if fails:
                    raise ValueError("in the fork")
                return  # the fork returns into _run_claim, as the claim does
            os.waitpid(pid, 0)
        if (pid := os.fork()) == 0:
            try:
                channel.send("result", forged=True)
            except UsageError:
                os._exit(42)
        _, status = os.waitpid(pid, 0)
        channel.send("result", refused=os.waitstatus_to_exitcode(status) == 42)

    ended = run(work)
    assert ended.messages == ({"kind": "result", "refused": True},)
    assert ended.code == 0


# The channel


def test_a_big_message_arrives_whole():
    ended = run(lambda channel: channel.send("result", text="x" * 4 * 2**20))
    assert len(ended.messages[0]["text"]) == 4 * 2**20


def test_a_message_over_the_limit_is_refused_where_it_is_sent(monkeypatch):
    monkeypatch.setattr(isolation, "MAX_MESSAGE_BYTES", 2**17)
    ended = run(lambda channel: channel.send("result", text="x" * 2**17))
    assert "UsageError: a message 'result' of 131" in describe(ended)


@pytest.mark.parametrize(
    "text", [b"1\n", b"{}\n", b'{"kind": 1}\n', b"\xff\n", b"[" * 9999 + b"\n", b"x" * 2**20]
)
def test_a_malformed_message_fails_the_claim(monkeypatch, text):
    monkeypatch.setattr(isolation, "MAX_MESSAGE_BYTES", 2**17)

    def work(channel):
        with contextlib.suppress(BrokenPipeError):  # the reader closes its end
            os.write(channel._fd, text)

    ended = run(work)
    assert [m["kind"] for m in ended.messages] == ["crash"]
    assert "not a message" in describe(ended)


def test_a_torn_message_is_dropped():
    def work(channel):
        channel.send("report")
        os.write(channel._fd, b'{"kind": "resu')
        os.kill(os.getpid(), signal.SIGKILL)

    assert run(work).messages == ({"kind": "report"},)


def test_a_claim_may_close_the_channel():
    ended = run(lambda channel: (os.close(channel._fd), time.sleep(0.1)))
    assert (ended.messages, ended.code) == ((), 0)


PRINTER = """
import ctypes, sys
from pytest_aiperf.machine.isolation import supervise
printf = ctypes.CDLL(None).printf

def work(channel):
    print("child", end=" ")
    printf(b"child-in-C ")

print("parent", end=" ")
printf(b"parent-in-C ")
supervise(work, deadline_s=30, on_message=print)
"""


def test_buffered_output_is_written_once():
    environ = {"PYTHONPATH": os.pathsep.join(sys.path)}  # no PYTHONUNBUFFERED: buffered
    out = subprocess.check_output([sys.executable, "-c", PRINTER], env=environ, text=True)
    assert sorted(out.split()) == ["child", "child-in-C", "parent", "parent-in-C"]


def test_a_parent_with_threads_is_not_warned_of_forking():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert run(lambda channel: channel.send("result")).messages
    finally:
        stop.set()
        thread.join()


COMPUTING = """
import sys
import torch
from pytest_aiperf.machine.isolation import supervise

def compute():
    return (torch.ones(2**22) * 2).sum().item()

torch.set_num_threads(2)
compute()  # starts OpenMP's threads, which a fork does not have

def work(channel):
    channel.send("result", sum=compute(), threads=torch.get_num_threads())

(message,) = supervise(work, deadline_s=60, on_message=lambda _: None).messages
assert message == {"kind": "result", "sum": 2.0**23, "threads": 2}, message
assert compute() == 2.0**23
"""


def test_a_claim_computes_though_pytest_has_computed_before():
    environ = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", COMPUTING], env=environ, check=True)


# When the pytest process is interrupted or dies


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_the_parent_leaves_nothing(stop):
    pids = []

    def work(channel):
        channel.send("report", pids=[os.getpid(), os.getppid(), sleeper(), daemon()])
        time.sleep(300)

    def received(message):
        pids.extend(message["pids"])
        if stop is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        raise stop

    with pytest.raises(stop):
        run(work, on_message=received)
    assert len(pids) == 4
    assert gone(*pids, within=0)


SUPERVISOR = """
import os, sys, time
sys.path[:0] = {path!r}
from test_isolation import daemon, sleeper
from pytest_aiperf.machine.isolation import supervise

def work(channel):
    pids = [os.getpid(), os.getppid(), sleeper(), daemon()]
    print(*pids, flush=True)
    time.sleep(300)

supervise(work, deadline_s=300, on_message=print)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_leaves_nothing(signum):
    path = [str(Path(__file__).parent), *sys.path]
    script = SUPERVISOR.format(path=path)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4
        assert all(map(runs, pids))
        parent.send_signal(signum)
        assert gone(*pids)
        assert parent.stdout.read() == b""  # no process keeps its stdout open


def test_arm_parent_death():
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            isolation.arm_parent_death(signal.SIGTERM)
            os.write(writer, str(os.getpid()).encode())
        time.sleep(300)
        os._exit(0)
    pid = int(os.read(reader, 20))
    assert runs(pid)
    os.kill(middle, signal.SIGKILL)
    os.waitpid(middle, 0)
    assert gone(pid)


def test_arm_parent_death_when_the_parent_is_dead_already():
    pid = os.fork()
    if pid == 0:
        # the pid of this process instead of its parent's
        isolation.arm_parent_death(signal.SIGTERM, parent=os.getpid())
        time.sleep(300)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


# Descriptions of exits


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        ("signalled", signal.SIGSEGV, "killed by SIGSEGV (segmentation fault) after 1.2 s"),
        ("signalled", 40, "killed by signal 40 (real-time signal 6) after 1.2 s"),
        (
            "signalled",
            signal.SIGKILL,
            "killed by SIGKILL after 1.2 s: out of host memory? peak RSS 3.1 GiB",
        ),
        (
            "timeout",
            signal.SIGTERM,
            "exceeded its deadline of 120 s (a kernel that never ends, or raise aiperf_deadline)",
        ),
        (
            "exited",
            0,
            (
                "ended with exit code 0 without a result "
                "(os._exit, sys.exit or a signal handler in the claim?)"
            ),
        ),
    ],
)
def test_describe(status, code, sentence):
    assert describe(ProcessExit((), status, code, 1.234, int(3.1 * 2**30), 120.0)) == sentence


def test_a_channel_takes_plain_builtins_only():
    with pytest.raises(TypeError, match="Path"):
        Channel(-1).send("result", path=Path())
