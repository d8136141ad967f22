"""Measures claims, from the agreement of their arms to their judgement."""

import math
import os
import random
import statistics
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from pytest_aiperf.build.nvcc import Build
from pytest_aiperf.correctness import argument_effects
from pytest_aiperf.correctness.argument_effects import ArgumentEffects
from pytest_aiperf.device.device import Device, HostDevice
from pytest_aiperf.errors import (
    AiperfError,
    ClaimNotMet,
    InvalidMeasurement,
    NeedsGpu,
    UsageError,
    WrongResult,
    is_out_of_memory,
)
from pytest_aiperf.machine import gpu_memory
from pytest_aiperf.machine.distributed import RankGroup
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.model import Error, Expectation, Gpu, Metric, Outcome, Result, Timing
from pytest_aiperf.rules import evidence, roofline, validity, verdict
from pytest_aiperf.rules.stats import speedup

from . import arm_errors, explanation
from .bound_claim import BoundClaim, bind
from .buffers import PREBUILT_SHARE, input_sets
from .claim import Claim, Progress
from .explanation import Inspected, Inspection
from .ladder import Ladder, identity
from .replicates import Measurement, measure_metric
from .scores import score_of
from .stopping_rule import QUICK, STANDARD, StoppingRule
from .torch_compile import uncompiled

T = TypeVar("T")

