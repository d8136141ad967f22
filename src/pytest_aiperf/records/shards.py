"""Split a session into shards for several machines, and collect their results."""

import statistics
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
