"""Measures one claim, from the agreement of its arms to its judgement."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from pytest_aiperf.build.nvcc import Build
from pytest_aiperf.correctness import agreement
from pytest_aiperf.device.device import Device
from pytest_aiperf.errors import AiperfError, ClaimNotMet, InvalidMeasurement, is_out_of_memory
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.model import Error, Expectation, Metric, Outcome, Result, Timing
from pytest_aiperf.rules import evidence, validity, verdict

from . import explanation
from .bound_claim import BoundClaim
from .claim import Claim, Progress
from .replicates import Measurement, measure_metric, speedup
from .stopping_rule import QUICK, StoppingRule
from .torch_compile import uncompiled

T = TypeVar("T")

QUIET_FLOOR = 0.1
"""A noise floor above this is measured again: one stalled block would otherwise raise it for all
claims of the session."""
FLOOR_REPEATS = 3
"""How often a floor above QUIET_FLOOR is measured. The median counts: a single stall does not raise
it, but permanent noise does."""


@dataclass(frozen=True, slots=True)
class ClaimContext:
    """Everything that the measurement of a claim needs from its session."""

    record: Result  #: The record so far: the claim's id, its seed and the software versions.
    device: Device  #: Device on which the arms are timed.
    lock: GpuLock  #: Lock of the claim's GPUs and of the host; the caller does not hold it.
    rule: StoppingRule  #: When the measurement of the judged metric stops.
    progress: Progress  #: Reports phases and figures to the live display.
    expectation: Expectation  #: Entry of expectations.yaml for this claim, GPU and code.
    code: str  #: Hash of the claim's source code.
    builds: Sequence[Build] = ()  #: CUDA builds that the claim uses.
    noise_floor: float = math.inf
    """The session's :func:`noise_floor`; infinite until measured: then no arm counts as faster."""
    ceilings: Mapping[str, float] = field(default_factory=dict)
    """The device's roofline ceilings by name; only claims with ``work`` need them."""

    def share(self, step: Callable[[], T]) -> T:
        """Run a step under the shared lock; when out of memory, repeat it under the exclusive."""
        try:
            with self.lock.shared():
                return step()
        except Exception as why:
            if not is_out_of_memory(why):
                raise
        self.device.release()
        with self.lock.exclusive_gpu():
            return step()


def check_claim(
    claim: Claim,
    device: Device | None,
    record: Result,
    *,
    builds: Sequence[Build] = (),
    archs: Sequence[str] = (),
) -> Result:
    """Check agreement at check sizes, and the evidence that needs no GPU; return the record.

    If ``device`` is None, the arms cannot run here, and only their builds are checked.
    """
    agreement: tuple[Error, ...] = ()
    if device is None:
        explanation.check(claim, builds, None, archs)
    else:
        with uncompiled():
            bound = BoundClaim(claim, device, 1, full=False)
            agreement = bound.check_agreement()
            explanation.check(claim, builds, bound, archs)
    return replace(record, against=claim.against, outcome=Outcome.PASSED, agreement=agreement)


def measure_claim(claim: Claim, context: ClaimContext) -> tuple[Result, AiperfError | None]:
    """Measure a claim and judge it; return its record and the error to raise."""
    started = time.monotonic() - context.lock.waited_s
    bound = BoundClaim(
        claim, context.device, context.record.seed, full=True, progress=context.progress
    )
    record = replace(
        context.record,
        against=claim.against,
        code=context.code,
        gpu=context.device.gpu,
        kernels=tuple(kernel for build in context.builds for kernel in build.kernels),
    )
    error: AiperfError | None = None
    try:
        refuse_debug_environment()
        record = _measure(bound, record, context)
        context.progress("explaining")
        with context.lock.shared():
            record = explanation.explain(bound, record, context.builds, context.ceilings)
        explanation.refuse_impossible_times(record)
        record = _judge(record, context)
        if record.outcome is not Outcome.PASSED:
            error = ClaimNotMet(record.message)
    except AiperfError as why:
        error = why
    record = replace(record, seconds=time.monotonic() - context.lock.waited_s - started)
    return failed(record, error) if error else record, error


