"""Measures one metric of a ladder in replicates, until the stopping rule is met."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

from pytest_aiperf.model import Metric, Replicate, Timing
from pytest_aiperf.rules import stats

from .ladder import Ladder
from .sampler import Sampler
from .scores import ScoreSampler
from .stopping_rule import WIDE, StoppingRule


class Measurement:
    """The measurement of one metric.

    Call :meth:`prepare`, then :meth:`measure` under the exclusive lock; repeat both until there is
    a ``timing``. Then call :meth:`finish`. ``is_undecided`` returns whether a timing leaves it open
    that a requirement is met: then more replicates follow.
    """

    def __init__(
        self,
        ladder: Ladder,
        metric: Metric,
        rule: StoppingRule,
        is_undecided: Callable[[Timing], bool] = lambda _: False,
    ) -> None:
        self.ladder = ladder
        self.bound = ladder.bound
        rungs = len(ladder.rungs)
        self.rule = replace(
            rule,
            time_budget_s=rungs * rule.time_budget_s,
            undecided_s=rungs * rule.undecided_s,
        )
        self._is_undecided = is_undecided
        if metric is Metric.MEMORY:
            self.rule = replace(self.rule, min_replicates=3)
        is_score = metric in (Metric.SCORE, Metric.MEMORY)
        sampler = ScoreSampler if is_score else Sampler
        self.sampler: Sampler | ScoreSampler = sampler(ladder, metric, self.rule)
        self.timing: Timing | None = None  #: None until the stopping rule is met.
        self._replicates: list[Replicate] = []
        self._seeds: list[int] = []
        self._measured_s = 0.0  # seconds spent in earlier calls of measure()
        self._ends_s: float | None = None  # when the replicates of an undecided measurement end
        self._notes: tuple[str, ...] = ()

    def prepare(self) -> None:
        """Build the buffers of the next replicates."""
        next_ = len(self._replicates)
        seeds = [self._seed(i) for i in range(next_, max(next_ + 1, self.rule.min_replicates))]
        with self.bound.step():
            if self._replicates:
                self.sampler.prepare_more(seeds)
            else:
                self.sampler.prepare(seeds)

    def measure(self) -> None:
        """Measure replicates until the stopping rule is met or more buffers must be prepared."""
        replicates = self._replicates
        self.bound.note_settings()  # a claim has more threads now than while it prepares
        if not replicates:
            self.sampler.begin()
        started = time.monotonic()
        stopped = ""
        while not stopped:
            seed = self._seed(len(replicates))
            if replicates and self.sampler.builds_long(seed):
                self._measured_s += time.monotonic() - started
                return
            replicates.append(self.sampler.replicate(seed))
            timing = self.sampler.timing(tuple(replicates))
            of_speedup, of_library = self._half_widths(timing)
            most = self.bound.device.ranks.max  # all ranks must stop at the same replicate
            spent_s = time.monotonic() - started - self.sampler.drawing_s
            elapsed_s = most(self._measured_s + spent_s)
            stopped = self._stop(most(of_speedup), most(of_library), elapsed_s)
            more = self.rule.undecided_replicates if stopped else 0
            if more and most(float(self._is_undecided(timing))):
                stopped = ""
                self._continue(more, elapsed_s)
        self.sampler.check_plausibility(timing)
        self.timing = replace(timing, stopped=stopped, notes=(*timing.notes, *self._notes))

    def finish(self) -> None:
        """Run the sampler's checks that need no blocks."""
        with self.bound.step():
            self.sampler.finish()

    def _seed(self, replicate: int) -> int:
        while len(self._seeds) <= replicate:
            self._seeds.append(self.bound.random.getrandbits(30))
        return self._seeds[replicate]

    def _half_widths(self, timing: Timing) -> tuple[float, float]:
        """Report progress; return the largest half-widths of the speedups and library ratios."""
        of_rungs = [self.ladder.timing_of(rung, timing) for rung in self.ladder.rungs]
        ratio = max(map(stats.speedup, of_rungs), key=stats.half_width)  # the least certain
        half_width = stats.half_width(ratio)
        beside = (stats.speedup(t, "library") for t in of_rungs if "library" in t.calls)
        state = self.bound.device.telemetry()
        self.bound.progress(
            "measuring",
            replicate=len(timing.replicates),
            most=self.rule.max_replicates,
            ratio=ratio.value,
            half_width=half_width if math.isfinite(half_width) else None,
            sm_mhz=state.sm_mhz,
            temperature_c=state.temperature_c,
        )
        return half_width, max(map(stats.half_width, beside), default=0.0)

    def _continue(self, more: int, elapsed_s: float) -> None:
        """Let more replicates follow, once."""
        count = len(self._replicates)
        self._notes = (f"undecided after {count} replicates, so more followed",)
        self._ends_s = elapsed_s + self.rule.undecided_s
        self.rule = replace(
            self.rule,
            min_replicates=count + more,
            max_replicates=count + more,
            undecided_replicates=0,
        )

    def _stop(self, of_speedup: float, of_library: float, elapsed_s: float) -> str:
        """Return the reason to stop, or an empty string to continue.

        ``of_speedup`` and ``of_library`` are half-widths.
        """
        rule, replicates = self.rule, len(self._replicates)
        if self._ends_s is not None:
            if elapsed_s >= self._ends_s:
                return "seconds"
        elif replicates >= rule.min_replicates:
            is_wide = max(of_speedup, of_library) > WIDE
            if of_speedup <= rule.target_half_width and not is_wide:
                return "width"
            enough = not is_wide or replicates >= rule.min_replicates + rule.extra_replicates
            if elapsed_s >= rule.time_budget_s and enough:
                return "seconds"
        return "replicates" if replicates >= rule.max_replicates else ""


def measure_metric(ladder: Ladder, metric: Metric, rule: StoppingRule) -> Timing:
    """Measure one metric: run all steps of a :class:`Measurement`."""
    measurement = Measurement(ladder, metric, rule)
    while measurement.timing is None:
        measurement.prepare()
        measurement.measure()
    measurement.finish()
    return measurement.timing
