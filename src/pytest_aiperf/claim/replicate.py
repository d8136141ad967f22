"""Measure a trial: warm up, replicate in mirrored rounds, verify, stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from pytest_aiperf.errors import CannotCapture, InvalidMeasurement
from pytest_aiperf.model import Interval, Metric, Mode, Replicate, Round, Senses, Timing
from pytest_aiperf.rules import guards, stats
from pytest_aiperf.timing.clock import LONGEST_BLOCK, Block, calls_per_block, choose_mode

from . import agree, leaves
from .figures import Figures, peak, score
from .leaves import Leaf
from .trial import Args, Trial, bind, overwrite

REDO = 3
"""How often a disturbed round is measured again: at once, then twice after the clocks settled."""

IN_A_ROW = 5
"""Calls in a row that are looked at one by one, once a measurement; two where a call is slow."""
SLOW = 0.01

WARM_SETS = 3
"""Input sets of a GPU claim that declares a warm cache: other data at other addresses each call."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How precisely to measure: stop on the interval's width, on seconds, or on replicates.

    Two rounds a replicate: a replicate's buffers, graphs and checks cost twice as much as a round,
    and layout, which differs between replicates, is half of the noise. Six replicates: stopped at a
    width, a 99 % interval misses the truth in up to 1.9 % with normal noise; with eight in 1.7 %.
    """

    half_width: float = 0.005
    least: int = 6
    most: int = 32
    rounds: int = 2
    seconds: float = 1.0


PLAN = Plan()
QUICK = Plan(half_width=0.01, least=5, most=12, seconds=0.6)

NARROW, MORE = 0.05, 2
"""An interval that is not so narrow has so many replicates more than the least."""


def measure(trial: Trial, metric: Metric, plan: Plan) -> Timing:
    """Replicate until the interval is narrow enough, or the plan's budget is spent."""
    trial.note_settings()
    if metric is Metric.SCORE:
        return _replicate(trial, plan, Figures(trial, score))
    if metric is Metric.MEMORY:
        return _replicate(trial, replace(plan, least=3), Figures(trial, peak))
    return _replicate(trial, plan, _Timed(trial, metric, plan))


def _replicate(trial: Trial, plan: Plan, way: _Timed | Figures) -> Timing:
    done: list[Replicate] = []
    started = time.monotonic()
    stopped = "replicates"
    while len(done) < plan.most:
        done.append(way.replicate(trial.seed + 1000 * (len(done) + 1)))
        trial.hold_settings()
        timing = way.timing(tuple(done))
        ratio = speedup(timing)
        width = stats.half_width(ratio)
        senses = trial.clock.sense()
        trial.say(
            "measuring",
            replicate=len(done),
            most=plan.most,
            ratio=ratio.value,
            half_width=width if math.isfinite(width) else None,
            sm_mhz=senses.sm_mhz,
            temperature_c=senses.temperature_c,
        )
        spent = trial.clock.peers.most(time.monotonic() - started)
        # each rank of a claim may have scores of its own
        width = trial.clock.peers.most(width)
        if len(done) < plan.least:
            continue
        if width <= plan.half_width:
            stopped = "width"
            break
        if spent >= plan.seconds and (width <= NARROW or len(done) >= plan.least + MORE):
            stopped = "seconds"
            break
    return replace(timing, stopped=stopped)


@dataclass(slots=True)
class _Stand:
    """One arm on buffers of its own, and the block of calls that is timed."""

    name: str
    pad: object
    args: list[Args]
    calls: list[Callable[[], object]]
    block: Block | None = None

    @property
    def ready(self) -> Block:
        assert self.block is not None
        return self.block


