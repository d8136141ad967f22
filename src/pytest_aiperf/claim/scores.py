"""Samples figures that are not times: peak bytes, or a score that an arm returns."""

import math
from collections.abc import Callable, Iterable, Sequence

from pytest_aiperf.correctness import argument_effects, tensors
from pytest_aiperf.correctness.contents import Contents
from pytest_aiperf.correctness.tensors import NamedTensor
from pytest_aiperf.device.device import UNTRACED_BYTES
from pytest_aiperf.errors import InvalidMeasurement, UsageError
from pytest_aiperf.model import Metric, Mode, Replicate, Round, Score, Timing
from pytest_aiperf.rules.stats import as_float
from pytest_aiperf.text import si

from .bound_claim import bind
from .ladder import Ladder
from .stopping_rule import StoppingRule

MORE_UNTRACED = 1.5
"""An arm is refused if its calls without a tracer need more than this many times the traced memory,
plus UNTRACED_BYTES. The factor allows for Python's pools of small objects, which are larger than
the objects."""


class ScoreSampler:
    """Samples figures of each arm in each replicate: a call's score or its peak bytes."""

    def __init__(self, ladder: Ladder, metric: Metric, rule: StoppingRule) -> None:
        self.ladder = ladder
        self.bound = ladder.bound
        self.metric = metric
        # peaks of memory hardly vary
        self._rounds = rule.scores_per_replicate if metric is Metric.SCORE else 1
        self.score: Score | None = None  #: The first score: all have its unit and direction.

    drawing_s = 0.0
    builds_quickly = False  # calls that return scores are whole services or training steps

    # These do nothing: inputs built in advance would take memory that the arms need, clocks
    # do not affect a score, and each replicate has new inputs.
    def prepare(self, seeds: Sequence[int]) -> None: ...
    def begin(self) -> None: ...
    def builds_long(self, _seed: int) -> bool:
        return False

    def prepare_more(self, seeds: Sequence[int]) -> None: ...
    def finish(self) -> None: ...

    def check_plausibility(self, timing: Timing) -> None:
        """Refuse arms that needed more memory in each checked call than in the measured calls.

        The tracer runs only in measured calls, and an arm could notice it.
        """
        for rung in self.ladder.rungs if self.metric is Metric.MEMORY else ():
            name = rung.arms["optimized"]
            measured = max(b.seconds[name][0] for r in timing.replicates for b in r.rounds)
            grown = min(rung.bound.grown_bytes.get("optimized", [0]))
            if grown > MORE_UNTRACED * measured + UNTRACED_BYTES:
                rung.suspicion = InvalidMeasurement(
                    f"optimized needs {si(grown, 'B')} in calls that are checked, but "
                    f"{si(measured, 'B')} in those whose memory is traced: a call must do the same "
                    "whether it is traced or not"
                )

    def unchecked(self) -> Iterable[str]:
        return ()

    def replicate(self, seed: int) -> Replicate:
        rounds = tuple(self._round(seed + i) for i in range(self._rounds))
        return Replicate(seed=seed, rounds=rounds)

    def _round(self, seed: int) -> Round:
        """Score each arm on its own inputs, and queue the outputs for verification."""
        bound = self.bound
        names = self.ladder.arms
        bound.random.shuffle(names)
        figures: dict[str, tuple[float, ...]] = {}
        for name in names:
            bound.device.release()
            owner, role = self.ladder.owner(name)
            held = owner.held_bytes(role)  # by earlier calls
            with owner.counting(role) as results:
                score, outputs, left, last_seed = self._sample(name, seed)
                results.append(tensors.nbytes(tuple(array for _, array in outputs)))
            self.ladder.verify_later(name, outputs, last_seed, "after measuring", left=left)
            figures[name] = (float(score.value + held),)
        order = "".join(map(self.ladder.letter, names))
        return Round(order=order, seconds=figures)

    def _sample(self, name: str, seed: int) -> tuple[Score, list[NamedTensor], list[Contents], int]:
        """Call an arm; return its score, copies of its outputs, other contents and the seed.

        The other contents are those that the call left in arguments that hold no arrays.
        """
        bound = self.bound
        # the first call allocates handles and workspaces; the second call's memory is measured
        count = 2 if self.metric is Metric.MEMORY else 1
        inputs = [bound.make_inputs(seed + i) for i in range(count)]
        score, returned = self._call(*[bind(self.ladder.prepare(name, i), i.args) for i in inputs])
        bound.refuse_changed_settings()
        outputs = bound.output_copies(returned, inputs[-1])
        left = argument_effects.contents_of(inputs[-1].args, bound.effects)
        if not score.value > 0 or math.isinf(score.value):
            arm = self.ladder.describe(name)
            raise UsageError(f"{arm} gives {score.value} {score.unit}: a ratio needs more than 0")
        first = self.score = self.score or score
        kind = score.unit, score.better
        if kind != (first.unit, first.better):
            raise UsageError(
                f"{self.ladder.describe(name)} gives {score.unit!r} ({score.better} is better) "
                f"after a score in {first.unit!r} ({first.better} is better): all calls need one "
                "unit and 'higher' or 'lower'"
            )
        return score, outputs, left, inputs[-1].seed

    def _call(self, *calls: Callable[[], object]) -> tuple[Score, object]:
        """Return the score of the last call, and its return value."""
        if self.metric is Metric.MEMORY:
            peak, returned = self.bound.device.peak_bytes(*calls)
            return Score(value=float(max(1, peak)), unit="B", better="lower"), returned
        returned = calls[-1]()
        return score_of(returned), returned

    def timing(self, replicates: tuple[Replicate, ...]) -> Timing:
        assert self.score is not None
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


def score_of(returned: object) -> Score:
    """Return the score among what an arm has returned."""
    values = returned if isinstance(returned, tuple) else (returned,)
    scores = [value for value in values if isinstance(value, Score)]
    if len(scores) != 1:
        raise UsageError(
            'metric="score": an arm returns exactly one Score(value, unit, better) beside its '
            f"results, not {len(scores)}"
        )
    (score,) = scores
    if score.better not in ("higher", "lower"):
        raise UsageError(f"Score(better={score.better!r}): use 'higher' or 'lower'")
    if not isinstance(score.unit, str):
        raise UsageError(f"Score(unit={score.unit!r}): name the unit of the figure")
    if as_float(score.value) is None:
        raise UsageError(f"Score(value={score.value!r}): give a number")
    return score