def refuse_debug_environment() -> None:
    """Refuse environment variables that make every timing meaningless."""
    if problem := validity.environment_problem(os.environ):
        raise InvalidMeasurement(problem)


def _measure(bound: BoundClaim, record: Result, context: ClaimContext) -> Result:
    """Check agreement, time every metric and verify the timed outputs."""
    work = context.share(bound.compute_work)
    agreement = bound.check_agreement(context.share)
    timings: list[Timing] = []
    notes: list[str] = []
    for metric in bound.claim.metrics:
        # only the first metric is judged, so a quick measurement suffices for the others
        measurement = Measurement(bound, metric, QUICK if timings else context.rule)
        context.share(measurement.prepare)
        lock = context.lock
        with lock.exclusive_host() if metric is Metric.WALL else lock.exclusive_gpu():
            try:
                timings.append(measurement.measure())
            except InvalidMeasurement as why:
                if not timings:
                    bound.verify()  # a wrong result explains more than this error
                    raise
                notes.append(f"{metric} is not shown: {why}")
            context.device.release()  # freeing memory later would disturb another claim
        context.share(measurement.check_with_new_inputs)
    context.progress("verifying")
    context.share(bound.verify)
    judged = timings[0]
    is_time = judged.metric in (Metric.DEVICE, Metric.WALL)
    return replace(
        record,
        agreement=agreement,
        work=work,
        timing=judged,
        also=tuple(timings[1:]),
        floor=context.noise_floor if is_time else 0.0,
        speedup=speedup(judged),
        library=speedup(judged, of="library") if "library" in bound.claim.arms else None,
        notes=tuple(notes),
    )


def _judge(record: Result, context: ClaimContext) -> Result:
    """Judge the speedup and the evidence."""
    assert record.speedup is not None
    judgement = verdict.judge(
        record.speedup,
        record.floor,
        context.expectation,
        library=record.library,
        share=explanation.min_share(record.limits, (record.timing, *record.also)),
        compare_recorded=not verdict.depends_on_host(record),
    )
    broken = evidence.broken(record.evidence)
    return replace(
        record,
        expectation=context.expectation,
        verdict=verdict.verdict(record.speedup, record.floor),
        outcome=Outcome.PASSED if judgement.holds and not broken else Outcome.FAILED,
        message="; ".join(filter(None, (broken, judgement.why, *judgement.notes))),
    )


def failed(record: Result, error: AiperfError) -> Result:
    """Return the record of a claim that ended with an error."""
    outcome = Outcome.ERROR
    if isinstance(error, AssertionError):  # WrongResult or ClaimNotMet
        outcome = Outcome.FAILED
    elif isinstance(error, InvalidMeasurement):
        outcome = Outcome.INVALID
    return replace(record, outcome=outcome, message=str(error))


def noise_floor(device: Device, seed: int, rule: StoppingRule, progress: Progress) -> float:
    """Return the relative difference that is measured between an arm and itself.

    Call it under the exclusive lock.
    """
    inputs, arm = device.noise_probe()
    metric = Metric.WALL if device.gpu is None else Metric.DEVICE
    claim = Claim(
        arms={"baseline": arm, "optimized": arm}, inputs=inputs, reference=arm, metrics=(metric,)
    )
    bound = BoundClaim(claim, device, seed, full=True, progress=progress)
    bound.effects = agreement.infer_effects(lambda _: arm, partial(bound.make_inputs, seed))
    floors: list[float] = []
    while len(floors) < FLOOR_REPEATS:
        timing = measure_metric(bound, metric, replace(rule, max_replicates=rule.min_replicates))
        ratio = speedup(timing)
        bound.verify()
        floors.append(max(ratio.high, 1 / ratio.low) - 1)
        if floors[0] <= QUIET_FLOOR:
            break
    return statistics.median(floors)
