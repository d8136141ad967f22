"""Comparisons whose truth is known: identical arms, an arm that spins longer, a heated GPU."""

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
from pytest_aiperf.claim.inputs import Claim, Trial
from pytest_aiperf.claim.measure import noise_floor
from pytest_aiperf.claim.replicates import measure, speedup
from pytest_aiperf.claim.stopping_rule import STANDARD, StoppingRule
from pytest_aiperf.device.device import Block, Call, Device, NoiseProbe
from pytest_aiperf.errors import AiperfError, InvalidMeasurement
from pytest_aiperf.limits import ceilings
from pytest_aiperf.model import Bench, Interval, Metric, Mode, Timing, Verdict
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.verdict import verdict

SHORT: Final = replace(STANDARD, max_replicates=12, time_budget_s=0.4)
"""How long a comparison takes where hundreds are made: half a second, a claim takes some."""
LEAD: Final = 1e-6
"""Both arms of a comparison with a longer arm spin at least so long: a kernel is not free."""
_SIDE, _BURST = 8192, 12  # 12 products of 1.6 ms on an H200: its power cap acts within them
_KERNELS: Final = Path(__file__).with_name("ground_truth.cu")

Arm = Callable[..., object]
Arms = tuple[Arm, Arm]
"""A baseline and an optimized arm."""


@dataclass(slots=True)
class Workbench:
    """A device and the calls whose duration is known or can be controlled on it."""

    device: Device
    """The device under check."""
    kinds: Mapping[str, NoiseProbe]
    """Inputs and arm of each kind of comparison, by name."""
    claim: tuple[Callable[[Bench], object], Arm, Arm]
    """One real claim: inputs, baseline and optimized arm."""
    spin: Callable[[float], object]
    """Occupy the device for about this many seconds."""
    timed_spin: Callable[[float], object]
    """The same, adding the seconds on the GPU's global timer to a running total."""
    mean_spin_s: Callable[[], float]
    """Mean seconds per ``timed_spin`` since the last call, on that independent timer."""
    empty: Call
    """Launch a kernel that does nothing."""
    sweep: Callable[[int], Call]
    """Make a call that reads this many bytes."""
    limit: Callable[[], float]
    """Bytes per second that device memory can deliver."""
    heat: Call
    """Slow the device down for a while."""
    in_fresh_process: Callable[[], float]
    """The ratio of ``claim`` as a process of its own measures it."""
    progress: ceilings.ProgressLine
    """Print a line of progress."""
    random: random.Random
    """Source of seeds and orders."""
    rest_s: float = 0.7
    """How long the device rests before a comparison on a cold GPU."""
    known_floor: float | None = None
    """The noise floor, once it has been measured."""

    def floor(self) -> float:
        """Return the noise floor, measured once, as a session does."""
        if self.known_floor is None:
            self.known_floor = noise_floor(self.device, self.seed(), STANDARD, quiet)
        return self.known_floor

    def seed(self) -> int:
        return self.random.randrange(1 << 30)


@dataclass(frozen=True, slots=True)
class Judged:
    """One comparison: no verdict and no ratio where a guard refused it.

    ``replicate_sd`` is that of the log ratios between replicates, ``round_sd`` that between the
    rounds of one: the fake device's noise is fitted to them.
    """

    verdict: Verdict | None
    ratio: Interval | None
    seconds: float
    replicate_sd: float = 0.0
    round_sd: float = 0.0

    @property
    def alarm(self) -> bool:
        """Whether it tells its arms apart."""
        return self.verdict in (Verdict.FASTER, Verdict.SLOWER)


def quiet(*_said: object, **_figures: object) -> None:
    """Report no progress."""


