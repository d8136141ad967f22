"""A lock on a file that the kernel releases, however its holder ends."""

from __future__ import annotations

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
    # flock, not POSIX record locks: those are lost when any handle of the file is closed. And in
    # the kernel, not by polling: who waits is woken at once, and is no load on a claim's timing.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
