"""What a test gets: compare, clock, capture, nvcc and gpu, in the process where it runs."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_aiperf.build.nvcc import Nvcc
from pytest_aiperf.claim import measure as claims
from pytest_aiperf.claim import source_hash, torch_compile
from pytest_aiperf.claim.inputs import Arm, Claim, Progress
from pytest_aiperf.claim.stopping_rule import QUICK, STANDARD, StoppingRule
from pytest_aiperf.device.device import Device, calls_per_block, choose_mode
from pytest_aiperf.errors import AiperfError, ToolMissing, UsageError
from pytest_aiperf.machine import torchrun
from pytest_aiperf.machine.distributed import TorchRankGroup
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.machine.requirements import REQUIREMENTS, claim_id, is_claim
from pytest_aiperf.model import Evidence, Interval, Metric, Profile, Result
from pytest_aiperf.profilers import capture, target, tools
from pytest_aiperf.schema import to_json

from .session import Session, on_cuda

DEVICE = pytest.StashKey[Device]()
LOCK = pytest.StashKey[GpuLock]()
NVCC = pytest.StashKey[Nvcc]()


def device_of(item: pytest.Item, session: Session) -> Device:
    """Return the item's clock; CUDA is initialised here, in the claim's process."""
    if DEVICE not in item.stash:
        gpus, peers, mine = session.gpus_for(item), None, 0
        if session.settings.part is not None:
            peers, mine = (
                TorchRankGroup("cuda" if on_cuda(gpus) else "cpu"),
                int(os.environ["LOCAL_RANK"]),
            )
        with lock_of(item, session).shared():  # a new clock spins, which others would measure
            item.stash[DEVICE] = session.machine.open_device(gpus[mine] if gpus else None, peers)
    return item.stash[DEVICE]


def lock_of(item: pytest.Item, session: Session) -> GpuLock:
    """Return the item's lease; what it waits for others does not count against its deadline."""
    if LOCK not in item.stash:
        # the claim's own process holds the lease for its ranks: theirs stand in nobody's way
        part = session.settings.part
        item.stash[LOCK] = GpuLock(
            [g.uuid for g in session.gpus_for(item)],
            Path(part.scratch, f"locks-{os.environ['RANK']}") if part is not None else None,
            on_wait=lambda why: session.send("waiting", phase=why),
            on_turn=lambda: session.send("working", phase="its turn"),
            threads=session.settings.threads,
        )
    return item.stash[LOCK]


def nvcc_of(item: pytest.Item, session: Session) -> Nvcc:
    """Return what builds the item's kernels, and loads them where there is a GPU."""
    item.stash[NVCC] = found = Nvcc(
        roots=session.roots(item),
        archs=session.archs(item),
        include=session.include(),
        load=bool(session.gpus_for(item)),
    )
    return found


class Stopwatch:
    """Time one callable: the ``clock`` fixture."""

    def __init__(self, clock: Device, lease: GpuLock) -> None:
        self.clock = clock
        self.lease = lease

    def __call__(self, call: Callable[..., object], *args: object) -> Interval:
        """Return the seconds of one call: median and the extremes of ten blocks."""
        with self.lease.exclusive_host() if self.clock.gpu is None else self.lease.exclusive_gpu():
            return self._time(call, *args)

    def _time(self, call: Callable[..., object], *args: object) -> Interval:
        once = self.clock.estimate_s(lambda: call(*args))
        mode = choose_mode(Metric.WALL if self.clock.gpu is None else Metric.DEVICE, once)
        calls = calls_per_block(mode, once, once)
        block = self.clock.block([lambda: call(*args)] * calls, mode)
        block.run()
        seconds = sorted(block.run() / calls for _ in range(10))
        return Interval(seconds[0], (seconds[4] + seconds[5]) / 2, seconds[-1])


