"""Claims that only compile; a claim that needs the host alone pauses them.

A claim registers with a locked file in the folder of the lock files. The kernel releases that lock
when the claim ends, however it ends. The process that pauses claims continues them; should it be
killed meanwhile, the pytest process that started it does.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .file_lock import is_shared, locked

STOP_TIMEOUT_S: Final = 2.0
"""How long to wait for processes to stop: one in a system call first ends that call."""
_PREFIX: Final = "compiling-"


@contextmanager
def registered(folder: Path) -> Iterator[None]:
    """Register this claim, which must lead its session, until the context ends."""
    file = folder / f"{_PREFIX}{os.getsid(0)}.lock"
    with locked(file, shared=True):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)  # while it is locked: nobody else has this name


@contextmanager
def paused(folder: Path) -> Iterator[None]:
    """Pause all registered claims, with the processes that they started.

    Hold the lock that a claim must take before it ends its registration, so that none misses its
    continuation.
    """
    try:
        end = time.monotonic() + STOP_TIMEOUT_S
        # again, for processes that were started before their parent stopped
        while _stop(folder) and time.monotonic() < end:
            time.sleep(0.002)
        yield
    finally:
        proceed(folder)


def proceed(folder: Path) -> None:
    """Continue all registered claims."""
    for pid in _processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _stop(folder: Path) -> bool:
    """Tell processes that run to stop; return whether there were any."""
    running = [pid for pid in _processes(folder) if _state(pid) not in ("", "T", "Z", "X")]
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    return bool(running)


def _processes(folder: Path) -> Iterator[int]:
    """Find the processes of the registered claims: the members of their sessions."""
    files = folder.glob(f"{_PREFIX}*.lock")
    sessions = {int(f.stem.removeprefix(_PREFIX)) for f in files if is_shared(f)}
    if not sessions:
        return
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            if os.getsid(int(process.name)) in sessions:
                yield int(process.name)


def _state(pid: int) -> str:
    """Return the letter of a process's state, "" if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    return ""