QUIET_FLOOR = 0.1
"""If the first measurement of the noise floor exceeds this, it is repeated, so that one stalled
block does not raise the floor for all claims of the session."""
LONG_CALL_BYTES = 3 << 30
"""If a set of inputs is larger than this, one call is expected to take as long as a block. The
block then holds one call and needs only one set."""
FLOOR_REPEATS = 3
"""Number of measurements of a noise floor above QUIET_FLOOR. Their median counts: a single stall
does not raise it, but permanent noise does."""


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
    draw: random.Random | None = None
    """Draws the orders of arms and the seeds of timed inputs; by default seeded by the record."""
    builds: Sequence[Build] = ()  #: CUDA builds that the claim uses.
    noise_floor: float = math.inf
    """The session's :func:`noise_floor`; infinite until measured: then no arm counts as faster."""
    ceilings: Mapping[str, float] = field(default_factory=dict)
    """The device's roofline limits by name; only claims with ``work`` need them."""
    has_all_memory: bool = False  #: Whether this process has reserved all memory of the GPU.
    step: Callable[[], object] = lambda: None
    """Called before each part of a measurement; it starts the claim's deadline anew."""

    def share(self, step: Callable[[], T]) -> T:
        """Run a step under the shared lock; if it runs out of memory, under the exclusive lock."""
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

    If ``device`` is None, the arms cannot run here: only their builds and ``work`` are checked, and
    that the arms take the inputs. Inputs that cannot be built without a GPU become a note.
    """
    agreement: tuple[Error, ...] = ()
    notes: tuple[str, ...] = ()
    if device is None:
        bound = BoundClaim(claim, HostDevice(), 1, full=False)
        try:
            args = bound.make_inputs(bound.seed).args
        except Exception as why:
            is_mistake = isinstance(why, UsageError) and not isinstance(why, NeedsGpu)
            if is_mistake and not arm_errors.needs_gpu(why):
                raise  # the same happens on a GPU
            first_line = str(why).strip().partition("\n")[0] or type(why).__name__
            notes = (f"inputs() fails without a GPU, so no call is checked: {first_line}",)
        else:
            for arm in claim.arms:
                bound.check_arguments(arm, args)
            bound.compute_work()
        explanation.check(claim, builds, None, archs)
    else:
        with uncompiled():
            bound = BoundClaim(claim, device, 1, full=False)
            bound.compute_work()
            agreement = bound.check_agreement()
            for name in claim.arms if Metric.SCORE in claim.metrics else ():
                inputs = bound.make_inputs(bound.seed)
                score_of(bind(bound.prepare(name, inputs), inputs.args)())
            explanation.check(claim, builds, bound, archs)
    passed = Outcome.PASSED
    return replace(record, against=claim.against, outcome=passed, agreement=agreement, notes=notes)


def measure_claim(claim: Claim, context: ClaimContext) -> tuple[Result, Exception | None]:
    """Measure a claim and judge it; return its record and the error to raise."""
    return measure_ladder([(claim, context)])[0]


def measure_ladder(
    claims: Sequence[tuple[Claim, ClaimContext]],
) -> list[tuple[Result, Exception | None]]:
    """Measure claims, and judge each; return each one's record and the error to raise.

    Claims that have the same inputs, reference, metrics and cache state are timed in the same
    rounds. All contexts share one device and one lock. A claim that fails does not affect the
    others, unless its error has broken the CUDA context: then this function raises that error.
    """
    lock = claims[0][1].lock
    started = time.monotonic() - lock.waited_s
    trials = [_Trial(*each, alone=len(claims) == 1) for each in claims]
    effects: dict[Hashable, ArgumentEffects] = {}
    with _reserved_memory(trials):
        for trial in trials:
            trial.run(partial(_learn, trial, effects))
        groups = _groups(trials)
        for group in groups:
            _agree(group)
            if ready := [trial for trial in group if trial.error is None]:
                _time(ready, is_last=group is groups[-1])
        _explain([trial for trial in trials if trial.error is None], lock)
    seconds = (time.monotonic() - lock.waited_s - started) / len(trials)
    return [(replace(trial.ended(), seconds=seconds), trial.error) for trial in trials]


class _Trial:
    """One claim while it is measured: its record so far, and its error."""

    def __init__(self, claim: Claim, context: ClaimContext, *, alone: bool) -> None:
        self.bound = BoundClaim(
            claim,
            context.device,
            context.record.seed,
            full=True,
            progress=context.progress,
            draw=context.draw,
            rung=context.record.claim.partition("[")[2].removesuffix("]"),
        )
        self.context = context
        self.alone = alone
        self.error: Exception | None = None
        self.inspected: Mapping[str, Inspected] | None = None
        """Observations of the claim's arms; None until they were inspected."""
        self.record = replace(
            context.record,
            against=claim.against,
            code=context.code,
            gpu=context.device.gpu,
            kernels=tuple(kernel for build in context.builds for kernel in build.kernels),
        )

    def run(self, step: Callable[[], object]) -> None:
        """Run a step, unless an earlier one has failed; keep its error."""
        if self.error is None:
            self.context.step()
            try:
                step()
            except Exception as why:  # noqa: BLE001  the claim's test raises it
                self.keep(why)

    def keep(self, error: Exception) -> None:
        self.error = error
        if is_out_of_memory(error):  # the error's traceback would keep the buffers alive
            traceback.clear_frames(error.__traceback__)
            self.context.device.release()
        if self.alone:
            return
        if self.context.device.ranks.count > 1 and not isinstance(error, ClaimNotMet):
            raise error  # another rank may not have failed, and would wait for this one
        # raises if the error has broken the CUDA context, which the other claims need
        self.context.device.synchronize()

    def note(self, text: str) -> None:
        self.record = replace(self.record, notes=(*self.record.notes, text))

    def ended(self) -> Result:
        return self.record if self.error is None else failed(self.record, self.error)


def unpredictable(ranks: RankGroup) -> random.Random:
    """Return a generator that no arm can predict, and that draws the same numbers in all ranks."""
    system = random.SystemRandom()
    if ranks.count == 1:
        return system
    return random.Random(int(ranks.max(float(system.getrandbits(52)))))  # noqa: S311  not alone


def refuse_debug_environment() -> None:
    """Refuse environment variables that make every timing meaningless."""
    if problem := validity.environment_problem(os.environ):
        raise InvalidMeasurement(problem)


@contextmanager
def _reserved_memory(trials: Sequence[_Trial]) -> Iterator[None]:
    """Reserve the GPU memory that claims need; other claims wait if theirs does not fit as well."""
    context, gpu = trials[0].context, trials[0].context.device.gpu
    # ranks must not wait: the process that started them holds the GPUs' locks
    unknown = gpu is None or not gpu.memory_bytes
    if unknown or context.has_all_memory or context.device.ranks.count > 1:
        yield
        return
    assert gpu is not None
    limit = gpu_memory.limit(gpu)
    arms = len(Ladder([trial.bound for trial in trials]).arms)
    needs = 0
    for trial in trials:
        try:
            with context.lock.shared():
                needs = max(needs, _footprint(trial.bound, gpu, arms))
        except Exception as why:  # noqa: BLE001  the claim's test raises it
            if is_out_of_memory(why):
                needs = limit  # wait until no other claim has reserved any
            else:
                trial.keep(why)
    context.device.release()
    with gpu_memory.reservation(
        gpu.uuid,
        min(needs, limit),
        limit,
        free=context.device.free_bytes,
        folder=context.lock.folder,
        on_wait=context.lock.on_wait,
        on_acquired=context.lock.on_acquired,
    ) as waited_s:
        context.lock.waited_s += waited_s
        yield


