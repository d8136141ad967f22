"""Reservations of GPU memory, shared by all pytest runs of one user.

Claims prepare side by side on one GPU, and each holds several sets of inputs. Each reserves its
memory first, so that together they do not run out of it. The kernel releases a reservation when the
process that holds it ends, however it ends.

A claim reserves before it takes a GpuLock, keeps the reservation until its buffers are freed, and
never waits for one while it holds a GpuLock: then no two claims wait for each other.
"""

import contextlib
import math
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_aiperf.model import Gpu

from .file_lock import is_shared, locked
from .gpu_lock import default_folder, private_folder

USABLE_SHARE: Final = 0.8
"""Fraction of a GPU's memory that claims may reserve together; the temporaries of arms, other
programs and the allocators' fragmentation take a part of the rest."""
CONTEXT_BYTES: Final = 1 << 30
"""Memory of a process besides its arrays: the CUDA context, loaded kernels, library workspaces and
the temporaries of a comparison, which is made by parts."""
REFERENCE_SETS: Final = 4
"""Memory of a reference in sets of inputs: its result in fp64 and a temporary of that size each
take twice the bytes of fp32 inputs."""
PATIENCE_S: Final = 240.0
"""A claim that has waited this long for all memory gets the next turn, ahead of later claims. One
that needs a tenth of the memory waits a tenth as long. For a large claim, many others must end."""
POLL_S: Final = 0.2  #: Polling interval of a process that waits for memory to become free.


def footprint(input_bytes: int, arms: int, sets: int, kept_bytes: float = math.inf) -> int:
    """Return an estimate of the most device memory that a claim needs at a time, in bytes.

    ``input_bytes`` is the size of one set of inputs and of the result, ``arms`` the number of arms
    in one measurement and ``sets`` the number of input sets that each arm rotates through. While
    agreement is checked, there are one set, each arm's result and a copy, and the reference. While
    the arms are timed, each has its own sets; two more sets and copies of each arm's results from
    two calls are made to check the outputs. Copies of results take at most ``kept_bytes``.
    """
    checked = 1 + REFERENCE_SETS
    timed = arms * sets + 2
    copies = max(
        checked * input_bytes + min(2 * arms * input_bytes, 2 * kept_bytes),
        timed * input_bytes + min(2 * arms * input_bytes, kept_bytes),
    )
    return CONTEXT_BYTES + int(copies)


def limit(gpu: Gpu) -> int:
    """Return the bytes of a GPU's memory that claims may reserve together."""
    return int(USABLE_SHARE * gpu.memory_bytes)


@contextmanager
def reservation(
    gpu: str,
    nbytes: int,
    limit: int,
    *,
    free: Callable[[], float] = lambda: math.inf,
    folder: Path | None = None,
    on_wait: Callable[[str], None] = lambda _: None,
    on_acquired: Callable[[], None] = lambda: None,
) -> Iterator[float]:
    """Reserve ``nbytes`` of a GPU's memory; yield the seconds that this waited.

    A reservation waits until all reservations together are at most ``limit`` bytes, and until it
    fits into the free memory: arms that keep copies of their weights need more than is reserved for
    them. A reservation larger than that waits until there is no other. A claim whose patience is
    over (see ``PATIENCE_S``) has the next turn: from then on, others pass only if all that have
    passed leave room for it. So small reservations do not overtake a large one forever, and do not
    wait for it.

    Args:
        gpu: UUID of the GPU.
        nbytes: Bytes to reserve.
        limit: Bytes that all reservations of this GPU may take, the same in all processes.
        free: Returns the bytes of the GPU that are free.
        folder: Where the reservations are kept; by default beside the locks of the GPUs.
        on_wait: Called with a sentence if the reservation has to wait.
        on_acquired: Called when this wait is over.

    Raises:
        UsageError: The folder cannot be used.

    """
    folder = private_folder(folder or default_folder())
    name = f"memory-{gpu.replace('/', '_')}"
    since: float | None = None

    def wait() -> None:
        nonlocal since
        if since is None:
            since = time.monotonic()
            on_wait(f"waiting for {nbytes / 2**30:.1f} GiB of GPU {gpu}, which other claims use")

    queue = _Queue(folder, name, nbytes, limit)
    patience_ends = time.monotonic() + PATIENCE_S * nbytes / limit
    with ExitStack() as scope, ExitStack() as turn:
        while True:
            with locked(folder / f"{name}.gate"):
                if queue.has_room(free):
                    turn.close()
                    entry = folder / f"{name}-{uuid.uuid4().hex}"
                    scope.enter_context(queue.noted(entry))
                    scope.callback(entry.unlink, missing_ok=True)
                    break
                if time.monotonic() > patience_ends and not is_shared(queue.turn):
                    turn.enter_context(queue.noted(queue.turn))
                    queue.has_turn = True
            wait()
            time.sleep(POLL_S)
        waited_s = 0.0
        if since is not None:
            waited_s = time.monotonic() - since
            on_acquired()
        yield waited_s


@dataclass(slots=True)
class _Queue:
    """The reservations of a GPU's memory, as seen by a claim that wants ``nbytes``.

    Call its methods only with the gate locked: nobody else then adds a reservation or takes a turn.
    """

    folder: Path
    name: str
    nbytes: int
    limit: int
    has_turn: bool = False  #: Whether this claim has the turn.

    @property
    def turn(self) -> Path:
        """The file that is locked by the claim whose turn comes next."""
        return self.folder / f"{self.name}.turn"

    def has_room(self, free: Callable[[], float]) -> bool:
        held = self._reservations()
        total = self.nbytes + sum(nbytes for nbytes, _ in held)
        if not self.has_turn and is_shared(self.turn):
            needed, since = _read(self.turn)
            needed += self.nbytes + sum(nbytes for nbytes, at_ns in held if at_ns > since)
            if needed > self.limit:  # once the reservations before the turn have ended
                return False
        elif not held:
            return True
        return total <= self.limit and self.nbytes <= free()

    @contextmanager
    def noted(self, path: Path) -> Iterator[None]:
        """Lock a file with the bytes that this claim wants and the time."""
        with locked(path, shared=True):
            path.write_text(f"{self.nbytes} {time.monotonic_ns()}", encoding="ascii")
            yield

    def _reservations(self) -> list[tuple[int, int]]:
        """Return bytes and time of each live reservation; delete what dead claims have left."""
        found = []
        for entry in self.folder.glob(f"{self.name}-*"):
            with contextlib.suppress(FileNotFoundError):  # released meanwhile
                if is_shared(entry):
                    found.append(_read(entry))
                else:
                    entry.unlink()
        return found


def _read(entry: Path) -> tuple[int, int]:
    nbytes, at_ns = entry.read_text(encoding="ascii").split()
    return int(nbytes), int(at_ns)
