"""Measure a comparison outside pytest."""

import functools
import inspect
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from pytest_aiperf.claim.claim import Arm, Claim, Progress, claim_of, refuse_gpu_figures
from pytest_aiperf.claim.measure import ClaimContext, unpredictable
from pytest_aiperf.claim.stopping_rule import QUICK, STANDARD
from pytest_aiperf.device.device import Device
from pytest_aiperf.errors import AiperfError, ArmError, UsageError
from pytest_aiperf.machine import nvml
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.model import (
    AgainstName,
    Bench,
    CacheName,
    Evidence,
    Expectation,
    Gpu,
    MetricName,
    Outcome,
    PrecisionName,
    Prepared,
    Result,
    Work,
)
from pytest_aiperf.records.journal import new_run_id
from pytest_aiperf.sources import source_hash
from pytest_aiperf.text import nearest

from .cuda_machine import CudaMachine, Machine
from .figures import SharedFigures
from .fixtures import refuse_identical_arms
from .session import Session, stack_of

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def _suggesting(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Make a function that takes a claim's arguments suggest the nearest name for a wrong one."""
    known = {**inspect.signature(claim_of).parameters, **inspect.signature(function).parameters}

    @functools.wraps(function)
    def call(*args: Parameters.args, **words: Parameters.kwargs) -> Returned:
        if wrong := [word for word in words if word not in known]:
            near = nearest(wrong[0], known)
            raise UsageError(f"{function.__name__}() has no keyword {wrong[0]!r}{near}")
        return function(*args, **words)

    return call


def report(phase: str, **figures: object) -> None:
    """Report a phase to the claim's session if this process runs a claim.

    The phase ``waiting`` pauses the claim's deadline until the next report.
    """
    if Session.current is not None:
        kind = "waiting" if phase == "waiting" else "working"
        Session.current.send(kind, phase=phase, **figures)


@_suggesting
def measure(
    *,
    baseline: Arm,
    optimized: Arm,
    inputs: Callable[[Bench], object],
    reference: Callable[..., object],
    work: Callable[..., Work] | None = None,
    library: Arm | None = None,
    metric: MetricName | Sequence[MetricName] = "device",
    against: AgainstName = "idiomatic",
    cache: CacheName = "cold",
    precision: PrecisionName | None = None,
    evidence: Evidence | Sequence[Evidence] = (),
    quick: bool = False,
    device: Literal["cuda", "cpu"] | None = None,
    seed: int | None = None,
) -> Result:
    """Measure whether ``optimized`` is faster than ``baseline``, in a script or a notebook.

    The arms are checked, timed and judged as by the ``compare`` fixture, with the same arguments.
    They run in this process, so a crash of an arm ends it. Measuring waits for other processes that
    use pytest-aiperf on the same GPU. The first call in a process also measures the noise floor
    and, if ``work`` is given, the GPU's limits that are not cached.

    .. code-block:: python

        result = measure(baseline=torch.softmax, optimized=fast, inputs=rows, reference=exact)
        print(result.verdict, result.speedup)  # FASTER 1.841x [1.822, 1.860]

    Args:
        baseline: The arm to beat: a callable of the inputs. Its result is its return value,
            followed by the arguments that it changed. :func:`prepared` makes an arm with setup.
        optimized: The arm that should be faster.
        inputs: ``inputs(bench)`` returns the arguments of one call, on ``bench.device``: a
            tuple or, for one argument, a single value. ``bench`` is a :class:`Bench`.
        reference: ``reference(*inputs)`` returns the correct result, computed in fp64 or
            exactly. fp64 takes 2 to 8 times the memory: for inputs that fill much of the GPU's
            memory, return an exact result in the arms' dtype, such as ``x.neg()``.
        work: ``work(*inputs)`` returns the :class:`Work` of one call. From it, reports compute
            how close an arm comes to the GPU's limits.
        library: A third arm: the library call that a user would otherwise choose.
        metric: The figure to judge: "device" (GPU time, needs a GPU), "wall" (host's clock),
            "memory" (peak bytes) or "score" (a :class:`Score` that each arm returns). If there are
            several, the first is judged and all are shown.
        against: The kind of baseline, for reports; their geometric means leave out "naive".
        cache: With "cold", a call finds no inputs in the L2 cache; "warm" allows them there.
        precision: Lower precision of the optimized arm, such as "bf16"; its tolerance applies.
        evidence: Bounds on figures that show why the optimized arm is faster; see
            :mod:`pytest_aiperf.evidence`.
        quick: Accept a wider interval from fewer replicates.
        device: Where to measure; by default on the first GPU, or on the host if there is none.
        seed: Seed of the inputs on which results are compared before timing; random by default.
            Inputs of timed calls are drawn anew in each run.

    Returns:
        The record. ``outcome`` is PASSED if the optimized arm is faster and all evidence holds. It
        is FAILED if one of these is not so or a result is wrong, INVALID if the times are not
        valid, and ERROR if the comparison cannot be measured. ``message`` gives the reason.

    Raises:
        UsageError: The arguments do not make a valid comparison, both arms are the same, or the
            device does not exist.
            Exceptions of the arms and of ``inputs`` are raised unchanged.

    """
    refuse_identical_arms(baseline, optimized)
    claim = claim_of(
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
    [(result, error)] = measure_claims([claim], quick=quick, device=device, seed=seed)
    if isinstance(error, ArmError) and error.__cause__ is not None:
        raise error.__cause__  # its own message is about tests
    if isinstance(error, UsageError) or not isinstance(error, AiperfError | None):
        raise error
    return result


@_suggesting
def measure_each(
    candidates: Sequence[Arm],
    *,
    quick: bool = False,
    device: Literal["cuda", "cpu"] | None = None,
    seed: int | None = None,
    **arguments: Any,
) -> list[Result]:
    """Measure whether each candidate is faster than one baseline.

    The baseline and all candidates are timed in the same rounds, on the same inputs. That takes
    less time than one call of :func:`measure` per candidate, and less waiting for other processes
    that measure on the same GPU.

    .. code-block:: python

        results = measure_each([tiled, fused], baseline=plain, inputs=rows, reference=exact)

    Args:
        candidates: The arms to compare with the baseline.
        quick: Accept wider intervals from fewer replicates.
        device: Where to measure, as for :func:`measure`.
        seed: Seed of the inputs on which results are compared before timing; random by default.
            Inputs of timed calls are drawn anew in each run.
        arguments: The other arguments of :func:`measure`, without ``optimized``.

    Returns:
        The candidates' records, in the same order. If a candidate raises an exception or returns
        a wrong result, the ``message`` of its record gives the reason, and the others are timed
        without it. A candidate may be the baseline itself.

    Raises:
        UsageError: The arguments do not make a valid comparison, or the device does not exist.
            An error that breaks the CUDA context, which the other candidates need, is raised
            unchanged.

    """
    claims = [claim_of(optimized=candidate, **arguments) for candidate in candidates]
    ended = measure_claims(claims, quick=quick, device=device, seed=seed)
    return [result for result, _ in ended]


def measure_claims(
    claims: Sequence[Claim],
    *,
    quick: bool = False,
    device: Literal["cuda", "cpu"] | None = None,
    seed: int | None = None,
    figures: SharedFigures | None = None,
    progress: Progress = report,
) -> list[tuple[Result, Exception | None]]:
    """Measure claims together in this process; return each one's record and error.

    ``figures`` are the noise floor and the limits that several processes share. Arguments are
    otherwise those of :func:`measure`.
    """
    if not claims:
        return []
    machine, gpu, opened = open_device(device, progress)
    gpus = () if gpu is None else (gpu,)
    for claim in claims if gpu is None else ():
        refuse_gpu_figures(claim)
    lock = _lock(gpus, progress)
    seed = secrets.randbelow(2**30) if seed is None else seed

    def context(claim: Claim) -> ClaimContext:
        optimized, baseline = claim.arms["optimized"], claim.arms["baseline"]
        return ClaimContext(
            record=_record(optimized, gpus, seed, quick=quick),
            device=opened,
            lock=lock,
            rule=QUICK if quick else STANDARD,
            progress=progress,
            expectation=Expectation(),
            code=source_hash.identity(_source_files(optimized, baseline)),
            draw=unpredictable(opened.ranks),
        )

    contexts = [(claim, context(claim)) for claim in claims]
    return (figures or _figures(gpus)).measure_ladder(contexts, gpus, machine)


def _lock(gpus: Sequence[Gpu], progress: Progress) -> GpuLock:
    return GpuLock(
        [g.uuid for g in gpus],
        on_wait=lambda _: progress("waiting"),
        on_acquired=lambda: progress("working"),
    )


@functools.cache
def _figures(gpus: tuple[Gpu, ...]) -> SharedFigures:
    """Return this process's figures; a claim's process may know its session's noise floor."""
    session = Session.current
    return SharedFigures(None, None if session is None else session.figures.noise_floor(gpus))


@functools.cache
def open_device(
    kind: Literal["cuda", "cpu"] | None, progress: Progress
) -> tuple[Machine, Gpu | None, Device]:
    """Return the device, which is opened once per process because opening it runs kernels."""
    machine = CudaMachine()
    gpus = [] if kind == "cpu" else machine.gpus()
    if kind == "cuda" and not gpus:
        raise UsageError(f"measure(device='cuda') needs an NVIDIA GPU: {nvml.absence()}")
    if kind not in ("cuda", "cpu", None):
        raise UsageError(f"measure(device={kind!r}): use 'cuda' or 'cpu'")
    gpu = gpus[0] if gpus else None
    with _lock(gpus[:1], progress).shared():
        return machine, gpu, machine.open_device(gpu)


def _record(optimized: Arm, gpus: Sequence[Gpu], seed: int, *, quick: bool) -> Result:
    now, function = datetime.now(UTC), _function(optimized)
    doc = getattr(function, "__doc__", None) or ""
    return Result(
        claim=getattr(function, "__name__", None) or type(function).__name__,
        nodeid="",
        title=doc.strip().partition("\n")[0],
        outcome=Outcome.ERROR,
        key=gpus[0].key if gpus else "cpu",
        run=new_run_id(now, os.getpid()),
        started=now.isoformat(timespec="seconds"),
        seed=seed,
        host=not gpus,
        stack=stack_of(gpus),
        quick=quick,
    )


def _source_files(*arms: Arm) -> list[Path]:
    """List the files below the current folder that define the arms; a notebook has none."""
    names = {str(getattr(_function(arm), "__module__", None)) for arm in arms}
    return [p for name in names for p in source_hash.files(sys.modules.get(name), Path.cwd())]


def _function(arm: Arm) -> Any:
    return arm.make if isinstance(arm, Prepared) else arm
