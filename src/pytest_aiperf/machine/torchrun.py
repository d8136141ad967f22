"""Claims in several processes: torchrun starts the ranks, and their exits are combined."""

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_aiperf.errors import AiperfError
from pytest_aiperf.model import Outcome, Result
from pytest_aiperf.schema import from_json, to_json

from . import distributed, isolation

EXIT_GRACE_S: Final = 20.0  #: How long a rank may take to leave its group after it wrote its exit.


@dataclass(frozen=True, slots=True)
class RankJob:
    """The job that a rank receives from the process that starts it."""

    scratch: str  #: Folder to which the ranks write their exits and their output.
    records: tuple[Result, ...]  #: The records so far: one claim's, or those of a ladder's rungs.
    noise_floor: float | None = None  #: The session's noise floor, if it is measured already.


@dataclass(frozen=True, slots=True)
class RankExit:
    """The exit of one rank, or the combined exit of all ranks."""

    results: tuple[Result, ...] = ()  #: Records of the claims that the rank measured.
    message: str = ""  #: First error, or reason of a skip; empty after a success.
    is_cause: bool = False
    """Whether ``message`` is a root cause: one of this plugin's messages. Any other exception may
    only be a consequence of another rank's failure."""
    skipped: bool = False  #: Whether the claim was skipped.
    at_s: float = 0.0  #: Time of the failure by the host's monotonic clock.


def rank_job(environ: Mapping[str, str]) -> RankJob | None:
    """Return the job of this process; None unless it is a rank."""
    text = environ.get(distributed.VARIABLE)
    return from_json(RankJob, json.loads(text)) if text else None


