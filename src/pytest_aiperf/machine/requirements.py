"""What a collected item is called, and what it needs of a machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pytest_aiperf.errors import UsageError

if TYPE_CHECKING:
    from pytest_aiperf.model import Gpu  # costs more than this room, and every pytest run loads it

CHAPTER = re.compile(r"ch\d\d")
ARCH_MARKS = ("sm90", "sm100", "sm103", "sm121")
REQUIREMENTS = pytest.StashKey["Requirements"]()
"""Where a collected item keeps its needs."""


def is_claim(item: pytest.Item) -> bool:
    """Whether an item is a claim: a test that takes the ``compare`` fixture."""
    return "compare" in getattr(item, "fixturenames", ())


def claim_id(nodeid: str) -> str:
    """Name a claim by its folder and function: ``ch07/coalesced_copy[vector]``."""
    path, _, rest = nodeid.partition("::")
    folder, _, file = path.rpartition("/")
    function, bracket, param = rest.rpartition("::")[2].partition("[")
    folder = folder.rpartition("/")[2] or file.removesuffix(".py").removeprefix("test_")
    return f"{folder}/{function.removeprefix('test_')}{bracket}{param}"


def chapter(nodeid: str) -> str | None:
    """Return the chapter whose folder holds this item."""
    folders = nodeid.partition("::")[0].split("/")[:-1]
    return next((f for f in folders if CHAPTER.fullmatch(f)), None)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What the marks of an item ask for."""

    host: bool = False
    gpu: bool = False
    count: int = 1
    min_sm: int | None = None
    memory: float | None = None
    archs: tuple[str, ...] = ()
    cpu: bool = True

    @property
    def checked_on_cpu(self) -> bool:
        """Whether its arms may run without a GPU; those of several ranks may, if not told no."""
        return self.cpu if self.count > 1 else not self.gpu

    def missing(self, gpus: Sequence[Gpu]) -> str | None:
        """Say in words what these GPUs lack; None when nothing."""
        if self.host:
            return None
        if len(gpus) < self.count:
            return f"needs {self.count} GPUs, this machine has {len(gpus)}"
        gpu = gpus[0]
        if self.archs and gpu.arch not in self.archs:
            return f"needs {' or '.join(self.archs)}, {gpu.name} is {gpu.arch}"
        if self.min_sm is not None and int(gpu.arch.removeprefix("sm")) < self.min_sm:
            return f"needs sm{self.min_sm} or newer, {gpu.name} is {gpu.arch}"
        if self.memory is not None and gpu.memory_bytes < self.memory:
            have, need = gpu.memory_bytes / 2**30, self.memory / 2**30
            return f"needs {need:.0f} GiB of GPU memory, {gpu.name} has {have:.0f} GiB"
        return None


def needs_of(marks: Iterable[pytest.Mark]) -> Requirements:
    """Read an item's marks; raise Misuse for a ``gpu`` mark that means nothing."""
    host, gpu, archs = False, False, []
    count, min_sm, memory, cpu = 1, None, None, True
    for mark in marks:
        if mark.name == "host":
            host = True
        elif mark.name in ARCH_MARKS:
            archs.append(mark.name)
        elif mark.name == "gpu":
            gpu = True
            unknown = set(mark.kwargs) - {"count", "min_sm", "memory", "cpu"}
            if mark.args or unknown:
                raise UsageError(
                    "@pytest.mark.gpu takes count=, min_sm= (90 for sm90), memory= (bytes) and "
                    f"cpu=, not {', '.join(map(repr, [*mark.args, *sorted(unknown)]))}"
                )
            count = max(count, int(mark.kwargs.get("count", 1)))
            min_sm = mark.kwargs.get("min_sm", min_sm)
            memory = mark.kwargs.get("memory", memory)
            cpu = cpu and bool(mark.kwargs.get("cpu", True))
    if host and (gpu or archs):
        raise UsageError(
            "a claim is either for the host or for GPUs: drop @pytest.mark.host or gpu"
        )
    return Requirements(host, gpu or bool(archs), count, min_sm, memory, tuple(sorted(archs)), cpu)


def duplicates(claims: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return claims that share an id: (id, first node, second node)."""
    seen: dict[str, str] = {}
    found = []
    for claim, nodeid in claims:
        if seen.setdefault(claim, nodeid) != nodeid:
            found.append((claim, seen[claim], nodeid))
    return found
