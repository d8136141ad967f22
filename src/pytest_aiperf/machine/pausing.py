"""Pauses claims that prepare while another one is timed.

A claim that prepares registers with a locked file for each resource that it uses: the host, and its
GPU. The kernel releases that lock when the claim ends, however it ends. A claim that holds a
resource exclusively stops all processes of the claims that are registered with it, and continues
them afterwards. If it ends meanwhile, however it ends, its supervisor continues them.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from .file_lock import is_shared, locked

STOP_TIMEOUT_S: Final = 2.0
"""How long to wait for processes to stop: a process in a system call first completes the call."""
BREATH_S: Final = 0.1
"""How long stopped processes continue if the GPU is still busy after they were stopped."""
BREATHS: Final = 10
"""Most times that stopped processes continue for BREATH_S. If the GPU is still busy after that,
other programs use it."""
_SUFFIX: Final = ".preparing"


class _Process(NamedTuple):
    pid: int
    parent: int
    session: int
    state: str  #: Letter, as ps shows it.


@contextmanager
def registered(folder: Path, resource: str) -> Iterator[None]:
    """Register this claim, which must lead its session, with a resource until the context ends.

    Enter it under a shared lock on the resource: then nobody is pausing claims.
    """
    file = folder / f"{resource}{_SUFFIX}" / str(os.getsid(0))
    file.parent.mkdir(mode=0o700, exist_ok=True)
    with locked(file, shared=True):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)  # while it is locked: nobody else has this name


@contextmanager
def paused(
    folder: Path, resources: Iterable[str], is_idle: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Pause all claims that are registered with resources that this process holds exclusively.

    ``is_idle`` returns whether the GPUs have finished the work that stopped processes had enqueued.
    A kernel that waits for its process ends only after the process has continued for a while.
    """
    resources, stopped = tuple(resources), set[int]()
    try:
        for breath in range(BREATHS + 1):
            _stop(folder, resources, stopped)
            if not stopped or breath == BREATHS or is_idle():
                break
            _continue(stopped)
            time.sleep(BREATH_S)
        yield
    finally:
        _continue(stopped)


def registrations(folder: Path) -> dict[int, set[str]]:
    """Return the sessions of the registered claims, and the resources that each uses."""
    found: dict[int, set[str]] = {}
    for file in folder.glob(f"*{_SUFFIX}/*"):
        if is_shared(file):
            found.setdefault(int(file.name), set()).add(file.parent.name.removesuffix(_SUFFIX))
    return found


def proceed(session: int) -> None:
    """Continue all processes of a claim."""
    _continue({process.pid for process in _processes({session})})


def _stop(folder: Path, resources: Iterable[str], stopped: set[int]) -> None:
    """Stop all processes of the registered claims, and add them to ``stopped``.

    The session of this process, and those of the processes that have started it, are left out.
    """
    wanted = set(resources)
    sessions = {session for session, used in registrations(folder).items() if used & wanted}
    sessions -= _own_sessions()
    end = time.monotonic() + STOP_TIMEOUT_S
    # repeated, because a process may have started others before it stopped
    while True:
        found = [p for p in _processes(sessions) if p.state not in "tZX"]
        # nobody else pauses them now: one that is stopped was left so by a claim that was killed
        stopped.update(p.pid for p in found)
        running = [p.pid for p in found if p.state != "T"]
        _send(running, signal.SIGSTOP)
        if not running or time.monotonic() > end:
            break
        time.sleep(0.002)


def _continue(pids: Iterable[int]) -> None:
    _send(pids, signal.SIGCONT)


def _send(pids: Iterable[int], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it may run under sudo
            os.kill(pid, signum)


def _own_sessions() -> set[int]:
    """Return the sessions of this process and of those that have started it."""
    found, pid = set[int](), os.getpid()
    while pid and (process := _process(pid)):
        found.add(process.session)
        pid = process.parent
    return found


def _process(pid: int) -> _Process | None:
    """Return a process, or None if it has ended."""
    try:
        # Linux cuts names after 15 bytes, perhaps in the middle of a character
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent, _group, session = stat.rpartition(") ")[2].split()[:4]
    return _Process(pid, int(parent), int(session), state)


def _processes(sessions: set[int]) -> list[_Process]:
    """Find the members of sessions, and all that these have started."""
    if not sessions:
        return []
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    found = {pid: process for pid in pids if (process := _process(pid))}

    def belongs(process: _Process | None) -> bool:
        while process and process.session not in sessions:
            process = found.get(process.parent)
        return process is not None

    return [process for process in found.values() if belongs(process)]
