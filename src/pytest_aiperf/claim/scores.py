"""Figures that are no times: peak bytes, or a score that an arm returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Metric, Mode, Replicate, Round, Score, Timing

from . import correctness
from .inputs import Trial, bind, overwrite
from .tensors import NamedTensor


class ScoreSampler:
    """A figure that is not a time: peak bytes, or a score that the arm itself returns."""

    def __init__(
        self, trial: Trial, figure: Callable[[Trial, Callable[[], object]], tuple[Score, object]]
    ) -> None:
        self.trial = trial
        self.figure = figure
        self.metric = Metric.MEMORY if figure is peak else Metric.SCORE
        self.last: Score | None = None

    def prepare(self, seeds: Sequence[int]) -> None:
        """Nothing: an arm's memory is measured while nothing else of the claim lies there."""

    def begin(self) -> None:
        """Nothing, as no clock need settle."""

    def challenge(self) -> None:
        """Nothing: no arm is called twice on the same inputs."""

    def replicate(self, seed: int) -> Replicate:
        trial = self.trial
        names = list(trial.claim.arms)
        trial.random.shuffle(names)
        figures: dict[str, tuple[float, ...]] = {}
        results: dict[str, list[NamedTensor]] = {}
        for name in names:
            trial.clock.release()
            args = trial.make(seed)
            call = bind(trial.prepare(name, seed, args), args)
            score, returned = self.figure(trial, call)
            if set(trial.contract.mutated) - set(trial.contract.write_only):
                overwrite(range(len(args)), args, trial.make(seed))
                returned = call()
            results[name] = correctness.kept(correctness.result(returned, args, trial.contract))
            if not score.value > 0 or math.isinf(score.value):
                raise UsageError(
                    f"{name} gives {score.value} {score.unit}: a ratio needs more than 0"
                )
            figures[name] = (score.value,)
            self.last = score
            del args, call, returned
        trial.verify_later([results], seed, "after measuring")
        return Replicate(seed, (Round("".join(n[0].upper() for n in names), figures),))

    def timing(self, done: tuple[Replicate, ...]) -> Timing:
        assert self.last is not None
        return Timing(
            self.metric,
            Mode.PLAIN,
            1,
            self.trial.claim.cache,
            1,
            done,
            unit=self.last.unit,
            better=self.last.better,
        )


def peak(trial: Trial, call: Callable[[], object]) -> tuple[Score, object]:
    trial.clock.peak_bytes(call)  # lazily built handles and workspaces are not the claim's
    trial.clock.release()
    peak = trial.clock.peak_bytes(call)
    return Score(float(max(1, peak)), "B", "lower"), call()


def score(_: Trial, call: Callable[[], object]) -> tuple[Score, object]:
    returned = call()
    values = returned if isinstance(returned, tuple) else (returned,)
    scores = [v for v in values if isinstance(v, Score)]
    if len(scores) != 1:
        raise UsageError(
            'metric="score": an arm returns exactly one Score(value, unit, better) beside its '
            f"results, not {len(scores)}"
        )
    return scores[0], returned
