"""Who may use which GPU now: reader-writer leases that every pytest run of the machine honours.

A lease ends with the process that holds it, however that ends: the kernel releases it. A process
holds one lease at a time, and takes it itself: a fork does not inherit it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .errors import Misuse

if TYPE_CHECKING:
    from fasteners import InterProcessReaderWriterLock

VARIABLE: Final = "PYTEST_AIPERF_LOCKS"
"""Environment variable that names the folder of the locks."""

_POLL: Final[Any] = {"delay": 0.01, "max_delay": 0.02}  # seconds between attempts


class Lease:
    """One claim's turns on the host and on its GPUs.

    ``on_wait`` is called once a turn, with a sentence, when others have to be waited for. There
    is no upgrade: leave ``prepare`` before you enter ``time_device`` or ``time_host``.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        folder: Path | None = None,
        on_wait: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        # One order for everybody, so that no two claims ever wait for each other.
        self._gpus = sorted(set(gpus))
        self._folder = _own_folder(folder or default_folder())
        self._on_wait = on_wait
        self._held = False

    def prepare(self) -> AbstractContextManager[None]:
        """Share the host and the GPUs with other claims that prepare."""
        return self._turn(host_alone=False, gpus_alone=False)

    def time_device(self) -> AbstractContextManager[None]:
        """Have the GPUs alone; the host is shared."""
        return self._turn(host_alone=False, gpus_alone=True)

    def time_host(self) -> AbstractContextManager[None]:
        """Have the host and the GPUs alone."""
        return self._turn(host_alone=True, gpus_alone=True)

    @contextmanager
    def _turn(self, *, host_alone: bool, gpus_alone: bool) -> Iterator[None]:
        if self._held:
            raise Misuse("a lease is held already: leave its with block before you enter another")
        on_wait = _Once(self._on_wait)
        self._held = True
        try:
            with ExitStack() as stack:
                for resource, alone, name in [
                    ("host", host_alone, "the host"),
                    *((f"gpu-{uuid}", gpus_alone, f"GPU {uuid}") for uuid in self._gpus),
                ]:
                    path = self._folder / resource.replace("/", "_")  # MIG UUIDs have slashes
                    stack.enter_context(_locked(path, alone, f"waiting for {name}", on_wait))
                yield
        finally:
            self._held = False


def default_folder() -> Path:
    """The folder of the locks, unless the caller names one."""
    named = os.environ.get(VARIABLE)
    return Path(named or Path(tempfile.gettempdir(), f"pytest-aiperf-locks-{os.getuid()}"))


class _Once:
    """Pass on the first call only."""

    def __init__(self, call: Callable[[str], None]) -> None:
        self._call = call
        self._called = False

    def __call__(self, sentence: str) -> None:
        if not self._called:
            self._called = True
            self._call(sentence)


@contextmanager
def _locked(path: Path, alone: bool, waiting: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    from fasteners import InterProcessReaderWriterLock

    # A writer holds the turnstile while it waits, and a reader passes through it: so readers
    # that keep coming do not keep a writer out.
    lock = InterProcessReaderWriterLock(f"{path}.lock")
    turnstile = InterProcessReaderWriterLock(f"{path}.turnstile")
    with ExitStack() as stack:
        ...
        yield
