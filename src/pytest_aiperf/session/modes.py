"""Check, measure or profile claims, in this process or in several ranks."""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from pytest_aiperf.claim import measure, torch_compile
from pytest_aiperf.claim.claim import Claim, refuse_gpu_figures
from pytest_aiperf.claim.ladder import identity
from pytest_aiperf.claim.stopping_rule import PATIENT, QUICK, STANDARD, StoppingRule
from pytest_aiperf.correctness.references import References
from pytest_aiperf.errors import AiperfError, NeedsGpu, ToolMissing, UsageError
from pytest_aiperf.machine import torchrun
from pytest_aiperf.machine.requirements import claim_id
from pytest_aiperf.model import Against, Outcome, Result
from pytest_aiperf.profilers import capture, target
from pytest_aiperf.rules import validity
from pytest_aiperf.sources import provenance, source_hash

from .config import Role
from .context import ItemContext

SET_BETWEEN_TESTS = {"PYTEST_CURRENT_TEST", "CUPY_SEED"}
"""Environment variables that pytest and this plugin set."""


def run(claim: Claim, context: ItemContext) -> Result:
    """Check, measure or profile a claim; return its record, or raise if the claim fails."""
    settings, required = context.settings, context.requirements
    if required.host:
        refuse_gpu_figures(claim)
    _refuse_other_baseline(claim, context)
    _refuse_impossible_requirements(claim, context)
    checks = not settings.measure and settings.capture_job is None
    on_cpu = required.checked_on_cpu and not any(
        getattr(arm, "needs_gpu", False) for arm in claim.arms.values()
    )
    if settings.profile is not None:
        result, error = _profile_arms(claim, context, settings.profile)
    elif checks and not on_cpu:
        return _check_builds(claim, context)
    elif context.session.ladder is not None:
        context.replaced = _replaced_later(claim)
        result, error = context.session.ladder.compare(context.item.nodeid, (claim, context))
    elif required.in_ranks and context.session.role is not Role.RANK:
        [(result, error)] = _run_in_ranks([(claim, context)])
    elif settings.capture_job is not None:
        target.perform_arm(settings.capture_job, claim, context.device, context.lock)
        pytest.exit("captured", returncode=0)
    elif checks:
        builds, archs = context.nvcc.used, required.archs or required.build_archs[:1]
        record = context.new_result()
        try:
            return measure.check_claim(claim, context.device, record, builds=builds, archs=archs)
        except NeedsGpu:  # an arm, or its setup, is a function that calls a launcher
            return _check_builds(claim, context)
    else:
        [(result, error)] = measure_together([(claim, context)])
    result = replace(result, sources=provenance.locate(claim.arms, settings.root))
    context.send_result(result)
    if error is not None:
        raise error
    return result


def _check_builds(claim: Claim, context: ItemContext) -> Result:
    """Check only the builds of a claim whose arms cannot run here."""
    if not context.nvcc.used:
        raise pytest.skip.Exception(
            "its results need a GPU, and it has nothing to build: run with --gpu",
            _use_item_location=True,
        )
    context.built_only = True
    return measure.check_claim(claim, None, context.new_result(), builds=context.nvcc.used)


def measure_together(
    claims: Sequence[tuple[Claim, ItemContext]],
) -> list[tuple[Result, Exception | None]]:
    """Check, time and judge claims in this process or, if they need several GPUs, in ranks."""
    errors = [_late_binding(context.replaced()) for _, context in claims]
    kept = [each for each, error in zip(claims, errors, strict=True) if error is None]
    outcomes = iter(_measure_together(kept) if kept else ())
    return [
        next(outcomes) if error is None else (measure.failed(context.new_result(), error), error)
        for (_, context), error in zip(claims, errors, strict=True)
    ]


