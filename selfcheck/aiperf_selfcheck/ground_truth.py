"""Comparisons with a known answer: identical arms, arms that spin longer, a heated GPU."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.build import nvcc
from pytest_aiperf.claim.bound_claim import BoundClaim
from pytest_aiperf.claim.claim import Claim, no_progress
from pytest_aiperf.claim.ladder import Ladder
from pytest_aiperf.claim.measure import noise_floor as measure_noise_floor
from pytest_aiperf.claim.replicates import measure_metric
from pytest_aiperf.claim.stopping_rule import STANDARD, StoppingRule
from pytest_aiperf.device.device import Block, Call, Device, NoiseProbe, nothing
from pytest_aiperf.errors import AiperfError, InvalidMeasurement
from pytest_aiperf.limits import ceilings
from pytest_aiperf.model import Bench, CacheName, Interval, Metric, Mode, Timing, Verdict
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.verdict import verdict

SHORT: Final = replace(STANDARD, max_replicates=12, time_budget_s=0.4)
"""Stopping rule for parts with hundreds of comparisons; one takes about half a second."""

MIN_SPIN_S: Final = 1e-6
"""Duration of the spin in the faster arm, so that both arms launch a spin kernel."""

_HEAT_MATRIX_SIDE: Final = 8192
"""Rows and columns of the matrices that heat the GPU: a product takes 1.6 ms on an H200."""

_HEAT_PRODUCTS: Final = 12
"""Matrix products per heating: 20 ms on an H200, enough for its power cap to lower the clock."""

_KERNELS: Final = Path(__file__).with_name("ground_truth.cu")

Arm = Callable[..., object]
Arms = tuple[Arm, Arm]
"""A baseline and an optimized arm."""


@dataclass(frozen=True, eq=False, slots=True)
class _Distinct:
    """An arm that equals no other: a ladder times arms that are equal only once."""

    arm: Arm

    def __call__(self, *args: object) -> object:
        return self.arm(*args)


@dataclass(slots=True)
class Workbench:
    """A device, and calls with a known or adjustable duration on it."""

    device: Device
    """The device whose timing is checked."""
    kinds: Mapping[str, NoiseProbe]
    """Name of each kind of work that comparisons use, to its inputs and arm."""
    claim: tuple[Callable[[Bench], object], Arm, Arm]
    """Inputs, baseline and optimized arm of a claim with a large speedup: two softmaxes."""
    spin: Callable[[float], object]
    """Occupy the device for about this many seconds."""
    timed_spin: Callable[[float], object]
    """Spin and add the spin's duration, by the GPU's global timer, to a running total."""
    pop_mean_spin_s: Callable[[], float]
    """Return the mean seconds per ``timed_spin`` in the running total, and reset the total."""
    empty: Call
    """Launch a kernel that does nothing."""
    sweep: Callable[[int], Call]
    """Make a call that reads the given number of bytes."""
    read_limit: Callable[[], float]
    """Return the measured bandwidth for reads of device memory in bytes per second."""
    heat: Call
    """Slow the device down for a while."""
    measure_in_new_process: Callable[[], float]
    """Measure ``claim`` in a new process; return its ratio."""
    progress: ceilings.ProgressLine
    """Print a line of progress."""
    random: random.Random
    """Source of random seeds and random orders."""
    rest_s: float = 0.7
    """Seconds for which the GPU rests before a comparison on a cool GPU."""
    cached_noise_floor: float | None = None
    """The noise floor, once it has been measured."""

    def noise_floor(self) -> float:
        """Return the noise floor, which is measured once, as in a pytest session."""
        if self.cached_noise_floor is None:
            self.cached_noise_floor = measure_noise_floor(
                self.device, self.seed(), STANDARD, no_progress
            )
        return self.cached_noise_floor

    def seed(self) -> int:
        return self.random.randrange(1 << 30)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of one comparison."""

    verdict: Verdict | None
    """None if a guard refused the measurement."""
    ratio: Interval | None
    """None if a guard refused the measurement."""
    seconds: float
    """Seconds that the comparison took."""
    replicate_sd: float = 0.0
    """Standard deviation of the log ratio between replicates."""
    round_sd: float = 0.0
    """Standard deviation of the log ratio between the rounds of a replicate."""

    @property
    def is_alarm(self) -> bool:
        """Whether the verdict says that the arms differ."""
        return self.verdict in (Verdict.FASTER, Verdict.SLOWER)


