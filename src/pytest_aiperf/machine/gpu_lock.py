"""Who may use which GPU now: reader-writer leases that every pytest run of the machine honours.

The kernel releases a lease when the process that took it ends, however that ends. A process takes
one lease at a time: a second one would wait for the first.
"""

from __future__ import annotations

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

PATIENCE: Final = 4.0
"""Seconds for which who wants a resource alone lets others share it while anybody does."""
LOOK: Final = 0.05
"""Seconds from one look whether anybody does to the next."""

VARIABLE: Final = "PYTEST_AIPERF_LOCKS"
"""Environment variable that names the folder of the lock files."""


class GpuLock:
    """One claim's turns on the host and on its GPUs.

    ``on_wait`` is called once a turn, with a sentence, when others have to be waited for, and
    then ``on_turn`` when the waiting is over. In a turn that shares the host, BLAS and OpenMP use
    ``threads`` at most: with a thread a core in each of several claims, they would wait for one
    another at every operation. A turn cannot be upgraded: leave ``prepare`` before
    you enter ``time_device`` or ``time_host``, and expect others in between.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        folder: Path | None = None,
        on_wait: Callable[[str], None] = lambda _: None,
        on_turn: Callable[[], None] = lambda: None,
        threads: int | None = None,
    ) -> None:
        self._gpus = sorted(set(gpus))
        self._folder = _own_folder(folder or default_folder())
        self._on_wait = on_wait
        self._on_turn = on_turn
        self._threads = threads
        self.waited = 0.0
        """Seconds that others were waited for, in all turns."""
        self._held = False
        self._shared: ExitStack | None = None  # the GPUs' locks, in a turn that shares them
        self._away = False  # they were let go

    def shared(self) -> AbstractContextManager[None]:
        """Share the host and the GPUs with other claims that prepare."""
        return self._turn(host_alone=False, gpus_alone=False)

    def exclusive_gpu(self) -> AbstractContextManager[None]:
        """Have the GPUs alone; the host stays shared."""
        return self._turn(host_alone=False, gpus_alone=True)

    def exclusive_host(self) -> AbstractContextManager[None]:
        """Have the host and the GPUs alone."""
        return self._turn(host_alone=True, gpus_alone=True)

    def suspend(self, first: Callable[[], object]) -> None:
        """Let others have the GPUs for a while, of a turn that shares them; the host is kept.

        ``first`` is called before: nothing may run on the GPUs until :meth:`take_back`.
        """
        if self._shared is not None and not self._away:
            first()
            self._shared.close()
            self._away = True

    def resume(self) -> None:
        """Share the GPUs again, as before :meth:`let_go`; nothing where that did not happen."""
        if self._shared is not None and self._away:
            self._away = False
            with self._waiting() as wait:
                self._take_gpus(self._shared, wait, alone=False)

    @contextmanager
    def _turn(self, *, host_alone: bool, gpus_alone: bool) -> Iterator[None]:
        if self._held:
            raise UsageError("this lease is held: leave its with block before you enter another")
        self._held = True
        try:
            with ExitStack() as turn:
                # One order for everybody, so that no two claims wait for each other.
                with self._waiting() as wait:
                    _take(turn, self._folder / "host", host_alone, partial(wait, "the host"))
                    gpus = turn.enter_context(ExitStack())
                    self._take_gpus(gpus, wait, alone=gpus_alone)
                self._shared = None if gpus_alone else gpus
                if not gpus_alone and self._threads is not None:
                    turn.enter_context(threadpool_limits(self._threads))
                yield
        finally:
            self._held, self._shared, self._away = False, None, False

    def _take_gpus(self, stack: ExitStack, wait: Callable[[str], None], *, alone: bool) -> None:
        for uuid in self._gpus:
            path = self._folder / f"gpu-{uuid.replace('/', '_')}"  # slashes: old MIG names
            _take(stack, path, alone, partial(wait, f"GPU {uuid}"))

    @contextmanager
    def _waiting(self) -> Iterator[Callable[[str], None]]:
        """Give what is to be called with the name of a thing that others have."""
        since: float | None = None

        def wait(name: str) -> None:
            nonlocal since
            if since is None:
                since = time.monotonic()
                self._on_wait(f"waiting for {name}, which another claim has")

        yield wait
        if since is not None:
            self.waited += time.monotonic() - since
            self._on_turn()


def default_folder() -> Path:
    """Where the lock files of this user lie."""
    named = os.environ.get(VARIABLE)
    return Path(named or Path(tempfile.gettempdir(), f"pytest-aiperf-locks-{os.geteuid()}"))


def _take(turn: ExitStack, resource: Path, alone: bool, wait: Callable[[], None]) -> None:
    """Lock a resource until ``turn`` ends.

    Who wants it alone holds the gate as well, together with all who want the same, and everybody
    else must pass it. So those who prepare do not keep one waiting who times; and who times follows
    upon another: in between, the slowest that prepares would keep all of them waiting.

    The gate is not closed at once: while one compiles for 10 s nobody can time, and the others may
    as well prepare beside it.
    """
    path = resource.with_name(resource.name + ".lock")
    lock = partial(locked, path, wait=wait)
    gate = partial(locked, resource.with_name(resource.name + ".gate"), wait=wait)
    if alone:
        closing = time.monotonic() + PATIENCE
        while time.monotonic() < closing and is_shared(path):
            wait()
            time.sleep(LOOK)
        turn.enter_context(gate(shared=True))
        turn.enter_context(lock(shared=False))
    else:
        with gate(shared=False):
            turn.enter_context(lock(shared=True))


def _own_folder(folder: Path) -> Path:
    """Make the folder of the lock files; refuse one that somebody else could tamper with."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as why:
        raise UsageError(f"{why}: no locks can be kept there; name a folder in {VARIABLE}") from why
    private = not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if not (stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and private):
        raise UsageError(
            f"{folder} must be a folder (no link) that is yours alone (mode 0700) to keep locks "
            f"in: remove it, or name another in {VARIABLE}"
        )
    return folder
