"""The parts of the proof: what the harness says where the truth is known."""

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
from pytest_aiperf.device.device import calls_per_block, choose_mode
from pytest_aiperf.errors import InvalidMeasurement
from pytest_aiperf.model import Bench, Metric, Mode, Verdict
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.validity import L2_SPANS, rotation

from . import other_timers
from .ground_truth import SHORT, Heated, Judged, Workbench, judged, longer

SPINS: Final = (2e-6, 5e-6, 2e-5, 1e-4, 1e-3, 5e-3, 2e-2, 1e-1)
SHARES: Final = (0.005, 0.01, 0.02, 0.05)
_TIMED: Final = (Mode.GRAPH, Mode.BACKLOG, Mode.PLAIN)
_PLAIN_FROM: Final = 1e-3  # below this launches show, and the mode is not used
_DRIFTING: Final = ("gemm", "copy")

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scale:
    """How often each part tries."""

    runs: int
    aa: int
    power: int
    drift: int
    repeat: int
    rivals: int


FULL: Final = Scale(runs=9, aa=300, power=24, drift=5, repeat=10, rivals=len(other_timers.CASES))
QUICK: Final = Scale(runs=3, aa=24, power=4, drift=1, repeat=2, rivals=4)


# the clock


def spin(workbench: Workbench, scale: Scale) -> Figures:
    """Hold each mode's times against kernels that spin, from 2 us to 100 ms.

    The truth is what the same kernels read off the GPU's global timer at their start and at their
    end, summed over a block's calls, right before a block of kernels that tell nothing (a kernel's
    end waits for what it writes) is timed. That timer does not follow the SM clock. It steps by
    32 ns on an H200 (by 1 us on some GPUs), which the sum over a block's calls evens out. Events
    may be stamped from the same crystal, so the host's clock, which is not, is held against the
    timer, too: one spin of 100 ms less one of 20 ms, so that the launch cancels.
    A kernel's own begin and end lie outside of its two readings: they are in the constant.
    """
    found: Figures = {}
    for mode in _TIMED:
        points = [_spun(workbench, mode, seconds, scale.runs) for seconds in SPINS]
        domain = [p for p, s in zip(points, SPINS, strict=True) if _domain(mode, s)]
        slope, a_call, a_block = fit(*zip(*domain, strict=True))
        found[mode.value] = {
            "slope": slope,
            "a_call_us": a_call * 1e6,
            "a_block_us": a_block * 1e6,
            "over_us": [round((got - want) / calls * 1e6, 3) for want, calls, got in points],
        }
    pairs = [
        [_spun(workbench, Mode.WALL, seconds, 1) for seconds in (SPINS[-1], SPINS[-2])]
        for _ in range(scale.runs)
    ]
    host = statistics.median((long[2] - short[2]) / (long[0] - short[0]) for long, short in pairs)
    return {"seconds": list(SPINS), **found, "host_clock": host}


def _domain(mode: Mode, seconds: float) -> bool:
    return mode is not Mode.PLAIN or seconds >= _PLAIN_FROM


def _spun(workbench: Workbench, mode: Mode, seconds: float, runs: int) -> tuple[float, int, float]:
    """Return a block's true seconds, its calls, and its seconds as the clock says."""
    calls = 1 if mode is Mode.WALL else calls_per_block(mode, seconds, seconds)
    block, truth = (
        workbench.device.block([partial(kind, seconds)] * calls, mode)
        for kind in (workbench.spin, workbench.timed_spin)
    )
    for each in (block, truth):
        each.run()  # uploads
    workbench.mean_spin_s()
    wants, overs = [], []
    for _ in range(runs):
        truth.run()
        wants.append(
            workbench.mean_spin_s() * calls
        )  # a mean: a block that is held back too short runs again
        overs.append(block.run() - wants[-1])
    want = statistics.median(wants)
    return want, calls, want + statistics.median(overs)