def _footprint(bound: BoundClaim, gpu: Gpu, arms: int) -> int:
    """Return the bytes of GPU memory that a claim needs at most, with replicates built ahead."""
    size = bound.set_bytes
    sets = 1 if size > LONG_CALL_BYTES else input_sets(gpu, bound.claim.cache, size)
    needed = gpu_memory.footprint(size, arms, sets, bound.kept_bytes)
    replicate = max(1, arms * sets * size)
    replicates = min(STANDARD.min_replicates, int(PREBUILT_SHARE * gpu.memory_bytes / replicate))
    return needed + 2 * max(0, replicates - 1) * replicate


def _learn(trial: _Trial, effects: dict[Hashable, ArgumentEffects]) -> None:
    """Learn the effects of a claim's baseline; keep them for other claims."""
    refuse_debug_environment()
    bound, context = trial.bound, trial.context
    trial.record = replace(trial.record, work=context.share(bound.compute_work))
    key = identity(bound.claim.arms["baseline"]), identity(bound.claim.inputs)
    bound.learn_effects(context.share, effects.get(key))
    effects[key] = bound.effects


def _agree(trials: Sequence[_Trial]) -> None:
    """Check the agreement of claims' arms together; if an arm fails, of each claim by itself."""
    context = trials[0].context

    def share(step: Callable[[], T]) -> T:
        context.step()
        return context.share(step)

    if len(trials) > 1 and context.device.ranks.count == 1:
        ladder = Ladder([trial.bound for trial in trials])
        if ladder.check_agreement(share):
            for trial, rung in zip(trials, ladder.rungs, strict=True):
                trial.record = replace(trial.record, agreement=rung.agreement)
                if rung.error is not None:
                    trial.keep(rung.error)
            return
        context.device.synchronize()  # raises if the error has broken the CUDA context
        context.device.release()
    for trial in trials:
        trial.run(partial(_agree_alone, trial))


def _agree_alone(trial: _Trial) -> None:
    errors = trial.bound.check_agreement(trial.context.share)
    trial.record = replace(trial.record, agreement=errors)


def _groups(trials: Sequence[_Trial]) -> list[list[_Trial]]:
    """Group the claims that can be timed together; note which cannot."""
    ready = [trial for trial in trials if trial.error is None]
    groups: dict[Hashable, list[_Trial]] = {}
    for trial in ready:
        claim = trial.bound.claim
        same = identity(claim.inputs), identity(claim.reference), claim.metrics, claim.cache
        groups.setdefault((same, trial.bound.effects), []).append(trial)
    for group in groups.values() if len(groups) > 1 else ():
        for trial in group:
            trial.note(
                "not timed together with all rungs: others differ in their inputs, their "
                "reference, the metric, cache=, or the arguments that they change"
            )
    return list(groups.values())


def _time(trials: Sequence[_Trial], *, is_last: bool) -> None:
    """Time claims together; if that fails, time each by itself.

    If ``is_last``, nothing is timed after them, so that their arms may be inspected under the lock
    under which they were timed.
    """
    ladder, context = Ladder([trial.bound for trial in trials]), trials[0].context
    context.step()
    failure: str | None = None
    inspect = partial(_inspect, trials, ladder) if is_last else None
    try:
        timings, notes, unchecked = _measure(trials, ladder, inspect)
    except Exception as why:  # noqa: BLE001  the claim's test raises it
        if len(trials) == 1 or trials[0].inspected is not None:  # a tracer would slow calls down
            for trial in trials:
                trial.keep(why)
            return
        failure = str(why)
    if failure is not None:  # not in the handler, where the error would keep the buffers
        context.device.synchronize()  # raises if the error has broken the CUDA context
        del ladder, inspect
        context.device.release()
        for trial in trials:
            trial.note(f"timed by itself, because the ladder could not be timed: {failure}")
            _time([trial], is_last=is_last and trial is trials[-1])
        return
    for trial, rung in zip(trials, ladder.rungs, strict=True):
        judged, *also = (ladder.timing_of(rung, timing) for timing in timings)
        mine = (*unchecked, *sorted(rung.bound.unchecked))
        trial.error = rung.error
        trial.record = replace(
            _timed(trial, judged),
            also=tuple(also),
            notes=(*trial.record.notes, *notes, *(f"not checked: {u}" for u in mine)),
            unchecked=(*trial.record.unchecked, *mine),
        )


