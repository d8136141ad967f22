"""Derive claim ids and requirements from the markers and fixtures of collected items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pytest_aiperf.errors import UsageError

if TYPE_CHECKING:
    from pytest_aiperf.model import Gpu  # slow to import, and every pytest run loads this module

FIXTURES = frozenset({"gpu", "nvcc", "clock", "capture", "compare"})  #: The plugin's fixtures.
ARCH_MARKS = ("sm90", "sm100", "sm103", "sm121")  #: Markers that restrict a test to architectures.
REQUIREMENTS = pytest.StashKey["Requirements"]()  #: Requirements of a collected item, in its stash.

_RUNG = "rung"  #: A claim parametrized over this name is a ladder.
_PLUGIN = f"{__package__.partition('.')[0]}.plugin"


def fixtures_of(item: pytest.Item) -> frozenset[str]:
    """Return the plugin's fixtures that an item uses, not a user's own of the same name."""
    # pytest has no public API that tells, before setup, which function provides a fixture
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    used = set()
    for name in FIXTURES & definitions.keys():
        for definition in reversed(definitions[name]):  # overrides come last
            if definition.func.__module__ == _PLUGIN:
                used.add(name)
            if name not in definition.argnames:  # the override does not use the overridden one
                break
    return frozenset(used)


def is_claim(item: pytest.Item) -> bool:
    """Whether an item is a claim: a test that uses the ``compare`` fixture."""
    return "compare" in fixtures_of(item)


def claims_of(items: Iterable[pytest.Item]) -> list[tuple[str, str]]:
    """Return the id and the nodeid of each claim among the items."""
    return [(claim_id(item.nodeid), item.nodeid) for item in items if is_claim(item)]


def claim_id(nodeid: str) -> str:
    """Return the id of a claim, its folder and function: ``ch07/coalesced_copy[vector]``."""
    path, _, rest = nodeid.partition("::")
    folder, _, file = path.rpartition("/")
    function, bracket, param = rest.rpartition("::")[2].partition("[")
    folder = folder.rpartition("/")[2] or file.removesuffix(".py").removeprefix("test_")
    return f"{folder}/{function.removeprefix('test_')}{bracket}{param}"


def ladder_id(item: pytest.Item) -> str:
    """Return the id of an item's ladder: the claim's id without the rung; "" if it has none."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or _RUNG not in callspec.params:
        return ""
    claim, _, _ = claim_id(item.nodeid).partition("[")
    others = [f"{k}={callspec.indices[k]}" for k in callspec.params if k != _RUNG]
    return claim + (f"[{','.join(others)}]" if others else "")


@dataclass(frozen=True, slots=True)
class Requirements:
    """The requirements of a test, from its markers."""

    host: bool = False  #: A host claim: it needs no GPU.
    gpu: bool = False  #: Marked with ``gpu`` or an architecture.
    count: int = 1  #: Minimum number of GPUs.
    min_sm: int | None = None  #: Minimum compute capability: 90 for sm90.
    memory: float | None = None  #: Minimum GPU memory in bytes.
    archs: tuple[str, ...] = ()  #: Architectures, one of which is required; if empty, any will do.
    cpu: bool = True  #: Whether a multi-GPU claim is checked on the CPU without ``--gpu``.

    @property
    def checked_on_cpu(self) -> bool:
        """Whether the arms can be checked without a GPU."""
        return self.cpu if self.count > 1 else not self.gpu

    def missing(self, gpus: Sequence[Gpu]) -> str | None:
        """Return what these GPUs lack as a reason to skip, or None if nothing is missing."""
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


def requirements_of(marks: Iterable[pytest.Mark]) -> Requirements:
    """Read the markers of an item; raise UsageError for a contradictory combination."""
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
    """Return the claims that share an id, as (id, first nodeid, second nodeid)."""
    seen: dict[str, str] = {}
    shared = []
    for claim, nodeid in claims:
        if seen.setdefault(claim, nodeid) != nodeid:
            shared.append((claim, seen[claim], nodeid))
    return shared