def fit(
    truths: Sequence[float], calls: Sequence[int], measured: Sequence[float]
) -> tuple[float, float, float]:
    """Fit blocks' seconds as slope * truth + constant a call + constant a block.

    By least squares of the relative errors, so that the longest do not decide alone. Without two
    different numbers of calls the two constants are one, told as that of a call.
    """
    import numpy as np

    x, n, y = (
        np.asarray(v, dtype=float) * s for v, s in ((truths, 1e6), (calls, 1), (measured, 1e6))
    )
    columns = [x, n, np.ones_like(x)] if len(set(calls)) > 1 else [x, n]
    solved, *_ = np.linalg.lstsq(np.stack(columns, 1) / x[:, None], y / x, rcond=None)
    slope, a_call, a_block = [*map(float, solved), 0.0][:3]
    return slope, a_call * 1e-6, a_block * 1e-6


def floor(workbench: Workbench, scale: Scale) -> Figures:
    """Time a kernel that does nothing: no call can seem shorter."""
    found = {}
    for mode in Mode:
        calls = calls_per_block(mode, 1e-6, 1e-6)
        block = workbench.device.block([workbench.empty] * calls, mode)
        block.run()
        found[mode.value] = statistics.median(block.run() for _ in range(scale.runs)) / calls * 1e6
    return found


def flush(workbench: Workbench, scale: Scale) -> Figures:
    """Show that rotated inputs are cold: the time of a read, three times over.

    ``rotated`` as the harness does it, ``flushed`` behind a read of eight times the L2 (whose own
    time is taken off), and ``warm`` of the same bytes again and again. Warm bytes come faster than
    device memory could give them, and cold ones do not. Rates leave out what an empty kernel takes.
    """
    assert workbench.device.gpu is not None
    l2 = workbench.device.gpu.l2_bytes or 32 << 20
    size = l2 * 3 // 8 >> 14 << 14
    sets = [workbench.sweep(size) for _ in range(rotation(size, l2))]
    beyond = workbench.sweep(8 * l2 >> 14 << 14)
    times = L2_SPANS * 4
    ways = {
        "rotated": (sets * times, len(sets) * times),
        "warm": (sets[:1] * len(sets) * times, len(sets) * times),
        "flushed": ([beyond, sets[0]] * times, times),
        "flush": ([beyond] * times, times),
        "empty": ([workbench.empty] * len(sets) * times, len(sets) * times),
    }
    took = {}
    for name, (calls, count) in ways.items():
        block = workbench.device.block(calls, Mode.GRAPH)
        block.run()
        took[name] = statistics.median(block.run() for _ in range(scale.runs)) / count
    took["flushed"] -= took.pop("flush")
    empty = took.pop("empty")
    limit = workbench.limit()
    return {
        "bytes": size,
        "sets": len(sets),
        "limit": limit,
        **{f"{name}_us": seconds * 1e6 for name, seconds in took.items()},
        **{f"{name}_of_limit": size / (seconds - empty) / limit for name, seconds in took.items()},
        "as_cold_as_flushed": (took["rotated"] - took["warm"]) / (took["flushed"] - took["warm"]),
    }


def modes(workbench: Workbench, scale: Scale) -> Figures:
    """Time one copy in each mode, in turns."""
    inputs, arm = workbench.kinds["copy"]
    workbench.device.seed(workbench.seed())
    args = inputs(Bench(workbench.device.torch_device, 0, full=True))
    call = partial(arm, *args)
    workbench.device.block([call], Mode.WALL).run()
    workbench.device.stabilize_clocks(call)
    once = workbench.device.estimate_s(call)
    made = {
        mode: (n := calls_per_block(mode, once, once), workbench.device.block([call] * n, mode))
        for mode in Mode
    }
    seen: dict[Mode, list[float]] = {mode: [] for mode in Mode}
    for _ in range(scale.runs + 1):
        for mode, (calls, block) in made.items():
            seen[mode].append(block.run() / calls)
    took = {mode.value: statistics.median(times[1:]) * 1e6 for mode, times in seen.items()}
    device = [took[mode.value] for mode in _TIMED]
    return {"us": took, "apart": max(device) / min(device) - 1}


# the verdicts


