"""Locks on the host and the GPUs, shared by all pytest runs of one user.

A claim that is timed holds its GPUs exclusively, and the host as well if its figure depends on the
host. Claims that prepare meanwhile are paused, see :mod:`.pausing`: a timed claim does not wait for
them, however long their steps take. A process that cannot be paused holds a readers-writer lock in
shared mode instead.

The kernel releases a lock when the process that holds it ends, however it ends. All processes lock
GPUs before the host, so that no two claims wait for each other.
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

from threadpoolctl import ThreadpoolController, threadpool_limits

from pytest_aiperf.errors import UsageError

from . import pausing
from .file_lock import locked

VARIABLE: Final = "PYTEST_AIPERF_LOCKS"  #: Environment variable with the folder of the lock files.
_HOST: Final = "host"


class GpuLock:
    """The lock of one claim on the host and on its GPUs.

    ``on_wait`` is called with a sentence when the lock has to wait for another process, and
    ``on_acquired`` when this wait is over. ``on_alone`` is called with what an exclusive scope has
    for itself, "GPU" or "host" (with the GPUs), and with "" when it ends. While the host is shared,
    BLAS and OpenMP use at most ``threads`` threads; for a claim on GPUs, OpenMP uses one. If each
    of several claims started one thread per core, their threads would wait for one another. A
    shared lock cannot be upgraded: release it before you take an exclusive one; others may hold the
    lock in between. ``pausable`` is for the process of a claim, which leads its session and may be
    stopped while it prepares; one that a user started, such as a notebook, may not.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        folder: Path | None = None,
        on_wait: Callable[[str], None] = lambda _: None,
        on_acquired: Callable[[], None] = lambda: None,
        threads: int | None = None,
        *,
        on_alone: Callable[[str], None] = lambda _: None,
        pausable: bool = False,
    ) -> None:
        self._gpus = sorted(set(gpus))
        self.folder = private_folder(folder or default_folder())
        self.on_wait = on_wait
        self.on_acquired = on_acquired
        self.on_alone = on_alone
        self._threads = threads
        self._pausable = pausable
        # else it locks: two claims with one GPU each could pause one on both, and one continue it
        self._registers = pausable and len(self._gpus) < 2
        self.is_idle: Callable[[], bool] = lambda: True
        """Returns whether the GPU has finished the work that paused claims had enqueued."""
        self.waited_s = 0.0
        """Seconds spent waiting for other processes so far."""
        self._held = False
        self._uses_host = False  # whether use_host() has registered this process
        self._shared: ExitStack | None = None  # shared locks of the GPUs; suspend() releases them
        self._is_suspended = False

    @contextmanager
    def use_host(self) -> Iterator[None]:
        """Be paused whenever another claim holds the host exclusively, until the context ends.

        Enter it in the process of a claim before anything else: its imports, builds and traces, for
        which it needs no lock, would take time from a claim that uses all cores.
        """
        with ExitStack() as scope:
            if self._pausable:
                with self._waiting() as wait:
                    self._register(scope, _HOST, wait)
                self._uses_host = True
                scope.callback(setattr, self, "_uses_host", False)
            yield

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
        """Release the GPUs until :meth:`resume`; until then, this process uses only the host.

        ``before`` is called first: it must end all work of this process on the GPUs. A process that
        cannot be paused keeps its locks: while it holds the host, it may not wait for a GPU.
        """
        if self._shared is None or self._is_suspended or not self._registers:
            return
        before()
        self._shared.close()
        self._is_suspended = True

    def resume(self) -> None:
        """Share the GPUs again; does nothing unless the lock is suspended."""
        if self._shared is None or not self._is_suspended:
            return
        with self._waiting() as wait:
            self._share(self._shared, self._gpus, wait)
        self._is_suspended = False

    @contextmanager
    def _lock_scope(self, *, exclusive_host: bool, exclusive_gpus: bool) -> Iterator[None]:
        if self._held:
            raise UsageError("this lock is held: leave its with block before you enter another")
        self._held = True
        try:
            with ExitStack() as scope:
                with self._waiting() as wait:
                    if exclusive_gpus:
                        self._lock(scope, self._gpus, wait, exclusive=True)
                        self._lock(scope, [_HOST], wait, exclusive=exclusive_host)
                    else:
                        self._shared = scope.enter_context(ExitStack())
                        self._share(self._shared, self._gpus, wait)
                        if not self._uses_host:
                            self._share(scope, [_HOST], wait)
                if exclusive_gpus:
                    resources = map(_name, [*self._gpus, *[_HOST] * exclusive_host])
                    scope.enter_context(pausing.paused(self.folder, resources, self.is_idle))
                    self.on_alone("host" if exclusive_host else "GPU")
                    scope.callback(self.on_alone, "")
                elif self._threads is not None:
                    api = "blas" if self._gpus else None  # None limits BLAS and OpenMP
                    scope.enter_context(threadpool_limits(self._threads, user_api=api))
                    if self._gpus:
                        scope.enter_context(_serial_openmp())
                yield
        finally:
            self._held, self._shared, self._is_suspended = False, None, False

    def _share(
        self, scope: ExitStack, resources: Sequence[str], wait: Callable[[str], None]
    ) -> None:
        """Register with resources; a process that cannot be paused locks them in shared mode."""
        if not self._registers:
            self._lock(scope, resources, wait, exclusive=False)
            return
        for resource in resources:
            self._register(scope, resource, wait)

    def _register(self, scope: ExitStack, resource: str, wait: Callable[[str], None]) -> None:
        """Register with a resource: whoever holds it exclusively pauses this claim."""
        with ExitStack() as entry:  # no exclusive holder may miss this registration
            self._lock(entry, [resource], wait, exclusive=False)
            scope.enter_context(pausing.registered(self.folder, _name(resource)))

    def _lock(
        self,
        scope: ExitStack,
        resources: Sequence[str],
        wait: Callable[[str], None],
        *,
        exclusive: bool,
    ) -> None:
        """Lock resources until ``scope`` ends, with a readers-writer lock that prefers writers.

        The gate is a second lock. A reader takes it exclusively, but only while it takes the first
        lock; writers hold it in shared mode while they wait and work. So no reader enters once a
        writer holds the gate, and queued writers follow one another directly.
        """
        for resource in resources:
            path = self.folder / _name(resource)
            says = partial(wait, "the host" if resource == _HOST else f"GPU {resource}")
            gate = partial(locked, path.with_name(f"{path.name}.gate"), wait=says)
            lock = partial(locked, _lock_file(path), wait=says)
            if exclusive:
                scope.enter_context(gate(shared=True))
                scope.enter_context(lock(shared=False))
            else:
                with gate(shared=False):
                    scope.enter_context(lock(shared=True))

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


