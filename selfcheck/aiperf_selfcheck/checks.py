"""The parts of the self-check: times and comparisons whose right answer is known."""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pytest_aiperf.claim.stopping_rule import STANDARD
from pytest_aiperf.device.device import Device, calls_per_block, choose_mode
from pytest_aiperf.errors import InvalidMeasurement
from pytest_aiperf.model import Bench, Metric, Mode, Verdict
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.validity import L2_SPANS, rotation

from . import other_timers
from .ground_truth import (
    SHORT,
    Comparison,
    HeatedDevice,
    Workbench,
    calibrate_slowdown,
    compare,
    compare_ladder,
    spin_arm,
    time_ladder,
)

SPINS_S: Final = (2e-6, 5e-6, 2e-5, 1e-4, 1e-3, 5e-3, 2e-2, 1e-1)
"""Durations of the spin kernels: from the shortest to the longest call of usual claims."""

LADDER_SPINS_S: Final = (2e-5, 5e-5, 1e-4, 1e-3, 5e-3)
"""Durations of the spin kernels of a ladder: slow arms must have fewer calls per block than fast
ones, because one block would otherwise take up to 125 ms."""

LADDER_ARMS: Final = 5
"""Arms of the ladders of ``power_ladder`` and ``aa_ladder``."""

SLOWDOWNS: Final = (0.005, 0.01, 0.02, 0.05)
"""Fractions by which ``power`` slows one arm: claims stop at an interval half-width of 0.005."""

LADDER_SLOWDOWNS: Final = (0.02, 0.05)
"""Fractions by which ``power_ladder`` slows one arm: ``power`` must detect both nearly always."""

_DEVICE_MODES: Final = (Mode.GRAPH, Mode.BACKLOG, Mode.PLAIN)
"""Modes that measure time on the GPU; the remaining mode, wall, measures time on the host."""

_PLAIN_FROM_S: Final = 1e-3
"""Shortest spin for which plain mode is checked. Claims time shorter calls in another mode,
because their times in plain mode include gaps between launches."""

_DRIFT_KINDS: Final = ("gemm", "copy")
"""Kinds of arms that ``drift`` compares: one bound by arithmetic, one by memory."""

Figures = dict[str, Any]
"""Figures of one part, as its record stores them."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sample sizes of the self-check's parts."""

    runs: int
    """Timed blocks per figure; the figure is their median."""
    aa: int
    """Comparisons of identical arms in ``aa``, for all kinds of arms together."""
    power: int
    """Comparisons per slowdown in ``power``."""
    ladders: int
    """Ladders in ``aa_ladder``, and ladders per slowdown in ``power_ladder``."""
    drift: int
    """Comparisons in ``drift`` per kind of arms on a heated GPU, and as many on a rested GPU."""
    repeat: int
    """Processes of ``repeat`` that measure the same claim."""
    cases: int
    """Cases of ``rivals`` that every timer judges."""


FULL: Final = Scale(
    runs=9, aa=300, power=24, ladders=16, drift=5, repeat=10, cases=len(other_timers.CASES)
)
QUICK: Final = Scale(runs=3, aa=24, power=4, ladders=2, drift=1, repeat=2, cases=4)


def spin(workbench: Workbench, scale: Scale) -> Figures:
    """Fit each mode's block times to the true times of kernels that spin for 2 µs to 100 ms.

    The true times come from a reference block that runs right before each timed block. Its kernels
    read the GPU's global timer at their start and end, and store the difference. The kernels of the
    timed block store nothing, because stores would delay the end of a kernel. The time that a
    kernel needs before the first and after the second read of the timer is part of the fit's
    constant per call.

    The global timer does not depend on the SM clock. Its step is 32 ns on an H200 (1 µs on some
    GPUs), which averages out over a block's calls. CUDA events may use the same oscillator.
    Therefore ``host_clock`` compares the timer with the host's clock. Both measure a 100 ms spin
    and a 20 ms spin: the launch time cancels in the difference.
    """
    fits: Figures = {}
    for mode in _DEVICE_MODES:
        points = [_time_spins(workbench, mode, seconds, scale.runs) for seconds in SPINS_S]
        fitted = [p for p, s in zip(points, SPINS_S, strict=True) if _is_used(mode, s)]
        fits[mode.value] = _fit_figures(points, fitted)
    pairs = [
        [_time_spins(workbench, Mode.WALL, seconds, 1) for seconds in (SPINS_S[-1], SPINS_S[-2])]
        for _ in range(scale.runs)
    ]
    host = statistics.median((long[2] - short[2]) / (long[0] - short[0]) for long, short in pairs)
    return {"seconds": list(SPINS_S), **fits, "host_clock": host}