def compare(  # noqa: PLR0917  all callers use the same order
    device: Device,
    inputs: Callable[[Bench], object],
    arms: Arms,
    noise_floor: float,
    rule: StoppingRule,
    seed: int,
    cache: CacheName = "cold",
) -> Comparison:
    """Compare two arms in the way that a claim's arms are compared, with new allocations."""
    [comparison] = compare_ladder(device, inputs, arms, noise_floor, rule, seed, cache)
    return comparison


def compare_ladder(  # noqa: PLR0917  in the order of compare()
    device: Device,
    inputs: Callable[[Bench], object],
    arms: Sequence[Arm],
    noise_floor: float,
    rule: StoppingRule,
    seed: int,
    cache: CacheName = "cold",
) -> list[Comparison]:
    """Compare each arm after the first with the first, as the rungs of a ladder are compared.

    Each comparison counts an equal part of the ladder's seconds.
    """
    started = time.monotonic()
    try:
        ladder, timing = time_ladder(device, inputs, arms, rule, seed, cache)
    except InvalidMeasurement:
        seconds = (time.monotonic() - started) / (len(arms) - 1)
        return [Comparison(None, None, seconds)] * (len(arms) - 1)
    timings = [ladder.timing_of(rung, timing) for rung in ladder.rungs]
    seconds = (time.monotonic() - started) / len(timings)
    return [
        Comparison(verdict(ratio, noise_floor), ratio, seconds, *deviations(of_rung))
        for ratio, of_rung in zip(map(stats.speedup, timings), timings, strict=True)
    ]


def time_ladder(  # noqa: PLR0917  in the order of compare()
    device: Device,
    inputs: Callable[[Bench], object],
    arms: Sequence[Arm],
    rule: StoppingRule,
    seed: int,
    cache: CacheName,
) -> tuple[Ladder, Timing]:
    """Time arms in one ladder whose rungs share the first arm as their baseline.

    The ladder names its arms in the given order. All of them must return the same values, which are
    checked. Raises InvalidMeasurement if a guard refuses the measurement.
    """
    baseline, *others = map(_Distinct, arms)
    claims = [
        Claim({"baseline": baseline, "optimized": other}, inputs, baseline, cache=cache)
        for other in others
    ]
    ladder = Ladder([BoundClaim(claim, device, seed, full=True) for claim in claims])
    try:
        return ladder, measure_metric(ladder, Metric.DEVICE, rule)
    finally:
        ladder.verify()
        ladder.raise_error()


def deviations(timing: Timing) -> tuple[float, float]:
    """Return the standard deviations of the log ratio: between replicates, and between rounds."""
    arms = ("baseline", "optimized")
    ratios = [stats.log_ratio(r, *arms) for r in timing.replicates]
    round_variances = [
        statistics.variance([stats.paired_log_ratio(round_, *arms) for round_ in r.rounds])
        for r in timing.replicates
        if len(r.rounds) > 1
    ]
    replicate_sd = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
    return replicate_sd, math.sqrt(statistics.fmean(round_variances)) if round_variances else 0.0


def spin_arm(workbench: Workbench, seconds: float) -> Arm:
    """Return an arm that spins, and returns its first argument."""

    def spin(*args: object) -> object:
        workbench.spin(seconds)
        return args[0]

    return spin


