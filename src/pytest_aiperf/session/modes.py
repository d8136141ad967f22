"""What a claim is called for: to check, measure or profile it, or to do so in several ranks."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NoReturn, Protocol

import pytest

from pytest_aiperf.claim import measure, torch_compile
from pytest_aiperf.claim.claim import Claim
from pytest_aiperf.claim.stopping_rule import QUICK, STANDARD
from pytest_aiperf.errors import AiperfError, ToolMissing
from pytest_aiperf.machine import torchrun
from pytest_aiperf.model import Metric, Outcome, Result
from pytest_aiperf.profilers import capture, target
from pytest_aiperf.sources import provenance, source_hash

from .config import Role
from .context import ItemContext


class Mode(Protocol):
    """One way to run a claim."""

    def run(self, claim: Claim, context: ItemContext) -> Result:
        """Return the claim's record; raise if the claim fails."""


def mode_for(claim: Claim, context: ItemContext) -> Mode:
    """Choose the mode from the session's settings, the test's markers and the claim's arms."""
    settings, required = context.settings, context.requirements
    if settings.profile is not None:
        return ProfileArms()
    checks = settings.measure is None and settings.capture_job is None
    on_cpu = required.checked_on_cpu and not any(
        getattr(arm, "needs_gpu", False) for arm in claim.arms.values()
    )
    if checks and not on_cpu:
        return CheckBuilds()
    if required.count > 1 and context.session.role is not Role.RANK:
        return Ranks()
    if settings.capture_job is not None:
        return ProfiledArm(settings.capture_job)
    return Check() if checks else Measure()


class Check:
    """Check agreement at small sizes on the CPU; nothing is timed."""

    def run(self, claim: Claim, context: ItemContext) -> Result:
        archs = context.requirements.archs or ("sm90",)
        return measure.check_claim(
            claim, context.device, context.new_result(), builds=context.builds, archs=archs
        )


class CheckBuilds:
    """Check only the builds of a claim whose arms cannot run here."""

    def run(self, claim: Claim, context: ItemContext) -> Result:
        if not context.builds:
            raise pytest.skip.Exception(
                "its agreement needs a GPU, and there is nothing to build: run with --gpu",
                _use_item_location=True,
            )
        context.built_only = True
        return measure.check_claim(claim, None, context.new_result(), builds=context.builds)


class Measure:
    """Check, time and judge a claim in this process."""

    def run(self, claim: Claim, context: ItemContext) -> Result:
        files = context.files()
        with (
            torch_compile.beside(context.lock, context.device, files),
            _deterministic(on=context.settings.reproducible),
        ):
            result, error = self._measure(claim, context, source_hash.identity(files))
        result = replace(result, sources=provenance.locate(claim.arms, context.settings.root))
        context.send_result(result)
        if error is not None:
            raise error
        return result

    def _measure(
        self, claim: Claim, context: ItemContext, code: str
    ) -> tuple[Result, AiperfError | None]:
        session, device = context.session, context.device
        rule = QUICK if context.settings.quick else STANDARD
        record = context.new_result()
        try:
            measure.refuse_debug_environment()
            noise_floor, ceilings = session.figures.for_claim(
                device,
                context.gpus,
                context.lock,
                partial(measure.noise_floor, device, record.seed, rule, context.progress),
                partial(session.machine.ceilings, device, context.progress) if claim.work else None,
            )
        except AiperfError as error:
            record = replace(record, against=claim.against, code=code, gpu=device.gpu)
            return measure.failed(record, error), error
        arch = context.gpus[0].arch if context.gpus else ""
        claim_context = measure.ClaimContext(
            record=record,
            device=device,
            lock=context.lock,
            rule=rule,
            progress=context.progress,
            noise_floor=noise_floor,
            ceilings=ceilings,
            expectation=session.expectations.lookup(record.claim, record.key, arch, code),
            code=code,
            builds=context.builds,
        )
        return measure.measure_claim(claim, claim_context)


class ProfileArms:
    """Run each arm in a process of its own under a profiler."""

    def run(self, claim: Claim, context: ItemContext) -> Result:
        assert context.settings.profile is not None
        kernels = tuple(kernel for build in context.builds for kernel in build.kernels)
        record = replace(
            context.new_result(), code=source_hash.identity(context.files()), kernels=kernels
        )
        # "copy" of "void copy<float>(float const*)": all tools show this part of a kernel's name
        names = {re.sub(r"[(<].*", "", k.function).split()[-1] for k in kernels}
        request = context.capture_request(
            context.settings.profile, context.settings.profile_calls, record.seed
        )
        try:
            # children have a deadline of their own
            result, error = capture.run(claim, request, record, sorted(names), context.wait_for)
        except ToolMissing as missing:
            raise pytest.skip.Exception(str(missing), _use_item_location=True) from None
        context.progress("reading")
        result = replace(result, sources=provenance.locate(claim.arms, context.settings.root))
        context.send_result(result)
        if error is not None:
            raise error
        return result


class ProfiledArm:
    """Run one arm inside the profiled range, and end this process."""

    def __init__(self, job: target.CaptureJob) -> None:
        self._job = job

    def run(self, claim: Claim, context: ItemContext) -> NoReturn:
        target.perform_arm(self._job, claim, context.device, context.lock)
        pytest.exit("captured", returncode=0)


class Ranks:
    """Run the test again in one process per GPU; all of them check, measure or profile it."""

    def run(self, claim: Claim, context: ItemContext) -> Result:
        settings, figures = context.settings, context.session.figures
        record = replace(context.new_result(), against=claim.against)
        count = context.requirements.count
        checks = settings.measure is None
        # nothing is compiled in a check: the ranks need not load the compiler
        environ = {"TORCH_COMPILE_DISABLE": "1"} if checks else {}
        with (
            tempfile.TemporaryDirectory(prefix="pytest-aiperf-") as scratch,
            self._lock(claim, context),
        ):
            job = torchrun.RankJob(scratch, record, figures.noise_floor(context.gpus))
            context.wait_for(f"in {count} ranks")  # the ranks have a deadline of their own
            ending = torchrun.run(job, count, context.arguments(), settings.deadline_s, environ)
            context.progress("reading")
        if ending.skipped:
            raise pytest.skip.Exception(ending.message, _use_item_location=True)
        if ending.result is not None:
            context.send_result(ending.result)
        if ending.message:
            raise AiperfError(ending.message)
        if settings.capture_job is not None:
            pytest.exit("captured", returncode=0)
        result = ending.result or replace(record, outcome=Outcome.PASSED)
        if result.floor:  # the next claim need not measure it again
            figures.keep_noise_floor(context.gpus, result.floor)
        return result

    def _lock(self, claim: Claim, context: ItemContext) -> AbstractContextManager[None]:
        """Lock the GPUs for the whole run of the ranks, and the host for a claim on wall time.

        One process locks them for all: ranks that each took the locks, phase by phase, would wait
        for each other both in the locks and in the collectives.
        """
        if context.settings.measure is None:
            return nullcontext()  # a check times nothing
        exclusive_host = Metric.WALL in claim.metrics
        return context.lock.exclusive_host() if exclusive_host else context.lock.exclusive_gpu()


@contextmanager
def _deterministic(*, on: bool) -> Iterator[None]:
    """Have torch use deterministic algorithms while a claim runs."""
    torch = sys.modules.get("torch")
    if not on or torch is None:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
