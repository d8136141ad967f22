"""Readers-writer locks on the host and the GPUs, shared by all pytest runs of one user.

The kernel releases a lock when the process that holds it ends, however it ends. A process holds one
lock at a time: a second one would wait for the first.
"""

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from threadpoolctl import threadpool_limits

from pytest_aiperf.errors import UsageError

from . import compilers
from .file_lock import is_shared, locked

WRITER_GRACE_S: Final = 0.3
"""How long a waiting writer lets more readers enter before it takes the gate. In a run of 11
workers on an H200, twice as long took a quarter of the time, while claims nearly always waited to
be timed.
"""
POLL_S: Final = 0.05  #: Polling interval during the grace period.
VARIABLE: Final = "PYTEST_AIPERF_LOCKS"  #: Environment variable with the folder of the lock files.


class GpuLock:
    """The lock of one claim on the host and on its GPUs.

    ``on_wait`` is called with a sentence when the lock has to wait for another process, and
    ``on_acquired`` when this wait is over. While the host is shared, BLAS and OpenMP use at most
    ``threads`` threads: if each of several claims started one thread per core, their threads would
    wait for one another. With GPUs only those of BLAS are limited: torch.compile compiles a
    function again when the number of OpenMP's threads has changed. A shared lock cannot be
    upgraded: release it before you take an exclusive one; others may hold the lock in between.
    ``pausable`` is for the process of a claim, which may be stopped while it compiles; one that a
    user started, such as a notebook, may not.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        folder: Path | None = None,
        on_wait: Callable[[str], None] = lambda _: None,
        on_acquired: Callable[[], None] = lambda: None,
        threads: int | None = None,
        *,
        pausable: bool = False,
    ) -> None:
        self._gpus = sorted(set(gpus))
        self.folder = private_folder(folder or default_folder())
        self.on_wait = on_wait
        self.on_acquired = on_acquired
        self._threads = threads
        self._pausable = pausable
        self.waited_s = 0.0
        """Seconds spent waiting for other processes so far."""
        self._held = False
        self._shared: ExitStack | None = None  # what suspend() releases
        self._registration = ExitStack()  # as a compiler, while suspended
        self._is_suspended = False

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
        """Release the shared locks until :meth:`resume`: until then this process only compiles.

        A claim that needs the host alone pauses it, see :mod:`.compilers`. A process that is not
        ``pausable`` keeps the shared lock of the host. ``before`` is called first: it must end all
        work of this process on the GPUs.
        """
        if self._shared is None or self._is_suspended:
            return
        before()
        if self._pausable:  # first, so that a claim that takes the host then finds this one
            self._registration.enter_context(compilers.registered(self.folder))
        self._shared.close()
        self._is_suspended = True

    def resume(self) -> None:
        """Take the shared locks again; does nothing unless they are suspended."""
        if self._shared is None or not self._is_suspended:
            return
        with self._waiting() as wait:
            self._lock_shared(self._shared, wait)
        self._is_suspended = False

    def give_way(self, before: Callable[[], object]) -> None:
        """Let claims go first that wait for an exclusive lock; return with the shared locks.

        Call it often while a claim prepares: otherwise everybody waits until its last step is over.
        ``before`` is called as in :meth:`suspend`.
        """
        if self._shared is None or self._is_suspended or not self._writer_waits():
            return
        before()
        self._shared.close()
        with self._waiting() as wait:
            self._lock_shared(self._shared, wait)

    def _writer_waits(self) -> bool:
        resources = [self._host] * self._pausable + [self._gpu(uuid) for uuid in self._gpus]
        return any(is_shared(_gate(resource)) for resource in resources)

    @contextmanager
    def _lock_scope(self, *, exclusive_host: bool, exclusive_gpus: bool) -> Iterator[None]:
        if self._held:
            raise UsageError("this lock is held: leave its with block before you enter another")
        self._held = True
        try:
            with ExitStack() as scope:
                shared = scope.enter_context(ExitStack())  # what suspend() releases
                # all processes lock in the same order, so that no two claims wait for each other
                with self._waiting() as wait:
                    releases_host = self._pausable and not exclusive_gpus
                    host = shared if releases_host else scope
                    self._lock_host(host, wait, exclusive=exclusive_host)
                    self._lock_gpus(shared, wait, exclusive=exclusive_gpus)
                if exclusive_host:
                    scope.enter_context(compilers.paused(self.folder))
                if not exclusive_gpus:
                    self._shared = shared
                    if self._threads is not None:
                        api = "blas" if self._gpus else None  # None stands for all
                        scope.enter_context(threadpool_limits(self._threads, user_api=api))
                yield
        finally:
            self._registration.close()
            self._held, self._shared, self._is_suspended = False, None, False

    def _lock_shared(self, scope: ExitStack, wait: Callable[[str], None]) -> None:
        """Take the locks again that :meth:`suspend` and :meth:`give_way` release."""
        if self._pausable:
            self._lock_host(scope, wait, exclusive=False)
            self._registration.close()  # with the host locked, nobody is pausing compilers
        self._lock_gpus(scope, wait, exclusive=False)

    def _lock_host(self, scope: ExitStack, wait: Callable[[str], None], *, exclusive: bool) -> None:
        _lock(scope, self._host, partial(wait, "the host"), exclusive=exclusive)

    def _lock_gpus(self, scope: ExitStack, wait: Callable[[str], None], *, exclusive: bool) -> None:
        for uuid in self._gpus:
            _lock(scope, self._gpu(uuid), partial(wait, f"GPU {uuid}"), exclusive=exclusive)

    @property
    def _host(self) -> Path:
        return self.folder / "host"

    def _gpu(self, uuid: str) -> Path:
        return self.folder / f"gpu-{uuid.replace('/', '_')}"  # old MIG names have slashes

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
    gate = partial(locked, _gate(resource), wait=wait)
    if exclusive:
        _wait_for_readers(path, wait)
        scope.enter_context(gate(shared=True))
        scope.enter_context(lock(shared=False))
    else:
        with gate(shared=False):
            scope.enter_context(lock(shared=True))


def _gate(resource: Path) -> Path:
    return resource.with_name(resource.name + ".gate")


def _wait_for_readers(path: Path, wait: Callable[[], None]) -> None:
    """Wait until nobody holds a lock in shared mode, but not longer than the grace period."""
    end = time.monotonic() + WRITER_GRACE_S
    while time.monotonic() < end and is_shared(path):
        wait()
        time.sleep(POLL_S)


def continue_compilers(folder: Path | None = None) -> None:
    """Continue claims that were paused by one that was killed, unless another needs them paused."""
    folder = private_folder(folder or default_folder())
    with suppress(BlockingIOError), locked(folder / "host.lock", shared=True, wait=_refuse):
        compilers.proceed(folder)


def _refuse() -> NoReturn:
    raise BlockingIOError


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
