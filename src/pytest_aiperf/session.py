"""What one pytest session knows, and how it runs one item in a process of its own."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pytest

# Public pytest has no way to run one item's three phases; xdist and rerunfailures use this one too.
from _pytest.runner import runtestprotocol

from . import build, child, expectations, journal, needs, report
from .clock import Machine
from .lease import Lease
from .model import Expectation, Gpu, Outcome, Result, from_json, to_json

FIXTURES = frozenset({"gpu", "nvcc", "clock", "capture", "compare"})
NEEDS = pytest.StashKey[needs.Needs]()
TITLE = pytest.StashKey[str]()
CHECKED = pytest.StashKey[str]()


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line and the ini file, read once."""

    measure: Literal["gpu", "cpu"] | None
    quick: bool
    update: bool
    reproducible: bool
    debug: bool
    seed: int
    started: float
    run_id: str
    worker: str
    budget: float | None
    deadline: float
    root: Path
    expectations: Path
    results: Path
    kernels: tuple[Path, ...]

    @property
    def is_worker(self) -> bool:
        return self.worker != "main"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the child a claim runs: how it talks, which attempt it is, its GPUs."""

    channel: child.Channel | None
    attempt: int
    gpus: tuple[Gpu, ...]


class Live:
    """One line that says what is being measured, on the controller's terminal.

    Workers send theirs over a datagram socket in the run's folder, so that nothing waits for it.
    """

    def __init__(self, config: pytest.Config, address: Path, *, worker: bool) -> None:
        self.reporter = config.pluginmanager.getplugin("terminalreporter")
        self.address = str(address)
        self.socket: socket.socket | None = None
        self.worker = worker
        self.shown = False

    def listen(self) -> None:
        """Show what workers send: only on the controller of an xdist run, which never forks."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self.socket.bind(self.address)
        except OSError:  # a path over 108 bytes: no live line, nothing else is lost
            self.socket = None
            return
        threading.Thread(target=self._forward, daemon=True).start()

    def _forward(self) -> None:
        while self.socket is not None:
            with suppress(OSError):
                self._write(report.clean(self.socket.recv(4096).decode(errors="replace")))

    def show(self, figures: Mapping[str, object]) -> None:
        line = report.live_line(figures)
        if not self.worker:
            self._write(line)
            return
        if self.socket is None:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self.socket.setblocking(False)
        with suppress(OSError):
            self.socket.sendto(line.encode(), self.address)

    def _write(self, line: str) -> None:
        if self.reporter is not None and self.reporter.isatty:
            self.reporter.rewrite(line, erase=True)
            self.shown = True

    def clear(self) -> None:
        if self.shown:
            self.reporter.rewrite("", erase=True)
            self.shown = False


