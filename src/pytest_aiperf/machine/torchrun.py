"""One claim in several processes: torchrun starts the ranks, and each says how it ended."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pytest_aiperf.errors import AiperfError
from pytest_aiperf.model import Outcome, Result
from pytest_aiperf.schema import from_json, to_json

from . import distributed, isolation

LEAVING = 20.0
"""Seconds that a rank may take to leave the others once all is said."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """What a rank is told: where to answer, its record's beginning, the noise floor if known."""

    scratch: str
    blank: Result
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class RankExit:
    """How one rank ended: its record, if it measured, or why it could not go on.

    ``ours`` says that ``why`` is a sentence of this plugin, and not an exception that may only
    follow from another rank's end; ``at`` is the host's monotonic clock.
    """

    result: Result | None = None
    why: str = ""
    ours: bool = False
    skipped: bool = False
    at: float = 0.0


def rank_job(environ: Mapping[str, str]) -> RankJob | None:
    """Return what this process is a rank of; None where it is none."""
    text = environ.get(distributed.VARIABLE)
    return from_json(RankJob, json.loads(text)) if text else None


def command(count: int, *words: str) -> tuple[str, ...]:
    """Return what runs pytest with these words in so many ranks."""
    start = ("torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
    return (sys.executable, "-m", *start, "--local-addr=127.0.0.1", "-m", "pytest", *words)


def environment(told: RankJob) -> dict[str, str]:
    """Return the environment in which :func:`command` makes its processes ranks."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    # torchrun sets the threads, too, and warns that it does; a host's name may not be resolved
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**defaults, **ours, distributed.VARIABLE: json.dumps(to_json(told))}


def run(
    told: RankJob, count: int, words: Sequence[str], deadline: float, environ: Mapping[str, str]
) -> RankExit:
    """Run pytest with these words in every rank, and say how the claim ended.

    It is rank 0's ending, or that of the first rank that could not go on. What the ranks printed
    is printed here where the sentence is not the whole story.
    """
    argv, log = command(count, *words), Path(told.scratch, "log")
    theirs = {**environment(told), **environ}

    def start(_: isolation.Channel) -> None:
        with log.open("wb") as out, Path(os.devnull).open("rb") as nothing:
            for file, fd in ((nothing, 0), (out, 1), (out, 2)):
                os.dup2(file.fileno(), fd)
            os.execve(argv[0], argv, theirs)  # noqa: S606  a list of words, no shell

    ended = isolation.supervise(start, deadline=deadline, on_message=lambda _: None)
    ending = _ending(told, count, ended)
    if ending.why and not ending.ours and log.exists():
        print(log.read_text(errors="replace")[-20_000:])  # noqa: T201  pytest shows it with the claim
    return ending


def _ending(told: RankJob, count: int, ended: isolation.ProcessExit) -> RankExit:
    endings: dict[int, RankExit] = {}
    failed: list[tuple[int, float, int, RankExit]] = []
    for rank in range(count):
        answer, trace = (Path(told.scratch, f"rank-{rank}.{end}") for end in ("json", "trace"))
        if answer.exists():
            endings[rank] = found = from_json(RankExit, json.loads(answer.read_text()))
            if found.why:
                failed.append((0 if found.ours else 2, found.at, rank, found))
        elif trace.exists() and not trace.stat().st_size:  # it began, and nobody stopped it
            gone = RankExit(why="its process ended without a result (os._exit, or a crash?)")
            failed.append((1, 0.0, rank, gone))
    results = [e.result for e in endings.values() if e.result is not None]
    if len(results) == count and len({r.message for r in results}) == 1:
        return endings[0]
    if not failed or (ended.status == "timeout" and not min(failed)[3].ours):
        if len(endings) == count and ended.status == "exited" and ended.code == 0:
            return endings[0]
        gone_too = "".join(f"; rank {rank}: {e.why}" for _, _, rank, e in sorted(failed)[:1])
        return _of_all(told, isolation.describe(ended) + gone_too)
    _, _, rank, first = min(failed)
    if first.skipped:
        return first
    why = f"rank {rank}: {first.why}"
    if first.result is None or first.result.outcome is Outcome.PASSED:  # it failed after that
        return _of_all(told, why, ours=first.ours)
    return replace(first, why=why, result=replace(first.result, message=why))


def _of_all(told: RankJob, why: str, *, ours: bool = False) -> RankExit:
    return RankExit(replace(told.blank, outcome=Outcome.ERROR, message=why), why, ours)


class Rank:
    """A pytest plugin that is registered only in a rank: it tells how its one item ended."""

    def __init__(self, told: RankJob) -> None:
        self._answer = Path(told.scratch, f"rank-{os.environ['RANK']}.json")
        self._ending = RankExit()
        # Tells a rank that torchrun stopped, because another one failed, from one that is lost:
        # and does so where Python runs no handler, in a collective that waits for ever.
        self._trace = self._answer.with_suffix(".trace").open("w")
        faulthandler.register(signal.SIGTERM, self._trace, chain=True)

    def hear(self, kind: str, **payload: Any) -> None:
        """Take what the claim tells its session: the record is kept."""
        if kind == "result":
            self._ending = replace(self._ending, result=from_json(Result, payload["result"]))

    def pytest_exception_interact(self, call: pytest.CallInfo[object]) -> None:
        assert call.excinfo is not None
        raised = call.excinfo.value
        self._fail(
            str(raised) if isinstance(raised, AiperfError) else call.excinfo.exconly(tryshort=True),
            ours=isinstance(raised, AiperfError),
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2].removeprefix("Skipped: ")
            self._fail(why, ours=True)
            self._ending = replace(self._ending, skipped=True)

    def _fail(self, why: str, *, ours: bool) -> None:
        if not self._ending.why:
            why = why.strip()[:2000]
            self._ending = replace(self._ending, why=why, ours=ours, at=time.monotonic())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus:
            self._fail(f"its pytest ended with exit code {exitstatus:d}", ours=False)
        new = self._answer.with_suffix(".new")
        new.write_text(json.dumps(to_json(self._ending)))
        new.replace(self._answer)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if self._ending.why and not self._ending.skipped:
            # the others may wait for this one in a collective: none of it can be left in order
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(1)
        # NCCL waits for ever for a captured graph that somebody still holds
        faulthandler.dump_traceback_later(LEAVING, exit=True, file=self._trace)
        distributed.leave()