def _replaced_later(claim: Claim) -> Callable[[], list[str]]:
    """Return a function that names what has changed since and what arms may depend on.

    These are the values that arms refer to, environment variables and global settings. Variables
    and settings that are new are left out, because imports bring some.
    """
    references = [References(arm) for arm in claim.arms.values()]
    before = [each.states() for each in references]
    variables, flags = dict(os.environ), validity.flags()

    def names() -> list[str]:
        pairs = zip(references, before, strict=True)
        replaced = sorted({name for each, was in pairs for name in each.replaced_since(was)})
        changed = {name for name, was in variables.items() if os.environ.get(name) != was}
        known = {name: now for name, now in validity.flags().items() if name in flags}
        return [
            *replaced,
            *(f"os.environ[{name!r}]" for name in sorted(changed - SET_BETWEEN_TESTS)),
            *validity.changed_flags(flags, known),
        ]

    return names


def _late_binding(names: Sequence[str]) -> UsageError | None:
    if not names:
        return None
    return UsageError(
        f"{', '.join(names)}: changed since this test called compare(), and an arm may depend on "
        "it. All rungs of a ladder are timed together, after their tests have called compare() and "
        "their fixtures were torn down: give the arm what it needs with functools.partial, and let "
        "a fixture tear down after a yield, not in a finalizer that a function adds for it"
    )


def _refuse_other_baseline(claim: Claim, context: ItemContext) -> None:
    """Refuse a rung "against the previous rung" whose baseline no earlier rung has optimized.

    Nothing is refused if an earlier rung is unknown, as that one may be meant.
    """
    record = context.new_result()
    index, earlier = record.rung_index, context.session.optimized.setdefault(record.ladder, {})
    is_known = identity(claim.arms["baseline"]) in earlier.values()
    is_judged = record.ladder and index > 0 and earlier.keys() >= {*range(index)}
    if claim.against is Against.PREVIOUS_RUNG and is_judged and not is_known:
        raise UsageError(
            'against="previous rung", but the baseline is not the optimized arm of any earlier '
            "rung: pass such an arm, or say with against= what this baseline is"
        )
    earlier[index] = identity(claim.arms["optimized"])


def _refuse_impossible_requirements(claim: Claim, context: ItemContext) -> None:
    """Refuse a claim that lacks what its entry in expectations.yaml is judged by."""
    name, file = claim_id(context.item.nodeid), context.settings.expectations.name
    requires = context.session.expectations.requires
    if "library" not in claim.arms and requires(name, "library"):
        raise UsageError(
            f"{file} requires a ratio to the library of {name}, but compare() has no library= arm: "
            "add one, or remove `library` from `require`"
        )
    if requires(name, "share") and (claim.work is None or context.requirements.host):
        why = "hosts have no limit" if context.requirements.host else "compare() has no work="
        remedy = "" if context.requirements.host else "add it, or "
        raise UsageError(
            f"{file} requires a share of the limit of {name}, but {why}: {remedy}remove `share` "
            "from `require`"
        )


def _measure_together(
    claims: Sequence[tuple[Claim, ItemContext]],
) -> list[tuple[Result, Exception | None]]:
    context = claims[0][1]
    if context.requirements.in_ranks and context.session.role is not Role.RANK:
        return _run_in_ranks(claims)
    session, lock, device = context.session, context.lock, context.device
    files = dict.fromkeys(file for _, each in claims for file in each.files())
    contexts = [(claim, _claim_context(each)) for claim, each in claims]
    with (
        torch_compile.suspend_while_compiling(lock, device, files),
        _deterministic(on="reproducible" in context.settings.conditions),
    ):
        return session.figures.measure_ladder(contexts, context.gpus, session.machine)


def _stopping_rule(context: ItemContext, record: Result) -> StoppingRule:
    if context.settings.quick:
        return QUICK
    return STANDARD if record.attempts == 1 else PATIENT


def _claim_context(context: ItemContext) -> measure.ClaimContext:
    record, code = context.new_result(), source_hash.identity(context.files())
    arch = context.gpus[0].arch if context.gpus else ""
    is_reproducible = "reproducible" in context.settings.conditions
    return measure.ClaimContext(
        record=record,
        device=context.device,
        lock=context.lock,
        rule=_stopping_rule(context, record),
        progress=context.progress,
        expectation=context.session.expectations.lookup(record.claim, record.key, arch, code),
        code=code,
        draw=None if is_reproducible else measure.unpredictable(context.device.ranks),
        builds=context.nvcc.used,
        has_all_memory=context.session.needs_all_memory,
        step=context.step,
    )