def spin_ladder(workbench: Workbench, scale: Scale) -> Figures:
    """Fit the times of kernels that spin for 20 µs to 5 ms and are timed in one ladder.

    The true times are measured as in ``spin``, once before the ladder and once after it.
    """

    def true_times() -> list[float]:
        points = (_time_spins(workbench, Mode.GRAPH, s, scale.runs) for s in LADDER_SPINS_S)
        return [true_s / calls for true_s, calls, _ in points]

    arms = [spin_arm(workbench, seconds) for seconds in LADDER_SPINS_S]
    inputs, _ = workbench.kinds["add"]
    before = true_times()
    # spin kernels read nothing, so their inputs need not rotate to stay out of the cache
    ladder, timing = time_ladder(workbench.device, inputs, arms, SHORT, workbench.seed(), "warm")
    truths = map(statistics.fmean, zip(before, true_times(), strict=True))
    points = []
    for true_s, name in zip(truths, ladder.arms, strict=True):
        calls = timing.calls[name]
        measured_s = stats.mean_call_s(timing.replicates, name)
        points.append((true_s * calls, calls, measured_s * calls))
    return {
        "arms": len(arms),
        "calls": [calls for _, calls, _ in points],
        timing.mode.value: _fit_figures(points, points),
    }


_Point = tuple[float, int, float]
"""True seconds of a block of spins, its number of calls and its measured seconds."""


def _fit_figures(points: Sequence[_Point], fitted: Sequence[_Point]) -> Figures:
    """Return the fit to the points in ``fitted``, and each point's excess time per call."""
    slope, per_call_s, per_block_s = fit(*zip(*fitted, strict=True))
    return {
        "slope": slope,
        "a_call_us": per_call_s * 1e6,
        "a_block_us": per_block_s * 1e6,
        "over_us": [round((got - true) / calls * 1e6, 3) for true, calls, got in points],
    }


def _is_used(mode: Mode, seconds: float) -> bool:
    return mode is not Mode.PLAIN or seconds >= _PLAIN_FROM_S


def _time_spins(workbench: Workbench, mode: Mode, seconds: float, runs: int) -> _Point:
    """Time a block of spins, and a reference block before each of its runs."""
    calls = 1 if mode is Mode.WALL else calls_per_block(mode, seconds, seconds)
    block, reference = (
        workbench.device.block([partial(kernel, seconds)] * calls, mode)
        for kernel in (workbench.spin, workbench.timed_spin)
    )
    for warm_up in (block, reference):
        warm_up.run()  # uploads the graph
    workbench.pop_mean_spin_s()  # resets the total
    true_s, excess_s = [], []
    for _ in range(runs):
        reference.run()
        # a mean, because a block whose blocking kernel was too short runs more than once
        true_s.append(workbench.pop_mean_spin_s() * calls)
        excess_s.append(block.run() - true_s[-1])
    truth = statistics.median(true_s)
    return truth, calls, truth + statistics.median(excess_s)


def fit(
    truths: Sequence[float], calls: Sequence[int], measured: Sequence[float]
) -> tuple[float, float, float]:
    """Fit the measured seconds of blocks: slope * true seconds + per_call * calls + per_block.

    The fit minimizes squared relative errors, so that the longest blocks do not dominate. If all
    blocks have the same number of calls, per_block is 0 and per_call contains both constants.
    """
    import numpy as np

    x, n, y = (
        np.asarray(v, dtype=float) * s for v, s in ((truths, 1e6), (calls, 1), (measured, 1e6))
    )
    columns = [x, n, np.ones_like(x)] if len(set(calls)) > 1 else [x, n]
    solution, *_ = np.linalg.lstsq(np.stack(columns, 1) / x[:, None], y / x, rcond=None)
    slope, per_call, per_block = [*map(float, solution), 0.0][:3]
    return slope, per_call * 1e-6, per_block * 1e-6


def floor(workbench: Workbench, scale: Scale) -> Figures:
    """Time an empty kernel: each mode reports at least this time per call."""
    per_call_us = {}
    for mode in Mode:
        calls = calls_per_block(mode, 1e-6, 1e-6)
        block = workbench.device.block([workbench.empty] * calls, mode)
        block.run()
        seconds = statistics.median(block.run() for _ in range(scale.runs))
        per_call_us[mode.value] = seconds / calls * 1e6
    return per_call_us