def judged(  # noqa: PLR0917  a comparison's own parts
    clock: Device,
    inputs: Callable[[Bench], object],
    arms: Arms,
    floor: float,
    plan: StoppingRule,
    seed: int,
    cache: str = "cold",
) -> Judged:
    """Compare two arms as a claim does, from fresh allocations and seeds."""
    begun = time.monotonic()
    baseline, optimized = arms
    claim = Claim({"baseline": baseline, "optimized": optimized}, inputs, baseline, cache=cache)
    trial = Trial(claim, clock, seed, full=True, say=quiet)
    try:
        timing = measure(trial, Metric.DEVICE, plan)
    except InvalidMeasurement:
        return Judged(None, None, time.monotonic() - begun)
    finally:
        trial.verify()
    ratio = speedup(timing)
    seconds = time.monotonic() - begun
    return Judged(verdict(ratio, floor), ratio, seconds, *spreads(timing))


def spreads(timing: Timing) -> tuple[float, float]:
    """Return the deviations of a log ratio between replicates, and between rounds of one."""
    arms = ("baseline", "optimized")
    between = [stats.log_ratio(r, *arms) for r in timing.replicates]
    within = [
        statistics.variance([stats.paired_log_ratio(round_, *arms) for round_ in r.rounds])
        for r in timing.replicates
        if len(r.rounds) > 1
    ]
    apart = statistics.stdev(between) if len(between) > 1 else 0.0
    return apart, math.sqrt(statistics.fmean(within)) if within else 0.0


def longer(workbench: Workbench, kind: NoiseProbe) -> Callable[[float], Arms]:
    """Return what makes two arms of a kind, the first of which takes a share longer.

    Both spin; by how much a longer spin prolongs a call is measured first, in the harness's very
    conditions, with a spin so long that the noise does not matter, and then scaled down.
    """
    inputs, arm = kind

    def spinning(seconds: float) -> Callable[..., object]:
        def spun(*args: object) -> object:
            workbench.spin(seconds)
            return arm(*args)

        return spun

    workbench.device.seed(0)
    call = partial(arm, *inputs(Bench(workbench.device.torch_device, 0, full=True)))
    workbench.device.block([call], Mode.WALL).run()
    extra = max(2e-6, 0.2 * workbench.device.estimate_s(call))
    del call
    base = spinning(LEAD)
    # the floor plays no part: only the ratio is asked for
    found = judged(
        workbench.device, inputs, (spinning(LEAD + extra), base), 0.0, STANDARD, workbench.seed()
    )
    if found.ratio is None or found.ratio.value < 1.05:
        raise InvalidMeasurement("spinning longer did not show: let the GPU cool and run again")
    grown = found.ratio.value - 1
    return lambda share: (spinning(LEAD + extra * share / grown), base)


