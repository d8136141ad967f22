"""One supervised process per claim: it ends within its deadline and leaves nothing behind.

    pytest or xdist worker --fork--> supervisor --fork--> the claim --> whatever the claim starts

The supervisor waits, runs no user code, and adopts every process that the claim orphans, daemons
included. When the claim has ended, or the pytest process has abandoned the supervisor (by an
exception, or because it was killed), the supervisor kills and reaps all its descendants, and no
other process. A claim's output goes where pytest's own output goes, without a size limit: the
kernel's only such limit (RLIMIT_FSIZE) would apply to result files, too.
"""

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from multiprocessing.connection import wait
from pathlib import Path
from socket import socket, socketpair
from typing import Any, Final, Literal, NoReturn

from threadpoolctl import threadpool_info

from pytest_aiperf.errors import UsageError

Message = dict[str, Any]
Work = Callable[["Channel"], None]
Status = Literal["exited", "signalled", "timeout", "interrupted", "stuck"]

MAX_MESSAGE_BYTES: Final = 16 * 2**20  #: Longest message of a claim; pytest holds it in memory.
TRANSIENT: Final = frozenset({"waiting", "working", "progress", "step"})
"""Kinds of messages that are passed to ``on_message`` but not kept."""
KILL_TIMEOUT_S: Final = 10.0
"""How long a process may take to end after SIGKILL before it counts as stuck."""

_RECEIVED_BYTES: Final = 2**16
"""Most bytes received from the supervisor at a time: more changes of the claim's state, of one byte
each, than come while the pytest process is busy, so that the report behind them is not cut."""
_MONITORING_EVENTS: Final = 10
"""The first events of ``sys.monitoring``, which are local: they can be on for single functions."""
_TERMINATE: Final = b"T"
_KILL: Final = b"K"
_STOPPED: Final = b"S"
_CONTINUED: Final = b"C"
_BLOCKED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_OMP_PAUSE_SOFT: Final = 1
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


class Channel:
    """The claim's private channel to the pytest process: one JSON object per line."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, kind: str, **payload: object) -> None:
        """Send one message, whose values must be JSON types.

        The kind ``waiting`` pauses the claim's deadline while it waits for other processes;
        ``working`` resumes it. The kind ``step`` starts it anew.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                f"a process that the claim forked sent {kind!r}: only the claim itself may send"
            )
        line = json.dumps({"kind": kind, **payload}).encode() + b"\n"
        if len(line) > MAX_MESSAGE_BYTES:
            limit = MAX_MESSAGE_BYTES
            raise UsageError(f"a message {kind!r} of {len(line)} bytes: at most {limit}, send less")
        rest = memoryview(line)
        with self._lock:
            while rest:
                rest = rest[os.write(self._fd, rest) :]


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a claim's process ended, and the messages that it sent."""

    messages: tuple[Message, ...]  #: The claim's messages, except the ``TRANSIENT`` kinds.
    status: Status
    """``interrupted``: the supervisor was killed from outside. ``stuck``: SIGKILL did not end the
    process, so its GPU cannot be trusted."""
    code: int  #: Exit status, or the number of the signal that ended the process.
    seconds: float
    peak_rss_bytes: int
    deadline_s: float


def supervise(
    work: Work,
    *,
    deadline_s: float,
    on_message: Callable[[Message], None],
    on_end: Callable[[], object] = lambda: None,
    grace_s: float = 2.0,
) -> ProcessExit:
    """Run ``work`` in a separate process; return when neither it nor a descendant is left.

    The deadline counts the time in which the claim works. Time for which its process is stopped
    does not count, unless it is stopped for as long as the deadline without a break; each message
    has the seconds so far as ``stopped_s``, without those in which it waited anyway. When the
    deadline is exceeded, the claim's process group gets SIGTERM, and SIGKILL ``grace_s`` seconds
    later. An exception that escapes ``work`` arrives as a message ``crash`` with its traceback as
    ``text``. An exception in this function, or in ``on_message``, kills the claim and reaches the
    caller. The supervisor calls ``on_end`` when the claim has ended, even if the pytest process was
    killed. Call this from a process that has not initialized CUDA.
    """
    _flush()  # otherwise the child, which flushes at its end, would write the same text again
    control, supervisor_control = socketpair()
    inlet, outlet = os.pipe()
    inbox = FileIO(inlet)
    supervisor = -1
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    try:
        try:
            supervisor = _fork()
            if supervisor == 0:
                control.close()  # so that the supervisor sees the end of the pytest process
                inbox.close()
                _run_supervisor(work, supervisor_control, outlet, mask, on_end)
        finally:
            supervisor_control.close()
            os.close(outlet)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return _watch(control, inbox, on_message, _Deadline(deadline_s, grace_s))
    finally:
        control.close()
        inbox.close()
        if supervisor > 0:
            _reap(supervisor)


