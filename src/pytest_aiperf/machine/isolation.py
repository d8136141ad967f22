"""One supervised process per claim: it ends within its deadline and leaves nothing behind.

    pytest or xdist worker --fork--> keeper --fork--> the claim --> whatever the claim starts

The keeper waits, runs no user code, and adopts every process that the claim orphans, daemons
included. When the claim has ended, or the pytest process has let go of the keeper (by an
exception, or because it was killed), the keeper kills and reaps all that descends from it, and
nothing else. What a claim prints goes where pytest's own output goes, without a cap: the only
limit the kernel offers (RLIMIT_FSIZE) would cap result files too.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from pytest_aiperf.errors import UsageError

Message = dict[str, Any]
Source = int | socket.socket | FileIO
Status = Literal["exited", "signalled", "timeout", "interrupted", "stuck"]

LIMIT: Final = 16 * 2**20
"""Bytes of the longest message a claim may send."""

TRANSIENT: Final = frozenset({"waiting", "working", "progress"})
"""Kinds of messages that are handed on when they come, and not kept."""

PATIENCE: Final = 10.0
"""Seconds that a process may take to die of SIGKILL before it counts as stuck in the kernel."""

_TERMINATE: Final = b"T"
_KILL: Final = b"K"
_ANSWERED: Final = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


class Channel:
    """The claim's private line to the pytest process: one JSON object a line."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, kind: str, **payload: object) -> None:
        """Send one message of plain builtins, whole.

        ``waiting`` pauses the claim's deadline (it waits for others), ``working`` resumes it.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                f"a process that the claim forked sent {kind!r}: only the claim reports"
            )
        line = json.dumps({"kind": kind, **payload}).encode() + b"\n"
        if len(line) > LIMIT:
            raise UsageError(f"a message {kind!r} of {len(line)} bytes: at most {LIMIT}, send less")
        rest = memoryview(line)
        with self._lock:
            while rest:
                rest = rest[os.write(self._fd, rest) :]


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a claim's process ended, and what it said before.

    ``code`` is the exit status, or the signal's number where a signal ended it. ``interrupted``:
    the keeper was killed from outside. ``stuck``: even SIGKILL did not end it, so its GPU is not
    to be trusted.
    """

    messages: tuple[Message, ...]
    status: Status
    code: int
    seconds: float
    peak_rss_bytes: int
    deadline: float


def supervise(
    work: Callable[[Channel], None],
    *,
    deadline: float,
    on_message: Callable[[Message], None],
    grace: float = 2.0,
) -> ProcessExit:
    """Run ``work`` in a process of its own, and return when nothing of it is left.

    The deadline counts only time in which the claim is at work; once it is exceeded the claim's
    process group gets SIGTERM, and SIGKILL ``grace`` seconds later. An exception that escapes
    ``work`` comes back as a message ``crash`` with its traceback as ``text``. Whatever is raised
    here meanwhile, by ``on_message`` too, kills the claim and goes on to the caller.
    Call it from a process that has not initialised CUDA.
    """
    _flush()  # else the child, which flushes when it ends, would write the same text again
    control, theirs = socket.socketpair()
    inlet, outlet = os.pipe()
    inbox = FileIO(inlet)
    keeper = -1
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ANSWERED)
    try:
        try:
            keeper = _fork()
            if keeper == 0:
                control.close()  # so that the keeper sees it end with our process
                inbox.close()
                _keep(work, theirs, outlet, mask)
        finally:
            theirs.close()
            os.close(outlet)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return _watch(control, inbox, on_message, _Deadline(deadline, grace))
    finally:
        control.close()
        inbox.close()
        if keeper > 0:
            _reap(keeper)


