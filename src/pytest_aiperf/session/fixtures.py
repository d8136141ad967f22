"""The callable fixtures: compare, clock and capture."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import MethodType

import pytest

from pytest_aiperf.claim.claim import Arm, claim_of
from pytest_aiperf.device.device import calls_per_block, choose_mode
from pytest_aiperf.errors import ToolMissing, UsageError
from pytest_aiperf.machine.requirements import is_claim
from pytest_aiperf.model import (
    AgainstName,
    Bench,
    CacheName,
    Evidence,
    Interval,
    Metric,
    MetricName,
    PrecisionName,
    Prepared,
    Profile,
    Result,
    Work,
)
from pytest_aiperf.profilers import capture, target

from . import modes
from .context import ItemContext


class Stopwatch:
    """Time one callable: the ``clock`` fixture."""

    def __init__(self, context: ItemContext) -> None:
        self._device = context.device
        self._lock = context.lock

    def __call__(self, call: Callable[..., object], *args: object) -> Interval:
        """Time ``call(*args)`` in ten blocks of calls, on the GPU or, without one, on the host.

        Returns:
            The minimum, median and maximum of the blocks, in seconds per call. They are GPU time,
            or host time in a test without a GPU.

        """
        host = self._device.gpu is None
        with self._lock.exclusive_host() if host else self._lock.exclusive_gpu():
            bound = partial(call, *args)
            estimate_s = self._device.estimate_s(bound)
            mode = choose_mode(Metric.WALL if host else Metric.DEVICE, estimate_s)
            calls = calls_per_block(mode, estimate_s, estimate_s)
            block = self._device.block([bound] * calls, mode)
            block.run()
            seconds = sorted(block.run() / calls for _ in range(10))
        return Interval(seconds[0], (seconds[4] + seconds[5]) / 2, seconds[-1])


class Compare:
    """State a claim: the ``compare`` fixture."""

    def __init__(self, context: ItemContext) -> None:
        self._context = context

    def __call__(
        self,
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
    ) -> Result:
        """Claim that ``optimized`` is faster than ``baseline`` on the same work.

        Without ``--gpu`` or ``--cpu`` the claim is only checked: the arms' results are compared at
        small sizes and nothing is timed.

        Args:
            baseline: The arm to beat. Arms are called with the inputs. An arm's result is its
                return value followed by the arguments that it changed.
            optimized: The arm that should be faster.
            inputs: ``inputs(bench)`` returns one set of inputs, on ``bench.device``.
            reference: Returns the correct result, computed in fp64 or exactly. For inputs that
                fill much of the GPU's memory, return it exactly in the arms' dtype, such as
                ``x.neg()``: fp64 takes 2 to 8 times the memory.
            work: Returns the :class:`Work` of one call, from which reports compute how close an
                arm comes to the GPU's limits.
            library: A third arm: the library call that a user would otherwise choose.
            metric: The figure to judge. If there are several, the first is judged and all
                are shown.
            against: The kind of baseline.
            cache: "warm" allows the inputs to stay in the L2 cache between calls.
            precision: Lower precision in which the optimized arm computes, such as "bf16".
            evidence: Bounds on figures that show why the optimized arm is faster, see
                :mod:`pytest_aiperf.evidence`.

        Returns:
            The claim's record; without timings if the claim was only checked.

        Raises:
            UsageError: The arguments do not make a valid claim, or both arms are the same.
            WrongResult: An arm's result differs from the reference.
            InvalidMeasurement: The times are not valid, for example because the GPU was throttled.
            ClaimNotMet: The claim is not met.

        """
        context = self._context
        try:
            context.claim_once()
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
            return modes.run(claim, context)
        except Exception as error:
            context.error = context.error or error
            raise


def refuse_identical_arms(baseline: Arm, optimized: Arm) -> None:
    """Raise UsageError if both arms are the same callable: the claim would measure only noise."""
    if _parts(baseline) == _parts(optimized):
        raise UsageError(
            "baseline= and optimized= are the same callable, so the claim compares it with itself: "
            "give the arms that differ"
        )


def _parts(arm: object) -> tuple[Hashable, ...]:
    """Return the parts of a callable; callables with the same parts do the same."""
    if isinstance(arm, Prepared):
        return "prepared", *_parts(arm.make)
    if isinstance(arm, partial):
        keywords = ((name, id(value)) for name, value in arm.keywords.items())
        return *_parts(arm.func), *map(id, arm.args), *keywords
    if isinstance(arm, MethodType):
        return id(arm.__self__), id(arm.__func__)
    return (id(arm),)


class Capture:
    """Profile one callable: the ``capture`` fixture."""

    def __init__(self, context: ItemContext) -> None:
        self._context = context
        self._profiles: list[Profile] = []
        self._capture_count = 0

    def __call__(
        self,
        call: Callable[..., object],
        *args: object,
        tool: str = "ncu",
        preset: str = "minimal",
        calls: int = 1,
    ) -> Profile:
        """Profile ``call(*args)``.

        The test runs a second time, up to this call, in a process under the profiler, where
        ``call`` is warmed up before it is profiled. The test is skipped if the tool is missing or
        not permitted, or without ``--gpu`` (``--cpu`` for a test marked ``host``).

        Args:
            call: The callable to profile.
            args: Its arguments.
            tool: The profiler, as in ``--profile=TOOL``.
            preset: "minimal", "deep_dive" or "roofline"; not every profiler has all of them.
            calls: Number of calls to profile.

        Returns:
            The profiler's figures with their units, the names of the kernels, and the path of the
            file that it wrote.

        Raises:
            UsageError: The test is a claim, or the profiler or its preset does not exist.
            CaptureFailed: The profiler left no file, or one that is empty or unreadable.

        """
        context = self._context
        if is_claim(context.item):
            raise UsageError("profile a claim with --profile, or use capture in a separate test")
        if not context.settings.measure:
            pytest.skip("captures only when measuring: run with --gpu (or --cpu, for @host)")
        index, self._capture_count = self._capture_count, self._capture_count + 1
        if (job := context.settings.capture_job) is not None:
            if index < len(job.before):
                return job.before[index]
            captured = partial(call, *args)
            target.perform(job, context.device, context.lock, lambda: (captured, None))
            pytest.exit("captured", returncode=0)
        seed = context.new_result().seed
        request = context.capture_request(f"{tool}:{preset}", calls, seed)
        try:
            # A wait stops this process's deadline: the profiled process has its own.
            context.wait_for(f"{tool}: call {index}")
            profile, _ = capture.capture(request, f"call-{index}", before=self._profiles)
        except ToolMissing as error:
            pytest.skip(str(error))
        finally:
            context.progress("reading the profile")
        self._profiles.append(profile)
        return profile