def describe(end: ProcessExit) -> str:
    """Describe in one sentence the end of a claim that sent no result."""
    after = f"after {end.seconds:.1f} s"
    for message in end.messages:
        if message["kind"] == "crash":
            # the last line that no traceback has indented; advice of torch follows in others
            lines = str(message.get("text")).splitlines()
            errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
            return f"crashed {after}: {(errors or lines or [''])[-1].strip()}"
    if end.status == "signalled":
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(end.code, f"signal {end.code}")
        if end.code == signal.SIGKILL:
            gib = end.peak_rss_bytes / 2**30
            return f"killed by {name} {after}: out of host memory? peak RSS {gib:.1f} GiB"
        return f"killed by {name} ({(signal.strsignal(end.code) or '').lower()}) {after}"
    return {
        "exited": f"ended with exit code {end.code} without a result "
        "(os._exit, sys.exit or a signal handler in the claim?)",
        "timeout": f"exceeded its deadline of {end.deadline_s:g} s "
        "(a kernel that never ends, or raise aiperf_deadline)",
        "interrupted": f"lost {after}: its supervisor process was killed from outside",
        "stuck": f"did not die of SIGKILL within {KILL_TIMEOUT_S:g} s (stuck in a driver?): "
        "look at its GPU before using it again",
    }[end.status]


def arm_parent_death(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent ends.

    Pass the parent's pid as ``parent`` if it may have ended already. The kernel takes the *thread*
    that started this process as its parent: the signal also comes when only that thread ends.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signum)


def turn_off_tracers() -> None:
    """Turn off all tracers and profilers of Python code in this thread and those it starts.

    Each costs time per line or per call, so that an arm with more Python code would lose.
    """
    for module in (sys, threading):
        module.settrace(None)
        module.setprofile(None)
    if monitoring := getattr(sys, "monitoring", None):  # Python 3.12 and newer
        for tool in range(6):
            if monitoring.get_tool(tool) is not None:
                monitoring.set_events(tool, 0)
                for event in range(_MONITORING_EVENTS):
                    # a callback that returns DISABLE also ends the events of single functions
                    monitoring.register_callback(tool, 1 << event, lambda *_: monitoring.DISABLE)
                monitoring.free_tool_id(tool)


class _Deadline:
    """The claim's remaining working time; when it is over, the commands to the supervisor."""

    def __init__(self, seconds: float, grace_s: float) -> None:
        self.seconds = seconds
        self.exceeded = self.stuck = False
        self._end: float | None = time.monotonic() + seconds  # None while it is paused
        self._left_at_pause = 0.0
        self._reasons: set[str] = set()  # why it is paused
        self._stopped_at: float | None = None
        self._stopped_in_wait = False  # whether the claim waited anyway when it was stopped
        self._stopped_s = 0.0
        self._commands = [(_TERMINATE, grace_s), (_KILL, KILL_TIMEOUT_S)]

    def update(self, kind: str) -> None:
        """Pause, resume or restart the deadline, if a message of this kind does."""
        if kind == "waiting":
            self._pause("waiting")
        elif kind == "working":
            self._resume("waiting")
        elif kind == "step":
            self._resume("waiting")
            if self._end is None:
                self._left_at_pause = self.seconds
            elif not self.exceeded:
                self._end = time.monotonic() + self.seconds

    def note_state(self, state: bytes) -> None:
        """Note that the claim was stopped, or that it continues."""
        self._stopped_s = self.stopped_s
        if state == _STOPPED:
            self._stopped_at = time.monotonic()
            self._stopped_in_wait = "waiting" in self._reasons
            self._pause("stopped")
        else:
            self._stopped_at = None
            self._resume("stopped")

    @property
    def stopped_s(self) -> float:
        """Seconds for which the claim has been stopped so far, without those of its waits."""
        if self._stopped_at is None or self._stopped_in_wait:
            return self._stopped_s
        return self._stopped_s + time.monotonic() - self._stopped_at

    def _pause(self, reason: str) -> None:
        if self._end is not None and not self.exceeded:
            self._left_at_pause, self._end = self._end - time.monotonic(), None
        self._reasons.add(reason)

    def _resume(self, reason: str) -> None:
        self._reasons.discard(reason)
        if self._end is None and not self._reasons:
            self._end = time.monotonic() + self._left_at_pause

    def left(self) -> float | None:
        """Return the seconds until the next command; None while the deadline is paused."""
        end = self._end
        if end is None and self._stopped_at is not None:
            end = self._stopped_at + self.seconds  # perhaps nobody will continue it
        return None if end is None else max(0.0, end - time.monotonic())

    def next_command(self) -> bytes:
        """Return the next command; after the last one the claim counts as stuck."""
        self.exceeded = True
        self.stuck = not self._commands
        command, timeout_s = self._commands.pop(0) if self._commands else (b"", 0.0)
        self._end = time.monotonic() + timeout_s
        return command