@dataclass(slots=True)
class Session:
    """One measuring or checking session, on the controller or on a worker."""

    config: pytest.Config
    settings: Settings
    machine: Machine
    gpus: tuple[Gpu, ...]
    run: journal.Run | None = None
    live: Live | None = None
    results: dict[str, Result] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    closing: list[str] = field(default_factory=list)
    _journal: journal.Journal | None = None
    _expected: expectations.Expectations | None = None

    # selection

    def mine(self, wanted: needs.Needs) -> tuple[Gpu, ...]:
        """Return the GPUs of this worker's claims: workers go round the machine's GPUs."""
        if self.settings.measure != "gpu" or wanted.host:
            return ()
        first = int(self.settings.worker.removeprefix("gw") or 0) if self.settings.is_worker else 0
        n = len(self.gpus)
        return tuple(self.gpus[(first + i) % n] for i in range(wanted.count))

    def key(self, wanted: needs.Needs) -> str:
        gpus = self.mine(wanted)
        if not gpus:
            return "cpu"
        return gpus[0].key if len(gpus) == 1 else f"{len(gpus)}x{gpus[0].key}"

    # records

    def blank(self, item: pytest.Item, attempt: int = 1) -> Result:
        """Return the record of a claim of which nothing is known yet."""
        wanted = item.stash[NEEDS]
        claim = needs.claim_id(item.nodeid)
        salt = f"{self.settings.seed}:{claim}:{attempt}".encode()
        seed = int.from_bytes(hashlib.sha256(salt).digest()[:4], "big") >> 2
        return Result(
            claim=claim,
            nodeid=item.nodeid,
            title=item.stash.get(TITLE, ""),
            outcome=Outcome.ERROR,
            key=self.key(wanted),
            run=self.settings.run_id,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            seed=seed,
            host=wanted.host,
            stack=stack(self.mine(wanted)),
            quick=self.settings.quick,
            attempts=attempt,
        )

    def record(self, result: Result) -> None:
        """Write a finished result to this process's journal; it survives whatever comes."""
        assert self.run is not None
        if self._journal is None:
            self._journal = self.run.journal(self.settings.worker)
        self._journal.append(result)

    def expected(self, result: Result) -> Callable[[str], Expectation]:
        if self._expected is None:
            self._expected = expectations.load(self.settings.expectations)
        loaded = self._expected
        arch = self.mine(needs.Needs())[0].arch if self.mine(needs.Needs()) else ""
        return lambda code: loaded.lookup(result.claim, result.key, arch, code)

    # one item

    def supervised(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Run one item in a process of its own; a failing verdict is confirmed in a fresh one."""
        attempts = 1 if self.settings.quick else 2
        for attempt in range(1, attempts + 1):
            reports, result = self._attempt(item, attempt)
            unproven = (
                result is not None
                and result.outcome is Outcome.FAILED
                and result.verdict is not None
            )
            if not unproven:
                break
        if result is not None:
            self.record(result)
            _attach(reports, result)
        return reports

    def _attempt(
        self, item: pytest.Item, attempt: int
    ) -> tuple[list[pytest.TestReport], Result | None]:
        data: list[dict[str, Any]] = []
        found: list[Result] = []
        claim = needs.claim_id(item.nodeid)

        def heard(message: dict[str, Any]) -> None:
            if message["kind"] == "report":
                data.append(message["data"])
            elif message["kind"] == "result":
                found.append(from_json(Result, message["result"]))
            elif self.live is not None:
                self.live.show({**message, "claim": claim})

        ended = child.supervise(
            lambda channel: self._inside(item, attempt, channel),
            deadline=self.settings.deadline,
            on_message=heard,
        )
        hook = item.config.hook
        reports = [hook.pytest_report_from_serializable(config=item.config, data=d) for d in data]
        if self.live is not None:
            self.live.clear()
        result = found[-1] if found else None
        if not reports or reports[-1].when != "teardown":
            why = child.describe(ended)
            crash = next((m["text"] for m in ended.messages if m["kind"] == "crash"), "")
            reports.append(_lost(item, f"{why}\n{crash}".strip(), ended.seconds, self._output()))
        if "compare" not in getattr(item, "fixturenames", ()):
            return reports, None
        return reports, self._final(item, attempt, reports, result)

    def _final(
        self,
        item: pytest.Item,
        attempt: int,
        reports: Sequence[pytest.TestReport],
        result: Result | None,
    ) -> Result:
        """Let the record say what the reports say: a claim has exactly one outcome."""
        result = result or self.blank(item, attempt)
        failed = next((r for r in reports if r.failed), None)
        skipped = next((r for r in reports if r.skipped), None)
        if failed is not None and result.outcome in (Outcome.PASSED, Outcome.ERROR):
            text = result.message or str(failed.longreprtext).strip()
            return replace(result, outcome=Outcome.ERROR, message=text[-2000:])
        if skipped is not None:
            return replace(result, outcome=Outcome.SKIPPED, message=_reason(skipped))
        if failed is None and result.outcome is Outcome.ERROR:
            return replace(result, message="the test did not call compare()")
        return result

    def _inside(self, item: pytest.Item, attempt: int, channel: child.Channel) -> None:
        """Run the item's three phases; this is the child."""
        gpus = self.mine(item.stash[NEEDS])
        if any(g.uuid.startswith("GPU-") for g in gpus):  # CUDA's own; a fake has another name
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(g.uuid for g in gpus)
        item.stash[PLACE] = Place(channel, attempt, gpus)
        for done in runtestprotocol(item, log=False, nextitem=None):
            hook = item.config.hook
            data = hook.pytest_report_to_serializable(config=item.config, report=done)
            channel.send("report", data=data)

    def _output(self) -> list[tuple[str, str]]:
        """Take what a lost child had printed from pytest's capture."""
        capture = self.config.pluginmanager.getplugin("capturemanager")
        if capture is None:
            return []
        out, err = capture.read_global_capture()
        return [
            (f"Captured {name} of the lost process", text[-20_000:])
            for name, text in (("stdout", out), ("stderr", err))
            if text
        ]

    def skipped(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        """Run an item that is going to be skipped here, without a process."""
        reports: list[pytest.TestReport] = runtestprotocol(item, log=False, nextitem=nextitem)
        why = next((r for r in reports if r.skipped), None)
        if why is not None and "compare" in getattr(item, "fixturenames", ()):
            outcome = Outcome.NOT_RUN if _reason(why).startswith("not run") else Outcome.SKIPPED
            result = replace(self.blank(item), outcome=outcome, message=_reason(why))
            self.record(result)
            _attach(reports, result)
        return reports

    def spent(self) -> str | None:
        """Say that the session's time budget is spent; None while it is not."""
        budget = self.settings.budget
        if budget is None or time.time() - self.settings.started < budget:
            return None
        return f"not run: the session's budget of {budget:g} s is spent"

    # all builds before the first timing

    def build_all(self, items: Sequence[pytest.Item]) -> None:
        """Build all that the selected claims name, in parallel; an error waits for its claim."""
        wants = {}
        for item in items:
            if "nvcc" not in getattr(item, "fixturenames", ()) or list(item.iter_markers("skip")):
                continue
            text = item.path.read_text(encoding="utf-8")
            for name, flags in build.nvcc_names(text):
                source = build.find_source(name, self.roots(item))
                if source is None:
                    continue
                for arch in self.archs(item):
                    wants[source, arch, flags] = build.Want(source, arch, flags)
        if wants:
            build.build_all(list(wants.values()), include=self.include(), progress=self._show_build)

    def _show_build(self, done: int, total: int, _: object) -> None:
        if self.live is not None:
            self.live.show({"phase": "building", "done": done, "total": total})

    def roots(self, item: pytest.Item) -> tuple[Path, ...]:
        return (*self.settings.kernels, item.path.parent)

    def include(self) -> tuple[Path, ...]:
        return tuple(k / "include" for k in self.settings.kernels if (k / "include").is_dir())

    def archs(self, item: pytest.Item) -> tuple[str, ...]:
        """Return the architectures that an item's kernels are built for in this session."""
        gpus = self.mine(item.stash[NEEDS])
        return (gpus[0].arch,) if gpus else (item.stash[NEEDS].archs or needs.ARCH_MARKS)

    def floor(self, place: Place, measure: Callable[[], float]) -> float:
        """Return the noise floor of this session on these GPUs; the first claim measures it.

        Called under an exclusive lease, so that nobody else is measuring it at the same time.
        """
        assert self.run is not None
        name = "-".join(g.uuid for g in place.gpus) or "host"
        path = self.run.path / f"floor-{name}.json"
        if not path.exists():
            journal.atomic_write(path, journal.dumps(measure(), path.name))
        return float(journal.loads(path.read_text(encoding="utf-8"), path.name))

    # the end

    def finish(self, interrupted: bool) -> None:
        """Merge the journals: every collected claim ends in exactly one outcome."""
        assert self.run is not None
        found, torn = journal.read_journals(self.run.path)
        why = "interrupted" if interrupted else "its process was lost before it finished"
        results = journal.complete(journal.read_manifest(self.run.path), found, why)
        self.results = {r.claim: r for r in results}
        if torn:
            self.closing.append(f"{torn} torn journal line(s) passed over")
        machine = journal.machine_info(self.gpus)
        written = self.run.finish(journal.document(results, machine, {}, datetime.now(UTC)))
        self.closing.append(f"results: {written}")
        if self.settings.update:
            self._update(results, interrupted=interrupted)

    def _update(self, results: Sequence[Result], *, interrupted: bool) -> None:
        if interrupted:
            self.closing.append("expectations: untouched, the session was interrupted")
            return
        machine = journal.machine_info(self.gpus)

        def merge(update: expectations.Update) -> None:
            for key in sorted({r.key for r in update.accepted}):
                mine = [r for r in update.accepted if r.key == key]
                journal.merge_results(self.settings.results / f"{key}.json", mine, machine)

        path = self.settings.expectations
        update = expectations.plan(path, results, datetime.now(UTC).date()).write(merge)
        self.closing += [*update.lines(), update.diff() or f"{path.name}: nothing changed"]

    @property
    def lost(self) -> list[Result]:
        return [r for r in self.results.values() if r.outcome is Outcome.NOT_RUN]


PLACE = pytest.StashKey[Place]()


def _attach(reports: Sequence[pytest.TestReport], result: Result) -> None:
    """Put the record on the report that says the outcome: xdist carries it to the controller."""
    last = next((r for r in reports if r.when == "call"), reports[0])
    last.aiperf = to_json(result)  # type: ignore[attr-defined]  # reports take extra attributes


def _reason(skipped: pytest.TestReport) -> str:
    where = skipped.longrepr
    text = where[2] if isinstance(where, tuple) else str(where)
    return text.removeprefix("Skipped: ")


def _lost(
    item: pytest.Item, why: str, seconds: float, output: list[tuple[str, str]]
) -> pytest.TestReport:
    return pytest.TestReport(
        item.nodeid,
        item.location,
        {},
        "failed",
        why,
        "call",
        sections=output,
        duration=seconds,
    )


def stack(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Name the versions that a figure depends on, from metadata: nothing heavy is imported."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("torch", "triton", "cupy-cuda13x", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[package.partition("-")[0]] = metadata.version(package)
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if gpus:
        found["driver"] = gpus[0].driver
    return found


def code_hash(files: Sequence[Path]) -> str:
    """Hash what a claim is made of: its test file, its kernels and their headers."""
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@contextmanager
def reproducible(on: bool) -> Iterator[None]:
    """Ask torch for deterministic algorithms while a claim runs."""
    torch = sys.modules.get("torch")
    if not on or torch is None:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def lease_for(place: Place) -> Lease:
    """Return the lease of a claim's GPUs; waiting for it does not count against the deadline."""

    def tell(kind: str, phase: str) -> None:
        if place.channel is not None:
            place.channel.send(kind, phase=phase)

    return Lease(
        [g.uuid for g in place.gpus],
        on_wait=lambda why: tell("waiting", why),
        on_turn=lambda: tell("working", "its turn"),
    )