class _Timed:
    """Seconds of a call: blocks of calls in mirrored rounds over rotated input sets."""

    def __init__(self, trial: Trial, metric: Metric, plan: Plan) -> None:
        self.trial = trial
        self.clock = trial.clock
        self.plan = plan
        self.metric = metric
        self._updated = set(trial.contract.written) - set(trial.contract.pure)
        self.notes: list[str] = []
        self.challenged = False
        self.sets, self.least_calls = self._count_sets()
        stands = self._stand(trial.seed)
        seconds = self._warm(stands)
        fast, slow = min(seconds.values()), max(seconds.values())
        self.mode = choose_mode(metric, fast)
        self.calls = self._count_calls(fast, slow)
        took = self._settle_mode(stands, fast, slow)
        self.sets = min(self.sets, self.calls)  # a slow call may be alone in its block
        self.in_a_row = IN_A_ROW if slow < SLOW else 2
        # a backlog's calls may take the host longer to enqueue than the GPU to do
        took = self.clock.peers.most(took)  # or ranks would run different numbers of rounds
        once = max(sum(seconds.values()) * 2 * self.calls, 2 * took)
        self.rounds = max(1, min(plan.rounds, int(plan.seconds / (plan.least * once))))

    def _count_sets(self) -> tuple[int, int]:
        """Count the input sets, and the calls that a block needs to go round them."""
        gpu = self.clock.gpu
        if gpu is None:
            return 1, 1  # a host claim: the medium's cache is part of what it says
        if self.trial.claim.cache == "warm":
            return WARM_SETS, 1
        size = leaves.nbytes(self.trial.make(self.trial.seed))
        sets = guards.rotation(size, gpu.l2_bytes)
        # a set of several times the L2 evicts itself: one call a block is cold, too
        return sets, 1 if size >= guards.SPAN * gpu.l2_bytes else sets

    def _count_calls(self, fast: float, slow: float) -> int:
        return max(self.least_calls, calls_per_block(self.mode, fast, slow))

    def _stand(self, seed: int) -> list[_Stand]:
        trial = self.trial
        names = list(trial.claim.arms)
        trial.random.shuffle(names)  # whose buffers come first must not favour an arm
        stands = []
        for name in names:
            pad = self.clock.pad(trial.random)
            args, calls = [], []
            for i in range(self.sets):
                made = trial.make(seed + i)
                leaves.poison(made, trial.contract.pure)
                call = trial.prepare(name, seed + i, made)
                args.append(made)
                calls.append(bind(call, made))
            stands.append(_Stand(name, pad, args, calls))
        return stands

    def _warm(self, stands: list[_Stand]) -> dict[str, float]:
        """Let the clocks settle under all arms, and return the seconds of one call of each."""
        self.trial.say("warming up")
        for stand in stands:
            self._run_each(stand)
        firsts = [stand.calls[0] for stand in stands]
        self.clock.settle(lambda: [call() for call in firsts])
        return {s.name: self._once(s.calls) for s in stands}

    def _once(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the seconds of one call: of short ones the least of three, as one may stumble."""
        found = math.inf
        for call in (*calls, *calls, *calls)[:3]:
            wall = self.metric is Metric.WALL
            once = self.clock.block([call], Mode.WALL).run() if wall else self.clock.once(call)
            found = min(found, once)
            if found > LONGEST_BLOCK:
                break
        return found

    def _run_each(self, stand: _Stand) -> None:
        """Run each call once on the clock's own stream, where libraries keep their workspaces."""
        self.clock.block(stand.calls[: self.sets], Mode.WALL).run()

    def _settle_mode(self, stands: list[_Stand], fast: float, slow: float) -> float:
        """Fall back until both arms run in one mode: graph, backlog, plain.

        Return the host's seconds of a first run of all blocks, where they are run.
        """
        while True:
            try:
                return self._blocks(stands)
            except (CannotCapture, InvalidMeasurement) as why:
                if self.mode not in (Mode.GRAPH, Mode.BACKLOG):
                    raise
                lower = Mode.BACKLOG if self.mode is Mode.GRAPH else Mode.PLAIN
                self.notes.append(f"not timed by {self.mode}: {why}")
                self.mode = lower
                self.calls = self._count_calls(fast, slow)

    def _blocks(self, stands: list[_Stand]) -> float:
        took = 0.0
        for stand in stands:
            calls = [stand.calls[i % self.sets] for i in range(self.calls)]
            stand.block = self.clock.block(calls, self.mode)
            if self.mode in (Mode.GRAPH, Mode.BACKLOG):
                begun = time.monotonic()
                stand.block.run()  # the first run pays for uploads, or finds how long to hold back
                took += time.monotonic() - begun
        return took

    def replicate(self, seed: int) -> Replicate:
        self.clock.release()
        stands = self._stand(seed)
        if self.mode is not Mode.BACKLOG:  # a backlog's first run finds how long to hold back
            for stand in stands:
                self._run_each(stand)
        self._blocks(stands)
        if self.metric is Metric.DEVICE:
            self.clock.wake([stand.ready for stand in stands])
        by_name = {s.name: s for s in stands}
        rounds: list[Round] = []
        redone = 0
        senses = self.clock.sense()
        for _ in range(self.rounds):
            done, problem, senses = self._round(by_name, senses)
            for again in range(REDO):
                if problem is None:
                    break
                redone += 1
                if again:  # at once helps where a clock rose from its rest, and nothing else
                    self.clock.settle(stands[0].calls[0])
                    senses = self.clock.sense()
                done, problem, senses = self._round(by_name, senses)
            if problem is not None:
                raise InvalidMeasurement(
                    f"a round was disturbed {REDO + 1} times, the last time by {problem}: "
                    "let the GPU cool, stop other work on it and in the calls, and run again"
                )
            rounds.append(done)
        self._verify(stands, seed)
        if not self.challenged:  # once: it costs as much as the rounds
            self._challenge(by_name, seed)
            self.challenged = True
        return Replicate(seed, tuple(rounds), redone)

    def _round(
        self, stands: Mapping[str, _Stand], before: Senses
    ) -> tuple[Round, str | None, Senses]:
        """Run a mirrored round: what it gave, what disturbed it, and the senses at its end."""
        half = list(stands)
        self.trial.random.shuffle(half)
        order = [*half, *reversed(half)]  # mirrored: a steady drift meets all arms alike
        seconds: dict[str, list[float]] = {name: [] for name in stands}
        extras = guards.extras()
        for name in order:
            seconds[name].append(stands[name].ready.run() / self.calls)
        after = self.clock.sense()
        done = Round(
            "".join(name[0].upper() for name in order),
            {name: tuple(s) for name, s in seconds.items()},
            after.sm_mhz,
            after.event_reasons,
        )
        problem = guards.round_problem(before, after)
        problem = problem or guards.extra_problem(extras, guards.extras())
        if not self.clock.peers.agree(problem is None):
            problem = problem or "what another rank felt"
        return done, problem, after

    def _verify(self, stands: Sequence[_Stand], seed: int) -> None:
        """Keep what the last timed calls left; inputs updated in place are restored first."""
        trial = self.trial
        last = (self.calls - 1) % self.sets
        results = {}
        for stand in stands:
            args, returned = stand.args[last], stand.ready.last
            if self._updated:
                overwrite(range(len(args)), args, trial.make(seed + last))
                returned = stand.calls[last]()
                self.clock.synchronize()  # a result in pinned memory is there only after a wait
            results[stand.name] = agree.kept(agree.result(returned, args, trial.contract))
        trial.verify_later([results], partial(trial.make, seed + last), "after timing")

    def _challenge(self, stands: Mapping[str, _Stand], seed: int) -> None:
        """Put other values into the timed inputs, in place: what an arm remembers is now wrong.

        Calls in a row meet one set of values and another in turn, and each is looked at: an arm
        that works at some calls only skips one of them. A result is taken in the order of its
        stream, without a wait that would hide what still runs; then the timed block itself is run
        on those values.
        """
        trial, clock = self.trial, self.clock
        last = (self.calls - 1) % self.sets

        def put(stand: _Stand, values: Args) -> None:
            overwrite(live, stand.args[last], values)
            leaves.poison(stand.args[last], trial.contract.pure)
            clock.synchronize()

        other, live = trial.other(seed + last, seed + 250_031)
        turns = (other, trial.make(seed + last))
        in_order = sorted(stands, key=("optimized", "library", "baseline").index)
        found: list[dict[str, list[Leaf]]] = [{} for _ in range(self.in_a_row)]
        for name in in_order:
            for i, results in enumerate(found):
                put(stands[name], turns[i % 2])
                taken = clock.block([partial(self._taken, stands[name], last)], Mode.WALL)
                taken.run()
                results[name] = agree.kept(cast("list[Leaf]", taken.last))

        def others() -> Args:
            return trial.other(seed + last, seed + 250_031)[0]

        when = "on values that were put into the timed inputs"
        trial.verify_later(found[::2], others, when)
        trial.verify_later(found[1::2], partial(trial.make, seed + last), when)
        if self._updated:
            return  # a block updates its inputs as often as it calls
        again: dict[str, list[Leaf]] = {}
        for name in in_order:
            put(stands[name], other)
            stands[name].ready.run()
            returned, args = stands[name].ready.last, stands[name].args[last]
            again[name] = agree.kept(agree.result(returned, args, trial.contract))
        trial.verify_later([again], others, "when the timed block ran on other values")

    def _taken(self, stand: _Stand, i: int) -> list[Leaf]:
        """Call an arm and take its result at once, in the order of the clock's stream."""
        found = agree.result(stand.calls[i](), stand.args[i], self.trial.contract)
        if self.clock.device == "cpu":
            return agree.kept(found)
        # what a GPU copies to the host is there only after a wait
        ours = [leaf for leaf in found if str(getattr(leaf[1], "device", "cpu")) != "cpu"]
        kept = dict(agree.kept(ours))
        return [(path, kept.get(path, value)) for path, value in found]

    def timing(self, done: tuple[Replicate, ...]) -> Timing:
        return Timing(
            self.metric,
            self.mode,
            self.calls,
            # the host's caches are not rotated through, whatever the claim says
            self.trial.claim.cache if self.clock.gpu else "warm",
            self.sets,
            done,
            notes=tuple(self.notes),
        )


def speedup(timing: Timing, of: str = "baseline") -> Interval:
    """Ratio by which the optimized arm is better than ``of``: above 1 whatever the unit."""
    arms = (of, "optimized") if timing.better == "lower" else ("optimized", of)
    return stats.comparison(timing.replicates, *arms)