def _batches(inbox: FileIO) -> Iterator[list[Message]]:
    """Read the channel until it is closed; yield the messages that each read completes."""
    partial = bytearray()
    with inbox:
        while data := inbox.read(2**20):
            partial += data
            lines: list[bytearray] = []
            if b"\n" in data:
                *lines, partial = partial.split(b"\n")
            if len(partial) > MAX_MESSAGE_BYTES:
                lines.append(partial)
            batch = [_message(bytes(line)) for line in lines]
            yield batch
            if any(message["kind"] == "crash" for message in batch):
                return


def _message(line: bytes) -> Message:
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(line)
        if isinstance(message, dict) and isinstance(message.get("kind"), str):
            return message
    text = f"the claim wrote on its private channel: {line[:80]!r} is not a message"
    return {"kind": "crash", "text": text}


def end_openmp_threads() -> None:
    """End OpenMP's idle threads: a fork does not have them, and would wait for them forever.

    They exist if a module computes when it is imported; the next computation starts new ones.
    """
    if len([*Path("/proc/self/task").iterdir()]) == 1:
        return  # in a fork by somebody else, OpenMP would itself wait for the threads of its parent
    for library in threadpool_info():
        if library["user_api"] == "openmp":
            pause = getattr(ctypes.CDLL(library["filepath"]), "omp_pause_resource_all", None)
            if pause is not None:  # since OpenMP 5.0
                pause(_OMP_PAUSE_SOFT)


def _fork() -> int:
    end_openmp_threads()
    with warnings.catch_warnings():
        # Python 3.12 and later warn when a process with threads forks (execnet's receiver, a thread
        # pool): a lock that another thread holds stays locked in the child. The child takes no
        # such lock, and a claim that hangs nevertheless meets its deadline.
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        return os.fork()


def _watch(
    control: socket, inbox: FileIO, on_message: Callable[[Message], None], deadline: _Deadline
) -> ProcessExit:
    """Pass messages on and send commands to the supervisor until it reports."""
    started = time.monotonic()
    batches = _batches(inbox)
    messages: list[Message] = []
    report: bytes | None = None
    while report is None and not deadline.stuck:
        sources: list[Any] = [control] if inbox.closed else [control, inbox]
        ready: Sequence[object] = wait(sources, deadline.left())
        if inbox in ready:  # first the messages: the report ends the loop
            for message in next(batches, []):
                deadline.update(message["kind"])
                if message["kind"] not in TRANSIENT:
                    messages.append(message)
                on_message({**message, "stopped_s": deadline.stopped_s})
        if control in ready:
            received = control.recv(_RECEIVED_BYTES)
            rest = received.lstrip(_STOPPED + _CONTINUED)
            for state in received.removesuffix(rest):
                deadline.note_state(bytes([state]))
            # nothing at all is received when the supervisor has ended
            report = rest if rest or not received else None
        elif deadline.left() == 0:
            # if the supervisor is gone, the next wait() finds its socket closed
            with contextlib.suppress(OSError):
                control.send(deadline.next_command())

    status: Status = "stuck" if deadline.stuck else "interrupted"
    code, rss_kib = int(signal.SIGKILL), 0
    if report:
        wait_status, rss_kib = map(int, report.split())
        code = os.waitstatus_to_exitcode(wait_status)
        status = "timeout" if deadline.exceeded else "signalled" if code < 0 else "exited"
    seconds, peak_rss = time.monotonic() - started, rss_kib * 1024
    return ProcessExit(tuple(messages), status, abs(code), seconds, peak_rss, deadline.seconds)