def describe(ended: ProcessExit) -> str:
    """Say in one sentence how a claim ended that sent no result."""
    after = f"after {ended.seconds:.1f} s"
    for message in ended.messages:
        if message["kind"] == "crash":
            last = str(message.get("text")).strip().rpartition("\n")[2]
            return f"crashed {after}: {last}"
    if ended.status == "signalled":
        names = {known.value: known.name for known in signal.Signals}
        name = names.get(ended.code, f"signal {ended.code}")
        if ended.code == signal.SIGKILL:
            gib = ended.peak_rss_bytes / 2**30
            return f"killed by {name} {after}: out of host memory? peak RSS {gib:.1f} GiB"
        return f"killed by {name} ({(signal.strsignal(ended.code) or '').lower()}) {after}"
    return {
        "exited": f"ended with exit code {ended.code} without a result "
        "(os._exit or sys.exit in the claim?)",
        "timeout": f"exceeded its deadline of {ended.deadline:g} s "
        "(a kernel that never ends, or raise aiperf_deadline)",
        "interrupted": f"lost {after}: the process that keeps it was killed from outside",
        "stuck": f"did not die of SIGKILL within {PATIENCE:g} s (stuck in a driver?): "
        "look at its GPU before using it again",
    }[ended.status]


def arm_parent_death(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent ends.

    Give ``parent``, the pid that the parent has or had, where it may have ended already. The
    kernel takes the *thread* that started this process for its parent.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signum)


# In the pytest process


class _Deadline:
    """What is left of a claim's time at work, and what is ordered when nothing is."""

    def __init__(self, seconds: float, grace: float) -> None:
        self.seconds = seconds
        self.exceeded = self.stuck = False
        self._due: float | None = time.monotonic() + seconds
        self._paused_with = 0.0
        self._orders = [(_TERMINATE, grace), (_KILL, PATIENCE)]

    def heed(self, kind: str) -> None:
        if kind == "waiting" and self._due is not None and not self.exceeded:
            self._paused_with, self._due = self._due - time.monotonic(), None
        elif kind == "working" and self._due is None:
            self._due = time.monotonic() + self._paused_with

    def left(self) -> float | None:
        return None if self._due is None else max(0.0, self._due - time.monotonic())

    def order(self) -> bytes:
        self.exceeded = True
        self.stuck = not self._orders
        order, patience = self._orders.pop(0) if self._orders else (b"", 0.0)
        self._due = time.monotonic() + patience
        return order


def _batches(inbox: FileIO) -> Iterator[list[Message]]:
    """Read from the channel once for each batch, until nothing more can come."""
    torn = bytearray()
    with inbox:
        while data := inbox.read(2**20):
            torn += data
            lines: list[bytearray] = []
            if b"\n" in data:
                *lines, torn = torn.split(b"\n")
            if len(torn) > LIMIT:
                lines.append(torn)
            batch = [_message(bytes(line)) for line in lines]
            yield batch
            if any(message["kind"] == "crash" for message in batch):
                return


