"""Derive claim ids and requirements from the markers and fixtures of collected items."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, Literal

import pytest

from pytest_aiperf.errors import UsageError

if TYPE_CHECKING:
    from pytest_aiperf.model import Gpu  # slow to import, and every pytest run loads this module

Kind = Literal["gpu", "cpu"]  #: Device of a claim; also the option that measures the claim.
KINDS: Final[tuple[Kind, ...]] = ("gpu", "cpu")
FIXTURES = frozenset({"gpu", "nvcc", "clock", "capture", "compare"})  #: The plugin's fixtures.
ARCH_MARKS = ("sm90", "sm100", "sm103", "sm121")  #: Markers that restrict a test to architectures.
REQUIREMENTS = pytest.StashKey["Requirements"]()  #: Requirements of a collected item, in its stash.

RANKS = "_aiperf_ranks"  #: Parameter of a multi-GPU claim in a session with ``--ranks``.

_RUNG = "rung"  #: A claim parametrized over this name is a ladder.
_RANKS_ID = re.compile(r"([\[-])ranks=(\d+)\]$")
"""End of the nodeid of a claim whose number of ranks is not that of its marker."""
_PLUGIN = f"{__package__.partition('.')[0]}.plugin"


def fixtures_of(item: pytest.Item) -> frozenset[str]:
    """Return the plugin's fixtures that an item uses, not a user's own of the same name."""
    return frozenset(
        name
        for name, definition in fixture_definitions(item, FIXTURES)
        if definition.func.__module__ == _PLUGIN
    )


def fixture_definitions(
    item: pytest.Item, names: frozenset[str] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the name and the definition of each fixture, or of those in ``names``, of an item.

    A fixture that overrides another of its name and uses it has several definitions.
    """
    # pytest has no public API that tells, before setup, which function provides a fixture
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    for name in definitions if names is None else names & definitions.keys():
        for definition in reversed(definitions[name]):  # overrides come last
            yield name, definition
            if name not in definition.argnames:  # the override does not use the overridden one
                break


def is_claim(item: pytest.Item) -> bool:
    """Whether an item is a claim: a test that uses the ``compare`` fixture."""
    return "compare" in fixtures_of(item)


def claims_of(items: Iterable[pytest.Item]) -> list[tuple[str, str]]:
    """Return the :func:`run_id` and the nodeid of each claim among the items."""
    return [(run_id(item.nodeid), item.nodeid) for item in items if is_claim(item)]


def ranks_param(ranks: int, usual: int) -> Any:
    """Return the parameter of a claim in ``ranks`` ranks; ``usual`` is the count of its marker.

    With the usual number, nodeid and ids are those of a session without ``--ranks``.
    """
    return pytest.param(ranks, id=pytest.HIDDEN_PARAM if ranks == usual else f"ranks={ranks}")


def run_id(nodeid: str) -> str:
    """Return an id that is unique in a run, in which a claim may run in several numbers of ranks.

    It is the claim's id, followed by the number of ranks if that is not the usual one:
    ``ch04/bucketed_all_reduce[ranks=4]``.
    """
    return claim_id(nodeid) + ranks_suffix(nodeid)


def ranks_suffix(nodeid: str) -> str:
    """Return the end of a :func:`run_id`, such as ``[ranks=4]``; "" for the usual number."""
    ranks = _RANKS_ID.search(nodeid)
    return f"[ranks={ranks[2]}]" if ranks else ""


def claim_id(nodeid: str) -> str:
    """Return the id of a claim, its folder and function: ``ch07/coalesced_copy[vector]``.

    It does not depend on the number of ranks, which is part of the result's key.
    """
    nodeid = _RANKS_ID.sub(lambda ranks: "" if ranks[1] == "[" else "]", nodeid)
    path, _, rest = nodeid.partition("::")
    folder, _, file = path.rpartition("/")
    test, bracket, param = rest.partition("[")  # first: a parameter may contain "::"
    function = test.rpartition("::")[2]
    folder = folder.rpartition("/")[2] or file.removesuffix(".py").removeprefix("test_")
    return f"{folder}/{function.removeprefix('test_')}{bracket}{param}"


