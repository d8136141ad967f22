"""Checks whether the times of the arms are plausible.

An arm must not do the work of one call in another, and nothing but its own work may make a baseline
slow.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_aiperf.errors import InvalidMeasurement
from pytest_aiperf.model import Metric, Mode, Replicate, Timing
from pytest_aiperf.rules.stats import median_call_s
from pytest_aiperf.text import si

from .bound_claim import BEFORE_OTHERS
from .ladder import Ladder

SLOWED = 1.5
"""An arm is reported if its timed calls take more than this many times as long as its first calls.
Smaller ratios are common on machines that do other work."""
SLOWED_BASELINE = 1.4
"""A baseline is reported as not checked if its fastest timed call takes more than this many times
its fastest call before another arm had run, plus WAKING_S: another arm may have left something
behind that slows the baseline down. On a noisy machine, the factor is multiplied by the ratio of
the median block to the fastest block."""
SLOWED_BY_OTHERS = 2.0
"""An arm is reported if its median block right after another arm's takes more than this many times
its median block right after one of its own, plus WAKING_S. On a busy CPU, caches that hold the
arm's own data make a difference of 1.7 times."""
SLOWED_ON_GPU = 1.1
"""The same factor on a GPU, without WAKING_S. In the course's claims, what another arm leaves in
the L2 cache makes a difference of 1.05 times."""
COMPARED = frozenset({"baseline", "library"})
"""Arms with whose times the optimized arm is compared."""
FEWEST_PAIRS = 2
"""Fewest blocks right after the same arm from which to judge whether other arms slow it down."""
FEWEST_AFTER_OTHERS = 4
"""Fewest blocks right after another arm from which to judge whether it slows the arm down."""
SLOWED_BY_INPUTS = 3.0
"""A baseline is reported as not checked if its calls after inputs() take more than this many times
its repeated calls, plus WAKING_S: inputs() may slow down something that only the baseline uses.
The factor is multiplied by the same ratio of the optimized arm."""
KEPT = 1.25
"""An arm is reported as not checked if three of four blocks on new values take more than this many
times the median block on values that it has already met, plus WAKING_S: the arm may cache results.
If the baseline is slower on new values as well, because they are not yet in caches, the factor is
multiplied by the baseline's ratio."""
ALIKE = 1.2
"""Ways of calling a baseline whose times differ by less than this factor count as equally fast."""
LONE_CALL_SHARE = 0.5
"""A call that is timed alone may take longer than a call in a block by this fraction of the
baseline's time, plus three times the same difference of the baseline."""
LONE_CALL_TIMES = 3.0
"""A call that is timed alone may also take at most this many times the arm's own time longer, plus
LONE_CALL_S. LONE_CALL_SHARE alone would let an arm that is twice as fast as the baseline skip its
work in blocks."""
LONE_CALL_S = 20e-6
"""Constant part of the limit that LONE_CALL_TIMES sets."""
WAKING_S = 50e-6
"""Allowance for a call on the host, whose threads have to wake up first."""
LAUNCHING_S = 200e-6
"""Allowance for a lone call on a GPU, whose time includes that of the first launch."""


@dataclass(frozen=True, slots=True)
class RecordedTimes:
    """Seconds per call of each arm, by its name, beside those of the rounds."""

    first_s: dict[str, float] = field(default_factory=dict)
    """The faster of the first two calls that were timed; both had the same inputs."""
    alone_s: dict[str, list[float]] = field(default_factory=dict)  #: Lone calls on new values.
    new_s: dict[str, list[float]] = field(default_factory=dict)
    """Blocks on new values, if other blocks repeat values."""
    known_s: dict[str, list[float]] = field(default_factory=dict)
    """Blocks on values that the arm had already met."""
    late: set[str] = field(default_factory=set)
    """Arms of a host claim whose results changed after the clock had stopped."""