def flush(workbench: Workbench, scale: Scale) -> Figures:
    """Check that rotated inputs are not in the L2 cache: time the same read in three ways.

    ``rotated`` rotates over several buffers, as claims do. ``flushed`` reads one buffer after a
    read of eight times the size of the L2; the time of this larger read is subtracted. ``warm``
    reads one buffer repeatedly; only it may be faster than device memory. Rates are computed from
    the times minus that of an empty kernel.
    """
    assert workbench.device.gpu is not None
    l2 = workbench.device.gpu.l2_bytes or 32 << 20
    size = l2 * 3 // 8 >> 14 << 14
    sets = [workbench.sweep(size) for _ in range(rotation(size, l2))]
    flushing = workbench.sweep(8 * l2 >> 14 << 14)
    repeats = L2_SPANS * 4
    ways = {
        "rotated": (sets * repeats, len(sets) * repeats),
        "warm": (sets[:1] * len(sets) * repeats, len(sets) * repeats),
        "flushed": ([flushing, sets[0]] * repeats, repeats),
        "flush": ([flushing] * repeats, repeats),
        "empty": ([workbench.empty] * len(sets) * repeats, len(sets) * repeats),
    }
    times = {}
    for name, (calls, count) in ways.items():
        block = workbench.device.block(calls, Mode.GRAPH)
        block.run()
        times[name] = statistics.median(block.run() for _ in range(scale.runs)) / count
    times["flushed"] -= times.pop("flush")
    empty = times.pop("empty")
    limit = workbench.read_limit()
    extra_when_flushed = times["flushed"] - times["warm"]
    return {
        "bytes": size,
        "sets": len(sets),
        "limit": limit,
        **{f"{name}_us": seconds * 1e6 for name, seconds in times.items()},
        **{f"{name}_of_limit": size / (seconds - empty) / limit for name, seconds in times.items()},
        "as_cold_as_flushed": (times["rotated"] - times["warm"]) / extra_when_flushed,
    }


def modes(workbench: Workbench, scale: Scale) -> Figures:
    """Time the same copy in each mode, with blocks of the modes in turn."""
    inputs, arm = workbench.kinds["copy"]
    workbench.device.seed(workbench.seed())
    args = inputs(Bench(workbench.device.torch_device, 0, full=True))
    call = partial(arm, *args)
    workbench.device.block([call], Mode.WALL).run()
    workbench.device.stabilize_clocks(call)
    call_s = workbench.device.estimate_s(call)
    counts = {mode: calls_per_block(mode, call_s, call_s) for mode in Mode}
    blocks = {mode: workbench.device.block([call] * counts[mode], mode) for mode in Mode}
    times: dict[Mode, list[float]] = {mode: [] for mode in Mode}
    for _ in range(scale.runs + 1):
        for mode, block in blocks.items():
            times[mode].append(block.run() / counts[mode])
    us = {mode.value: statistics.median(runs[1:]) * 1e6 for mode, runs in times.items()}
    device_us = [us[mode.value] for mode in _DEVICE_MODES]
    return {"us": us, "apart": max(device_us) / min(device_us) - 1}


def aa(workbench: Workbench, scale: Scale) -> Figures:
    """Compare two identical arms, each time with new allocations; repeat each false alarm.

    ``confirmed`` counts the false alarms with the same verdict in both measurements.
    """
    return _compare_identical(workbench, "aa", 2, scale.aa)


def aa_ladder(workbench: Workbench, scale: Scale) -> Figures:
    """Compare identical arms as ``aa`` does, but in ladders: four arms with the same baseline.

    Each rung is judged by its own 99 % interval, as every claim is; the interval is not widened for
    the number of rungs. So the bound on false alarms is per comparison, not per ladder.
    """
    return _compare_identical(workbench, "aa_ladder", LADDER_ARMS, scale.ladders)


def _compare_identical(workbench: Workbench, part: str, arms: int, measurements: int) -> Figures:
    noise_floor = workbench.noise_floor()
    comparisons: dict[str, list[Comparison]] = {name: [] for name in workbench.kinds}
    confirmed = 0
    error = ""
    try:
        for name, i in _cycle(workbench.kinds, measurements):
            inputs, arm = workbench.kinds[name]
            measure = partial(compare_ladder, workbench.device, inputs, [arm] * arms, noise_floor)
            of_ladder = measure(SHORT, workbench.seed())
            if any(c.is_alarm for c in of_ladder):
                again = measure(STANDARD, workbench.seed())
                both = zip(of_ladder, again, strict=True)
                confirmed += sum(c.is_alarm and c.verdict is a.verdict for c, a in both)
            comparisons[name] += of_ladder
            _progress(workbench, part, i, measurements)
    except Exception as why:  # noqa: BLE001  after any error, keep the earlier comparisons
        workbench.progress(traceback.format_exc())
        error = f"{type(why).__name__}: {why}"
    return {
        "arms": arms,
        "broken": error,
        "floor": noise_floor,
        **aggregate([c for of_kind in comparisons.values() for c in of_kind]),
        "confirmed": confirmed,
        "kinds": {name: aggregate(of_kind) for name, of_kind in comparisons.items() if of_kind},
    }