def _reap(supervisor: int) -> None:
    """Wait for the supervisor to end; if it does not, kill it, and the claim dies with it."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # a SIGCHLD handler reaped it
        pidfd = os.pidfd_open(supervisor)
        if not wait([pidfd], KILL_TIMEOUT_S):
            os.kill(supervisor, signal.SIGKILL)
        os.close(pidfd)
        os.waitpid(supervisor, 0)


def _run_supervisor(
    work: Work,
    control: socket,
    outlet: int,
    mask: Collection[int],
    on_end: Callable[[], object],
) -> NoReturn:
    try:
        for signum in _BLOCKED_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)  # the pytest process decides about Ctrl-C
        signal.signal(signal.SIGCHLD, lambda *_: None)  # not SIG_DFL, which wakes nobody
        changes, wakeup = socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setsid()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        gc.freeze()  # garbage collection would finalise pytest's objects or copy their pages
        supervisor = os.getpid()
        claim = os.fork()
        if claim == 0:
            signal.set_wakeup_fd(-1)
            for end in (control, changes, wakeup):
                end.close()
            _run_claim(work, outlet, supervisor)
        pidfd = os.pidfd_open(claim)
        while pidfd not in (ready := wait([pidfd, control, changes])):
            if changes in ready:
                changes.recv(64)
                _tell_state(claim, control)
            if control not in ready:
                continue
            if control.recv(1) != _TERMINATE:
                break  # commanded to kill, or the pytest process is gone
            with contextlib.suppress(ProcessLookupError):
                os.killpg(claim, signal.SIGTERM)
        report = _kill_descendants(claim)
        try:
            control.send(report)
        finally:  # the pytest process may be gone
            on_end()
    finally:
        os._exit(0)


def _tell_state(claim: int, control: socket) -> None:
    """Tell the pytest process if the claim was stopped, or continued."""
    changes = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
    while change := os.waitid(os.P_PID, claim, changes):
        is_stop = change.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED)
        control.send(_STOPPED if is_stop else _CONTINUED)


def _kill_descendants(claim: int) -> bytes:
    """Kill and reap all descendants of this process; return the claim's status and peak RSS."""
    with contextlib.suppress(ProcessLookupError):  # the claim has no group yet
        os.killpg(claim, signal.SIGKILL)  # the whole group at once: no member can fork first
    os.kill(claim, signal.SIGKILL)
    _, status, usage = os.wait4(claim, 0)
    with contextlib.suppress(ChildProcessError):  # no child remains
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                for child in _children():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(child, signal.SIGKILL)
                os.waitpid(-1, 0)  # orphans of the reaped process become children of this one
    return f"{status} {usage.ru_maxrss}".encode()


def _children() -> list[int]:
    children = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            after_name = (process / "stat").read_bytes().rpartition(b")")[2]
            if int(after_name.split()[1]) == os.getpid():
                children.append(int(process.name))
    return children


def _run_claim(work: Work, outlet: int, supervisor: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # the traceback of a crash or of a missed deadline goes to the claim's own stderr
        faulthandler.enable(2)
        faulthandler.register(signal.SIGTERM, 2, chain=True)
        arm_parent_death(signal.SIGKILL, supervisor)
        channel = Channel(outlet)
        turn_off_tracers()
        try:
            work(channel)
            code = 0
        except BaseException:  # noqa: BLE001  no exception may return into pytest's main loop
            channel.send("crash", text=traceback.format_exc())
        _flush()
    finally:
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the stream is closed or has no reader
            stream.flush()
    _LIBC.fflush(None)  # output of kernels and C extensions


def _prctl(option: int, argument: int) -> None:
    if _LIBC.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")
