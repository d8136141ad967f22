"""Measures one metric of a ladder in replicates, until the stopping rule is met."""

import math
import time
from dataclasses import replace

from pytest_aiperf.model import Metric, Replicate, Timing
from pytest_aiperf.rules import stats

from .ladder import Ladder
from .sampler import Sampler
from .scores import ScoreSampler
from .stopping_rule import EXTRA_REPLICATES, WIDE, StoppingRule


class Measurement:
    """The measurement of one metric.

    Call :meth:`prepare`, then :meth:`measure` under the exclusive lock; repeat both until there is
    a ``timing``. Then call :meth:`finish`.
    """

    def __init__(self, ladder: Ladder, metric: Metric, rule: StoppingRule) -> None:
        self.ladder = ladder
        self.bound = ladder.bound
        budget_s = rule.time_budget_s * len(ladder.rungs)
        self.rule = replace(rule, time_budget_s=budget_s)
        if metric is Metric.MEMORY:
            self.rule = replace(self.rule, min_replicates=3)
        is_score = metric in (Metric.SCORE, Metric.MEMORY)
        sampler = ScoreSampler if is_score else Sampler
        self.sampler: Sampler | ScoreSampler = sampler(ladder, metric, self.rule)
        self.timing: Timing | None = None  #: None until the stopping rule is met.
        self._replicates: list[Replicate] = []
        self._seeds: list[int] = []
        self._measured_s = 0.0  # seconds spent in earlier calls of measure()

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
            half_width = self._report(timing)
            elapsed_s = self._measured_s + time.monotonic() - started - self.sampler.drawing_s
            ranks = self.bound.device.ranks  # all ranks must stop at the same replicate
            stopped = self._stop(len(replicates), ranks.max(half_width), ranks.max(elapsed_s))
        self.sampler.compare_lone_calls(replicates)
        self.timing = replace(timing, stopped=stopped)

    def finish(self) -> None:
        """Run the sampler's checks that need no blocks."""
        with self.bound.step():
            self.sampler.finish()

    def _seed(self, replicate: int) -> int:
        while len(self._seeds) <= replicate:
            self._seeds.append(self.bound.random.getrandbits(30))
        return self._seeds[replicate]

    def _report(self, timing: Timing) -> float:
        """Report progress; return the half-width of the widest confidence interval so far."""
        of_rungs = (self.ladder.timing_of(rung, timing) for rung in self.ladder.rungs)
        ratio = max(map(stats.speedup, of_rungs), key=stats.half_width)  # the least certain
        half_width = stats.half_width(ratio)
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
        return half_width

    def _stop(self, replicates: int, half_width: float, elapsed_s: float) -> str:
        """Return the reason to stop, or an empty string to continue."""
        rule = self.rule
        if replicates >= rule.min_replicates:
            if half_width <= rule.target_half_width:
                return "width"
            enough = half_width <= WIDE or replicates >= rule.min_replicates + EXTRA_REPLICATES
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
