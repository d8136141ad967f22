"""The same comparisons of known truth, judged by our rule and by the ways that are in use."""

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
from pytest_aiperf.model import Bench, Verdict

from .ground_truth import Arms, Heated, Workbench, judged, longer

THRESHOLD: Final = 1.02
"""Above this ratio, or below its inverse, the other ways' arms count as different: they give no
interval, and 2 % is what people call noise."""
_PAIRS, _WARM_UP = 100, 10
_WALL_SECONDS: Final = 0.25

Way = Callable[[Call], float]
"""Seconds of a call, as one of the other ways measures it."""


@dataclass(frozen=True, slots=True)
class Case:
    """A comparison: optimized is faster by ``share``, and may cost the host ``overhead`` seconds.

    ``kind`` names one of the workbench's kinds, or is the seconds of a kernel that only spins.
    ``stress`` is the heater, or a GPU that has rested.
    """

    kind: str | float
    share: float = 0.0
    overhead: float = 0.0
    stress: str = ""

    def __str__(self) -> str:
        name = self.kind if isinstance(self.kind, str) else f"spin {self.kind * 1e6:g} us"
        host = f"+{self.overhead * 1e6:g} us on the host" if self.overhead else ""
        return " ".join(filter(None, (name, f"{1 + self.share:g}x", host, self.stress)))


CASES: Final = (
    # identical and not in turn, so that the first few are a fair sample
    Case(5e-6), Case(5e-6, 0.05),
    Case("copy", stress="heated"), Case("copy", 0.03, stress="heated"),
    Case(5e-6, overhead=20e-6), Case(5e-6, 0.05, overhead=20e-6),
    Case("gemm", stress="cold"), Case("gemm", 0.03, stress="cold"),
    Case("add"), Case(20e-6, 0.03),
    Case("gemm", stress="heated"), Case("gemm", 0.03, stress="heated"),
    Case("softmax"), Case("softmax", 0.03),
    Case(50e-6, overhead=100e-6), Case(50e-6, 0.05, overhead=100e-6),
    Case(1e-3, stress="heated"), Case(1e-3, 0.03, stress="heated"),
    Case("copy", stress="cold"), Case("copy", 0.03, stress="cold"),
)  # fmt: skip
"""Ten of identical arms, and ten with a difference."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one way says of one comparison; without a ratio it declined."""

    truth: float
    verdict: Verdict | None
    ratio: float | None
    seconds: float


def scored(answers: Sequence[Answer]) -> dict[str, float | int | None]:
    """Count false alarms, what was seen of true differences, and how far the ratios are off.

    A verdict in the wrong direction is a false alarm, whatever the truth. ``bias`` is the mean of
    the ratios' relative errors, ``error`` that of their sizes, ``worst`` the largest.
    """
    told = sum(a.verdict in (Verdict.FASTER, Verdict.SLOWER) for a in answers)
    right = sum(a.truth > 1 and a.verdict is Verdict.FASTER for a in answers)
    off = [math.log(a.ratio / a.truth) for a in answers if a.ratio]
    return {
        "identical": sum(a.truth == 1 for a in answers),
        "false_alarms": told - right,
        "different": sum(a.truth > 1 for a in answers),
        "seen": right,
        "bias": statistics.fmean(off) if off else None,
        "error": statistics.fmean(map(abs, off)) if off else None,
        "worst": max(map(abs, off), default=None),
        "seconds_each": statistics.fmean(a.seconds for a in answers) if answers else None,
    }


def by_threshold(ratio: float) -> Verdict:
    """Judge a bare ratio as people do who have no interval."""
    if ratio > THRESHOLD:
        return Verdict.FASTER
    return Verdict.SLOWER if ratio < 1 / THRESHOLD else Verdict.SAME