def ladder_id(item: pytest.Item) -> str:
    """Return the id of an item's ladder: the claim's id without the rung; "" if it has none."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or _RUNG not in callspec.params:
        return ""
    claim, _, _ = claim_id(item.nodeid).partition("[")
    # values, not indices: pytest's index of a parameter is the position of the whole combination
    others = [
        f"{name}={getattr(value, '__name__', value)}"
        for name, value in callspec.params.items()
        if name not in (_RUNG, RANKS)
    ]
    return claim + (f"[{','.join(others)}]" if others else "")


@dataclass(frozen=True, slots=True)
class Requirements:
    """The requirements of a test, from its markers."""

    host: bool = False  #: A host claim: it needs no GPU.
    gpu: bool = False  #: Marked with ``gpu`` or an architecture.
    count: int = 1  #: Number of GPUs.
    min_sm: int | None = None  #: Minimum compute capability: 90 for sm90.
    memory: float | None = None  #: Minimum GPU memory in bytes.
    archs: tuple[str, ...] = ()  #: Architectures, one of which is required; if empty, any will do.
    checked_on_cpu: bool = True  #: Whether the arms can be checked without a GPU.
    features: tuple[str, ...] = ()  #: Hardware features, all of which are required.
    shared_memory: int = 0  #: Minimum shared memory of a thread block in bytes.
    in_ranks: bool = False  #: Whether one process per GPU runs it, even if that is only one.

    def __post_init__(self) -> None:
        """Refuse features that no architecture has together."""
        if not self.build_archs:
            needs = [*self.features, *filter(None, [self._shared_memory_needed])]
            raise UsageError(
                f"no architecture of {', '.join(self.archs or ARCH_MARKS)} has "
                f"{' and '.join(needs)}"
            )

    @property
    def build_archs(self) -> tuple[str, ...]:
        """Architectures to build for without a GPU: those with a marker that have all features.

        Of a claim for GPUs that are newer than all of them, the newest.
        """
        new_enough = [arch for arch in ARCH_MARKS if not self._is_older(arch)]
        archs = self.archs or new_enough or ARCH_MARKS[-1:]
        return tuple(
            arch for arch in archs if not _lacking(self.features, arch) and self._fits(arch)
        )

    @property
    def _shared_memory_needed(self) -> str:
        kib = self.shared_memory / 2**10
        return f"{kib:.0f} KiB of shared memory per block" if kib else ""

    def _fits(self, arch: str) -> bool:
        """Whether a thread block can have the shared memory; an unknown architecture may."""
        if not self.shared_memory:
            return True
        from pytest_aiperf.model import SHARED_MEMORY  # imported here: few markers need it

        kib = SHARED_MEMORY.get(int(arch.removeprefix("sm")))
        return kib is None or self.shared_memory <= kib * 2**10

    def missing(self, gpus: Sequence[Gpu]) -> str | None:
        """Return what these GPUs lack as a reason to skip, or None if nothing is missing."""
        if self.host:
            return None
        if len(gpus) < self.count:
            return f"needs {self.count} GPUs, this machine has {len(gpus)}"
        gpu = gpus[0]
        if requirement := self._unmet_by(gpu.arch):
            return f"needs {requirement}, {gpu.name} is {gpu.arch}"
        if self.memory is not None and gpu.memory_bytes < self.memory:
            have, need = gpu.memory_bytes / 2**30, self.memory / 2**30
            return f"needs {need:.0f} GiB of GPU memory, {gpu.name} has {have:.0f} GiB"
        return None

    def _unmet_by(self, arch: str) -> str:
        """Return the requirement that an architecture does not meet, or ""."""
        if self.archs and arch not in self.archs:
            return " or ".join(self.archs)
        if lacking := _lacking(self.features, arch):
            return " and ".join(lacking)
        if not self._fits(arch):
            return self._shared_memory_needed
        return f"sm{self.min_sm} or newer" if self._is_older(arch) else ""

    def _is_older(self, arch: str) -> bool:
        return self.min_sm is not None and int(arch.removeprefix("sm")) < self.min_sm


def of_item(item: pytest.Item) -> Requirements:
    """Return the requirements of a collected item; raise UsageError for a contradiction."""
    # Other tests' marks are ignored: their gpu or host may belong to another plugin.
    marks = item.iter_markers() if fixtures_of(item) else ()
    try:
        required = requirements_of(marks)
    except UsageError as error:
        raise UsageError(f"{item.nodeid}: {error}") from None
    params = getattr(getattr(item, "callspec", None), "params", {})
    return replace(required, count=params.get(RANKS, required.count))


def requirements_of(marks: Iterable[pytest.Mark]) -> Requirements:
    """Read the markers of an item; raise UsageError for a contradictory combination."""
    host, gpu, archs = False, False, []
    count, min_sm, memory, shared_memory = 1, 0, 0.0, 0
    features: set[str] = set()
    cpu: bool | None = None
    for mark in marks:
        if mark.name == "host":
            host = True
        elif mark.name in ARCH_MARKS:
            archs.append(mark.name)
        elif mark.name == "gpu":
            gpu = True
            known = {"count", "min_sm", "memory", "shared_memory", "cpu", "features"}
            unknown = set(mark.kwargs) - known
            if mark.args or unknown:
                raise UsageError(
                    "@pytest.mark.gpu takes count=, min_sm= (90 for sm90), features=, memory= and "
                    "shared_memory= (bytes) and cpu=, "
                    f"not {', '.join(map(repr, [*mark.args, *sorted(unknown)]))}"
                )
            # of several marks, such as a module's and a test's, the highest requirement counts
            count = max(count, int(_number(mark, "count", Integral)))
            min_sm = max(min_sm, int(_number(mark, "min_sm", Integral)))
            memory = max(memory, _number(mark, "memory", Real))
            shared_memory = max(shared_memory, int(_number(mark, "shared_memory", Real)))
            features |= _features(mark.kwargs.get("features", ()))
            if mark.kwargs.get("cpu") is not None:
                cpu = bool(mark.kwargs["cpu"]) and cpu is not False
    if host and (gpu or archs):
        raise UsageError(
            "a claim is either for the host or for GPUs: drop @pytest.mark.host or gpu"
        )
    gpu = gpu or bool(archs)
    if cpu is None:
        cpu = not gpu or count > 1
    min_sm = max(min_sm, *(_capabilities(name).start for name in features), 0)
    return Requirements(
        host,
        gpu,
        count,
        min_sm or None,
        memory or None,
        tuple(sorted(archs)),
        cpu,
        tuple(sorted(features)),
        shared_memory,
        in_ranks=count > 1,
    )


def _number(mark: pytest.Mark, name: str, kind: type[Any]) -> float:
    """Return a number given to the ``gpu`` mark; 0 if it is None or not given."""
    if (value := mark.kwargs.get(name)) is None:
        return 0
    if not isinstance(value, kind):
        raise UsageError(
            f"@pytest.mark.gpu({name}={value!r}): give a number, such as count=2, min_sm=90 (for "
            "sm90), memory=40e9 or shared_memory=100_000 (bytes)"
        )
    return float(value)


def _features(names: Any) -> set[str]:
    """Return the names given as ``features=``; raise UsageError if one is no feature."""
    several = isinstance(names, Iterable) and not isinstance(names, str)
    listed = [*names] if several else [names]
    for name in listed:
        _capabilities(name)
    return {*listed}


def _lacking(features: Iterable[str], arch: str) -> list[str]:
    """Return those of the features that an architecture does not have."""
    capability = int(arch.removeprefix("sm"))
    return [name for name in features if capability not in _capabilities(name)]


def _capabilities(feature: str) -> range:
    """Return the compute capabilities that have a feature."""
    from pytest_aiperf.model import FEATURES  # imported here: few markers name a feature

    try:
        return FEATURES[feature]
    except KeyError:
        raise UsageError(
            f"@pytest.mark.gpu(features=...) knows {', '.join(FEATURES)}, not {feature!r}"
        ) from None


def duplicates(claims: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return the claims that share an id, as (id, first nodeid, second nodeid)."""
    seen: dict[str, str] = {}
    shared = []
    for claim, nodeid in claims:
        if seen.setdefault(claim, nodeid) != nodeid:
            shared.append((claim, seen[claim], nodeid))
    return shared
