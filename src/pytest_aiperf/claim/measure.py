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
    """Everything that measuring a claim takes from its session."""

    record: Result
    """The claim's record so far: its identity, its seed and the versions of its stack."""
    device: Device
    """Device on which the arms are timed."""
    lock: GpuLock
    """Lock of the claim's GPUs and of the host; not held when the claim starts."""
    rule: StoppingRule
    """How precisely the judged metric is measured."""
    progress: Progress
    """Callback that reports phases and figures to the live display."""
    noise_floor: float
    """Relative difference that an A/A comparison shows in this session (:func:`noise_floor`)."""
    ceilings: Mapping[str, float]
    """This device's limits by name; needed only by claims with ``work``."""
    expectation: Expectation
    """Entry of expectations.yaml for this claim, GPU and code."""
    code: str
    """Hash of the claim's source code (:func:`source_hash.identity`)."""
    builds: Sequence[Build] = ()
    """CUDA builds that the claim uses."""


def check_claim(
    claim: Claim,
    device: Device | None,
    record: Result,
    *,
    builds: Sequence[Build] = (),
    archs: Sequence[str] = (),
) -> Result:
    """Check agreement at check sizes, and the evidence that needs no GPU; return the record.

    Without a ``device`` the arms cannot run here, and only their builds are checked.
    """
    agreement: tuple[Error, ...] = ()
    if device is None:
        explanation.check(claim, builds, None, archs)
    else:
        with uncompiled():
            trial = Trial(claim, device, 1, full=False, say=lambda *_a, **_k: None)
            agreement = trial.agreement()
            explanation.check(claim, builds, trial, archs)
    return replace(record, against=claim.against, outcome=Outcome.PASSED, agreement=agreement)


def failed(record: Result, why: AiperfError) -> Result:
    """Return the record of a claim that ended with an error."""
    outcomes = {WrongResult: Outcome.FAILED, InvalidMeasurement: Outcome.INVALID}
    return replace(record, outcome=outcomes.get(type(why), Outcome.ERROR), message=str(why))


def measure_claim(claim: Claim, case: ClaimContext) -> tuple[Result, AiperfError | None]:
    """Measure a claim and judge it; return its record and the error to raise."""
    started = time.monotonic() - case.lock.waited
    result = replace(
        case.record,
        against=claim.against,
        code=case.code,
        gpu=case.device.gpu,
        kernels=tuple(kernel for made in case.builds for kernel in made.kernels),
    )
    problem: AiperfError | None = None
    try:
        _refuse_debug_environment()
        trial = Trial(claim, case.device, result.seed, full=True, say=case.progress)
        result = _measured(trial, case, result)
        case.progress("explaining")
        with case.lock.shared():
            result = explanation.explain(trial, result, case.builds, case.ceilings)
        explanation.hold_limits(result)
    except AiperfError as why:
        result, problem = failed(result, why), why
    else:
        result = _judged(result, case)
        if result.outcome is not Outcome.PASSED:
            problem = ClaimNotMet(result.message)
    spent = time.monotonic() - case.lock.waited - started
    return replace(result, seconds=spent), problem


def _refuse_debug_environment() -> None:
    if problem := validity.environment_problem(os.environ):
        raise InvalidMeasurement(problem)


def _measured(trial: Trial, case: ClaimContext, result: Result) -> Result:
    claim = trial.claim

    def prepare(turn: Turn) -> tuple[Work | None, tuple[Error, ...]]:
        with turn():
            trial.note_settings()
            args = trial.make(result.seed)
            work = claim.work(*args) if claim.work else None
            del args
            trial.hold_settings()
            case.device.synchronize()  # or what makes inputs would still run in another's turn
        return work, trial.agreement(turn)

    work, agreement = _uncrowded(case, prepare)
    timings: list[Timing] = []
    notes: list[str] = []
    for metric in claim.metrics:
        alone = case.lock.exclusive_host if metric is Metric.WALL else case.lock.exclusive_gpu
        # what is only shown beside the judged figure need not be known as well
        measurement = Measurement(trial, metric, QUICK if timings else case.rule)
        _uncrowded(case, partial(_in_turn, measurement.prepare))
        with alone():
            try:
                timings.append(measurement.measure())
            except InvalidMeasurement as why:
                if not timings:
                    trial.verify()  # a wrong result says more than a disturbed round
                    raise
                notes.append(f"{metric} is not shown: {why}")
            case.device.release()  # while alone: freeing memory would show in the next claim
        _uncrowded(case, partial(_in_turn, measurement.challenge))
    case.progress("verifying")
    _uncrowded(case, partial(_in_turn, trial.verify))
    timing = timings[0]
    result = replace(result, agreement=agreement, work=work, timing=timing, also=tuple(timings[1:]))
    return replace(
        result,
        notes=tuple(notes),
        floor=case.noise_floor if timing.metric in (Metric.DEVICE, Metric.WALL) else 0.0,
        speedup=speedup(timing),
        library=speedup(timing, of="library") if "library" in claim.arms else None,
    )


def _in_turn(step: Callable[[], None], turn: Turn) -> None:
    with turn():
        step()


def _uncrowded(case: ClaimContext, step: Callable[[Turn], T]) -> T:
    """Do a step beside others, and where they leave too little memory for it, once more alone."""
    try:
        return step(case.lock.shared)
    except Exception as why:
        if not is_out_of_memory(why):
            raise
    case.device.release()
    with case.lock.exclusive_gpu():  # alone it is the claim's own fault
        return step(nullcontext)


def _judged(result: Result, case: ClaimContext) -> Result:
    assert result.speedup is not None
    assert result.timing is not None
    held = verdict.judge(
        result.speedup,
        result.floor,
        case.expectation,
        library=result.library,
        share=explanation.least_share(result),
        compare_recorded=not verdict.is_hosts(result),
    )
    unproven = evidence.broken(result.evidence)
    return replace(
        result,
        expectation=case.expectation,
        verdict=verdict.verdict(result.speedup, result.floor),
        outcome=Outcome.PASSED if held.holds and not unproven else Outcome.FAILED,
        message="; ".join(filter(None, (unproven, held.why, *held.notes))),
    )


def noise_floor(device: Device, seed: int, rule: StoppingRule, progress: Progress) -> float:
    """Return the relative difference that an arm shows when it is compared with itself.

    Call it while you hold the exclusive lock: it times the device.
    """
    _refuse_debug_environment()
    inputs, arm = device.noise_probe()
    claim = Claim({"baseline": arm, "optimized": arm}, inputs, arm)
    metric = Metric.WALL if device.gpu is None else Metric.DEVICE
    trial = Trial(replace(claim, metrics=(metric,)), device, seed, full=True, say=progress)
    trial.contract = correctness.infer_effects(arm, lambda: trial.make(seed))
    found: list[float] = []
    while len(found) < FLOORS:
        ratio = speedup(measure(trial, metric, replace(rule, max_replicates=rule.min_replicates)))
        trial.verify()
        found.append(max(ratio.high, 1 / ratio.low) - 1)
        if found[0] <= CALM:
            break
    return statistics.median(found)
