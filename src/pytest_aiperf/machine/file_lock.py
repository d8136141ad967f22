"""Lock a file; the kernel releases the lock when its holder ends, however it ends."""

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
    """Hold a lock, exclusively or shared; call ``wait`` once if another process holds it.

    A process that is forked while the lock is held does not keep it locked.
    """
    fd = _open(path)
    try:
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            # block in the kernel, which wakes the process at once; polling would disturb timings
            fcntl.flock(fd, mode)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # not only close(): forked processes keep the file open
        os.close(fd)


def is_shared(path: Path) -> bool:
    """Return whether at least one process holds a lock in shared mode."""
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
    # flock, not POSIX record locks: a process loses those when it closes any handle of the file
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