def _timed(trial: _Trial, judged: Timing) -> Result:
    """Return a claim's record with the timing of its judged metric and the ratios."""
    is_time = judged.metric.is_time
    return replace(
        trial.record,
        timing=judged,
        floor=trial.context.noise_floor if is_time else 0.0,
        speedup=speedup(judged),
        library=speedup(judged, of="library") if "library" in judged.calls else None,
        first=speedup(judged, of="first") if "first" in judged.calls else None,
    )


def _is_undecided(
    trials: Sequence[_Trial], ladder: Ladder, earlier: Sequence[Timing], timing: Timing
) -> bool:
    """Whether a timing leaves it open that a requirement of one of the claims is met.

    ``earlier`` has the timings of the metrics before it. The first of all is judged.
    """
    for trial, rung in zip(trials, ladder.rungs, strict=True):
        judged, *also = (ladder.timing_of(rung, t) for t in (*earlier, timing))
        record = replace(_timed(trial, judged), also=tuple(also))
        seconds = roofline.call_seconds(record, ["optimized"])
        limits = roofline.limits_of(record, seconds, trial.context.ceilings)
        expectation = trial.context.expectation
        if not limits:  # the share is that of a metric that follows
            require = replace(expectation.require, share=None)
            expectation = replace(expectation, require=require)
        judgement = _judgement(replace(record, limits=limits), expectation)
        if judgement.is_undecided and rung.error is None:
            return True
    return False


def _measure(
    trials: Sequence[_Trial],
    ladder: Ladder,
    inspect: Callable[[Timing, Metric], object] | None,
) -> tuple[list[Timing], list[str], list[str]]:
    """Time every metric and verify the timed outputs.

    Return the timings, notes, and what could not be checked of all rungs together. ``inspect`` is
    called with the judged timing and the last metric, once all are measured, and still under the
    lock of that metric.
    """
    timings: list[Timing] = []
    notes: list[str] = []
    unchecked: list[str] = []
    metrics, context = ladder.bound.claim.metrics, trials[0].context
    with_share = any(t.context.expectation.require.share is not None for t in trials)
    for metric in metrics:
        # the first metric is judged, and so is the first in seconds if a share of the limit is
        # required; a quick measurement suffices for the others
        is_share = with_share and metric.is_time and all(t.unit != "s" for t in timings)
        rule = context.rule if is_share or not timings else QUICK
        is_undecided = partial(_is_undecided, trials, ladder, tuple(timings))
        measurement = Measurement(ladder, metric, rule, is_undecided)
        try:
            while measurement.timing is None:
                context.share(measurement.prepare)
                if not ladder.bound.depends_on_load(metric):
                    context.share(measurement.measure)
                    continue
                with _exclusive(context.lock, metric):
                    try:
                        measurement.measure()
                    finally:
                        context.device.release()  # a later release would disturb another claim
                    timing, is_last = measurement.timing, metric is metrics[-1]
                    if timing and is_last and inspect and measurement.sampler.builds_quickly:
                        inspect(timings[0] if timings else timing, metric)
            timings.append(measurement.timing)
        except InvalidMeasurement as why:
            if not timings:
                context.share(ladder.verify)  # a wrong result explains more than this error
                ladder.raise_error()
                raise
            notes.append(f"{metric} is not shown: {why}")
            continue  # it may have ended before there was anything to check
        context.share(measurement.finish)
        unchecked.extend(measurement.sampler.unchecked())
    context.progress("verifying")
    context.share(ladder.verify)
    unchecked += ladder.not_compared()
    return timings, notes, unchecked


