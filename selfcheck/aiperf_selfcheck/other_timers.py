"""Comparisons with a known answer, judged by pytest-aiperf and by other timers."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pytest_aiperf.claim.stopping_rule import STANDARD
from pytest_aiperf.device.device import Call, NoiseProbe, now
from pytest_aiperf.model import Bench, CacheName, Verdict

from .ground_truth import (
    Arm,
    Arms,
    HeatedDevice,
    Workbench,
    calibrate_slowdown,
    compare,
    spin_arm,
)

THRESHOLD: Final = 1.02
"""A ratio above this, measured by another timer, counts as a difference. Other timers have no
intervals to judge by, and differences up to 2 % are commonly taken for noise."""

_EVENT_PAIRS: Final = 100
"""Number of calls that ``events`` times, each between two CUDA events."""

_EVENT_WARM_UPS: Final = 10
"""Number of untimed calls that ``events`` makes first."""

_WALL_BUDGET_S: Final = 0.25
"""Seconds that ``wall`` times an arm: less than pytest-benchmark's default of 1 s."""

Timer = Callable[[Call], float]
"""A function that times a call and returns its seconds."""


@dataclass(frozen=True, slots=True)
class Case:
    """A comparison with a known answer, which every timer judges."""

    kind: str | float
    """Name of one of the workbench's kinds, or the seconds of a kernel that only spins."""
    share: float = 0.0
    """Fraction by which the optimized arm is faster; 0 for identical arms."""
    host_overhead_s: float = 0.0
    """Seconds that each call of the optimized arm occupies the host."""
    condition: str = ""
    """``heated``: the GPU is heated at random times. ``cold``: it rests before the comparison."""

    def __str__(self) -> str:
        name = self.kind if isinstance(self.kind, str) else f"spin {self.kind * 1e6:g} us"
        host = f"+{self.host_overhead_s * 1e6:g} us on the host" if self.host_overhead_s else ""
        return " ".join(filter(None, (name, f"{1 + self.share:g}x", host, self.condition)))


CASES: Final = (
    # identical and different arms alternate, so that the first few cases have as many of both
    Case(5e-6), Case(5e-6, 0.05),
    Case("copy", condition="heated"), Case("copy", 0.03, condition="heated"),
    Case(5e-6, host_overhead_s=20e-6), Case(5e-6, 0.05, host_overhead_s=20e-6),
    Case("gemm", condition="cold"), Case("gemm", 0.03, condition="cold"),
    Case("add"), Case(20e-6, 0.03),
    Case("gemm", condition="heated"), Case("gemm", 0.03, condition="heated"),
    Case("softmax"), Case("softmax", 0.03),
    Case(50e-6, host_overhead_s=100e-6), Case(50e-6, 0.05, host_overhead_s=100e-6),
    Case(1e-3, condition="heated"), Case(1e-3, 0.03, condition="heated"),
    Case("copy", condition="cold"), Case("copy", 0.03, condition="cold"),
)  # fmt: skip
"""Ten cases with identical arms and ten with different ones."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One timer's verdict on one case."""

    truth: float
    """The true ratio."""
    verdict: Verdict | None
    """None if a guard refused the measurement."""
    ratio: float | None
    """The measured ratio; None if a guard refused the measurement."""
    seconds: float
    """Seconds that the comparison took."""


def score(judgements: Sequence[Judgement]) -> dict[str, float | int | None]:
    """Count false alarms and detected differences, and average the errors of the ratios.

    A verdict in the wrong direction is a false alarm, too. ``bias`` is the mean relative error of
    the ratios, ``error`` the mean and ``worst`` the maximum of its absolute value.
    """
    alarms = sum(j.verdict in (Verdict.FASTER, Verdict.SLOWER) for j in judgements)
    detected = sum(j.truth > 1 and j.verdict is Verdict.FASTER for j in judgements)
    errors = [math.log(j.ratio / j.truth) for j in judgements if j.ratio]
    return {
        "identical": sum(j.truth == 1 for j in judgements),
        "false_alarms": alarms - detected,
        "different": sum(j.truth > 1 for j in judgements),
        "seen": detected,
        "bias": statistics.fmean(errors) if errors else None,
        "error": statistics.fmean(map(abs, errors)) if errors else None,
        "worst": max(map(abs, errors), default=None),
        "seconds_each": statistics.fmean(j.seconds for j in judgements) if judgements else None,
    }


def by_threshold(ratio: float) -> Verdict:
    """Judge a ratio by THRESHOLD."""
    if ratio > THRESHOLD:
        return Verdict.FASTER
    return Verdict.SLOWER if ratio < 1 / THRESHOLD else Verdict.SAME


