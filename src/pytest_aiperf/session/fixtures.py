"""The callable fixtures: compare, clock and capture."""

from collections.abc import Callable, Sequence
from functools import partial

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
        """Return the seconds per call: median, minimum and maximum of ten blocks of calls.

        It is GPU time, or host time in a test without a GPU.
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
        self.called = False

    @property
    def built_only(self) -> bool:
        """Whether the check built the kernels without running the arms."""
        return self._context.built_only

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
        evidence: Sequence[Evidence] = (),
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
            UsageError: The arguments do not make a valid claim.
            WrongResult: An arm's result differs from the reference.
            InvalidMeasurement: The times are not valid, for example because the GPU was throttled.
            ClaimNotMet: The claim is not met.

        """
        if self.called:
            raise UsageError("a test is one claim: call compare() once")
        self.called = True
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
        return modes.run(claim, self._context)


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
        """Return a profile of ``call(*args)``: its figures, its kernels, its artefact.

        The test runs a second time, up to this call, in a process under the profiler, where
        ``call`` is warmed up before it is profiled. If the tool is missing or not permitted, the
        test is skipped.
        """
        context = self._context
        if is_claim(context.item):
            raise UsageError("profile a claim with --profile, or use capture in a separate test")
        if context.settings.measure is None:
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
            context.progress("reading")
        self._profiles.append(profile)
        return profile
