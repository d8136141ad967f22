"""Split a session into shards for several machines, and collect their results."""

import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Outcome, Result

from . import journal
from .results import read_results

T = TypeVar("T")

WHOLE: Final = "whole"  #: Folder, in a shard's run, with the manifest of all shards.


def parse(text: str) -> tuple[int, int]:
    """Parse I/N, which means shard I of N shards, counted from 1."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UsageError(f"{text!r} is not a shard I/N with I from 1 to N, such as 2/3")
    return int(number), int(count)


def split(ids: Sequence[str], seconds: Mapping[str, float], count: int) -> list[set[str]]:
    """Split tests into shards of about equal time; the order of ``ids`` does not matter.

    Beginning with the longest, each test is added to the shard with the least time so far.
    """
    duration = durations(ids, seconds)
    shards: list[set[str]] = [set() for _ in range(count)]
    loads = [0.0] * count
    for nodeid in sorted(duration, key=lambda i: (-duration[i], i)):
        shortest = loads.index(min(loads))
        shards[shortest].add(nodeid)
        loads[shortest] += duration[nodeid]
    return shards


def split_by_id(ids: Iterable[str], count: int) -> list[set[str]]:
    """Split tests into shards by a hash of their ids; a test stays in its shard when others change.

    For runs that measure one shard per week: each test is in exactly one of ``count`` runs.
    """
    shards: list[set[str]] = [set() for _ in range(count)]
    for nodeid in ids:
        shards[zlib.crc32(nodeid.encode()) % count].add(nodeid)
    return shards


def recorded_s(folder: Path) -> dict[str, float]:
    """Return each test's median seconds, by its id, over the accepted results of all machines.

    Shards on different GPUs split the tests in the same way only if they use the same times.
    """
    seconds: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*.json")):
        if path.stem.isalnum():  # other files, such as ceilings-h200.json, hold no results
            for result in read_results(path):
                seconds.setdefault(result.nodeid, []).append(result.seconds)
    return {nodeid: statistics.median(values) for nodeid, values in seconds.items()}


def paired(items: Sequence[T], workers: int) -> list[T]:
    """Put a short item behind each of the longest, one per worker; ``items`` begins with those.

    xdist gives each worker two items to begin with, and the second waits for the first, however
    long that takes.
    """
    count = min(workers, len(items) // 2)
    rest = len(items) - count
    pairs = zip(items[:count], reversed(items[rest:]), strict=True)
    return [*chain.from_iterable(pairs), *items[count:rest]]


def durations(ids: Iterable[str], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each test; tests without a known time get the median."""
    measured = [s for s in seconds.values() if s > 0]
    median = statistics.median(measured) if measured else 1.0
    return {i: seconds.get(i) or median for i in ids}


def collect(folders: Iterable[Path]) -> dict[str, Result | None]:
    """Return the last result, or None, of every claim that the runs below ``folders`` collected.

    The keys are the ids in the manifests: a claim may run in several numbers of ranks.
    A killed run has no results.json; its journals are read instead.
    """
    claims: dict[str, None] = {}
    results: list[Result] = []
    runs = [file.parent for folder in folders for file in sorted(folder.rglob("manifest.json"))]
    if not runs:
        raise UsageError("there is no run below these folders: name folders with a manifest.json")
    for run in runs:
        claims |= dict.fromkeys(journal.read_manifest(run).claims)
        file = run / "results.json"
        results += read_results(file) if file.exists() else journal.read_journals(run)[0]
    ended = [r for r in results if r.outcome != Outcome.NOT_RUN]
    latest = {journal.id_in_run(r): r for r in journal.latest(ended)}
    return {claim: latest.get(claim) for claim in {**claims, **latest}}


def is_broken(result: Result) -> bool:
    """Whether a claim ended in an error, or failed before it was measured."""
    failed = result.outcome == Outcome.FAILED and result.speedup is None
    return failed or result.outcome == Outcome.ERROR
