"""The callable fixtures: compare, clock and capture."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
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
from pytest_aiperf.text import si

from . import modes
from .context import ItemContext


@dataclass(frozen=True, slots=True)
class Seconds(Interval):
    """Median, minimum and maximum of the seconds per call; prints ``100 µs [98.1 µs, 104 µs]``."""

    def __str__(self) -> str:
        value, low, high = (si(seconds, "s") for seconds in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]"


class Stopwatch:
    """Time one callable: the ``clock`` fixture."""

    def __init__(self, context: ItemContext) -> None:
        self._device = context.device
        self._lock = context.lock

    def __call__(self, call: Callable[..., object], *args: object) -> Interval:
        """Time ``call(*args)`` in ten blocks of calls, after one block that is not counted.

        Returns:
            The blocks' minimum (``low``), median (``value``) and maximum (``high``), in seconds per
            call. With ``--gpu``, they are GPU time, except in a test marked ``host``.
            Otherwise, they are time by the host's clock.

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
        return Seconds(seconds[0], (seconds[4] + seconds[5]) / 2, seconds[-1])


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
            metric: The figure to judge: "device" (GPU time), "wall" (host's clock), "memory" (peak
                bytes) or "score" (a :class:`Score` that each arm returns). If there are several,
                the first is judged and all are shown.
            against: The kind of baseline, for reports; their geometric means leave out "naive".
            cache: With "cold", a call finds no inputs in the L2 cache; "warm" allows them there.
            precision: Lower precision of the optimized arm, such as "bf16"; its tolerance applies.
            evidence: Bounds on figures that show why the optimized arm is faster; see
                :mod:`pytest_aiperf.evidence`.

        Returns:
            The claim's record; without timings if the claim was only checked.

        Raises:
            UsageError: The arguments do not make a valid claim, both arms are the same, or the test
                has called ``compare`` before.
            WrongResult: An arm's result differs from the reference.
            InvalidMeasurement: The times are not valid, for example because the GPU was throttled.
            ClaimNotMet: The optimized arm is not as fast as claimed, or evidence does not hold.

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
        """Profile ``call(*args)`` in a second process.

        The profiler starts this process, which runs the test again up to this call, warms ``call``
        up and profiles it. The test is skipped if the tool is missing or not permitted. It is also
        skipped without ``--gpu`` (``--cpu`` for a test marked ``host``).

        Args:
            call: The callable to profile.
            args: Its arguments.
            tool: The profiler, as in ``--profile=TOOL``.
            preset: "minimal" or, if the tool has it, "deep_dive", "operators" or "roofline".
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