def _inspect(trials: Sequence[_Trial], ladder: Ladder, judged: Timing, metric: Metric) -> None:
    """Inspect the arms of timed claims, under the lock of a metric.

    Preparing the arms under the lock costs all claims less than waiting for it a second time.
    """
    timed = [
        (trial.bound, replace(trial.record, timing=ladder.timing_of(rung, judged)))
        for trial, rung in zip(trials, ladder.rungs, strict=True)
    ]
    inspection = Inspection(timed, trials[0].context.step)
    if inspection.uses_host and not metric.needs_quiet_host:
        return
    inspection.prepare()
    inspection.run()
    for trial, arms in zip(trials, inspection.arms, strict=True):
        trial.inspected = arms


def _exclusive(lock: GpuLock, metric: Metric) -> AbstractContextManager[None]:
    return lock.exclusive_host() if metric.needs_quiet_host else lock.exclusive_gpu()


def _explain(trials: Sequence[_Trial], lock: GpuLock) -> None:
    """Explain the speedups of timed claims and judge each."""
    if not trials:
        return
    context = trials[0].context
    context.progress("reading evidence")
    rest = [trial for trial in trials if trial.inspected is None]
    inspection = Inspection([(trial.bound, trial.record) for trial in rest], context.step)
    inspection.locked(lock)
    for trial, arms in zip(rest, inspection.arms, strict=True):
        trial.inspected = arms
    for trial in trials:
        trial.run(partial(_explain_one, trial))


def _explain_one(trial: _Trial) -> None:
    context = trial.context
    assert trial.inspected is not None
    trial.record = explanation.explain(
        trial.bound,
        trial.record,
        context.builds,
        context.ceilings,
        context.lock,
        inspected=trial.inspected,
    )
    explanation.refuse_impossible_times(trial.record)
    trial.record = _judge(trial.record, context)
    if trial.record.outcome is not Outcome.PASSED:
        raise ClaimNotMet(trial.record.message)


def _judge(record: Result, context: ClaimContext) -> Result:
    """Judge the speedup and the evidence."""
    assert record.speedup is not None
    judgement = _judgement(record, context.expectation)
    broken = evidence.broken(record.evidence)
    reasons = [broken, judgement.why]
    if judgement.is_undecided and evidence.depends_on_load(record.evidence):
        reasons.reverse()  # a busy host may be the cause of both: the message begins "undecided"
    message = "; ".join(filter(None, (*reasons, *judgement.notes)))
    if judgement.advice:  # in a line of its own: summaries and notes show the first line only
        message = f"{message}\n{judgement.advice}"
    return replace(
        record,
        expectation=context.expectation,
        verdict=verdict.verdict(record.speedup, record.floor),
        outcome=Outcome.PASSED if judgement.holds and not broken else Outcome.FAILED,
        message=message,
    )


def _judgement(record: Result, expectation: Expectation) -> verdict.Judgement:
    """Judge the figures of a timed claim."""
    assert record.speedup is not None
    return verdict.judge(
        record.speedup,
        record.floor,
        expectation,
        library=record.library,
        share=roofline.optimized_share(record),
        # deterministic algorithms are other kernels than those of the recorded run
        compare_recorded=not (
            verdict.depends_on_host(record) or "reproducible" in record.conditions
        ),
        quick=record.quick,
    )


def failed(record: Result, error: Exception) -> Result:
    """Return the record of a claim that ended with an error."""
    outcome = Outcome.ERROR
    message = str(error)
    if not isinstance(error, AiperfError):
        message = f"{type(error).__name__}: {message}"
    if isinstance(error, (WrongResult, ClaimNotMet)):
        outcome = Outcome.FAILED
    elif isinstance(error, InvalidMeasurement):
        outcome = Outcome.INVALID
    return replace(record, outcome=outcome, message=message.strip()[:2000])


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
    bound.effects = argument_effects.infer_effects(lambda _: arm, partial(bound.make_inputs, seed))
    ladder = Ladder([bound])
    floors: list[float] = []
    while len(floors) < FLOOR_REPEATS:
        timing = measure_metric(ladder, metric, replace(rule, max_replicates=rule.min_replicates))
        ratio = speedup(timing)
        ladder.verify()
        ladder.raise_error()
        floors.append(max(ratio.high, 1 / ratio.low) - 1)
        if floors[0] <= QUIET_FLOOR:
            break
    return statistics.median(floors)
