"""One pytest session in one process: its role, its GPUs, its records."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_aiperf.build import nvcc
from pytest_aiperf.errors import ToolMissing, UsageError
from pytest_aiperf.machine import nvml, requirements, telemetry, torchrun
from pytest_aiperf.machine.requirements import REQUIREMENTS, Kind
from pytest_aiperf.model import Gpu, Outcome, Result
from pytest_aiperf.profilers import tools
from pytest_aiperf.records import expectations, journal, shards
from pytest_aiperf.records.expectations import Expectations
from pytest_aiperf.records.results import document, machine_info, processor, read_results
from pytest_aiperf.report.live import Live

from .config import Role, Settings, read_settings
from .cuda_machine import CudaMachine, Machine
from .figures import SharedFigures
from .ladder import LadderRun

if TYPE_CHECKING:
    from pytest_aiperf.device.device import Device
    from pytest_aiperf.machine.gpu_lock import GpuLock

RUNS = ".aiperf"  #: Default folder of runs, in pytest's root folder.
NOT_RUN = "not run: "
"""Prefix of skip reasons that come from the session (budget spent), not from the claim."""
LOST = "its process was lost before it finished"
"""Reason for a missing result if the run was neither interrupted nor stopped; such a run fails."""


@dataclass(slots=True)
class Session:
    """The state of a checking or measuring session in one of its processes."""

    settings: Settings
    role: Role  #: Role of this process; differs from the settings' role in a claim's process.
    machine: Machine  #: Source of GPUs and devices.
    gpus: tuple[Gpu, ...]
    """GPUs to measure on; none when only checking, or measuring only the host."""
    expectations: Expectations
    figures: SharedFigures  #: Noise floor and limits that all claims of the session use.
    run: journal.Run | None = None  #: Folder of the run; None in a process that records nothing.
    live: Live | None = None  #: The line that shows progress; None if ``run`` is None.
    send: Callable[..., None] = lambda _kind, **_fields: None
    """Sends a message (kind and fields) to the supervising process; drops it if there is none."""
    results: dict[str, Result] = field(default_factory=dict)
    """Results by nodeid; filled at the end of the run, on the controller only."""
    closing: list[str] = field(default_factory=list)  #: Lines that the terminal shows at the end.
    unchecked: tuple[str, ...] = ()  #: Checks that no claim of this session can make.
    attempt: int = 1  #: Number of the current attempt at a claim.
    needs_all_memory: bool = False
    """Whether the current attempt reserves all memory of its GPUs: the last one ran out of it."""
    ladder: LadderRun[Any] | None = None  #: The rungs that this process measures together.
    optimized: dict[str, dict[int, Hashable]] = field(default_factory=dict)
    """The identities of the optimized arms that are known, by ladder and position of the rung."""
    opened: Device | None = None  #: The device of this process, once it is opened.
    lock: GpuLock | None = None  #: The lock of this process, once it is needed.
    phase: str = "starting"  #: What this process is doing; waits do not count as phases.
    alone: str = ""  #: What this process has for itself: "GPU", "host" (with its GPUs), or "".

    current: ClassVar[Session | None] = None
    """The session of this process if it is the process of a claim, whose deadline is supervised."""

    def skip_reason(self, item: pytest.Item) -> str | None:
        """Return why an item cannot be measured or profiled here, or None if it can."""
        required = item.stash[REQUIREMENTS]
        reason = required.missing(self._own_gpus_first()) if self.gpus else None
        if reason is None and self.settings.profile and requirements.is_claim(item):
            tool, _ = tools.parse(self.settings.profile)
            if required.in_ranks and not tool.ranks:
                others = ", ".join(t.name for t in tools.TOOLS.values() if t.ranks)
                return f"a multi-GPU claim: {tool.name} profiles one process, try {others}"
            if required.host and not tool.host:
                return f"a host claim: {tool.name} profiles the GPU, try perf"
            try:
                tools.require_tool(tool.name)
            except ToolMissing as error:
                return str(error)
        return reason

    def gpus_for(self, item: pytest.Item) -> tuple[Gpu, ...]:
        """Return an item's GPUs: worker N uses GPU N and the following ones, counted cyclically."""
        required = item.stash[REQUIREMENTS]
        if "gpu" not in self.settings.measure or required.host:
            return ()
        gpus = self._own_gpus_first()
        return tuple(gpus[i % len(gpus)] for i in range(required.count))

    def _own_gpus_first(self) -> tuple[Gpu, ...]:
        """Return all GPUs, beginning with that of this worker."""
        worker = int(self.settings.worker.removeprefix("gw").replace("main", "0"))
        first = worker % len(self.gpus)
        return (*self.gpus[first:], *self.gpus[:first])

    def roots(self, item: pytest.Item) -> tuple[Path, ...]:
        """Return the folders in which nvcc() looks for an item's sources."""
        return (*self.settings.kernels, item.path.parent)

    def include(self) -> tuple[Path, ...]:
        return tuple(k / "include" for k in self.settings.kernels if (k / "include").is_dir())

    def archs(self, item: pytest.Item) -> tuple[str, ...]:
        """Return the architectures that an item's kernels are built for in this session."""
        gpus = self.gpus_for(item)
        if gpus:
            return (gpus[0].arch,)
        return item.stash[REQUIREMENTS].build_archs

    def build_all(self, items: Sequence[pytest.Item]) -> None:
        """Build in parallel the sources that items name. The claim raises a build error later."""
        wants = {}
        for item in items:
            if list(item.iter_markers("skip")):
                continue
            for name, flags in nvcc.nvcc_calls(item.path.read_bytes()):
                source = nvcc.find_source(name, self.roots(item))
                for arch in self.archs(item) if source else ():
                    assert source is not None
                    wants[source, arch, flags] = nvcc.BuildRequest(source, arch, flags)
        if wants:
            requests = list(wants.values())
            nvcc.build_parallel(requests, include=self.include(), progress=self._show_build)

    def _show_build(self, done: int, total: int, _: object) -> None:
        if self.live is not None:
            self.live.show({"phase": "building", "done": done, "total": total})

    def split_by_shard(
        self, items: Sequence[pytest.Item]
    ) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """Split items into those of this session's shard and the others."""
        assert self.settings.shard is not None
        number, count = self.settings.shard
        if self.settings.profile:  # the recorded times are not those under a profiler
            shard = shards.split_by_id(self._lengths(items, {}), count)[number - 1]
        else:
            lengths = self._lengths(items, shards.recorded_s(self.settings.results))
            shard = shards.split(list(lengths), lengths, count)[number - 1]
        if self.run is not None:
            journal.Run(self.run.path / shards.WHOLE).write_manifest(requirements.claims_of(items))
        kept = [i for i in items if requirements.ladder_id(i) in shard or i.nodeid in shard]
        return kept, [i for i in items if i not in kept]

    def in_order(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """On an xdist worker, put long items first, so that none of them runs alone at the end.

        Rungs that are measured with the first rung of their ladder come last.
        With a time budget, keep the order: a few long items could use up the budget.
        """
        if self.role is not Role.WORKER or self.settings.budget_s is not None:
            return list(items)
        try:
            recorded_s = self._recorded_s()
        except UsageError:
            recorded_s = {}  # an unreadable results file must not stop a measurement
        lengths = self._lengths(items, recorded_s)

        def length(item: pytest.Item) -> float:
            # the first rung measures its whole ladder, the others only report
            return lengths.pop(requirements.ladder_id(item) or item.nodeid, 0.0)

        keys = {item.nodeid: -length(item) for item in items}
        timed = sorted((i for i in items if keys[i.nodeid] < 0), key=lambda i: keys[i.nodeid])
        others = (item for item in items if keys[item.nodeid] == 0)
        # without records, all lengths are the same
        return [*shards.paired(timed, self.settings.workers if recorded_s else 0), *others]

    @staticmethod
    def _lengths(items: Sequence[pytest.Item], recorded_s: dict[str, float]) -> dict[str, float]:
        """Return the seconds of each ladder, by its id, and of each other item, by its nodeid."""
        seconds = shards.durations((i.nodeid for i in items), recorded_s)
        lengths: dict[str, float] = {}
        for item in items:
            name = requirements.ladder_id(item) or item.nodeid
            lengths[name] = lengths.get(name, 0.0) + seconds[item.nodeid]
        return lengths

    def _recorded_s(self) -> dict[str, float]:
        """Return each item's duration, by nodeid, from this machine's accepted results, if any."""
        path = self.settings.results / f"{self.gpus[0].key if self.gpus else 'cpu'}.json"
        return {r.nodeid: r.seconds for r in read_results(path)} if path.exists() else {}

    def new_result(self, item: pytest.Item) -> Result:
        """Return the record of a claim before anything is measured."""
        if self.settings.rank_job is not None:
            # all ranks need the same seed
            return next(r for r in self.settings.rank_job.records if r.nodeid == item.nodeid)
        gpus = self.gpus_for(item)
        key = gpus[0].key if gpus else "cpu"
        claim = requirements.claim_id(item.nodeid)
        callspec, ladder = getattr(item, "callspec", None), requirements.ladder_id(item)
        indices = callspec.indices if callspec else {}
        positions = [i for name, i in indices.items() if name != requirements.RANKS]
        # all rungs of a ladder have the same seed, and so the same inputs
        salt = f"{self.settings.seed}:{ladder or claim}:{self.attempt}".encode()
        doc = getattr(getattr(item, "module", None), "__doc__", None) or ""
        return Result(
            claim=claim,
            nodeid=item.nodeid,
            title=doc.strip().partition("\n")[0],
            outcome=Outcome.ERROR,
            key=f"{len(gpus)}x{key}" if gpus and item.stash[REQUIREMENTS].in_ranks else key,
            run=self.settings.run_id,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            seed=int.from_bytes(hashlib.sha256(salt).digest()[:4], "big") >> 2,
            host=item.stash[REQUIREMENTS].host,
            stack=stack_of(gpus),
            quick=self.settings.quick,
            conditions=self.settings.conditions,
            attempts=self.attempt,
            unchecked=self.unchecked,
            ladder=ladder,
            # pytest counts the numbers of ranks, too, in the indices of the other parameters
            rung_index=sum(positions) // max(1, len(self.settings.ranks)),
        )

    def record(self, result: Result) -> None:
        """Write a finished result to this process's journal, which survives a crash."""
        if self.run is not None:
            self.run.journal(self.settings.worker).append(result)

    def budget_exhausted(self) -> str | None:
        """Return the skip reason once the session's time budget is spent, else None."""
        budget_s = self.settings.budget_s
        if budget_s is None or time.time() - self.settings.started < budget_s:
            return None
        return f"{NOT_RUN}the session's budget of {budget_s:g} s is spent"

    def register_worker(self, pid: int | None) -> None:
        """Write a worker's pid to a file, for the controller to end it; None removes the file."""
        if self.run is not None:
            path = self.run.path / f"worker-{self.settings.worker}"
            path.unlink(missing_ok=True) if pid is None else path.write_text(str(pid))

    def finish(self, *, interrupted: bool, stopped: bool) -> None:
        """Merge the journals, so that every collected claim has one outcome; write the results."""
        assert self.run is not None
        if interrupted:
            # SIGTERM lets workers end their claims; xdist would kill the workers after 10 s.
            for path in self.run.path.glob("worker-*"):
                with suppress(OSError, ValueError):  # this worker has just ended
                    os.kill(int(path.read_text()), signal.SIGTERM)
        finished, torn = journal.read_journals(self.run.path)
        reason = "interrupted" if interrupted else "stopped at a failure" if stopped else LOST
        doing = journal.unfinished(self.run.path) if interrupted else {}
        now = time.time()

        def why(claim: str) -> str:
            phase, since = doing.get(claim) or doing.get(claim.partition("[")[0]) or ("", now)
            return f"{reason} after {now - since:.0f} s of: {phase}" if phase else reason

        results = journal.complete(journal.read_manifest(self.run.path), finished, why)
        self.results = {r.nodeid: r for r in results}
        if torn:
            self.closing.append(f"{torn} incomplete journal line(s) ignored")
        machine = machine_info(self.gpus)
        from pytest_benchmark.utils import get_commit_info  # here: measuring does not need it

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


def open_session(config: pytest.Config, machine: Machine, measure: frozenset[Kind]) -> Session:
    """Open this process's session; raise UsageError for settings that this machine cannot meet."""
    settings = read_settings(config, measure)
    gpus = tuple(machine.gpus()) if "gpu" in measure else ()
    if measure:
        _check_measurable(config, gpus, measure)
    # Read now, so that an invalid file is an error before the measurement and not after it.
    expected = expectations.load(settings.expectations)
    # a machine of the user's has a clock that this package does not know
    name = f"{type(machine).__module__}.{type(machine).__qualname__}"
    foreign = () if type(machine) is CudaMachine else (f"the clock of {name}",)
    arguments = (settings, settings.role, machine, gpus, expected)
    open_here = partial(Session, *arguments, unchecked=foreign)
    if settings.rank_job is not None:
        rank = torchrun.Rank(settings.rank_job)
        config.pluginmanager.register(rank, "aiperf-rank")
        return open_here(SharedFigures(None, settings.rank_job.noise_floor), send=rank.receive)
    if not measure or settings.role is Role.TARGET or config.option.collectonly:
        return open_here(SharedFigures(None))
    runs, is_worker = settings.runs, settings.role is Role.WORKER
    run_id = settings.run_id
    run = journal.Run(runs / run_id) if is_worker else journal.open_run(runs, run_id)
    live = Live(config.pluginmanager, run.path / "live", worker=is_worker)
    if config.option.aiperf_telemetry and not is_worker:
        recorder = telemetry.Recorder([gpu.uuid for gpu in gpus], run.path / telemetry.FILE)
        config.add_cleanup(recorder.stop)
    return open_here(SharedFigures(run.path), run, live)


def _check_measurable(config: pytest.Config, gpus: Sequence[Gpu], measure: frozenset[Kind]) -> None:
    if config.getoption("dist", "no") not in ("no", "load", "worksteal"):
        raise pytest.UsageError(
            f"--dist {config.option.dist} loses or hangs tests when a worker dies: "
            "use --dist load or worksteal to measure"
        )
    if config.option.aiperf_telemetry and (not gpus or config.option.aiperf_update_expectations):
        raise pytest.UsageError(
            "--telemetry samples GPUs, and its queries of the driver may disturb a measurement: "
            "add --gpu, and drop --cpu and --update-expectations"
        )
    if config.option.aiperf_ranks and "gpu" not in measure:
        raise pytest.UsageError(
            "--ranks is for claims for several GPUs, and this run measures only host claims: use "
            "--gpu, or drop --ranks"
        )
    profile = config.option.aiperf_profile
    if "gpu" in measure and not gpus and profile and not profile.startswith("perf"):
        tool = profile.removesuffix(":minimal")  # the default, which nobody types
        raise pytest.UsageError(
            f"--profile={tool} profiles the GPU, and needs an NVIDIA GPU: {nvml.absence()}; "
            "`pytest --profile=perf` profiles the host claims"
        )
    if "gpu" in measure and not gpus:
        raise pytest.UsageError(
            f"--gpu needs an NVIDIA GPU: {nvml.absence()}; `pytest` checks without one, "
            "`pytest --cpu` measures the host claims"
        )


def on_cuda(gpus: Sequence[Gpu]) -> bool:
    """Whether these are real GPUs, not the fake ones of a test."""
    return any(g.uuid.startswith("GPU-") for g in gpus)


def stack_of(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the software versions that figures depend on, without importing the packages.

    Without a GPU, the figures depend on the processor, too.
    """
    stack = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("torch", "triton", "cupy-cuda13x", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            stack[package.partition("-")[0]] = metadata.version(package)
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        stack["cuda"] = torch.version.cuda
    if gpus:
        stack["driver"] = gpus[0].driver
    else:
        stack["processor"] = processor()
    return stack
