"""A lock on a file that the kernel releases, however its holder ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(
    path: Path, *, shared: bool = False, wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold a lock, alone or shared; ``wait`` is called once when somebody else has it.

    A process that is forked meanwhile does not hold it.
    """
    # in the kernel, not by polling: who waits is woken at once, and is no load on a claim's timing
    fd = _open(path)
    try:
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            fcntl.flock(fd, mode)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: processes we forked have it too
        os.close(fd)


def is_shared(path: Path) -> bool:
    """Return whether others share a lock: neither is it free, nor has anybody got it alone."""
    fd = _open(path)
    try:
        for mode, shared in ((fcntl.LOCK_EX, False), (fcntl.LOCK_SH, True)):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, mode | fcntl.LOCK_NB)
                fcntl.flock(fd, fcntl.LOCK_UN)
                return shared
        return False
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    # for flock, not POSIX record locks: those are lost when any handle of the file is closed
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