def aggregate(comparisons: Sequence[Comparison]) -> Figures:
    """Count verdicts on identical arms; average interval widths and standard deviations.

    ``without_1`` counts the 99 % intervals that do not contain 1, the true ratio. Unlike a false
    alarm, such an interval need not lie beyond the noise floor.
    """
    valid = [c for c in comparisons if c.ratio]
    ratios = [c.ratio.value for c in comparisons if c.ratio]
    widths = [stats.half_width(c.ratio) for c in comparisons if c.ratio]
    seconds = [c.seconds for c in comparisons]
    return {
        "comparisons": len(comparisons),
        "refused": len(comparisons) - len(valid),
        "false_alarms": sum(c.is_alarm for c in comparisons),
        "without_1": sum(not c.ratio.low <= 1 <= c.ratio.high for c in comparisons if c.ratio),
        "beyond_3_percent": sum(max(ratio, 1 / ratio) >= 1.03 for ratio in ratios),
        "half_width": statistics.median(widths) if widths else None,
        "replicate_sd": _pooled(c.replicate_sd for c in valid),
        "round_sd": _pooled(c.round_sd for c in valid),
        "seconds_each": statistics.fmean(seconds) if seconds else None,
    }


def _pooled(deviations: Iterable[float]) -> float | None:
    squares = [sd * sd for sd in deviations]
    return math.sqrt(statistics.fmean(squares)) if squares else None


def power(workbench: Workbench, scale: Scale) -> Figures:
    """Count how often a known slowdown of one of two arms, chosen at random, is detected."""
    return _detect(workbench, "power", 2, SLOWDOWNS, scale.power)


def power_ladder(workbench: Workbench, scale: Scale) -> Figures:
    """Slow one of the five arms of a ladder, chosen at random; judge all rungs.

    If the slow arm is the baseline, all rungs differ from it. Otherwise one rung does, and the
    three others must be neither FASTER nor SLOWER.
    """
    return _detect(workbench, "power_ladder", LADDER_ARMS, LADDER_SLOWDOWNS, scale.ladders)


def _detect(
    workbench: Workbench, part: str, arms: int, slowdowns: Sequence[float], measurements: int
) -> Figures:
    noise_floor = workbench.noise_floor()
    slowed = {n: calibrate_slowdown(workbench, kind) for n, kind in workbench.kinds.items()}
    figures: Figures = {"arms": arms}
    for share in slowdowns:
        seen = wrong = 0
        log_ratios: list[float] = []
        different: list[Comparison] = []
        equal: list[Comparison] = []
        for name, i in _cycle(workbench.kinds, measurements):
            slow, fast = slowed[name](share)
            ladder = [fast] * arms
            slow_index = workbench.random.randrange(arms)
            ladder[slow_index] = slow
            comparisons = compare_ladder(
                workbench.device, workbench.kinds[name][0], ladder, noise_floor, SHORT,
                workbench.seed(),
            )  # fmt: skip
            right, opposite, sign = Verdict.SLOWER, Verdict.FASTER, -1
            if slow_index == 0:
                right, opposite, sign = opposite, right, 1
            for index, comparison in enumerate(comparisons, 1):
                if slow_index not in (0, index):
                    equal.append(comparison)
                    continue
                different.append(comparison)
                seen += comparison.verdict is right
                wrong += comparison.verdict is opposite
                if comparison.ratio:
                    log_ratios.append(sign * math.log(comparison.ratio.value))
            _progress(workbench, f"{part} at {share:.1%}", i, measurements)
        figures[f"{share:g}"] = {
            "of": len(different),
            "seen": seen,
            "wrong": wrong,
            "refused": sum(c.ratio is None for c in (*different, *equal)),
            "mean": math.expm1(statistics.fmean(log_ratios)) if log_ratios else None,
            "equal": len(equal),
            "false_alarms": sum(c.is_alarm for c in equal),
        }
    return figures