class Heated:
    """A clock that makes its device slow before half of its blocks, at random."""

    def __init__(self, clock: Device, heat: Call, rng: random.Random) -> None:
        self._clock, self._heat, self._random = clock, heat, rng
        self._runs: list[tuple[list[float], list[float]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)

    def block(self, calls: Sequence[Call], mode: Mode) -> Block:
        block = self._clock.block(calls, mode)
        if mode is Mode.WALL:  # nothing is timed by it here
            return block
        self._runs.append(([], []))
        return _HeatedBlock(block, self._warmed, self._runs[-1])

    def _warmed(self) -> bool:
        heated = self._random.random() < 0.5
        if heated:
            self._heat()
        return heated

    def effect(self) -> float:
        """Return by how much blocks took longer after the heat than without: the attack's force."""
        means = [[statistics.fmean(run) for run in both] for both in self._runs if all(both)]
        return math.expm1(statistics.fmean(h - c for c, h in means)) if means else 0.0


class _HeatedBlock:
    def __init__(
        self, block: Block, warmed: Callable[[], bool], runs: tuple[list[float], list[float]]
    ) -> None:
        self._block, self._warmed, self._runs = block, warmed, runs
        self.last = block.last

    def run(self) -> float:
        heated = self._warmed()
        seconds = self._block.run()
        self.last = self._block.last
        self._runs[heated].append(math.log(seconds))
        return seconds

    def run_untimed(self) -> None:
        self._block.run_untimed()
        self.last = self._block.last


# a real GPU


def kinds() -> dict[str, NoiseProbe]:
    """Name arms of four kinds: bound by memory, by arithmetic, by both, and by their launch."""
    import torch

    def copying(bench: Bench) -> tuple[Any, ...]:
        a = torch.randn(1 << 25, device=bench.device)
        return a, torch.empty_like(a)

    def matrices(bench: Bench) -> tuple[Any, ...]:
        a = torch.randn(4096, 4096, device=bench.device, dtype=torch.bfloat16)
        return a, torch.randn_like(a)

    def rows(bench: Bench) -> tuple[Any, ...]:
        return (torch.randn(8192, 4096, device=bench.device),)

    def million(bench: Bench) -> tuple[Any, ...]:
        x = torch.randn(1_000_000, device=bench.device)
        return x, torch.randn_like(x)

    return {
        "copy": (copying, lambda a, out: out.copy_(a)),
        "gemm": (matrices, torch.mm),
        "softmax": (rows, lambda x: torch.softmax(x, 1)),
        "add": (million, torch.add),
    }


def on_gpu(clock: Device, say: ceilings.ProgressLine) -> Workbench:
    """Make the workbench of a real GPU: kernels of our own, and torch's."""
    import torch

    assert clock.gpu is not None
    kernels = nvcc.Nvcc([_KERNELS.parent], [clock.gpu.arch])(_KERNELS.name)
    # each once: to look a kernel up takes the host longer than to launch it
    names = ("empty", "sweep", "spin", "timed_spin")
    empty, sweep, launch_spin, launch_timed_spin = (kernels[name] for name in names)
    counts = torch.zeros(2, dtype=torch.int64, device=clock.torch_device)

    def mean_spin_s() -> float:
        clock.synchronize()
        nanoseconds, count = counts.tolist()
        counts.zero_()
        clock.synchronize()
        return float(nanoseconds * 1e-9 / max(1, count))

    def calibrated(cycles: int) -> float:
        clock.block([lambda: launch_timed_spin(cycles, counts)], Mode.WALL).run()
        return cycles / mean_spin_s()

    calibrated(10_000_000)  # the first finds the GPU asleep
    cycles_per_s = calibrated(100_000_000)

    def spin(seconds: float) -> None:
        launch_spin(round(seconds * cycles_per_s))

    def timed_spin(seconds: float) -> None:
        launch_timed_spin(round(seconds * cycles_per_s), counts)

    def sweeping(size: int) -> Call:
        data = torch.randint(256, (size,), dtype=torch.uint8, device=clock.torch_device)
        out = torch.zeros(1, dtype=torch.int32, device=clock.torch_device)
        return lambda: sweep(data, size, out)

    a, b = (
        torch.randn(_SIDE, _SIDE, device=clock.torch_device, dtype=torch.bfloat16) for _ in "ab"
    )
    product = torch.empty_like(a)
    burst = [lambda: torch.mm(a, b, out=product)] * _BURST
    clock.block(burst[:1], Mode.WALL).run()  # its workspace is not to be allocated in a round

    def limit() -> float:
        found = ceilings.known(clock, ("read",), say)
        if "read" not in found:
            raise InvalidMeasurement("the read ceiling of this GPU is not known")
        return float(found["read"])

    def written_out(x: Any) -> Any:
        e = torch.exp(x - x.amax(1, keepdim=True))
        return e / e.sum(1, keepdim=True)

    known = kinds()
    rows, softmax = known["softmax"]
    return Workbench(
        device=clock,
        kinds=known,
        claim=(rows, written_out, softmax),
        spin=spin,
        timed_spin=timed_spin,
        mean_spin_s=mean_spin_s,
        empty=empty,
        sweep=sweeping,
        limit=limit,
        heat=lambda: clock.block(burst, Mode.WALL).run(),
        in_fresh_process=_in_fresh_process,
        progress=say,
        random=random.Random(),  # noqa: S311  seeds and orders, not secrets
    )


def _in_fresh_process() -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "one.json")
        command = [sys.executable, "-m", "pytest_aiperf", "prove", "--only=one", f"--json={path}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode or not path.exists():
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise AiperfError(f"{' '.join(command[1:])} failed and said: {said}")
        return float(json.loads(path.read_text(encoding="utf-8"))["parts"]["one"]["ratio"])
