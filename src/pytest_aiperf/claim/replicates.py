"""Measure a trial: replicate until its interval is narrow enough, then stop."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from pytest_aiperf.model import Interval, Metric, Replicate, Timing
from pytest_aiperf.rules import stats

from .inputs import Trial
from .sampler import Sampler
from .scores import ScoreSampler, peak, score
from .stopping_rule import MORE, NARROW, StoppingRule


class Measurement:
    """A trial's measurement, in three steps; only the second needs the device alone."""

    def __init__(self, trial: Trial, metric: Metric, plan: StoppingRule) -> None:
        self.trial, self.plan = trial, plan
        self.way: Sampler | ScoreSampler
        if metric is Metric.SCORE:
            self.way = ScoreSampler(trial, score)
        elif metric is Metric.MEMORY:
            self.plan = replace(plan, min_replicates=3)
            self.way = ScoreSampler(trial, peak)
        else:
            self.way = Sampler(trial, metric, plan)

    def prepare(self) -> None:
        """Make what the first replicates need, as far as there is room for it."""
        self.trial.note_settings()
        self.way.prepare([_seed(self.trial, i) for i in range(self.plan.min_replicates)])
        self.trial.hold_settings()
        self.trial.clock.synchronize()  # or what makes inputs would still run in another's turn

    def measure(self) -> Timing:
        """Replicate until the interval is narrow enough, or the plan's budget is spent."""
        self.trial.note_settings()
        self.way.begin()
        return _replicate(self.trial, self.plan, self.way)

    def challenge(self) -> None:
        """Try the arms that were timed last on other values, and let go of them."""
        self.trial.note_settings()
        self.way.challenge()
        self.trial.hold_settings()
        self.trial.clock.synchronize()


def measure(trial: Trial, metric: Metric, plan: StoppingRule) -> Timing:
    """Do all steps of a measurement at once."""
    measurement = Measurement(trial, metric, plan)
    measurement.prepare()
    timing = measurement.measure()
    measurement.challenge()
    return timing


def _seed(trial: Trial, replicate: int) -> int:
    return trial.seed + 1000 * (replicate + 1)


def _replicate(trial: Trial, plan: StoppingRule, way: Sampler | ScoreSampler) -> Timing:
    done: list[Replicate] = []
    started = time.monotonic()
    stopped = "replicates"
    while len(done) < plan.max_replicates:
        done.append(way.replicate(_seed(trial, len(done))))
        trial.hold_settings()
        timing = way.timing(tuple(done))
        ratio = speedup(timing)
        width = stats.half_width(ratio)
        senses = trial.clock.telemetry()
        trial.say(
            "measuring",
            replicate=len(done),
            most=plan.max_replicates,
            ratio=ratio.value,
            half_width=width if math.isfinite(width) else None,
            sm_mhz=senses.sm_mhz,
            temperature_c=senses.temperature_c,
        )
        spent = trial.clock.ranks.max(time.monotonic() - started)
        # each rank of a claim may have scores of its own
        width = trial.clock.ranks.max(width)
        if len(done) < plan.min_replicates:
            continue
        if width <= plan.target_half_width:
            stopped = "width"
            break
        if spent >= plan.time_budget_s and (
            width <= NARROW or len(done) >= plan.min_replicates + MORE
        ):
            stopped = "seconds"
            break
    return replace(timing, stopped=stopped)


def speedup(timing: Timing, of: str = "baseline") -> Interval:
    """Ratio by which the optimized arm is better than ``of``: above 1 whatever the unit."""
    arms = (of, "optimized") if timing.better == "lower" else ("optimized", of)
    return stats.comparison(timing.replicates, *arms)