class Compare:
    """The claim: the ``compare`` fixture."""

    def __init__(self, item: pytest.Item, session: Session) -> None:
        self._item = item
        self._session = session
        self.called = False
        self.built_only = False

    def __call__(
        self,
        *,
        baseline: Arm,
        optimized: Arm,
        inputs: Callable[..., object],
        reference: Callable[..., object],
        work: Callable[..., Any] | None = None,
        library: Arm | None = None,
        metric: str | Sequence[str] = "device",
        against: str = "idiomatic",
        cache: str = "cold",
        precision: str | None = None,
        evidence: Sequence[Evidence] = (),
    ) -> Result | None:
        """Hold that ``optimized`` beats ``baseline`` on the same work.

        Arms, ``reference`` and ``work`` are called with what ``inputs(bench)`` returns. A call's
        result is what it returns followed by the arguments that it changed; ``reference`` gives
        the same in fp64 or exactly. ``metric`` is what is judged (of several, the first);
        ``against`` says what the baseline is; ``cache="warm"`` declares that the working set may
        stay in the L2; ``precision`` declares arithmetic of fewer bits in the optimized arm;
        ``evidence`` says what proves the mechanism (pytest_aiperf.evidence).
        Returns the record when measuring, None when only checking. Raises Misuse, Disagreement,
        InvalidMeasurement or Unproven, each with one sentence.
        """
        if self.called:
            raise UsageError("a test is one claim: call compare() once")
        self.called = True
        claim = claims.claim_of(
            baseline=baseline,
            optimized=optimized,
            inputs=inputs,
            reference=reference,
            work=work,
            library=library,
            metric=metric,
            against=against,
            cache=cache,
            precision=precision,
            evidence=evidence,
        )
        session = self._session
        settings = session.settings
        if settings.job is not None:
            if self._starts_ranks():
                self._run_ranks(claim, session.new_result(self._item), {})
            else:
                clock, lease = device_of(self._item, session), lock_of(self._item, session)
                target.perform_arm(settings.job, claim, clock, lease)
            pytest.exit("captured", returncode=0)
        if settings.profile is not None:
            return self._profile(claim, settings.profile)
        if settings.measure is not None:
            return self._in_ranks(claim) if self._starts_ranks() else self._measure(claim)
        self._check(claim)
        return None

    def _check(self, claim: Claim) -> None:
        item = self._item
        arms = claim.arms.values()
        used = item.stash[NVCC].used if NVCC in item.stash else []
        archs = item.stash[REQUIREMENTS].archs or ("sm90",)
        on_cpu = item.stash[REQUIREMENTS].checked_on_cpu
        if on_cpu and not any(getattr(arm, "needs_gpu", False) for arm in arms):
            if self._starts_ranks():
                self._in_ranks(claim)
                return
            clock = device_of(item, self._session)
            claims.check_claim(
                claim, clock, self._session.new_result(item), builds=used, archs=archs
            )
        elif used:
            claims.check_claim(claim, None, self._session.new_result(item), builds=used)
            self.built_only = True
        else:
            raise pytest.skip.Exception(
                "its agreement needs a GPU, and there is nothing to build: run with --gpu",
                _use_item_location=True,
            )

    def _starts_ranks(self) -> bool:
        return self._item.stash[REQUIREMENTS].count > 1 and self._session.settings.part is None

    def _in_ranks(self, claim: Claim) -> Result | None:
        """Have the test run anew in a rank for each GPU; all of them check or measure it."""
        item, session = self._item, self._session
        # a check compiles nothing (see compiling.uncompiled): each rank is spared the compiler
        environ = {} if session.settings.measure else {"TORCH_COMPILE_DISABLE": "1"}
        result = self._run_ranks(
            claim, replace(session.new_result(item), against=claim.against), environ
        )
        if result is not None and result.floor:
            session.floor(item, partial(float, result.floor))  # known to the next claim
        return result

    def _run_ranks(self, claim: Claim, blank: Result, environ: Mapping[str, str]) -> Result | None:
        """Run the test in ranks; raise what the claim, or the first rank that failed, says."""
        item, session = self._item, self._session
        count, settings = item.stash[REQUIREMENTS].count, session.settings
        with tempfile.TemporaryDirectory(prefix="pytest-aiperf-") as scratch, self._alone(claim):
            told = torchrun.RankJob(scratch, blank, session.known_floor(item))
            session.send("waiting", phase=f"in {count} ranks")  # which have a deadline of their own
            ending = torchrun.run(told, count, _again(item, session), settings.deadline, environ)
            session.send("working", phase="reading")
        if ending.skipped:
            raise pytest.skip.Exception(ending.why, _use_item_location=True)
        if settings.measure is not None and ending.result is not None:
            session.send("result", result=to_json(ending.result))
        if ending.why:
            raise AiperfError(ending.why)
        return ending.result

    def _alone(self, claim: Claim) -> AbstractContextManager[None]:
        """Have the GPUs alone for the ranks' whole run, and the host where a caller's wait counts.

        One process takes them for all: ranks that did so each for itself, phase by phase, would
        wait for one another in the lease and in the collectives.
        """
        if self._session.settings.measure is None:
            return nullcontext()  # a check times nothing
        lease = lock_of(self._item, self._session)
        return lease.exclusive_host() if Metric.WALL in claim.metrics else lease.exclusive_gpu()

    def _profile(self, claim: Claim, spec: str) -> Result:
        item, session = self._item, self._session
        used = item.stash[NVCC].used if NVCC in item.stash else ()
        blank = replace(
            session.new_result(item),
            code=source_hash.identity(_files(item)),
            kernels=tuple(k for b in used for k in b.kernels),
        )
        # "void turn<Padded>(float const*)": the part that all tools give, however they demangle
        own = {re.sub(r"[(<].*", "", k.function).split()[-1] for k in blank.kernels}
        order = order_of(item, session, spec, session.settings.calls, blank.seed)

        def say(phase: str) -> None:
            session.send("waiting", phase=phase)  # for a child, which has a deadline of its own

        try:
            result, problem = capture.run(claim, order, blank, sorted(own), say)
        except ToolMissing as why:
            raise pytest.skip.Exception(str(why), _use_item_location=True) from None
        session.send("working", phase="reading")
        session.send("result", result=to_json(result))
        if problem is not None:
            raise problem
        return result

    def _measure(self, claim: Claim) -> Result:
        item, session = self._item, self._session
        blank = session.new_result(item)
        plan = QUICK if session.settings.quick else STANDARD
        used = item.stash[NVCC].used if NVCC in item.stash else []

        def say(phase: str, **figures: object) -> None:
            session.send("working", phase=phase, **figures)

        device, lock = device_of(item, session), lock_of(item, session)
        code = source_hash.identity(_files(item))
        problem: AiperfError | None
        quiet = torch_compile.beside(lock, device, _files(item))
        with quiet, _deterministic(on=session.settings.reproducible):
            try:
                floor, ceilings = self._figures_of_the_session(claim, blank.seed, plan, say)
            except AiperfError as why:
                record = replace(blank, against=claim.against, code=code, gpu=device.gpu)
                result, problem = claims.failed(record, why), why
            else:
                context = claims.ClaimContext(
                    record=blank,
                    device=device,
                    lock=lock,
                    rule=plan,
                    progress=say,
                    noise_floor=floor,
                    ceilings=ceilings,
                    expectation=session.expected(item, code),
                    code=code,
                    builds=used,
                )
                result, problem = claims.measure_claim(claim, context)
        session.send("result", result=to_json(result))
        if problem is not None:
            raise problem
        return result

    def _figures_of_the_session(
        self, claim: Claim, seed: int, rule: StoppingRule, progress: Progress
    ) -> tuple[float, Mapping[str, float]]:
        """Return the noise floor and the ceilings; measure what no claim has measured yet."""
        item, session = self._item, self._session
        device, lock = device_of(item, session), lock_of(item, session)
        floor = session.known_floor(item)
        ceilings = session.known_ceilings(device) if claim.work else {}
        if floor is None or ceilings is None:
            with lock.exclusive_host() if device.gpu is None else lock.exclusive_gpu():
                floor = session.floor(
                    item, lambda: claims.noise_floor(device, seed, rule, progress)
                )
                ceilings = session.ceilings(device, progress) if claim.work else {}
                device.release()  # while alone: freeing memory would show in the next claim
        return floor, ceilings