def _message(line: bytes) -> Message:
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(line)
        if isinstance(message, dict) and isinstance(message.get("kind"), str):
            return message
    text = f"the claim wrote on its private channel: {line[:80]!r} is no message"
    return {"kind": "crash", "text": text}


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 and later warn of forking with threads (execnet's receiver, a thread pool):
        # a lock that another thread holds stays locked in the child. What runs there takes none
        # of theirs, and a claim that hangs in one after all meets its deadline.
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        return os.fork()


def _watch(
    control: socket.socket,
    inbox: FileIO,
    on_message: Callable[[Message], None],
    clock: _Deadline,
) -> ProcessExit:
    """Hand messages on and give the keeper its orders until it reports."""
    started = time.monotonic()
    batches = _batches(inbox)
    kept: list[Message] = []
    report: bytes | None = None
    while report is None and not clock.stuck:
        ready = _ready([control] if inbox.closed else [control, inbox], clock.left())
        if inbox in ready:  # a batch is all that the pipe holds: nothing is missed by a report
            for message in next(batches, []):
                clock.heed(message["kind"])
                if message["kind"] not in TRANSIENT:
                    kept.append(message)
                on_message(message)
        if control in ready:
            report = control.recv(64)
        elif clock.left() == 0:
            with contextlib.suppress(OSError):  # a keeper that is gone shows in `ready`
                control.send(clock.order())

    status: Status = "stuck" if clock.stuck else "interrupted"
    code, rss_kib = int(signal.SIGKILL), 0
    if report:
        wait_status, rss_kib = map(int, report.split())
        code = os.waitstatus_to_exitcode(wait_status)
        status = "timeout" if clock.exceeded else "signalled" if code < 0 else "exited"
    seconds = time.monotonic() - started
    return ProcessExit(tuple(kept), status, abs(code), seconds, rss_kib * 1024, clock.seconds)


def _reap(keeper: int) -> None:
    """Wait for the keeper; one that cannot finish is killed, and its claim dies with it."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # reaped by a SIGCHLD handler
        pidfd = os.pidfd_open(keeper)
        if not _ready([pidfd], PATIENCE):
            os.kill(keeper, signal.SIGKILL)
        os.close(pidfd)
        os.waitpid(keeper, 0)


# In the keeper


def _keep(
    work: Callable[[Channel], None], control: socket.socket, outlet: int, mask: Collection[int]
) -> NoReturn:
    try:
        for signum in _ANSWERED:
            signal.signal(signum, signal.SIG_IGN)  # Ctrl-C is for the pytest process to decide
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setsid()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        gc.freeze()  # no collector here may finalise the pytest process's objects, or copy them
        keeper = os.getpid()
        claim = os.fork()
        if claim == 0:
            control.close()
            _run(work, outlet, keeper)
        pidfd = os.pidfd_open(claim)
        while pidfd not in _ready([pidfd, control], None):
            if control.recv(1) != _TERMINATE:
                break  # told to kill, or let go of
            with contextlib.suppress(ProcessLookupError):
                os.killpg(claim, signal.SIGTERM)
        control.send(_bury(claim))
    finally:
        os._exit(0)


def _bury(claim: int) -> bytes:
    """Kill and reap everything that descends from this process, and report on the claim."""
    with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
        os.killpg(claim, signal.SIGKILL)  # in one go: nothing in it can fork its way out
    os.kill(claim, signal.SIGKILL)
    _, status, usage = os.wait4(claim, 0)
    with contextlib.suppress(ChildProcessError):  # none left
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                for child in _children():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(child, signal.SIGKILL)
                os.waitpid(-1, 0)  # whose own children are ours from now on
    return f"{status} {usage.ru_maxrss}".encode()


def _children() -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked
            after_name = (process / "stat").read_bytes().rpartition(b")")[2]
            if int(after_name.split()[1]) == os.getpid():
                found.append(int(process.name))
    return found


# In the claim's process


def _run(work: Callable[[Channel], None], outlet: int, keeper: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Where it crashed, or where it was at its deadline, goes to the claim's own stderr.
        faulthandler.enable(2)
        faulthandler.register(signal.SIGTERM, 2, chain=True)
        arm_parent_death(signal.SIGKILL, keeper)
        channel = Channel(outlet)
        try:
            work(channel)
            code = 0
        except BaseException:  # noqa: BLE001  nothing may return into pytest's main loop
            channel.send("crash", text=traceback.format_exc())
        _flush()
    finally:
        os._exit(code)


# On both sides of a fork


def _ready(sources: Sequence[Source], seconds: float | None) -> list[Source]:
    poll = select.poll()
    by_fd = {s if isinstance(s, int) else s.fileno(): s for s in sources}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    found = poll.poll(None if seconds is None else math.ceil(seconds * 1000))
    return [by_fd[fd] for fd, _ in found]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    _LIBC.fflush(None)  # what a kernel or an extension printed


def _prctl(option: int, argument: int) -> None:
    if _LIBC.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")
