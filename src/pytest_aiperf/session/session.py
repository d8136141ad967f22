"""What one pytest session knows: its settings, its GPUs, its records."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

import pytest

from pytest_aiperf.build import nvcc
from pytest_aiperf.device.device import Device, Machine
from pytest_aiperf.errors import ToolMissing, UsageError
from pytest_aiperf.machine import nvml, requirements, torchrun
from pytest_aiperf.machine.requirements import REQUIREMENTS
from pytest_aiperf.model import Expectation, Gpu, Outcome, Result
from pytest_aiperf.profilers import target, tools
from pytest_aiperf.records import expectations, journal, shards
from pytest_aiperf.records.results import atomic_write, document, dumps, machine_info, read_json
from pytest_aiperf.report.live import Live

RUNS = ".aiperf"
"""The folder of runs, under pytest's root folder."""
NOT_RUN = "not run: "
"""How the reason of a skip begins that is no skip of the claim's own."""
LOST = "its process was lost before it finished"
"""What is said of a claim that nothing else explains; the run fails then."""


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
    profile: str | None = None
    """TOOL:preset, where this session captures instead of timing."""
    calls: int = 1
    job: target.CaptureJob | None = None
    """What this process is to capture, where it is the child of such a session."""
    shard: tuple[int, int] | None = None
    """Which of how many shards this session is, where it is one."""
    part: torchrun.RankJob | None = None
    """What this process is a rank of, where it is one."""

    @property
    def is_worker(self) -> bool:
        return self.worker != "main"

    @property
    def threads(self) -> int | None:
        """A worker's part of the cores, for its claims while they share the host."""
        workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT") if self.is_worker else None
        return max(1, len(os.sched_getaffinity(0)) // int(workers)) if workers else None


@dataclass(slots=True)
class Session:
    """One checking or measuring session: on the controller, on a worker, in a claim's process."""

    settings: Settings
    machine: Machine
    gpus: tuple[Gpu, ...]
    expectations: expectations.Expectations
    run: journal.Run | None = None
    live: Live | None = None
    results: dict[str, Result] = field(default_factory=dict)
    closing: list[str] = field(default_factory=list)
    attempt: int = 1
    send: Callable[..., None] = lambda *_a, **_k: None
    """Report from a claim's process to the pytest process: a kind and its payload."""

    # an item

    def skip_reason(self, item: pytest.Item) -> str | None:
        """Say why an item cannot be measured, or captured, here; None when it can."""
        wanted = item.stash[REQUIREMENTS]
        why_not = wanted.missing(self.gpus) if self.gpus else None
        if why_not is None and self.settings.profile and requirements.is_claim(item):
            tool, _ = tools.chosen(self.settings.profile)
            if wanted.count > 1 and not tool.ranks:
                others = ", ".join(t.name for t in tools.TOOLS.values() if t.ranks)
                return (
                    f"a claim of several GPUs, and {tool.name} looks at one process: try {others}"
                )
            if wanted.host and not tool.host:
                return f"a claim of the host: {tool.name} captures what a GPU does, try perf"
            try:
                tools.find(tool.name)
            except ToolMissing as why:
                return str(why)
        return why_not

    def gpus_for(self, item: pytest.Item) -> tuple[Gpu, ...]:
        """Return the GPUs of an item on this worker: workers go round the machine's GPUs."""
        wanted = item.stash[REQUIREMENTS]
        if self.settings.measure != "gpu" or wanted.host:
            return ()
        first = int(self.settings.worker.removeprefix("gw")) if self.settings.is_worker else 0
        n = len(self.gpus)
        return tuple(self.gpus[(first + i) % n] for i in range(wanted.count))

    def roots(self, item: pytest.Item) -> tuple[Path, ...]:
        return (*self.settings.kernels, item.path.parent)

    def include(self) -> tuple[Path, ...]:
        return tuple(k / "include" for k in self.settings.kernels if (k / "include").is_dir())

    def archs(self, item: pytest.Item) -> tuple[str, ...]:
        """Return the architectures that an item's kernels are built for in this session."""
        gpus = self.gpus_for(item)
        return (
            (gpus[0].arch,) if gpus else (item.stash[REQUIREMENTS].archs or requirements.ARCH_MARKS)
        )

    def build_all(self, items: Sequence[pytest.Item]) -> None:
        """Build all that these items name, in parallel; an error waits for its claim."""
        wants = {}
        for item in items:
            if list(item.iter_markers("skip")):
                continue
            for name, flags in nvcc.nvcc_names(item.path.read_text(encoding="utf-8")):
                source = nvcc.find_source(name, self.roots(item))
                for arch in self.archs(item) if source else ():
                    assert source is not None
                    wants[source, arch, flags] = nvcc.Want(source, arch, flags)
        if wants:
            nvcc.build_all(list(wants.values()), include=self.include(), progress=self._show_build)

    def _show_build(self, done: int, total: int, _: object) -> None:
        if self.live is not None:
            self.live.show({"phase": "building", "done": done, "total": total})

    # records

    def collected(self, claims: Sequence[tuple[str, str]]) -> None:
        """Write down which claims are going to run: each must end in exactly one outcome."""
        if self.run is not None:
            self.run.manifest(claims)

    def split_by_shard(
        self, items: Sequence[pytest.Item]
    ) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """Part items into those of this session's shard and those of the others."""
        assert self.settings.shard is not None
        number, count = self.settings.shard
        mine = shards.deal([i.nodeid for i in items], self._recorded(), count)[number - 1]
        if self.run is not None:
            claims = [
                (requirements.claim_id(i.nodeid), i.nodeid)
                for i in items
                if requirements.is_claim(i)
            ]
            shards.write_manifest(self.run, claims)
        kept = [i for i in items if i.nodeid in mine]
        return kept, [i for i in items if i.nodeid not in mine]

    def in_order(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Order what several workers take in turn: a long one that came last would be alone."""
        if not self.settings.is_worker or self.settings.budget is not None:
            return list(items)  # of a budget, long ones would leave the least to the others
        try:
            known = self._recorded()
        except UsageError:
            known = {}  # a broken file keeps nobody from measuring
        lengths = shards.lengths((i.nodeid for i in items), known)
        return sorted(items, key=lambda item: -lengths[item.nodeid])

    def _recorded(self) -> dict[str, float]:
        key = self.gpus[0].key if self.gpus else "cpu"
        return shards.recorded(self.settings.results / f"{key}.json")

    def new_result(self, item: pytest.Item) -> Result:
        """Return the record of a claim of which nothing is known yet."""
        if self.settings.part is not None:
            return self.settings.part.blank  # the ranks' seed is one
        gpus = self.gpus_for(item)
        key = gpus[0].key if gpus else "cpu"
        claim = requirements.claim_id(item.nodeid)
        salt = f"{self.settings.seed}:{claim}:{self.attempt}".encode()
        doc = getattr(getattr(item, "module", None), "__doc__", None) or ""
        return Result(
            claim=claim,
            nodeid=item.nodeid,
            title=doc.strip().partition("\n")[0],
            outcome=Outcome.ERROR,
            key=key if len(gpus) < 2 else f"{len(gpus)}x{key}",
            run=self.settings.run_id,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            seed=int.from_bytes(hashlib.sha256(salt).digest()[:4], "big") >> 2,
            host=item.stash[REQUIREMENTS].host,
            stack=_stack(gpus),
            quick=self.settings.quick,
            attempts=self.attempt,
        )

    def expected(self, item: pytest.Item, code: str) -> Expectation:
        blank, gpus = self.new_result(item), self.gpus_for(item)
        return self.expectations.lookup(blank.claim, blank.key, gpus[0].arch if gpus else "", code)

    def floor(self, item: pytest.Item, measure: Callable[[], float]) -> float:
        """Return the noise floor of this session on an item's GPUs; the first claim measures it.

        Called under an exclusive lease, so that nobody else is measuring it at the same time.
        """
        known = self.known_floor(item)
        if known is not None:
            return known
        measured = measure()
        if self.run is not None:
            path = self._floor(self.run, item)
            atomic_write(path, dumps(measured, path.name))
        return measured

    def known_floor(self, item: pytest.Item) -> float | None:
        """Return the noise floor where a claim of this session has measured it."""
        if self.settings.part is not None:
            return self.settings.part.floor
        if self.run is None or not self._floor(self.run, item).exists():
            return None
        return float(read_json(self._floor(self.run, item)))

    def _floor(self, run: journal.Run, item: pytest.Item) -> Path:
        name = "-".join(g.uuid for g in self.gpus_for(item)) or "host"
        return run.path / f"floor-{name}.json"

    def known_ceilings(self, device: Device) -> Mapping[str, float] | None:
        """Return a device's limits where a claim of this session has measured them."""
        if device.gpu is None:
            return {}
        path = self._ceilings(device.gpu)
        known: dict[str, float] | None = read_json(path) if path and path.exists() else None
        return known

    def ceilings(self, device: Device, say: Callable[[str], object]) -> Mapping[str, float]:
        """Return a device's limits; where they are not known the first claim measures them.

        Called under an exclusive lease. All claims of a session are held to the same figures.
        """
        known = self.known_ceilings(device)
        if known is not None:
            return known
        measured = dict(device.ceilings(say))
        path = self._ceilings(device.gpu) if device.gpu else None
        if path:
            atomic_write(path, dumps(measured, path.name))
        return measured

    def _ceilings(self, gpu: Gpu) -> Path | None:
        uuid = gpu.uuid.replace("/", "_")
        return self.run.path / f"ceilings-{uuid}.json" if self.run is not None else None

    def record(self, result: Result) -> None:
        """Write a finished result to this process's journal; it survives whatever comes."""
        if self.run is not None:
            self.run.journal(self.settings.worker).append(result)

    def budget_exhausted(self) -> str | None:
        """Say that the session's time budget is spent; None while it is not."""
        budget = self.settings.budget
        if budget is None or time.time() - self.settings.started < budget:
            return None
        return f"{NOT_RUN}the session's budget of {budget:g} s is spent"

    # the end

    def register_worker(self, pid: int | None) -> None:
        """Let the controller know a worker's process; None when it has nothing left to stop."""
        if self.run is not None:
            path = self.run.path / f"worker-{self.settings.worker}"
            path.unlink(missing_ok=True) if pid is None else path.write_text(str(pid))

    def _stop_workers(self) -> None:
        """Have workers leave their claims now; xdist would give them ten seconds and then kill."""
        assert self.run is not None
        for path in self.run.path.glob("worker-*"):
            with suppress(OSError, ValueError):  # it has just ended
                os.kill(int(path.read_text()), signal.SIGTERM)

    def finish(self, *, interrupted: bool, stopped: bool) -> None:
        """Merge the journals: every collected claim ends in exactly one outcome."""
        assert self.run is not None
        if interrupted:
            self._stop_workers()
        found, torn = journal.read_journals(self.run.path)
        why = "interrupted" if interrupted else "stopped at a failure" if stopped else LOST
        results = journal.complete(journal.read_manifest(self.run.path), found, why)
        self.results = {r.claim: r for r in results}
        if torn:
            self.closing.append(f"{torn} torn journal line(s) passed over")
        machine = machine_info(self.gpus)
        from pytest_benchmark.utils import get_commit_info  # late: not needed to measure

        commit = get_commit_info(self.settings.root.name)
        written = self.run.finish(document(results, machine, datetime.now(UTC), commit))
        self.closing.append(f"results: {written}")
        if self.settings.update and interrupted:
            self.closing.append("expectations: untouched, the session was interrupted")
        elif self.settings.update:
            path = self.settings.expectations
            update = expectations.propose_update(path, results, datetime.now(UTC).date())
            update = update.write(self.settings.results, machine)
            self.closing += [*update.lines(), update.diff() or f"{path.name}: nothing changed"]


def open_session(
    config: pytest.Config, machine: Machine, measure: Literal["gpu", "cpu"] | None
) -> Session:
    """Read the settings; raise UsageError where this machine cannot do what they ask for."""
    option, given = config.option, getattr(config, "workerinput", {}).get("aiperf", {})
    started = given.get("started", time.time())
    start = datetime.fromtimestamp(started, UTC)
    root = config.rootpath
    settings = Settings(
        measure=measure,
        quick=option.quick,
        update=option.update_expectations,
        reproducible=option.reproducible,
        debug=config.getoption("usepdb", False),
        seed=given.get("seed", 0 if option.reproducible else secrets.randbelow(2**31)),
        started=started,
        run_id=given.get("run_id") or journal.new_run_id(start, os.getpid()),
        worker=os.environ.get("PYTEST_XDIST_WORKER", "main") if given else "main",
        budget=option.budget,
        deadline=_deadline(config.getini("aiperf_deadline")),
        root=root,
        expectations=root / str(config.getini("aiperf_expectations")),
        results=root / str(config.getini("aiperf_results")),
        kernels=tuple(root / k for k in config.getini("aiperf_kernels")),
        # a plugin that a conftest names comes too late to add it
        profile=getattr(option, "aiperf_profile", None),
        calls=option.aiperf_profile_calls,
        job=target.job(os.environ),
        shard=option.shard,
        part=torchrun.rank_job(os.environ),
    )
    if measure is None:
        return Session(settings, machine, (), expectations.Expectations({}))
    if config.getoption("dist", "no") not in ("no", "load", "worksteal"):
        raise pytest.UsageError(
            f"--dist {option.dist} loses or hangs tests when a worker dies: "
            "use --dist load or worksteal to measure"
        )
    found = tuple(machine.gpus()) if measure == "gpu" else ()
    if measure == "gpu" and not found:
        raise pytest.UsageError(
            f"--gpu needs an NVIDIA GPU: {nvml.absence()}; `pytest` checks without one, "
            "`pytest --cpu` measures the host claims"
        )
    # a bad expectations file is told now, not after an hour
    session = Session(settings, machine, found, expectations.load(settings.expectations))
    if not option.collectonly and settings.job is None and settings.part is None:
        runs = root / RUNS
        if settings.is_worker:
            session.run = journal.Run(runs / settings.run_id)
        else:
            session.run = journal.open_run(runs, settings.run_id)
        session.live = Live(
            config.pluginmanager, session.run.path / "live", worker=settings.is_worker
        )
    return session


def on_cuda(gpus: Sequence[Gpu]) -> bool:
    """Whether CUDA names these GPUs so; a fake has another name."""
    return any(g.uuid.startswith("GPU-") for g in gpus)


def _deadline(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise pytest.UsageError(f"aiperf_deadline = {text}: give seconds, more than 0")
    return seconds


def _stack(gpus: Sequence[Gpu]) -> dict[str, str]:
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
