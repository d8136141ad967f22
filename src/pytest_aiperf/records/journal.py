"""A run's folder, so that nothing that finished is lost: its manifest and journals."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Outcome, Result
from pytest_aiperf.schema import from_json, to_json

from .results import atomic_write, dumps, loads, read_json, read_record, sync, writing


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run set out to do; each of its claims must end in exactly one outcome."""

    run: str
    started: str
    claims: Mapping[str, str]
    """Each claim's nodeid, in collection order."""


@dataclass(frozen=True, slots=True)
class Run:
    """The folder of one pytest session: manifest, journals and, at the end, results."""

    path: Path

    @property
    def id(self) -> str:
        """Name the run."""
        return self.path.name

    @property
    def collected(self) -> bool:
        """Whether the manifest has been written."""
        return (self.path / "manifest.json").exists()

    def manifest(self, collected: Iterable[tuple[str, str]]) -> None:
        """Write down what was collected, as (claim, nodeid), before the first claim runs.

        Under xdist every worker has collected the same: the first writes.
        """
        if not self.collected:
            manifest = Manifest(self.id, datetime.now(UTC).isoformat(), dict(collected))
            text = dumps(to_json(manifest), "manifest", indent=1)
            atomic_write(self.path / "manifest.json", text)

    def journal(self, worker: str) -> Journal:
        """Give this process a journal of its own."""
        return Journal(self.path / f"journal-{worker}-{os.getpid()}.jsonl")

    def finish(self, document: Mapping[str, Any]) -> Path:
        """Write results.json, then point ``latest`` at this run; a run cut short gets neither."""
        path = self.path / "results.json"
        atomic_write(path, dumps(document, "results", indent=1))
        link, fresh = self.path.parent / "latest", self.path / "latest"
        with writing(link):
            fresh.symlink_to(self.id)
            fresh.replace(link)
        return path


def new_run_id(now: datetime, pid: int) -> str:
    """Name a run so that names sort by start and two processes never share one."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%S.%f}-{pid}"


def open_run(folder: Path, run_id: str) -> Run:
    """Create a run's folder."""
    run = Run(folder / run_id)
    # This also proves, before hours are spent, that what is written here reaches the disk.
    atomic_write(folder / ".gitignore", "*\n")
    with writing(run.path):
        run.path.mkdir()
    return run


@dataclass(frozen=True, slots=True)
class Journal:
    """Finished results of one process, a line each, on disk before the next claim starts."""

    path: Path

    def append(self, result: Result) -> None:
        """Add a result; whatever goes wrong, the earlier lines stay as they are."""
        # The newline comes first too: an earlier write that was cut short stays a line alone.
        line = f"\n{dumps(to_json(result), result.claim)}\n".encode()
        with writing(self.path), self.path.open("ab") as file:
            new = file.tell() == 0
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
            if new:
                sync(self.path.parent)


def read_journals(folder: Path) -> tuple[list[Result], int]:
    """Read a run's journals: the last record of each claim, and how many lines were torn.

    Only a line cut short by a crash is passed over; a whole line that is no result is refused.
    """
    results: list[Result] = []
    torn = 0
    for path in sorted(folder.glob("journal-*.jsonl")):
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if not line:
                continue
            try:
                record = loads(line.decode(), "")
            except (ValueError, RecursionError):
                torn += 1
            else:
                results.append(read_record(record, f"{path}:{number}"))
    return latest(results), torn


def latest(results: Iterable[Result]) -> list[Result]:
    """Keep the last record of each claim, sorted by claim: any order and repetition agree."""
    ordered = sorted(results, key=lambda r: (r.claim, r.attempts, r.started, r.seed))
    return list({result.claim: result for result in ordered}.values())


def read_manifest(folder: Path) -> Manifest:
    """Read what a run set out to do."""
    path = folder / "manifest.json"
    try:
        return from_json(Manifest, read_json(path), "manifest")
    except ValueError as error:
        raise UsageError(f"{path}: {error}; run it anew") from error


def complete(manifest: Manifest, results: Iterable[Result], reason: str) -> list[Result]:
    """Give every collected claim exactly one outcome, in collection order.

    Claims without a result are NOT_RUN for ``reason``. A result that nobody collected is kept, at
    the end: it finished.
    """
    ended = {
        claim: Result(
            claim=claim,
            nodeid=nodeid,
            title="",
            outcome=Outcome.NOT_RUN,
            key="",
            run=manifest.run,
            started=manifest.started,
            seed=0,
            message=reason,
        )
        for claim, nodeid in manifest.claims.items()
    }
    ended.update((result.claim, result) for result in results)
    return list(ended.values())
