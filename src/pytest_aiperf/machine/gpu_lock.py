"""Readers-writer locks on the host and the GPUs, shared by all pytest runs of one user.

The kernel releases a lock when the process that holds it ends, however it ends. A process holds one
lock at a time: a second one would wait for the first.
"""

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from threadpoolctl import threadpool_limits

from pytest_aiperf.errors import UsageError

from .file_lock import is_shared, locked

WRITER_GRACE_S: Final = 4.0
"""How long a waiting writer lets more readers enter before it takes the gate."""
COMPILER_GRACE_S: Final = 60.0
"""How long a claim that needs the host alone lets others prepare, while one of them compiles."""
POLL_S: Final = 0.05  #: Polling interval during the grace period.
VARIABLE: Final = "PYTEST_AIPERF_LOCKS"  #: Environment variable with the folder of the lock files.


class GpuLock:
    """The lock of one claim on the host and on its GPUs.

    ``on_wait`` is called with a sentence when the lock has to wait for another process, and
    ``on_acquired`` when this wait is over. While the host is shared, BLAS and OpenMP use at most
    ``threads`` threads: if each of several claims started one thread per core, their threads would
    wait for one another. A shared lock cannot be upgraded: release it before you take an
    exclusive one; others may hold the lock in between.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        folder: Path | None = None,
        on_wait: Callable[[str], None] = lambda _: None,
        on_acquired: Callable[[], None] = lambda: None,
        threads: int | None = None,
    ) -> None:
        self._gpus = sorted(set(gpus))
        self.folder = private_folder(folder or default_folder())
        self.on_wait = on_wait
        self.on_acquired = on_acquired
        self._threads = threads
        self.waited_s = 0.0
        """Seconds spent waiting for other processes so far."""
        self._held = False
        self._shared_gpus: ExitStack | None = None  # shared locks of the GPUs, while held
        self._suspended = False

    def shared(self) -> AbstractContextManager[None]:
        """Hold shared locks on the host and the GPUs, while a claim prepares."""
        return self._lock_scope(exclusive_host=False, exclusive_gpus=False)

    def exclusive_gpu(self) -> AbstractContextManager[None]:
        """Hold exclusive locks on the GPUs and a shared lock on the host."""
        return self._lock_scope(exclusive_host=False, exclusive_gpus=True)

    def exclusive_host(self) -> AbstractContextManager[None]:
        """Hold exclusive locks on the host and the GPUs."""
        return self._lock_scope(exclusive_host=True, exclusive_gpus=True)

    def suspend(self, before: Callable[[], object]) -> None:
        """Release the shared locks of the GPUs until :meth:`resume`, but not that of the host.

        This process then only compiles. A claim that needs the host alone waits for compilers
        before it waits for the host, so that others can prepare meanwhile. ``before`` is called
        first: it must end all work of this process on the GPUs.
        """
        if self._shared_gpus is None or self._suspended:
            return
        before()
        self._shared_gpus.close()
        self._suspended = True
        self._shared_gpus.enter_context(locked(self._compilers, shared=True))

    def resume(self) -> None:
        """Take the shared locks of the GPUs again; does nothing unless they are suspended."""
        if self._shared_gpus is None or not self._suspended:
            return
        self._shared_gpus.close()
        self._suspended = False
        with self._waiting() as wait:
            self._lock_gpus(self._shared_gpus, wait, exclusive=False)

    @contextmanager
    def _lock_scope(self, *, exclusive_host: bool, exclusive_gpus: bool) -> Iterator[None]:
        if self._held:
            raise UsageError("this lock is held: leave its with block before you enter another")
        self._held = True
        try:
            with ExitStack() as scope:
                # all processes lock in the same order, so that no two claims wait for each other
                with self._waiting() as wait:
                    self._lock_host(scope, wait, exclusive=exclusive_host)
                    gpus = scope.enter_context(ExitStack())
                    self._lock_gpus(gpus, wait, exclusive=exclusive_gpus)
                self._shared_gpus = None if exclusive_gpus else gpus
                if not exclusive_gpus and self._threads is not None:
                    scope.enter_context(threadpool_limits(self._threads))
                yield
        finally:
            self._held, self._shared_gpus, self._suspended = False, None, False

    @property
    def _compilers(self) -> Path:
        return self.folder / "compilers.lock"  # shared by all processes that compile

    def _lock_host(self, scope: ExitStack, wait: Callable[[str], None], *, exclusive: bool) -> None:
        named = partial(wait, "the host")
        if exclusive:
            _wait_for_readers(self._compilers, named, COMPILER_GRACE_S)
        _lock(scope, self.folder / "host", named, exclusive=exclusive)

    def _lock_gpus(self, scope: ExitStack, wait: Callable[[str], None], *, exclusive: bool) -> None:
        for uuid in self._gpus:
            path = self.folder / f"gpu-{uuid.replace('/', '_')}"  # old MIG names have slashes
            _lock(scope, path, partial(wait, f"GPU {uuid}"), exclusive=exclusive)

    @contextmanager
    def _waiting(self) -> Iterator[Callable[[str], None]]:
        """Yield a function to call with the name of a resource that another claim holds."""
        since: float | None = None

        def wait(name: str) -> None:
            nonlocal since
            if since is None:
                since = time.monotonic()
                self.on_wait(f"waiting for {name}, which another claim holds")

        yield wait
        if since is not None:
            self.waited_s += time.monotonic() - since
            self.on_acquired()


def default_folder() -> Path:
    folder = os.environ.get(VARIABLE)
    return Path(folder or Path(tempfile.gettempdir(), f"pytest-aiperf-locks-{os.geteuid()}"))


def _lock(scope: ExitStack, resource: Path, wait: Callable[[], None], *, exclusive: bool) -> None:
    """Lock a resource until ``scope`` ends, with a readers-writer lock that prefers writers.

    The gate is a second lock. A reader takes it exclusively, but only while it takes the first
    lock; writers hold it in shared mode while they wait and work. So no reader enters once a writer
    holds the gate, and queued writers follow one another directly. A writer takes the gate only
    after a grace period, in which more readers may enter: claims can prepare side by side.
    """
    path = resource.with_name(resource.name + ".lock")
    lock = partial(locked, path, wait=wait)
    gate = partial(locked, resource.with_name(resource.name + ".gate"), wait=wait)
    if exclusive:
        _wait_for_readers(path, wait, WRITER_GRACE_S)
        scope.enter_context(gate(shared=True))
        scope.enter_context(lock(shared=False))
    else:
        with gate(shared=False):
            scope.enter_context(lock(shared=True))


def _wait_for_readers(path: Path, wait: Callable[[], None], most_s: float) -> None:
    """Wait until nobody holds a lock in shared mode, but not longer than ``most_s`` seconds."""
    end = time.monotonic() + most_s
    while time.monotonic() < end and is_shared(path):
        wait()
        time.sleep(POLL_S)


def private_folder(folder: Path) -> Path:
    """Make the folder of the lock files; refuse one that another user could tamper with."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as why:
        raise UsageError(f"{why}: no locks can be kept there; name a folder in {VARIABLE}") from why
    private = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if not (stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and private):
        raise UsageError(
            f"{folder} must be a folder (no link) that is yours alone (mode 0700) to keep locks "
            f"in: remove it, or name another in {VARIABLE}"
        )
    return folder
