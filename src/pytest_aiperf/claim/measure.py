"""One claim, whole: what it says, how it is measured under a lease, what comes of it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

from pytest_aiperf.build.nvcc import Build
from pytest_aiperf.device.device import Device
from pytest_aiperf.errors import (
    AiperfError,
    ClaimNotMet,
    InvalidMeasurement,
    UsageError,
    WrongResult,
    is_out_of_memory,
)
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.model import (
    Against,
    Bench,
    Error,
    Evidence,
    Expectation,
    Metric,
    Outcome,
    Prepared,
    Result,
    Timing,
    Work,
)
from pytest_aiperf.rules import evidence, validity, verdict

from . import correctness, explanation
from .inputs import Arm, Claim, Progress, Trial, Turn
from .replicates import Measurement, measure, speedup
from .stopping_rule import QUICK, StoppingRule
from .torch_compile import uncompiled

T = TypeVar("T")

CALM, FLOORS = 0.1, 3
"""A noise floor above this is measured so many times, and their median counts.

All of a session's claims are held to it: one block that was held up must not decide for them, and a
host that is as noisy as this shall."""


def claim_of(
    *,
    baseline: Arm,
    optimized: Arm,
    inputs: Callable[[Bench], object],
    reference: Callable[..., object],
    work: Callable[..., Work] | None,
    library: Arm | None,
    metric: str | Sequence[str],
    against: str,
    cache: str,
    precision: str | None,
    evidence: Sequence[Evidence] = (),
) -> Claim:
    """Check the words of a claim; raise Misuse with the known ones."""
    arms = {"baseline": baseline, "optimized": optimized, "library": library}
    arms = {name: arm for name, arm in arms.items() if arm is not None}
    for name, value in {**arms, "inputs": inputs, "reference": reference}.items():
        if not callable(value) and not isinstance(value, Prepared):
            raise UsageError(f"compare({name}=...) needs a callable, not {value!r}")
    metrics = (metric,) if isinstance(metric, str) else tuple(metric)
    for word, kind, given in (
        *(("metric", Metric, m) for m in metrics),
        ("against", Against, against),
    ):
        if given not in list(kind):
            raise UsageError(f"compare({word}={given!r}): known are {', '.join(kind)}")
    for piece in evidence:
        if not isinstance(piece, Evidence):
            raise UsageError(f"compare(evidence=[...]) takes what evidence.* gives, not {piece!r}")
        if piece.per == "work" and work is None:
            raise UsageError(f"evidence about {piece.of or piece.kind} for each byte needs work=")
    if cache not in ("cold", "warm"):
        raise UsageError(f"compare(cache={cache!r}): known are cold, warm")
    return Claim(
        cast("Mapping[str, Arm]", arms),
        inputs,
        reference,
        work,
        tuple(Metric(m) for m in metrics),
        Against(against),
        cache,
        precision,
        tuple(evidence),
    )


@dataclass(frozen=True, slots=True)
class ClaimContext:
    """Where a claim stands in the session; the fixture binds it."""

    blank: Result
    clock: Device
    lease: GpuLock
    plan: StoppingRule
    say: Progress
    floor: Callable[[Device], float]
    expected: Callable[[str], Expectation]
    code: Callable[[], str]
    builds: Sequence[Build] = ()
    ceilings: Callable[[Device], Mapping[str, float]] = lambda _: {}


def check(
    claim: Claim,
    clock: Device | None,
    *,
    builds: Sequence[Build] = (),
    archs: Sequence[str] = (),
) -> tuple[Error, ...]:
    """Agreement at small sizes, and what evidence can be looked at; nothing is timed.

    Without a clock the arms cannot run here, and only their builds are looked at.
    """
    if clock is None:
        explanation.check(claim, builds, None, archs)
        return ()
    with uncompiled():
        trial = Trial(claim, clock, 1, full=False, say=lambda *_a, **_k: None)
        errors = trial.agreement()
        explanation.check(claim, builds, trial, archs)
    return errors


def run(claim: Claim, case: ClaimContext) -> tuple[Result, AiperfError | None]:
    """Measure a claim and judge it: its record, and what is to be raised of it."""
    started = time.monotonic() - case.lease.waited
    result = replace(
        case.blank,
        against=claim.against,
        code=case.code(),
        gpu=case.clock.gpu,
        kernels=tuple(kernel for made in case.builds for kernel in made.kernels),
    )
    problem: AiperfError | None = None
    try:
        trial = Trial(claim, case.clock, result.seed, full=True, say=case.say)
        result, ceilings = _measured(trial, case, result)
        case.say("explaining")
        with case.lease.shared():
            result = explanation.explain(trial, result, case.builds, ceilings)
        explanation.hold_limits(result)
    except WrongResult as why:
        result, problem = replace(result, outcome=Outcome.FAILED, message=str(why)), why
    except InvalidMeasurement as why:
        result, problem = replace(result, outcome=Outcome.INVALID, message=str(why)), why
    except AiperfError as why:
        result, problem = replace(result, outcome=Outcome.ERROR, message=str(why)), why
    else:
        result = _judged(result, case)
        if result.outcome is not Outcome.PASSED:
            problem = ClaimNotMet(result.message)
    spent = time.monotonic() - case.lease.waited - started
    return replace(result, seconds=spent), problem


def _measured(
    trial: Trial, case: ClaimContext, result: Result
) -> tuple[Result, Mapping[str, float]]:
    claim = trial.claim
    problem = validity.environment_problem(os.environ)
    if problem:
        raise InvalidMeasurement(problem)

    def prepare(turn: Turn) -> tuple[Work | None, tuple[Error, ...]]:
        with turn():
            trial.note_settings()
            args = trial.make(result.seed)
            work = claim.work(*args) if claim.work else None
            del args
            trial.hold_settings()
            case.clock.synchronize()  # or what makes inputs would still run in another's turn
        return work, trial.agreement(turn)

    work, agreement = _uncrowded(case, prepare)
    timings: list[Timing] = []
    notes: list[str] = []
    for metric in claim.metrics:
        alone = case.lease.exclusive_host if metric is Metric.WALL else case.lease.exclusive_gpu
        # what is only shown beside the judged figure need not be known as well
        measurement = Measurement(trial, metric, QUICK if timings else case.plan)
        _uncrowded(case, partial(_in_turn, measurement.prepare))
        with alone():
            floor = case.floor(case.clock)
            ceilings = case.ceilings(case.clock) if claim.work else {}
            try:
                timings.append(measurement.measure())
            except InvalidMeasurement as why:
                if not timings:
                    trial.verify()  # a wrong result says more than a disturbed round
                    raise
                notes.append(f"{metric} is not shown: {why}")
            case.clock.release()  # while alone: freeing memory would show in the next claim
        _uncrowded(case, partial(_in_turn, measurement.challenge))
    case.say("verifying")
    _uncrowded(case, partial(_in_turn, trial.verify))
    timing = timings[0]
    result = replace(result, agreement=agreement, work=work, timing=timing, also=tuple(timings[1:]))
    result = replace(
        result,
        notes=tuple(notes),
        floor=floor if timing.metric in (Metric.DEVICE, Metric.WALL) else 0.0,
        speedup=speedup(timing),
        library=speedup(timing, of="library") if "library" in claim.arms else None,
    )
    return result, ceilings


def _in_turn(step: Callable[[], None], turn: Turn) -> None:
    with turn():
        step()


def _uncrowded(case: ClaimContext, step: Callable[[Turn], T]) -> T:
    """Do a step beside others, and where they leave too little memory for it, once more alone."""
    try:
        return step(case.lease.shared)
    except Exception as why:
        if not is_out_of_memory(why):
            raise
    case.clock.release()
    with case.lease.exclusive_gpu():  # alone it is the claim's own fault
        return step(nullcontext)


def _judged(result: Result, case: ClaimContext) -> Result:
    assert result.speedup is not None
    assert result.timing is not None
    expectation = case.expected(result.code)
    held = verdict.judge(
        result.speedup,
        result.floor,
        expectation,
        library=result.library,
        share=explanation.least_share(result),
        compare_recorded=not verdict.is_hosts(result),
    )
    unproven = evidence.broken(result.evidence)
    return replace(
        result,
        expectation=expectation,
        verdict=verdict.verdict(result.speedup, result.floor),
        outcome=Outcome.PASSED if held.holds and not unproven else Outcome.FAILED,
        message="; ".join(filter(None, (unproven, held.why, *held.notes))),
    )


def noise_floor(clock: Device, seed: int, plan: StoppingRule, say: Progress) -> float:
    """Compare an arm with itself: half the noise of this session is at least this large."""
    inputs, arm = clock.identity()
    claim = Claim({"baseline": arm, "optimized": arm}, inputs, arm)
    metric = Metric.WALL if clock.gpu is None else Metric.DEVICE
    trial = Trial(replace(claim, metrics=(metric,)), clock, seed, full=True, say=say)
    trial.contract = correctness.infer_effects(arm, lambda: trial.make(seed))
    found: list[float] = []
    while len(found) < FLOORS:
        ratio = speedup(measure(trial, metric, replace(plan, max_replicates=plan.min_replicates)))
        trial.verify()
        found.append(max(ratio.high, 1 / ratio.low) - 1)
        if found[0] <= CALM:
            break
    return statistics.median(found)
