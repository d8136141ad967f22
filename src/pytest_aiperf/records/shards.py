"""One session dealt to several machines, and whether all of it came back."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Outcome, Result

from . import journal
from .results import read_results

WHOLE: Final = "whole"
"""The folder, in a shard's run, of the manifest of all shards together."""


def parse(text: str) -> tuple[int, int]:
    """Read I/N: the shard I of N, counted from 1."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UsageError(f"{text!r} is no shard: 2/3 is the second of three")
    return int(number), int(count)


def deal(ids: Sequence[str], seconds: Mapping[str, float], count: int) -> list[set[str]]:
    """Deal tests to shards of about equal time: the longest first, each to the shard with least.

    Every machine deals alike, in whatever order it collected.
    """
    length = lengths(ids, seconds)
    shards: list[set[str]] = [set() for _ in range(count)]
    loads = [0.0] * count
    for nodeid in sorted(length, key=lambda i: (-length[i], i)):
        least = loads.index(min(loads))
        shards[least].add(nodeid)
        loads[least] += length[nodeid]
    return shards


def lengths(ids: Iterable[str], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each test's seconds; a test of unknown length counts as the typical one."""
    usual = statistics.median(known) if (known := [s for s in seconds.values() if s > 0]) else 1.0
    return {i: seconds.get(i) or usual for i in ids}


def recorded(path: Path) -> dict[str, float]:
    """Read how long each test took in an accepted run; nothing is known where there is none."""
    return {r.nodeid: r.seconds for r in read_results(path)} if path.exists() else {}


def write_manifest(run: journal.Run, claims: Iterable[tuple[str, str]]) -> None:
    """Write down what all shards together are to measure, beside this shard's own manifest."""
    journal.Run(run.path / WHOLE).manifest(claims)


def gathered(folders: Iterable[Path]) -> dict[str, Result | None]:
    """Return the last result of every claim that the runs below some folders set out to measure.

    None where there is none. A run that was killed counts with what its journals hold.
    """
    wanted: dict[str, None] = {}
    found: list[Result] = []
    runs = [file.parent for folder in folders for file in sorted(folder.rglob("manifest.json"))]
    if not runs:
        raise UsageError("there is no run below these folders: name folders with a manifest.json")
    for run in runs:
        wanted |= dict.fromkeys(journal.read_manifest(run).claims)
        done = run / "results.json"
        found += read_results(done) if done.exists() else journal.read_journals(run)[0]
    ended = {r.claim: r for r in journal.latest(r for r in found if r.outcome != Outcome.NOT_RUN)}
    return {claim: ended.get(claim) for claim in {**wanted, **ended}}


def broken(result: Result) -> bool:
    """Whether a claim ended without a figure for a reason that is its own."""
    failed = result.outcome == Outcome.FAILED and result.speedup is None
    return failed or result.outcome == Outcome.ERROR