def aa(workbench: Workbench, scale: Scale) -> Figures:
    """Compare identical arms, each time from fresh allocations; ask again where they differ."""
    level = workbench.floor()
    found: dict[str, list[Judged]] = {name: [] for name in workbench.kinds}
    sure = 0
    broken = ""
    try:
        for name, i in _turns(workbench.kinds, scale.aa):
            inputs, arm = workbench.kinds[name]
            one = judged(workbench.device, inputs, (arm, arm), level, SHORT, workbench.seed())
            if one.alarm:  # as a claim that fails is measured again
                again = judged(
                    workbench.device, inputs, (arm, arm), level, STANDARD, workbench.seed()
                )
                sure += again.verdict is one.verdict
            found[name].append(one)
            _progress(workbench, "aa", i, scale.aa)
    except Exception as why:  # noqa: BLE001  minutes of comparisons are kept
        workbench.progress(traceback.format_exc())
        broken = f"{type(why).__name__}: {why}"
    return {
        "broken": broken,
        "floor": level,
        **counted([one for ones in found.values() for one in ones]),
        "confirmed": sure,
        "kinds": {name: counted(ones) for name, ones in found.items() if ones},
    }


def counted(ones: Sequence[Judged]) -> Figures:
    """Count what comparisons of identical arms said; the deviations are those of a log ratio."""
    valid = [one for one in ones if one.ratio]
    ratios = [one.ratio.value for one in ones if one.ratio]
    widths = [stats.half_width(one.ratio) for one in ones if one.ratio]
    return {
        "comparisons": len(ones),
        "refused": len(ones) - len(valid),
        "false_alarms": sum(one.alarm for one in ones),
        "beyond_3_percent": sum(max(ratio, 1 / ratio) >= 1.03 for ratio in ratios),
        "half_width": statistics.median(widths) if widths else None,
        "replicate_sd": _pooled(one.replicate_sd for one in valid),
        "round_sd": _pooled(one.round_sd for one in valid),
        "seconds_each": statistics.fmean(one.seconds for one in ones) if ones else None,
    }


def _pooled(deviations: Iterable[float]) -> float | None:
    squares = [sd * sd for sd in deviations]
    return math.sqrt(statistics.fmean(squares)) if squares else None


def power(workbench: Workbench, scale: Scale) -> Figures:
    """Count how often a slowdown is seen: both arms spin, one of them longer.

    The longer arm is baseline and optimized in turn.
    """
    level = workbench.floor()
    made = {name: longer(workbench, kind) for name, kind in workbench.kinds.items()}
    found: Figures = {}
    for share in SHARES:
        seen = wrong = refused = 0
        logs = []
        for name, i in _turns(workbench.kinds, scale.power):
            slow, fast = made[name](share)
            faster = workbench.random.random() < 0.5
            arms = (slow, fast) if faster else (fast, slow)
            one = judged(
                workbench.device, workbench.kinds[name][0], arms, level, SHORT, workbench.seed()
            )
            seen += one.verdict is (Verdict.FASTER if faster else Verdict.SLOWER)
            wrong += one.verdict is (Verdict.SLOWER if faster else Verdict.FASTER)
            refused += one.ratio is None
            if one.ratio:
                logs.append(math.log(one.ratio.value) * (1 if faster else -1))
            _progress(workbench, f"power at {share:.1%}", i, scale.power)
        measured = math.expm1(statistics.fmean(logs)) if logs else None
        found[f"{share:g}"] = {
            "of": scale.power, "seen": seen, "wrong": wrong, "refused": refused, "mean": measured,
        }  # fmt: skip
    return found