class Capture:
    """Profile one callable: the ``capture`` fixture."""

    def __init__(self, item: pytest.Item, session: Session) -> None:
        self._item = item
        self._session = session
        self._count = 0
        self.found: list[Profile] = []

    def __call__(
        self,
        call: Callable[..., object],
        *args: object,
        tool: str = "ncu",
        preset: str = "minimal",
        calls: int = 1,
    ) -> Profile:
        """Return what a profiler sees of one call: its figures, its kernels, its artefact.

        The test runs anew in a process under the tool, as far as this call, which is warmed up
        there. A tool that is missing or not permitted is a skip.
        """
        item, session = self._item, self._session
        if is_claim(item):
            raise UsageError(
                "a claim is captured with --profile: take capture in a test of its own"
            )
        if session.settings.measure is None:
            pytest.skip("captures only when measuring: run with --gpu (or --cpu, for @host)")
        number, self._count = self._count, self._count + 1
        job = session.settings.job
        if job is not None:
            if number < len(job.before):
                return job.before[number]
            clock = device_of(item, session)
            lease = lock_of(item, session)
            target.perform(job, clock, lease, lambda: (lambda: call(*args), None))
            pytest.exit("captured", returncode=0)
        order = order_of(item, session, f"{tool}:{preset}", calls, session.new_result(item).seed)
        try:
            session.send("waiting", phase=f"{tool}: call {number}")  # the child has a deadline
            found, _ = capture.capture(order, f"call-{number}", before=self.found)
        except ToolMissing as why:
            pytest.skip(str(why))
        finally:
            session.send("working", phase="reading")
        self.found.append(found)
        return found