def calibrate_slowdown(workbench: Workbench, kind: NoiseProbe) -> Callable[[float], Arms]:
    """Return a function that makes two arms from ``kind``, the first slower by a given share.

    Both arms spin before they call the kind's arm; the slower one spins longer. The slowdown by a
    long extra spin is measured as a claim is, because noise is negligible next to it. The extra
    spin for a given share is scaled down from that.
    """
    inputs, arm = kind

    def with_spin(seconds: float) -> Arm:
        def spin_then_call(*args: object) -> object:
            workbench.spin(seconds)
            return arm(*args)

        return spin_then_call

    workbench.device.seed(0)
    call = partial(arm, *inputs(Bench(workbench.device.torch_device, 0, full=True)))
    workbench.device.block([call], Mode.WALL).run()
    extra_s = max(2e-6, 0.2 * workbench.device.estimate_s(call))
    del call
    fast = with_spin(MIN_SPIN_S)
    slow = with_spin(MIN_SPIN_S + extra_s)
    # a noise floor of 0.0, because it affects only the verdict, which is not used here
    comparison = compare(workbench.device, inputs, (slow, fast), 0.0, STANDARD, workbench.seed())
    if comparison.ratio is None or comparison.ratio.value < 1.05:
        raise InvalidMeasurement(
            "a long spin did not slow its arm by 5 %: let the GPU cool and run again"
        )
    slowdown = comparison.ratio.value - 1
    return lambda share: (with_spin(MIN_SPIN_S + extra_s * share / slowdown), fast)