def _profile_arms(claim: Claim, context: ItemContext, spec: str) -> tuple[Result, Exception | None]:
    """Run each arm in a process of its own under a profiler."""
    kernels = tuple(kernel for build in context.nvcc.used for kernel in build.kernels)
    code = source_hash.identity(context.files())
    record = replace(context.new_result(), code=code, kernels=kernels)
    # Keep only "copy" of "void copy<float>(float const*)": all profilers show that part.
    names = {re.sub(r"[(<].*", "", k.function).split()[-1] for k in kernels}
    request = context.capture_request(spec, context.settings.profile_calls, record.seed)
    try:
        # wait_for stops this process's deadline: each profiled process has its own.
        profiled = capture.run(claim, request, record, sorted(names), context.wait_for)
    except ToolMissing as missing:
        raise pytest.skip.Exception(str(missing), _use_item_location=True) from None
    context.progress("reading the profile")
    return profiled


def _run_in_ranks(
    claims: Sequence[tuple[Claim, ItemContext]],
) -> list[tuple[Result, Exception | None]]:
    """Run tests again in one process per GPU; together they check, measure or profile the claims.

    If the ranks do not measure all rungs of a ladder, each rung gets ranks of its own.
    """
    claim, context = claims[0]
    settings, figures = context.settings, context.session.figures
    records = [replace(each.new_result(), against=claim.against) for claim, each in claims]
    count = context.requirements.count
    checks = not settings.measure
    # A check runs torch.compile'd arms uncompiled, so that no rank must load the compiler.
    environ = {"TORCH_COMPILE_DISABLE": "1"} if checks else {}
    lock = context.lock
    needs_host = any(metric.needs_quiet_host for metric in claim.metrics)
    lock_all = lock.exclusive_host if needs_host else lock.exclusive_gpu
    with (
        tempfile.TemporaryDirectory(prefix="pytest-aiperf-") as scratch,
        # This process holds the locks for all ranks. If each rank took locks itself, one could wait
        # for a lock while the lock's holder waits for that rank in a collective: a deadlock.
        # A check needs no lock, because it times nothing.
        nullcontext() if checks else lock_all(),
    ):
        job = torchrun.RankJob(scratch, tuple(records), figures.noise_floor(context.gpus))
        context.wait_for(f"in {count} ranks")  # stops this deadline: the ranks have another
        arguments = context.arguments([each.item for _, each in claims])
        ending = torchrun.run(job, count, arguments, settings.deadline_s * len(claims), environ)
        context.progress("reading results")
    measured = {result.nodeid: result for result in ending.results}
    if len(claims) > 1 and any(record.nodeid not in measured for record in records):
        apart = [_run_in_ranks([each])[0] for each in claims]
        note = f"measured by itself, because the ranks of its ladder failed: {ending.message}"
        return [(replace(r, notes=(*r.notes, note)), error) for r, error in apart]
    if ending.skipped:
        raise pytest.skip.Exception(ending.message, _use_item_location=True)
    if settings.capture_job is not None and not ending.message:
        pytest.exit("captured", returncode=0)
    results = [
        measured.get(r.nodeid)
        or replace(r, outcome=Outcome.ERROR if ending.message else Outcome.PASSED)
        for r in records
    ]
    if results[0].floor:  # keep it, so that the next claim need not measure it
        figures.keep_noise_floor(context.gpus, results[0].floor)
    if len(claims) == 1:
        return [(results[0], AiperfError(ending.message) if ending.message else None)]
    passed = Outcome.PASSED
    return [(r, None if r.outcome is passed else AiperfError(r.message)) for r in results]


@contextmanager
def _deterministic(*, on: bool) -> Iterator[None]:
    """If ``on``, make torch use deterministic algorithms, where it has them, in this context."""
    torch = sys.modules.get("torch")
    if not on or torch is None:
        yield
        return
    deterministic = torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # torch.empty would launch a kernel to fill the memory, which counts as work of an arm
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = fills