def command(count: int, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs pytest with these arguments in ``count`` ranks."""
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
    return (sys.executable, "-m", *torchrun, "--local-addr=127.0.0.1", "-m", "pytest", *arguments)


def run(
    job: RankJob, count: int, args: Sequence[str], deadline_s: float, environ: Mapping[str, str]
) -> RankExit:
    """Run pytest with these arguments in every rank; return the exit of the claim.

    The exit of the claim is rank 0's or, after a failure, that of the rank that failed first. If
    the failure's message is not its root cause, the output of all ranks is printed.
    """
    argv, log = command(count, *args), Path(job.scratch, "log")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    # without these, torchrun warns about the thread count, and gloo may not resolve the host name
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    rank_environ = defaults | inherited | {distributed.VARIABLE: json.dumps(to_json(job))}
    rank_environ |= environ

    def start(_: isolation.Channel) -> None:
        with log.open("wb") as output, Path(os.devnull).open("rb") as nothing:
            for file, fd in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(file.fileno(), fd)
            os.execve(argv[0], argv, rank_environ)  # noqa: S606  a list of words, no shell

    launcher = isolation.supervise(start, deadline_s=deadline_s, on_message=lambda _: None)
    combined = _combine_exits(job, count, launcher)
    if combined.message and not combined.is_cause and log.exists():
        output = log.read_text(errors="replace")
        print(output[-20_000:])  # noqa: T201  pytest shows it with the claim
    return combined


def _combine_exits(job: RankJob, count: int, launcher: isolation.ProcessExit) -> RankExit:
    exits: dict[int, RankExit] = {}
    failures: list[tuple[int, float, int, RankExit]] = []  # the most likely cause sorts first
    for rank in range(count):
        exit_file, trace = (Path(job.scratch, f"rank-{rank}.{end}") for end in ("json", "trace"))
        if exit_file.exists():
            exits[rank] = rank_exit = from_json(RankExit, json.loads(exit_file.read_text()))
            if rank_exit.message:
                priority = 0 if rank_exit.is_cause else 2
                failures.append((priority, rank_exit.at_s, rank, rank_exit))
        elif trace.exists() and not trace.stat().st_size:  # empty trace: torchrun did not stop it
            lost = RankExit(message="its process ended without a result (os._exit, or a crash?)")
            failures.append((1, 0.0, rank, lost))
    messages = [tuple(r.message for r in e.results) for e in exits.values()]
    complete = [m for m in messages if len(m) == len(job.records)]
    if len(complete) == count and len(set(complete)) == 1:
        return exits[0]
    if not failures or (launcher.status == "timeout" and not min(failures)[3].is_cause):
        if len(exits) == count and launcher.status == "exited" and launcher.code == 0:
            return exits[0]
        others = "".join(f"; rank {rank}: {e.message}" for _, _, rank, e in sorted(failures)[:1])
        seen = [_last_seen(job, rank) for rank in range(count) if rank not in exits]
        return _failed(job, isolation.describe(launcher) + others + "".join(seen))
    _, _, rank, first = min(failures)
    if first.skipped:
        return first
    message = f"rank {rank}: {first.message}"
    if len(first.results) != 1 or first.results[0].outcome is Outcome.PASSED:
        return _failed(job, message, is_cause=first.is_cause)  # failed before or after measuring
    return replace(first, message=message, results=(replace(first.results[0], message=message),))


def _last_seen(job: RankJob, rank: int) -> str:
    """Describe what a rank was doing when it was stopped, from its phase and its trace.

    The description names the innermost function of the trace, and the innermost one that no library
    defines: they show where ranks wait for each other.
    """
    phase, trace = (Path(job.scratch, f"rank-{rank}.{end}") for end in ("phase", "trace"))
    doing = [phase.read_text()] if phase.exists() else []
    _, _, main = trace.read_text().rpartition("Current thread") if trace.exists() else ("", "", "")
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', main)
    own = [frame for frame in frames if "/site-packages/" not in frame[0]]
    for file, line, name in dict.fromkeys([*frames[:1], *own[:1]]):
        doing.append(f"in {name} ({Path(file).name}:{line})")
    return f"; rank {rank}: {', '.join(doing)}" if doing else ""


def _failed(job: RankJob, message: str, *, is_cause: bool = False) -> RankExit:
    if len(job.records) > 1:
        return RankExit((), message, is_cause)
    record = replace(job.records[0], outcome=Outcome.ERROR, message=message)
    return RankExit((record,), message, is_cause)


class Rank:
    """The pytest plugin of a rank: it writes the RankExit of the rank's tests."""

    def __init__(self, job: RankJob) -> None:
        self._file = Path(job.scratch, f"rank-{os.environ['RANK']}.json")
        self._exit = RankExit()
        isolation.turn_off_tracers()
        # torchrun stops the other ranks with SIGTERM when one fails. faulthandler writes a trace
        # then, even inside a collective that never returns; a rank that crashed has written none.
        self._trace = self._file.with_suffix(".trace").open("w")
        faulthandler.register(signal.SIGTERM, self._trace, chain=True)

    def receive(self, kind: str, **payload: Any) -> None:
        """Keep the claims' results, and their last phase in a file."""
        if phase := payload.get("phase"):
            self._file.with_suffix(".phase").write_text(phase)
        if kind == "result":
            result = from_json(Result, payload["result"])
            self._exit = replace(self._exit, results=(*self._exit.results, result))

    def pytest_exception_interact(self, call: pytest.CallInfo[object]) -> None:
        assert call.excinfo is not None
        error = call.excinfo.value
        is_cause = isinstance(error, AiperfError)
        message = str(error) if is_cause else call.excinfo.exconly(tryshort=True)
        self._fail(message, is_cause=is_cause)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._fail(report.longrepr[2].removeprefix("Skipped: "), is_cause=True)
            self._exit = replace(self._exit, skipped=True)

    def _fail(self, message: str, *, is_cause: bool) -> None:
        if not self._exit.message:
            message, at_s = message.strip()[:2000], time.monotonic()
            self._exit = replace(self._exit, message=message, is_cause=is_cause, at_s=at_s)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus:
            self._fail(f"its pytest ended with exit code {exitstatus:d}", is_cause=False)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(to_json(self._exit)))
        new.replace(self._file)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if self._exit.message and not self._exit.skipped:
            # other ranks may wait for this one in a collective, and then an orderly exit would hang
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(1)
        # with a time limit: NCCL waits forever for a captured graph that is still referenced
        faulthandler.dump_traceback_later(EXIT_GRACE_S, exit=True, file=self._trace)
        distributed.leave()