class HeatedDevice:
    """A device that is heated before a random half of its timed blocks."""

    def __init__(self, device: Device, heat: Call, rng: random.Random) -> None:
        self._device, self._heat, self._random = device, heat, rng
        # for each block: the log seconds of its runs without heating, and of those after heating
        self._log_seconds: list[tuple[list[float], list[float]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def block(self, calls: Sequence[Call], mode: Mode, keep: int = -1) -> Block:
        block = self._device.block(calls, mode, keep)
        if mode is Mode.WALL:  # these blocks only warm up: their times are not used
            return block
        self._log_seconds.append(([], []))
        return _HeatedBlock(block, self._heat_at_random, self._log_seconds[-1])

    def _heat_at_random(self) -> bool:
        is_heated = self._random.random() < 0.5
        if is_heated:
            self._heat()
        return is_heated

    def effect(self) -> float:
        """Return the fraction by which heating lengthened the time of blocks."""
        means = [[statistics.fmean(run) for run in both] for both in self._log_seconds if all(both)]
        return math.expm1(statistics.fmean(hot - cold for cold, hot in means)) if means else 0.0


class _HeatedBlock:
    def __init__(
        self,
        block: Block,
        heat_at_random: Callable[[], bool],
        log_seconds: tuple[list[float], list[float]],
    ) -> None:
        self._block, self._heat_at_random, self._log_seconds = block, heat_at_random, log_seconds

    @property
    def keep(self) -> int:
        return self._block.keep

    @keep.setter
    def keep(self, number: int) -> None:
        self._block.keep = number

    @property
    def kept(self) -> object:
        return self._block.kept

    @kept.setter
    def kept(self, result: object) -> None:
        self._block.kept = result

    @property
    def stopped(self) -> int:
        return self._block.stopped

    @stopped.setter
    def stopped(self, reading: int) -> None:
        self._block.stopped = reading

    def run(self, before: Call = nothing, after: Call = nothing) -> float:
        is_heated = False

        def heated() -> None:
            nonlocal is_heated
            before()
            is_heated = self._heat_at_random()

        seconds = self._block.run(heated, after)
        self._log_seconds[is_heated].append(math.log(seconds))
        return seconds


def kinds() -> dict[str, NoiseProbe]:
    """Return kinds of work bound by memory, by arithmetic, by both and by launch overhead."""
    import torch

    def copy_inputs(bench: Bench) -> tuple[Any, ...]:
        a = torch.randn(1 << 25, device=bench.device)
        return a, torch.empty_like(a)

    def gemm_inputs(bench: Bench) -> tuple[Any, ...]:
        a = torch.randn(4096, 4096, device=bench.device, dtype=torch.bfloat16)
        return a, torch.randn_like(a)

    def softmax_inputs(bench: Bench) -> tuple[Any, ...]:
        return (torch.randn(8192, 4096, device=bench.device),)

    def add_inputs(bench: Bench) -> tuple[Any, ...]:
        x = torch.randn(1_000_000, device=bench.device)
        return x, torch.randn_like(x)

    return {
        "copy": (copy_inputs, lambda a, out: out.copy_(a)),
        "gemm": (gemm_inputs, torch.mm),
        "softmax": (softmax_inputs, lambda x: torch.softmax(x, 1)),
        "add": (add_inputs, torch.add),
    }


def on_gpu(device: Device, progress: ceilings.ProgressLine) -> Workbench:
    """Make the workbench of a real GPU with the kernels of ground_truth.cu and of torch."""
    import torch

    assert device.gpu is not None
    kernels = nvcc.Nvcc([_KERNELS.parent], [device.gpu.arch])(_KERNELS.name)
    # look kernels up only once, because a lookup takes longer than a launch
    names = ("empty", "sweep", "spin", "timed_spin")
    empty, sweep_bytes, launch_spin, launch_timed_spin = (kernels[name] for name in names)
    totals = torch.zeros(2, dtype=torch.int64, device=device.torch_device)

    def pop_mean_spin_s() -> float:
        device.synchronize()
        nanoseconds, count = totals.tolist()
        totals.zero_()
        device.synchronize()
        return float(nanoseconds * 1e-9 / max(1, count))

    def measure_clock_hz(cycles: int) -> float:
        device.block([lambda: launch_timed_spin(cycles, totals)], Mode.WALL).run()
        return cycles / pop_mean_spin_s()

    measure_clock_hz(10_000_000)  # makes an idle GPU raise its clock
    clock_hz = measure_clock_hz(100_000_000)

    def spin(seconds: float) -> None:
        launch_spin(round(seconds * clock_hz))

    def timed_spin(seconds: float) -> None:
        launch_timed_spin(round(seconds * clock_hz), totals)

    def sweep(size: int) -> Call:
        data = torch.randint(256, (size,), dtype=torch.uint8, device=device.torch_device)
        out = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        return lambda: sweep_bytes(data, size, out)

    a, b = (
        torch.randn(
            _HEAT_MATRIX_SIDE, _HEAT_MATRIX_SIDE, device=device.torch_device, dtype=torch.bfloat16
        )
        for _ in "ab"
    )
    product = torch.empty_like(a)
    products = [lambda: torch.mm(a, b, out=product)] * _HEAT_PRODUCTS
    device.block(products[:1], Mode.WALL).run()  # allocates cuBLAS's workspace before timing

    def read_limit() -> float:
        limits = ceilings.get(device, ("read",), progress)
        if "read" not in limits:
            raise InvalidMeasurement("the read limit of this GPU is not known")
        return float(limits["read"])

    def softmax_of_operations(x: Any) -> Any:
        e = torch.exp(x - x.amax(1, keepdim=True))
        return e / e.sum(1, keepdim=True)

    arms = kinds()
    softmax_inputs, softmax = arms["softmax"]
    return Workbench(
        device=device,
        kinds=arms,
        claim=(softmax_inputs, softmax_of_operations, softmax),
        spin=spin,
        timed_spin=timed_spin,
        pop_mean_spin_s=pop_mean_spin_s,
        empty=empty,
        sweep=sweep,
        read_limit=read_limit,
        heat=lambda: device.block(products, Mode.WALL).run(),
        measure_in_new_process=_measure_in_new_process,
        progress=progress,
        random=random.Random(),  # noqa: S311  seeds and orders, not secrets
    )


def _measure_in_new_process() -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "one.json")
        command = [sys.executable, "-m", "pytest_aiperf", "prove", "--only=one", f"--json={path}"]
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if process.returncode or not path.exists():
            error = (process.stderr.strip().splitlines() or ["no error output"])[-1]
            raise AiperfError(f"{' '.join(command[1:])} failed: {error}")
        return float(json.loads(path.read_text(encoding="utf-8"))["parts"]["one"]["ratio"])
