"""Command line, ini file and environment, read once into the settings of a session."""

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from pytest_aiperf.machine import torchrun
from pytest_aiperf.machine.cache_folder import BUILD_CACHES
from pytest_aiperf.machine.requirements import Kind
from pytest_aiperf.profilers import target
from pytest_aiperf.records import journal


class Role(StrEnum):
    """The part that this process plays in a run."""

    CONTROLLER = "controller"
    """Started by the user: runs the items itself, or distributes them to workers."""
    WORKER = "worker"  #: An xdist worker: runs items that the controller sends.
    CLAIM = "claim"  #: A fork of a controller or worker; runs one item.
    RANK = "rank"  #: One of the processes that torchrun starts for a multi-GPU claim.
    TARGET = "target"  #: Runs one arm under a profiler.


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a session, which come from the user and from the parent process."""

    role: Role
    """Role of the process that read the settings; a fork has its own role in ``Session.role``."""
    measure: frozenset[Kind]
    """Which claims are measured; none in a session that only checks."""
    quick: bool
    """Measure with :data:`~pytest_aiperf.claim.stopping_rule.QUICK`, without a second attempt."""
    update: bool  #: Write the results into expectations.yaml at the end.
    conditions: Mapping[str, str]  #: Conditions set by --reproducible and --cold-start, by option.
    debug: bool  #: Run items in this process, so that a debugger works (--pdb).
    seed: int  #: Seed of the session, from which each claim derives its own.
    started: float  #: Unix time at which the controller started.
    run_id: str  #: Name of the run's folder, the same in all processes of the run.
    worker: str
    """xdist's name of the worker ("gw0") that this process is or belongs to, or "main"."""
    threads: int | None
    """CPU threads that a claim may use beside other xdist workers' claims; None without xdist."""
    workers: int  #: Number of xdist workers; 1 without xdist.
    budget_s: float | None  #: Seconds after which no further claim starts.
    deadline_s: float  #: Time limit per claim; waiting for locks does not count.
    root: Path  #: pytest's root folder.
    expectations: Path  #: The expectations file.
    results: Path  #: Folder of the accepted results.
    runs: Path  #: Folder of runs.
    artifacts: Path  #: Folder of profilers' output files.
    kernels: tuple[Path, ...]  #: Folders in which nvcc() looks for sources.
    profile: str | None = None  #: TOOL:PRESET of a session that profiles instead of timing.
    profile_calls: int = 1  #: Number of calls of each arm that are profiled.
    ranks: tuple[int, ...] = ()  #: Numbers of ranks for multi-GPU claims; () for their markers'.
    shard: tuple[int, int] | None = None  #: Number of this shard, from 1, and the number of shards.
    capture_job: target.CaptureJob | None = None  #: Job of a process under a profiler.
    rank_job: torchrun.RankJob | None = None  #: Job of a rank.


def read_settings(config: pytest.Config, measure: frozenset[Kind]) -> Settings:
    """Read the settings; raise pytest.UsageError for a value that cannot be used."""
    option, root = config.option, config.rootpath
    workerinput = getattr(config, "workerinput", None)
    shared = (workerinput or {}).get("aiperf", {})  # values that the controller sent to this worker
    started = shared.get("started", time.time())
    capture_job, rank_job = target.job_from(os.environ), torchrun.rank_job(os.environ)
    if rank_job is not None:  # tested first: a profiled rank has a capture job, too
        role = Role.RANK
    elif capture_job is not None:
        role = Role.TARGET
    else:
        role = Role.CONTROLLER if workerinput is None else Role.WORKER
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    return Settings(
        role=role,
        measure=measure,
        quick=option.aiperf_quick,
        update=option.aiperf_update_expectations,
        conditions=_conditions(option),
        debug=config.getoption("usepdb", False),
        seed=shared.get("seed", 0 if option.aiperf_reproducible else random_seed()),
        started=started,
        run_id=shared.get("run_id")
        or journal.new_run_id(datetime.fromtimestamp(started, UTC), os.getpid()),
        worker=workerinput["workerid"] if role is Role.WORKER and workerinput else "main",
        workers=workers,
        threads=threads if measure and role is Role.WORKER else None,
        budget_s=option.aiperf_budget,
        deadline_s=_deadline_s(config.getini("aiperf_deadline")),
        root=root,
        expectations=root / str(config.getini("aiperf_expectations")),
        results=root / str(config.getini("aiperf_results")),
        runs=root / str(config.getini("aiperf_runs")),
        artifacts=root / str(config.getini("aiperf_artifacts")),
        kernels=tuple(root / folder for folder in config.getini("aiperf_kernels")),
        profile=option.aiperf_profile,
        profile_calls=option.aiperf_profile_calls,
        ranks=option.aiperf_ranks,
        shard=option.aiperf_shard,
        capture_job=capture_job,
        rank_job=rank_job,
    )


def random_seed() -> int:
    """Draw the seed of a session."""
    return secrets.randbelow(2**31)


def _conditions(option: Any) -> dict[str, str]:
    conditions = {}
    if option.aiperf_reproducible:
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        conditions["reproducible"] = (
            f"session seed 0, torch's deterministic algorithms, CUBLAS_WORKSPACE_CONFIG={workspace}"
        )
    if option.aiperf_cold_start:
        caches = ", ".join(BUILD_CACHES.values())
        conditions["cold-start"] = f"build caches empty at the start: {caches}"
    return conditions


def _deadline_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise pytest.UsageError(f"aiperf_deadline = {text}: give seconds, more than 0")
    return seconds