class PlausibilityChecks:
    """The checks of one metric's times.

    A rung gets a ``suspicion`` if its optimized arm is faster in blocks than alone, or if the arm's
    results come late. Other times that are not plausible may have honest causes, so
    :meth:`unchecked` only describes them.
    """

    def __init__(
        self, ladder: Ladder, timing: Timing, times: RecordedTimes, *, renews: bool
    ) -> None:
        self.ladder, self.timing, self.times = ladder, timing, times
        self.device = ladder.bound.device
        self.renews = renews  #: Whether all blocks had values that no call had met.
        # by baseline or library: its times, if another arm may slow it down
        self._slowed_baselines: dict[str, str] = {}
        # by baseline: its times, if it is slow only while it is timed
        self._slow_when_timed: dict[str, str] = {}
        # by baseline: its times, if inputs() may slow it down
        self._slowing_inputs: dict[str, str] = {}
        self._keeping: dict[str, str] = {}  # by arm: its times, if new values slow it down

    def run(self) -> None:
        self._find_slowed_baselines()
        self._find_slowed_by_others()
        self._find_slowing_inputs()
        self._find_kept_work()
        self._compare_lone_calls()
        self._suspect_late_results()

    def _find_slowed_baselines(self) -> None:
        for rung in self.ladder.rungs if self.timing.metric is Metric.WALL else ():
            name = rung.arms["baseline"]
            ways = rung.bound.baseline_alone_s
            alone_s = min(ways.values(), default=math.inf)
            blocks = list(block_seconds(self.timing.replicates, name))
            noise = statistics.median(blocks) / min(blocks)
            timed_s = min(*blocks, *self.times.alone_s.get(name, ()))
            slowed_s = (timed_s - WAKING_S) / (SLOWED_BASELINE * noise)
            if alone_s >= slowed_s:
                continue
            how = next(how for how, s in ways.items() if s <= ALIKE * alone_s)
            by_others = how == BEFORE_OTHERS
            # Other work on the machine may have begun after the calls before timing. Ranks do not
            # repeat them: only some may get here, and their collectives would wait for the others.
            is_final = by_others or self.device.ranks.count > 1
            if is_final or rung.bound.time_baseline(how) < slowed_s:
                reports = self._slowed_baselines if by_others else self._slow_when_timed
                reports[name] = f"{si(timed_s, 's')}, but {si(alone_s, 's')} {how}"

    def _find_slowed_by_others(self) -> None:
        """Compare blocks that follow another arm's with those that follow one of the same arm.

        In a mirrored round, the arm in the middle has two adjacent blocks: the first follows
        another arm's block, the second its own. The second block of the arm at the ends follows the
        blocks of all others. On the host, new values are drawn before each block.
        """
        on_gpu = self.device.gpu is not None
        if self.timing.metric is not Metric.DEVICE if on_gpu else not self.renews:
            return
        times, waking_s = (SLOWED_ON_GPU, 0.0) if on_gpu else (SLOWED_BY_OTHERS, WAKING_S)
        rounds = [round_ for replicate in self.timing.replicates for round_ in replicate.rounds]
        arms = [rung.arms[r] for rung in self.ladder.rungs for r in COMPARED & rung.arms.keys()]
        for name in dict.fromkeys(arms):
            letter = self.ladder.letter(name)
            pairs = [r.seconds[name] for r in rounds if 2 * letter in r.order]
            after_itself = sorted(second for _, second in pairs)
            after_others = [first for first, _ in pairs]
            after_others += (r.seconds[name][1] for r in rounds if r.order.endswith(letter))
            if len(pairs) < FEWEST_PAIRS or len(after_others) < FEWEST_AFTER_OTHERS:
                continue
            noise = statistics.median(after_itself) / after_itself[0]
            is_, was = statistics.median(after_others), statistics.median(after_itself)
            upper = after_itself[3 * len(pairs) // 4]  # quartile; of two or three, the largest
            if min(after_others) > upper and is_ > times * noise * was + waking_s:
                text = f"{si(is_, 's')} after another arm, but {si(was, 's')} after itself"
                self._slowed_baselines.setdefault(name, text)

    def _find_slowing_inputs(self) -> None:
        if not self.device.renews or self.ladder.bound.second_call_differs:
            return  # no values are drawn between blocks, or the second call has other work
        first_s = self.times.first_s
        timed = {name: min(block_seconds(self.timing.replicates, name)) for name in first_s}
        for rung in self.ladder.rungs:
            name, optimized = rung.arms["baseline"], rung.arms["optimized"]
            was, is_ = first_s[name], timed[name]
            usual = max(1.0, timed[optimized] / first_s[optimized])
            if is_ > SLOWED_BY_INPUTS * usual * was + WAKING_S:
                times = f"{si(is_, 's')} after inputs(), but {si(was, 's')} when it was repeated"
                self._slowing_inputs[name] = times

    def _find_kept_work(self) -> None:
        """Compare blocks on new values with those in which all values have returned."""
        if self.renews or not self.device.renews:
            return
        new_by_arm, known_by_arm = self.times.new_s, self.times.known_s
        arms = known_by_arm.keys() & new_by_arm.keys()
        for rung in self.ladder.rungs if arms >= self.timing.calls.keys() else ():
            name, base = rung.arms["optimized"], rung.arms["baseline"]
            known_s = {arm: statistics.median(known_by_arm[arm]) for arm in (name, base)}
            usual = max(1.0, statistics.median(new_by_arm[base]) / known_s[base])
            new_s = sorted(new_by_arm[name])
            quartile = new_s[len(new_s) // 4]
            if quartile > KEPT * usual * known_s[name] + WAKING_S:
                is_, was = si(statistics.median(new_s), "s"), si(known_s[name], "s")
                self._keeping[name] = f"{is_} on new values, but {was}"

    def _compare_lone_calls(self) -> None:
        """Suspect arms whose calls are faster in a block than alone, by more than the baseline's.

        Such an arm does the work of several calls at once, or that of later ones in the first.
        """
        alone_s = self.times.alone_s
        blocks = {name: median_call_s(self.timing.replicates, name) for name in alone_s}
        extra = {name: min(alone) - blocks[name] for name, alone in alone_s.items()}
        waiting_s = 0.0  # a graph, or a kernel in front of the call, hides the launch
        if self.timing.mode in (Mode.WALL, Mode.PLAIN):
            waiting_s = LAUNCHING_S if self.device.gpu else WAKING_S
        for rung in self.ladder.rungs if extra else ():
            name, base = rung.arms["optimized"], rung.arms["baseline"]
            own_s = LONE_CALL_TIMES * blocks[name] + LONE_CALL_S
            allowed = min(LONE_CALL_SHARE * blocks[base], own_s)
            allowed += waiting_s + 3 * max(0.0, extra[base])
            if blocks[name] < blocks[base] and extra[name] > allowed:
                alone, many = (si(s, "s") for s in (min(alone_s[name]), blocks[name]))
                rung.suspicion = InvalidMeasurement(
                    f"optimized takes {many} per call in a block, but {alone} in a call that is "
                    "timed alone, and the baseline shows no such difference: each call must do all "
                    "of its own work, and none of another call's"
                )

    def _suspect_late_results(self) -> None:
        for rung in self.ladder.rungs:
            if rung.arms["optimized"] in self.times.late:
                rung.suspicion = InvalidMeasurement(
                    "optimized's result changed after the clock had stopped: a call must finish "
                    "its work before it returns"
                )

    def unchecked(self) -> Iterator[str]:
        """Describe what the times leave in doubt."""
        describe = self.ladder.describe
        for name, times in self._slowed_baselines.items():
            role = "library" if name.startswith("library") else "baseline"
            yield f"whether another arm slows the {role} down: {describe(name)} took {times}"
        for name, times in self._slow_when_timed.items():
            arm = describe(name)
            yield f"whether the baseline is slow only while it is timed: {arm} took {times}"
        for name, times in self._slowing_inputs.items():
            yield f"whether inputs() slows the baseline down: {describe(name)} took {times}"
        for name, times in self._keeping.items():
            yield (
                f"results cached by value: {describe(name)} took {times} when they returned, as "
                "inputs() takes too long for new values in each block; draw the inputs faster"
            )


def slower_when_timed(
    replicates: Sequence[Replicate], first_s: Mapping[str, float]
) -> Iterator[str]:
    """Describe arms that are always much slower when they are timed than when first called."""
    for name, was_s in first_s.items():
        timed_s = min(block_seconds(replicates, name))
        if timed_s > SLOWED * was_s:
            was, is_ = (si(seconds, "s") for seconds in (was_s, timed_s))
            yield f"{name} took {was} in repeated calls before timing, and {is_} when timed"


def block_seconds(replicates: Sequence[Replicate], name: str) -> Iterator[float]:
    """Yield an arm's seconds per call in each block."""
    return (s for r in replicates for b in r.rounds for s in b.seconds[name])