def head_to_head(
    workbench: Workbench, cases: Sequence[Case], ways: Mapping[str, Way]
) -> dict[str, Any]:
    """Let our rule and the other ways judge each case, in a random order each time."""
    floor = workbench.floor()
    made: dict[str, Callable[[float], Arms]] = {}
    found: dict[str, list[Answer]] = {name: [] for name in ("ours", *ways)}
    judges = {
        "ours": partial(_ours, floor=floor),
        **{n: partial(_theirs, w) for n, w in ways.items()},
    }
    for number, case in enumerate(cases, 1):
        workbench.progress(f"rivals: {number} of {len(cases)}: {case}")
        kind, arms = _arms(workbench, case, made)
        for name in workbench.random.sample(list(judges), len(judges)):
            workbench.device.release()
            if case.stress == "cold":
                time.sleep(workbench.rest_s)
            begun = time.monotonic()
            verdict, ratio = judges[name](workbench, case, kind, arms)
            seconds = time.monotonic() - begun
            found[name].append(Answer(1 + case.share, verdict, ratio, seconds))
    return {
        "threshold": THRESHOLD,
        "cases": {
            str(case): {n: round(a[i].ratio or 0, 4) for n, a in found.items()}
            for i, case in enumerate(cases)
        },
        "ways": {name: scored(answers) for name, answers in found.items()},
    }


def _arms(
    workbench: Workbench, case: Case, made: dict[str, Callable[[float], Arms]]
) -> tuple[NoiseProbe, Arms]:
    """Make a case's inputs and arms: baseline is the longer one."""
    if isinstance(case.kind, str):
        kind = workbench.kinds[case.kind]
        if case.share and case.kind not in made:
            made[case.kind] = longer(workbench, kind)
        slow, fast = made[case.kind](case.share) if case.share else (kind[1], kind[1])
    else:
        kind = (workbench.kinds["add"][0], _spinning(workbench, case.kind))
        slow, fast = _spinning(workbench, case.kind * (1 + case.share)), kind[1]
    return kind, (slow, _busy(fast, case.overhead) if case.overhead else fast)


def _spinning(workbench: Workbench, seconds: float) -> Callable[..., object]:
    def spun(*args: object) -> object:
        workbench.spin(seconds)
        return args[0]

    return spun


def _busy(arm: Any, seconds: float) -> Callable[..., object]:
    def call(*args: object) -> object:
        until = now() + seconds * 1e9
        while now() < until:
            pass
        return arm(*args)

    return call


def _ours(
    workbench: Workbench, case: Case, kind: NoiseProbe, arms: Arms, *, floor: float
) -> tuple[Verdict | None, float | None]:
    clock: Any = workbench.device
    if case.stress == "heated":
        clock = Heated(clock, workbench.heat, workbench.random)
    # what a spinning kernel reads does not matter
    cache = "cold" if isinstance(case.kind, str) else "warm"
    said = judged(clock, kind[0], arms, floor, STANDARD, workbench.seed(), cache)
    return said.verdict, said.ratio.value if said.ratio else None


def _theirs(
    way: Way, workbench: Workbench, case: Case, kind: NoiseProbe, arms: Arms
) -> tuple[Verdict | None, float | None]:
    """Time one arm, then the other, on the same inputs; the heater comes before either, or not."""
    workbench.device.seed(workbench.seed())
    args = kind[0](Bench(workbench.device.torch_device, 0, full=True))
    seconds = []
    for arm in arms:
        call: Call = partial(arm, *args)
        call()  # loads libraries
        workbench.device.synchronize()
        if case.stress == "heated" and workbench.random.random() < 0.5:
            workbench.heat()
        seconds.append(way(call))
    ratio = seconds[0] / seconds[1]
    return by_threshold(ratio), ratio


def on_gpu(workbench: Workbench) -> dict[str, Way]:
    """Return the other ways on a real GPU, as their users write them.

    ``do_bench`` is triton's, by its median; ``events`` the median of 100 event pairs; ``wall``
    what a function that synchronises gives under pytest-benchmark, by its minimum: one call a
    round (its timer resolves that), for a quarter of a second instead of one.
    """
    import torch

    def events(call: Call) -> float:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_PAIRS)]
        for _ in range(_WARM_UP):
            call()
        for start, end in pairs:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) * 1e-3

    def wall(call: Call) -> float:
        least, until = math.inf, now() + _WALL_SECONDS * 1e9
        while now() < until:
            begun = now()
            call()
            torch.cuda.synchronize()
            least = min(least, (now() - begun) * 1e-9)
        return least

    ways: dict[str, Way] = {"events": events, "wall": wall}
    try:
        from triton.testing import do_bench
    except ImportError:
        workbench.progress("rivals: triton is not installed, so do_bench is left out")
    else:
        ways["do_bench"] = lambda call: float(do_bench(call, return_mode="median")) * 1e-3
    return ways