def drift(workbench: Workbench, scale: Scale) -> Figures:
    """Compare identical arms while the device is heated before blocks, and after a rest.

    Ours beside the median of 20 blocks of one arm, then of 20 of the other, which is called
    different beyond 2 %.
    """
    level = workbench.floor()
    found: Figures = {}
    for stress in ("heated", "cold"):
        ours: list[Judged] = []
        theirs: list[float] = []
        effects: list[float] = []
        for name, i in _turns(_DRIFTING, len(_DRIFTING) * scale.drift):
            inputs, arm = workbench.kinds[name]
            clock: Any = (
                Heated(workbench.device, workbench.heat, workbench.random)
                if stress == "heated"
                else workbench.device
            )
            _rest(workbench, stress)
            theirs.append(_sequential(clock, inputs, arm, workbench.seed()))
            _rest(workbench, stress)
            ours.append(judged(clock, inputs, (arm, arm), level, SHORT, workbench.seed()))
            if stress == "heated":
                effects.append(clock.effect())
            _progress(workbench, stress, i, len(_DRIFTING) * scale.drift)
        logs = [math.log(ratio) for ratio in theirs]
        values = [math.log(one.ratio.value) for one in ours if one.ratio]
        found[stress] = {
            "comparisons": len(ours),
            "slower_after_heat": statistics.fmean(effects) if effects else None,
            "ours": {
                "false_alarms": sum(one.alarm for one in ours),
                "refused": len(ours) - len(values),
                "sd": statistics.stdev(values) if len(values) > 1 else None,
            },
            "sequential": {
                "false_alarms": sum(
                    other_timers.by_threshold(ratio) is not Verdict.SAME for ratio in theirs
                ),
                "sd": statistics.stdev(logs) if len(logs) > 1 else None,
            },
        }
    return found


def _rest(workbench: Workbench, stress: str) -> None:
    workbench.device.release()
    if stress == "cold":
        time.sleep(workbench.rest_s)


def _sequential(
    clock: Any, inputs: Callable[..., Any], arm: Callable[..., object], seed: int
) -> float:
    clock.seed(seed)
    args = inputs(Bench(clock.torch_device, seed, full=True))
    call = partial(arm, *args)
    clock.block([call], Mode.WALL).run()
    once = clock.estimate_s(call)
    mode = choose_mode(Metric.DEVICE, once)
    block = clock.block([call] * calls_per_block(mode, once, once), mode)
    first, second = ([block.run() for _ in range(20)] for _ in range(2))
    return float(statistics.median(first) / statistics.median(second))


def one(workbench: Workbench, _: Scale) -> Figures:
    """Measure one real claim: softmax by torch against softmax written out."""
    inputs, *arms = workbench.claim
    found = judged(workbench.device, inputs, (arms[0], arms[1]), 0.0, STANDARD, workbench.seed())
    if found.ratio is None:
        raise InvalidMeasurement("the GPU was disturbed: let it cool and run again")
    return {"ratio": found.ratio.value, "half_width": stats.half_width(found.ratio)}


def repeat(workbench: Workbench, scale: Scale) -> Figures:
    """Measure that claim in processes of their own."""
    ratios = []
    for i in range(1, scale.repeat + 1):
        ratios.append(workbench.in_fresh_process())
        workbench.progress(f"repeat: {i} of {scale.repeat}: {ratios[-1]:.4f}x")
    return {
        "processes": len(ratios),
        "ratio": statistics.geometric_mean(ratios),
        "sd": statistics.stdev(map(math.log, ratios)) if len(ratios) > 1 else None,
    }


def head_to_head(workbench: Workbench, scale: Scale) -> Figures:
    """Let our rule and others judge the same comparisons of known truth."""
    return other_timers.head_to_head(
        workbench, other_timers.CASES[: scale.rivals], other_timers.on_gpu(workbench)
    )


def _turns(names: Iterable[str], count: int) -> Iterator[tuple[str, int]]:
    each = list(names)
    return ((each[i % len(each)], i + 1) for i in range(count))


def _progress(workbench: Workbench, what: str, done: int, of: int) -> None:
    if done == of or done % 20 == 0:
        workbench.progress(f"{what}: {done} of {of}")


PARTS: Final[Mapping[str, Callable[[Workbench, Scale], Figures]]] = {
    "spin": spin,
    "floor": floor,
    "flush": flush,
    "modes": modes,
    "drift": drift,
    "power": power,
    "aa": aa,
    "rivals": head_to_head,
    "repeat": repeat,
    "one": one,
}
"""The parts in their order; ``one`` is what each process of ``repeat`` does."""