@contextmanager
def _serial_openmp() -> Iterator[None]:
    """Give one thread to each parallel region that this thread enters, until the context ends.

    A thread of OpenMP that waits for others spins for milliseconds before it sleeps. With the
    threads of many claims, the cores are then busy while hardly any work is done. The number of
    threads that OpenMP reports stays the same: if it changed, torch.compile would compile again.
    """
    controllers = ThreadpoolController().select(user_api="openmp").lib_controllers
    libraries = [controller.dynlib for controller in controllers]
    levels = [library.omp_get_max_active_levels() for library in libraries]
    for library in libraries:
        library.omp_set_max_active_levels(0)
    try:
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.omp_set_max_active_levels(level)


def default_folder() -> Path:
    folder = os.environ.get(VARIABLE)
    return Path(folder or Path(tempfile.gettempdir(), f"pytest-aiperf-locks-{os.geteuid()}"))


def _name(resource: str) -> str:
    """Return the name of a resource's files: of the host, or of the GPU with this UUID."""
    if resource == _HOST:
        return resource
    return f"gpu-{resource.replace('/', '_')}"  # old MIG names have slashes


def _lock_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def continue_paused(folder: Path | None = None) -> None:
    """Continue claims that a killed claim had paused, unless another claim needs them paused."""
    folder = private_folder(folder or default_folder())
    for session, resources in pausing.registrations(folder).items():
        with suppress(BlockingIOError), ExitStack() as scope:
            for resource in sorted(resources):
                file = _lock_file(folder / resource)
                scope.enter_context(locked(file, shared=True, wait=_refuse))
            pausing.proceed(session)


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