def head_to_head(
    workbench: Workbench, cases: Sequence[Case], timers: Mapping[str, Timer]
) -> dict[str, Any]:
    """Let pytest-aiperf (``ours``) and the timers judge each case, in random order."""
    noise_floor = workbench.noise_floor()
    slowdowns: dict[str, Callable[[float], Arms]] = {}
    judgements: dict[str, list[Judgement]] = {name: [] for name in ("ours", *timers)}
    judges = {
        "ours": partial(_judge_by_harness, noise_floor=noise_floor),
        **{name: partial(_judge_by_timer, timer) for name, timer in timers.items()},
    }
    for number, case in enumerate(cases, 1):
        workbench.progress(f"rivals: {number} of {len(cases)}: {case}")
        kind, arms = _arms(workbench, case, slowdowns)
        for name in workbench.random.sample(list(judges), len(judges)):
            workbench.device.release()
            if case.condition == "cold":
                time.sleep(workbench.rest_s)
            started = time.monotonic()
            verdict, ratio = judges[name](workbench, case, kind, arms)
            seconds = time.monotonic() - started
            judgements[name].append(Judgement(1 + case.share, verdict, ratio, seconds))
    return {
        "threshold": THRESHOLD,
        "cases": {
            str(case): {name: round(of[i].ratio or 0, 4) for name, of in judgements.items()}
            for i, case in enumerate(cases)
        },
        "ways": {name: score(of) for name, of in judgements.items()},
    }


def _arms(
    workbench: Workbench, case: Case, slowdowns: dict[str, Callable[[float], Arms]]
) -> tuple[NoiseProbe, Arms]:
    """Make a case's inputs and arms; the baseline is the slower one."""
    if isinstance(case.kind, str):
        kind = workbench.kinds[case.kind]
        if case.share and case.kind not in slowdowns:
            slowdowns[case.kind] = calibrate_slowdown(workbench, kind)
        slow, fast = slowdowns[case.kind](case.share) if case.share else (kind[1], kind[1])
    else:
        kind = (workbench.kinds["add"][0], spin_arm(workbench, case.kind))
        slow, fast = spin_arm(workbench, case.kind * (1 + case.share)), kind[1]
    if case.host_overhead_s:
        fast = _with_host_overhead(fast, case.host_overhead_s)
    return kind, (slow, fast)


def _with_host_overhead(arm: Arm, seconds: float) -> Arm:
    def call(*args: object) -> object:
        end = now() + seconds * 1e9
        while now() < end:
            pass
        return arm(*args)

    return call


def _judge_by_harness(
    workbench: Workbench, case: Case, kind: NoiseProbe, arms: Arms, *, noise_floor: float
) -> tuple[Verdict | None, float | None]:
    device: Any = workbench.device
    if case.condition == "heated":
        device = HeatedDevice(device, workbench.heat, workbench.random)
    # spin kernels read nothing, so their inputs need not rotate to stay out of the cache
    cache: CacheName = "cold" if isinstance(case.kind, str) else "warm"
    comparison = compare(device, kind[0], arms, noise_floor, STANDARD, workbench.seed(), cache)
    return comparison.verdict, comparison.ratio.value if comparison.ratio else None


def _judge_by_timer(
    timer: Timer, workbench: Workbench, case: Case, kind: NoiseProbe, arms: Arms
) -> tuple[Verdict | None, float | None]:
    """Time the arms one after the other on the same inputs.

    If the case's condition is ``heated``, the GPU is heated before each arm with probability 1/2.
    """
    workbench.device.seed(workbench.seed())
    args = kind[0](Bench(workbench.device.torch_device, 0, full=True))
    seconds = []
    for arm in arms:
        call: Call = partial(arm, *args)
        call()  # untimed, because the first call loads libraries
        workbench.device.synchronize()
        if case.condition == "heated" and workbench.random.random() < 0.5:
            workbench.heat()
        seconds.append(timer(call))
    ratio = seconds[0] / seconds[1]
    return by_threshold(ratio), ratio


def on_gpu(workbench: Workbench) -> dict[str, Timer]:
    """Return the other timers by name, each as it is usually applied to a GPU.

    ``do_bench`` is the median of Triton's function of that name. ``events`` is the median of 100
    calls, each between two CUDA events. ``wall`` is the minimum wall time of a call that
    synchronizes, as pytest-benchmark reports it for rounds of one call.
    """
    import torch

    def events(call: Call) -> float:
        pairs = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_EVENT_PAIRS)
        ]
        for _ in range(_EVENT_WARM_UPS):
            call()
        for start, end in pairs:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) * 1e-3

    def wall(call: Call) -> float:
        shortest, end = math.inf, now() + _WALL_BUDGET_S * 1e9
        while now() < end:
            started = now()
            call()
            torch.cuda.synchronize()
            shortest = min(shortest, (now() - started) * 1e-9)
        return shortest

    timers: dict[str, Timer] = {"events": events, "wall": wall}
    try:
        from triton.testing import do_bench
    except ImportError:
        workbench.progress("rivals: triton is not installed, so do_bench is left out")
    else:
        timers["do_bench"] = lambda call: float(do_bench(call, return_mode="median")) * 1e-3
    return timers