def drift(workbench: Workbench, scale: Scale) -> Figures:
    """Compare identical arms on a GPU that is heated before random blocks, and on a cool GPU.

    ``ours`` counts the verdicts of pytest-aiperf. ``sequential`` counts those of a simple method:
    20 blocks of one arm, then 20 of the other, and a threshold of 2 % for the ratio of the medians.
    """
    noise_floor = workbench.noise_floor()
    figures: Figures = {}
    for condition in ("heated", "cold"):
        comparisons: list[Comparison] = []
        sequential: list[float] = []
        effects: list[float] = []
        for name, i in _cycle(_DRIFT_KINDS, len(_DRIFT_KINDS) * scale.drift):
            inputs, arm = workbench.kinds[name]
            device: Any = workbench.device
            if condition == "heated":
                device = HeatedDevice(device, workbench.heat, workbench.random)
            _rest(workbench, condition)
            sequential.append(_sequential_ratio(device, inputs, arm, workbench.seed()))
            _rest(workbench, condition)
            comparisons.append(
                compare(device, inputs, (arm, arm), noise_floor, SHORT, workbench.seed())
            )
            if condition == "heated":
                effects.append(device.effect())
            _progress(workbench, condition, i, len(_DRIFT_KINDS) * scale.drift)
        by_threshold = [other_timers.by_threshold(ratio) for ratio in sequential]
        log_ratios = [math.log(c.ratio.value) for c in comparisons if c.ratio]
        figures[condition] = {
            "comparisons": len(comparisons),
            "slower_after_heat": statistics.fmean(effects) if effects else None,
            "ours": {
                "false_alarms": sum(c.is_alarm for c in comparisons),
                "refused": len(comparisons) - len(log_ratios),
                "sd": _deviation(log_ratios),
            },
            "sequential": {
                "false_alarms": sum(verdict is not Verdict.SAME for verdict in by_threshold),
                "sd": _deviation([math.log(ratio) for ratio in sequential]),
            },
        }
    return figures


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _rest(workbench: Workbench, condition: str) -> None:
    workbench.device.release()
    if condition == "cold":
        time.sleep(workbench.rest_s)


def _sequential_ratio(
    device: Device, inputs: Callable[..., Any], arm: Callable[..., object], seed: int
) -> float:
    device.seed(seed)
    args = inputs(Bench(device.torch_device, seed, full=True))
    call = partial(arm, *args)
    device.block([call], Mode.WALL).run()
    call_s = device.estimate_s(call)
    mode = choose_mode(Metric.DEVICE, call_s)
    block = device.block([call] * calls_per_block(mode, call_s, call_s), mode)
    first, second = ([block.run() for _ in range(20)] for _ in range(2))
    return statistics.median(first) / statistics.median(second)


def one(workbench: Workbench, _: Scale) -> Figures:
    """Measure ``workbench.claim`` once."""
    inputs, *arms = workbench.claim
    comparison = compare(
        workbench.device, inputs, (arms[0], arms[1]), 0.0, STANDARD, workbench.seed()
    )
    if comparison.ratio is None:
        raise InvalidMeasurement("the GPU was disturbed: let it cool and run again")
    return {"ratio": comparison.ratio.value, "half_width": stats.half_width(comparison.ratio)}


def repeat(workbench: Workbench, scale: Scale) -> Figures:
    """Measure ``workbench.claim`` in several new processes."""
    ratios = []
    for i in range(1, scale.repeat + 1):
        ratios.append(workbench.measure_in_new_process())
        workbench.progress(f"repeat: {i} of {scale.repeat}: {ratios[-1]:.4f}x")
    return {
        "processes": len(ratios),
        "ratio": statistics.geometric_mean(ratios),
        "sd": _deviation([math.log(ratio) for ratio in ratios]),
    }


def head_to_head(workbench: Workbench, scale: Scale) -> Figures:
    """Let pytest-aiperf and other timers judge the same cases."""
    return other_timers.head_to_head(
        workbench, other_timers.CASES[: scale.cases], other_timers.on_gpu(workbench)
    )


def _cycle(names: Iterable[str], count: int) -> Iterator[tuple[str, int]]:
    """Yield ``count`` pairs of a name and a number from 1; the names take turns."""
    listed = list(names)
    return ((listed[i % len(listed)], i + 1) for i in range(count))


def _progress(workbench: Workbench, phase: str, done: int, of: int) -> None:
    if done == of or done % 20 == 0:
        workbench.progress(f"{phase}: {done} of {of}")


PARTS: Final[Mapping[str, Callable[[Workbench, Scale], Figures]]] = {
    "spin": spin,
    "spin_ladder": spin_ladder,
    "floor": floor,
    "flush": flush,
    "modes": modes,
    "drift": drift,
    "power": power,
    "power_ladder": power_ladder,
    "aa": aa,
    "aa_ladder": aa_ladder,
    "rivals": head_to_head,
    "repeat": repeat,
    "one": one,
}
"""The parts by name, in the record's order. The processes of ``repeat`` run the part ``one``."""
