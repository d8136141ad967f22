"""The folder of a run: a manifest of its claims and a journal of their results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine import environment
from pytest_aiperf.machine.cache_folder import create_tagged
from pytest_aiperf.machine.requirements import ranks_suffix
from pytest_aiperf.model import Outcome, Result
from pytest_aiperf.schema import from_json, to_json

from .results import atomic_write, dumps, loads, read_json, read_record, sync, writing


@dataclass(frozen=True, slots=True)
class Manifest:
    """The claims that a run collected; each must end in exactly one outcome."""

    run: str
    started: str
    claims: Mapping[str, str]
    """Id of each claim in the run, as :func:`~pytest_aiperf.machine.requirements.run_id` returns
    it, to pytest's nodeid, in collection order."""
    command: str = ""  #: The arguments of pytest, as a shell would take them.
    settings: Mapping[str, str] = field(default_factory=dict)  #: The plugin's ini settings.
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that may change figures or builds, without private values."""


@dataclass(frozen=True, slots=True)
class Run:
    """The folder of one pytest session: a manifest, journals and, at the end, results.json."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def collected(self) -> bool:
        return (self.path / "manifest.json").exists()

    def write_manifest(
        self,
        collected: Iterable[tuple[str, str]],
        command: str = "",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Write the manifest of (id in the run, nodeid) pairs, unless another worker wrote it."""
        if not self.collected:
            started = datetime.now(UTC).isoformat()
            variables = environment.recorded(os.environ)
            manifest = Manifest(
                self.id, started, dict(collected), command, settings or {}, variables
            )
            text = dumps(to_json(manifest), "manifest", indent=1)
            atomic_write(self.path / "manifest.json", text)

    def journal(self, worker: str) -> Journal:
        """Return the journal of this process."""
        return Journal(self.path / f"journal-{worker}-{os.getpid()}.jsonl")

    def phases(self, worker: str) -> Phases:
        """Return the log of what this process's claims are doing."""
        return Phases(self.path / f"phases-{worker}-{os.getpid()}.jsonl")

    def finish(self, document: Mapping[str, Any]) -> Path:
        """Write results.json, then point the link ``latest`` at this run."""
        path = self.path / "results.json"
        atomic_write(path, dumps(document, "results", indent=1))
        link, temporary = self.path.parent / "latest", self.path / "latest"
        with writing(link):
            temporary.symlink_to(self.id)
            temporary.replace(link)
        return path


def new_run_id(now: datetime, pid: int) -> str:
    """Return a run id from start time and process id; ids sort in the order of start times."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%S.%f}-{pid}"


def open_run(folder: Path, run_id: str) -> Run:
    """Create the folder of a run."""
    run = Run(folder / run_id)
    with writing(folder):
        create_tagged(folder)
    # written before the first measurement, so that an unwritable disk is an error at once
    atomic_write(folder / ".gitignore", "*\n")
    with writing(run.path):
        run.path.mkdir()
    return run


@dataclass(frozen=True, slots=True)
class Journal:
    """The file with one process's results, one per line, each on disk before the next claim."""

    path: Path

    def append(self, result: Result) -> None:
        """Append a result; an error leaves earlier lines intact."""
        # the newline in front ends an earlier record that a crash left incomplete
        line = f"\n{dumps(to_json(result), result.claim)}\n".encode()
        with writing(self.path), self.path.open("ab") as file:
            is_new = file.tell() == 0
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
            if is_new:
                sync(self.path.parent)


@dataclass(slots=True)
class Phases:
    """The file in which a process logs each phase of its claims, with the time at which it began.

    It tells what a claim was doing when a run was interrupted, and what claims waited for.
    """

    path: Path
    _last: tuple[str, str, str] = ("", "", "")

    def append(self, claim: str, phase: str, alone: str = "") -> None:
        """Log a phase, unless it is the last one; an error is ignored: nothing depends on it.

        ``alone`` is what the claim then has for itself: "GPU", "host" (with its GPUs), or "".
        """
        if (claim, phase, alone) != self._last:
            self._last = claim, phase, alone
            entry = {"time": time.time(), "claim": claim, "phase": phase}
            line = dumps(entry | ({"alone": alone} if alone else {}), claim)
            with suppress(OSError), self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


ENDED: Final = "ended"  #: The phase that ends a claim.


def unfinished(folder: Path) -> dict[str, tuple[str, float]]:
    """Return the last phase, and the time at which it began, of claims that have not ended.

    The keys are ids of claims; that of a ladder stands for all of its rungs.
    """
    found: dict[str, tuple[str, float]] = {}
    for path in folder.glob("phases-*.jsonl"):
        with suppress(OSError):
            for line in path.read_bytes().splitlines():
                with suppress(ValueError, KeyError):  # a line that a full disk left incomplete
                    entry = loads(line.decode(), "")
                    found[entry["claim"]] = entry["phase"], entry["time"]
    return {claim: last for claim, last in found.items() if last[0] != ENDED}


def read_journals(folder: Path) -> tuple[list[Result], int]:
    """Read the journals of a run: each claim's last result, and the number of incomplete lines.

    Lines that a crash left incomplete are skipped; any other line that is no result is an error.
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
    """Keep the last result of each claim in each number of ranks, sorted by claim."""
    # ids of runs sort in the order of start times; a later run's first attempt counts
    ordered = sorted(results, key=lambda r: (r.claim, r.run, r.attempts, r.started, r.seed))
    return list({id_in_run(result): result for result in ordered}.values())


def id_in_run(result: Result) -> str:
    """Return the id by which a manifest lists the claim of a result."""
    return result.claim + ranks_suffix(result.nodeid)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in the folder of a run."""
    path = folder / "manifest.json"
    try:
        return from_json(Manifest, read_json(path), "manifest")
    except ValueError as error:
        raise UsageError(f"{path}: {error}; run again") from error


def complete(
    manifest: Manifest, results: Iterable[Result], reason: Callable[[str], str]
) -> list[Result]:
    """Return exactly one result per collected claim, in collection order.

    A claim without a result gets the outcome NOT_RUN, with the ``reason`` for its id in the run as
    its message. Results of claims that the manifest does not list come last.
    """
    lost = partial(Result, title="", outcome=Outcome.NOT_RUN, key="", seed=0)
    completed = {
        name: lost(
            claim=name.removesuffix(ranks_suffix(nodeid)),
            nodeid=nodeid,
            message=reason(name),
            run=manifest.run,
            started=manifest.started,
        )
        for name, nodeid in manifest.claims.items()
    }
    completed.update((id_in_run(result), result) for result in results)
    return list(completed.values())