def order_of(
    item: pytest.Item, session: Session, spec: str, calls: int, seed: int
) -> capture.CaptureRequest:
    """Say how to capture what an item does: by running it anew, in a pytest of its own."""
    tool, preset = tools.chosen(spec)
    settings, words = session.settings, _again(item, session)
    folder = (
        settings.root / capture.ARTIFACTS / settings.run_id / capture.safe(claim_id(item.nodeid))
    )
    target = (sys.executable, "-m", "pytest", *words)
    return capture.CaptureRequest(tool, preset, folder, target, settings.deadline, calls, seed)


def _again(item: pytest.Item, session: Session) -> list[str]:
    """Return the words with which a pytest of its own runs an item anew, as this one does."""
    settings, option = session.settings, item.config.option
    function = item.nodeid.partition("::")[2]
    words = [f"{item.path}::{function}", f"--rootdir={settings.root}", "--capture=no"]
    words += [f"--{settings.measure}"] if settings.measure else []
    words += ["-c", str(item.config.inipath)] if item.config.inipath else []
    words += [word for name in option.plugins for word in ("-p", name)]
    words += [word for name in option.override_ini or () for word in ("-o", name)]
    words += ["-n0"] if item.config.pluginmanager.hasplugin("xdist") else []
    words += ["--reproducible"] if settings.reproducible else []
    words += ["--quick"] if settings.quick else []
    return words


def _files(item: pytest.Item) -> list[Path]:
    """Name the files that a claim is made of: its test, its kernels, their headers."""
    built = item.stash[NVCC].sources if NVCC in item.stash else []
    return [
        item.path,
        *built,
        *source_hash.files(getattr(item, "module", None), item.config.rootpath),
    ]


@contextmanager
def _deterministic(*, on: bool) -> Iterator[None]:
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
