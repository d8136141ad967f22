"""Samples figures that are not times: peak bytes, or a score that an arm returns."""

import math
from collections.abc import Callable, Sequence

from pytest_aiperf.correctness.tensors import NamedTensor
from pytest_aiperf.device.device import Device
from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Metric, Mode, Replicate, Round, Score, Timing

from .bound_claim import bind
from .ladder import Ladder


class ScoreSampler:
    """Samples one figure per arm and replicate: a call's score or its peak bytes."""

    def __init__(self, ladder: Ladder, metric: Metric) -> None:
        self.ladder = ladder
        self.bound = ladder.bound
        self.metric = metric

    # These three do nothing: inputs built in advance would take memory that the arms need, clocks
    # do not affect a score, and each replicate has new inputs, which expose a result cached in an
    # earlier replicate. A result cached in an earlier call of the same replicate is not detected.
    def prepare(self, seeds: Sequence[int]) -> None: ...
    def begin(self) -> None: ...
    def check_with_new_inputs(self) -> None: ...

    def replicate(self, seed: int) -> Replicate:
        """Score each arm on its own inputs, and queue the outputs for verification."""
        bound = self.bound
        names = self.ladder.arms
        bound.random.shuffle(names)
        figures: dict[str, tuple[float, ...]] = {}
        results: dict[str, list[NamedTensor]] = {}
        for name in names:
            bound.device.release()
            inputs = bound.make_inputs(seed)
            call = bind(self.ladder.prepare(name, inputs), inputs.args)
            self.score, returned = self._call(call)
            if bound.effects.updates:
                returned = bound.call_again(inputs, call)
            results[name] = bound.output_copies(returned, inputs)
            if not self.score.value > 0 or math.isinf(self.score.value):
                raise UsageError(
                    f"{name} gives {self.score.value} {self.score.unit}: a ratio needs more than 0"
                )
            figures[name] = (self.score.value,)
            del inputs, call, returned
        self.ladder.verify_later([results], seed, "after measuring")
        order = "".join(map(self.ladder.letter, names))
        return Replicate(seed=seed, rounds=(Round(order=order, seconds=figures),))

    def _call(self, call: Callable[[], object]) -> tuple[Score, object]:
        """Return the score of a call, and its return value."""
        if self.metric is Metric.MEMORY:
            peak = max(1, peak_bytes(self.bound.device, call))
            return Score(value=float(peak), unit="B", better="lower"), call()
        returned = call()
        values = returned if isinstance(returned, tuple) else (returned,)
        scores = [value for value in values if isinstance(value, Score)]
        if len(scores) != 1:
            raise UsageError(
                'metric="score": an arm returns exactly one Score(value, unit, better) beside its '
                f"results, not {len(scores)}"
            )
        return scores[0], returned

    def timing(self, replicates: tuple[Replicate, ...]) -> Timing:
        return Timing(
            metric=self.metric,
            mode=Mode.PLAIN,
            calls=dict.fromkeys(self.ladder.arms, 1),
            cache=self.bound.claim.cache,
            sets=1,
            replicates=replicates,
            unit=self.score.unit,
            better=self.score.better,
        )


def peak_bytes(device: Device, call: Callable[[], object]) -> int:
    """Return the peak bytes of an arm's second call: the first one also allocates handles."""
    device.peak_bytes(call)
    device.release()
    return device.peak_bytes(call)
