"""Times the arms of a claim in mirrored rounds of blocks, on values that no call has met.

On the host, a block is one pass over input sets with new values, which are drawn between blocks
for each arm separately. An arm therefore gains nothing from what it remembers of earlier calls,
from what its destination already holds, or from what another arm has left behind. The result of one
randomly chosen call is copied as soon as the clock has stopped, and is verified later. Calls are
also timed alone, so that an arm gains nothing by doing the work of a whole block in its first call.

On a GPU, only replicates, and lone calls before and after timing, get new values, and blocks go
around the sets many times: values written between blocks would lie in another cache than the
others. In each replicate, the result of one randomly chosen block per arm is copied.
"""

import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from pytest_aiperf.correctness.contents import Contents
from pytest_aiperf.correctness.peek import Peek
from pytest_aiperf.correctness.tensors import NamedTensor
from pytest_aiperf.device.device import (
    MAX_BLOCK_S,
    calls_per_block,
    choose_mode,
    gc_disabled,
)
from pytest_aiperf.errors import CannotCapture, InvalidMeasurement
from pytest_aiperf.model import GpuState, Metric, Mode, Replicate, Round, Timing
from pytest_aiperf.rules import validity
from pytest_aiperf.text import si

from . import result_copies
from .buffers import MIN_SETS, ArmBuffers, BufferBuilder
from .ladder import Ladder
from .passes import Batch, Pass
from .plausibility import PlausibilityChecks, RecordedTimes, block_seconds, slower_when_timed
from .search import FEWEST_SEEDS, JUDGED, SEARCHING_S
from .side_effects import SideEffects
from .stopping_rule import StoppingRule

MAX_REPEATS = 3
"""Most repeats of a disturbed round: the first at once, the others after the clocks are stable."""
LONG_CALL_S = 0.1
"""A call that takes longer than this is not warmed up again between building its inputs and timing
it, because what a GPU and a CPU forget meanwhile costs them a few milliseconds at most."""
MIN_PASS_S = 50e-6
"""A block of a single pass over the input sets takes at least this long, which is 100 times the
resolution of a GPU's events. If one pass is shorter, the block goes around the sets again."""
MAX_ROUNDS = 4
"""If few input sets make blocks short, up to this many rounds take the place of each round."""
CHECKED_CALLS = 5
"""Lone calls of each arm on new values after timing, if the timed blocks repeat their values."""
CHECKING_S = 1.0
"""If these lone calls of all arms, with drawing their values, would take longer than this, each arm
makes only two."""
TIMED = "in a timed block"
"""Names the call with a wrong result in error messages: calls may have met its values before."""
TIMED_ON_NEW = "on new values in a timed block"
"""Names the call with a wrong result in error messages: no call had met its values."""


class Sampler:
    """Samples the seconds per call of each arm."""

    def __init__(self, ladder: Ladder, metric: Metric, rule: StoppingRule) -> None:
        self.ladder = ladder
        self.bound = ladder.bound
        self.device = ladder.bound.device
        self.rule = rule
        self.metric = metric
        self.notes: list[str] = []
        self.builder = BufferBuilder(ladder)
        self.times = RecordedTimes()
        self._warm: list[ArmBuffers] = []  # buffers on which all arms were just called
        self.drawing_s = 0.0
        """Seconds spent on drawing new values. The time budget excludes them: it decides how narrow
        the interval becomes."""
        self._rotations: list[list[str]] = []  # orders of the arms in the next rounds
        self._typical_s: dict[str, float] = {}  # by arm: geometric mean of its blocks
        self._checks: PlausibilityChecks | None = None  # None until all is timed
        self._idle = validity.IdleTime()
        self._last_buffers: list[ArmBuffers] = []  # buffers of the last replicate
        self._blocks_until_kept: dict[str, int] = {}  # by arm: blocks until a result is kept
        self._problem: str | None = None  # what disturbed the running round
        self._state = GpuState()  # state after the last round

    def prepare(self, seeds: Sequence[int]) -> None:
        """Build the buffers of the first replicate, and of later ones while memory allows.

        This runs before the exclusive lock is taken, so that other claims can use the device
        meanwhile: building takes as long as timing.
        """
        builder = self.builder
        first_s = self.times.first_s
        for arm in builder.build_first(seeds[0]):
            block = self.device.block([arm.call(0)], Mode.WALL)
            first_s[arm.name] = min(block.run(), block.run())
        fastest_s = min(first_s.values())
        builder.choose_sets(fastest_s, choose_mode(self.metric, fastest_s))
        builder.complete(seeds)

    def prepare_more(self, seeds: Sequence[int]) -> None:
        """Build the next replicate's buffers and, while memory allows, those of later ones."""
        self._last_buffers = []  # frees them
        self.builder.build_more(seeds)

    def builds_long(self, seed: int) -> bool:
        return self.builder.builds_long(seed)

    @property
    def builds_quickly(self) -> bool:
        return self.builder.builds_quickly

    def begin(self) -> None:
        """Wait for stable clocks; choose the mode, the calls per block and the rounds."""
        builder = self.builder
        self.bound.progress("warming up")
        buffers = self._warm = next(iter(builder.prebuilt.values()))
        for arm in buffers if self.metric is Metric.DEVICE else ():
            try:
                self.device.refuse_unjoined(arm.call(0))
            except InvalidMeasurement as why:
                raise InvalidMeasurement(f"{self.ladder.describe(arm.name)}: {why}") from None
        first_calls = [arm.call(0) for arm in buffers]
        self.device.stabilize_clocks(lambda: [call() for call in first_calls])
        seconds = {arm.name: self._estimate_s(arm) for arm in buffers}
        self.mode = choose_mode(self.metric, min(seconds.values()))
        self._count_calls(seconds)
        first_run_s = self._choose_mode(buffers, seconds)
        if not self.device.renews:
            builder.sets = min(builder.sets, max(self.calls.values()))  # at most one set per call
        # calls that update their inputs need the original values anyway
        is_cheap = builder.renews_quickly(min(MIN_SETS, max(self.calls.values())))
        self.renews = self.device.ranks.all(is_cheap) or self.bound.second_call_differs
        self.renews = self.renews and self.device.renews
        # A round takes at least as long as the host needs to enqueue its blocks. The maximum over
        # the ranks makes all of them choose the same number of rounds.
        blocks_s = sum(2 * calls * seconds[name] for name, calls in self.calls.items())
        renewals_s = 2 * self.renews * builder.set_s * sum(self.calls.values())
        round_s = self.device.ranks.max(max(blocks_s, 2 * first_run_s) + renewals_s)
        rounds = self.rule.rounds_per_replicate * self._short
        affordable = int(self.rule.time_budget_s / (self.rule.min_replicates * round_s))
        self.rounds = max(1, min(rounds, affordable))

    def _count_calls(self, seconds: Mapping[str, float]) -> None:
        """Choose each arm's calls per block: the same for all arms that are about as fast."""
        sets, fastest = self.builder.sets, min(seconds.values())
        self.calls, self._short = {}, 1
        for name, call_s in seconds.items():
            enough = calls_per_block(self.mode, fastest, call_s)
            count = enough
            if self.device.renews:
                count = min(enough, max(sets, math.ceil(MIN_PASS_S / max(call_s, 1e-9))))
            if self.device.renews and self.bound.second_call_differs:
                count = min(count, sets)  # a second call on a set has another result
            self._short = max(self._short, min(MAX_ROUNDS, enough // count))
            self.calls[name] = max(self.builder.min_calls(call_s), count)

    def _estimate_s(self, arm: ArmBuffers) -> float:
        """Return the shortest of three estimates of the seconds per call; of one, if it is slow.

        Each estimate is made on values that no call has met. Calls of an arm that caches results
        would otherwise look shorter than they are, and the arm would get blocks that repeat values.
        """
        builder, shortest = self.builder, math.inf
        is_renewed = self.device.renews and self.device.ranks.all(builder.renews_quickly(1))
        for i in range(3):
            if is_renewed:
                builder.renew(arm, [i % builder.sets])
            call = arm.call(i % builder.sets)
            if self.metric is Metric.WALL:
                seconds = self.device.block([call], Mode.WALL).run()
            else:
                seconds = self.device.estimate_s(call)
            shortest = min(shortest, seconds)
            if shortest > MAX_BLOCK_S:
                break
        self.bound.refuse_changed_settings(arm.name)
        return shortest

    def _choose_mode(self, buffers: list[ArmBuffers], seconds: Mapping[str, float]) -> float:
        """Fall back from graph to backlog mode, then to plain mode, until all arms run in one.

        Graph and backlog mode can fail, so each block runs once to try them. Return the host's
        seconds for these runs; they are about 0 in the other modes, which need no try.
        """
        builder = self.builder
        while True:
            try:
                batches = self._make_batches(buffers, self.calls)
                started = time.monotonic()
                for batch in batches.values() if self.mode in (Mode.GRAPH, Mode.BACKLOG) else ():
                    batch.block.run()
                    if self.mode is Mode.GRAPH and not builder.is_large and self.device.renews:
                        builder.renew(batch.arm, [0])
                        self._refuse_stuck(batch.arm)
                return time.monotonic() - started
            except (CannotCapture, InvalidMeasurement) as why:
                if self.mode not in (Mode.GRAPH, Mode.BACKLOG):
                    raise
                self.notes.append(f"not timed by {self.mode}: {why}")
                self.mode = Mode.BACKLOG if self.mode is Mode.GRAPH else Mode.PLAIN
                self._count_calls(seconds)

    def _refuse_stuck(self, arm: ArmBuffers) -> None:
        """Raise CannotCapture if inputs of captured calls cannot be overwritten.

        Calls that are not captured can get new inputs instead.
        """
        stuck = self.builder.stuck
        if arm.name in stuck and not self.ladder.is_prepared(arm.name):
            paths = ", ".join(map(self.bound.effects.label, stuck.pop(arm.name)))
            raise CannotCapture(f"{paths} cannot get new values in a captured graph")

    def _make_batches(
        self, buffers: Sequence[ArmBuffers], calls: Mapping[str, int]
    ) -> dict[str, Batch]:
        """Make a block of so many calls for each arm that is named in ``calls``."""
        batches: dict[str, Batch] = {}
        for arm in (arm for arm in buffers if arm.name in calls):
            arm.in_place = self.mode is Mode.GRAPH or self.ladder.is_prepared(arm.name)
            order, keep = self._draw_order(arm, calls[arm.name])
            batches[arm.name] = Batch(self.device, arm, self.mode, order, keep)
        return batches

    def _draw_order(self, arm: ArmBuffers, count: int) -> tuple[list[int], int]:
        """Draw the order of the sets of a block, and the call whose result is kept.

        If an arm returns the same memory each time, only its last result survives. The length of
        the block is then drawn as well, so that the arm does not know which call is the last.
        """
        draw, sets = self.bound.random, self.builder.sets
        if not self.device.renews:
            # a block ends with the last set, so that the next one starts with the coldest
            last = sets if count > 1 else draw.randint(1, sets)
            return [(last - count + i) % sets for i in range(count)], count - 1
        order = draw.sample(range(sets), sets)
        order.sort(key=arm.met.__contains__)  # values return as late as possible
        order = [order[i % sets] for i in range(count)]
        if arm.name not in self.builder.reusing:
            return order, draw.choice((draw.randrange(count), count - 1))
        if draw.random() < 0.5:
            order = order[: draw.randint(1, count)]
        return order, len(order) - 1

    def replicate(self, seed: int) -> Replicate:
        """Time each arm on its own buffers, and queue results of its blocks for verification."""
        self._last_buffers = []  # frees them
        buffers = self.builder.prebuilt.pop(seed, [])
        # Free cached memory, so that new buffers, or outputs allocated in the calls, get new
        # addresses. With prebuilt buffers, graph and wall mode skip this: a graph owns its memory,
        # and wall mode would time the driver's allocation.
        if not buffers or self.mode in (Mode.BACKLOG, Mode.PLAIN):
            self.device.release()
        is_warm = bool(buffers) and buffers is self._warm
        to_warm = not is_warm if self.mode is Mode.WALL else self.mode is Mode.GRAPH and not buffers
        at_most_s = LONG_CALL_S if buffers else math.inf  # calls that build() has warmed up
        buffers = buffers or self.builder.build(seed)
        self._warm = []
        padding = self.device.random_padding(self.bound.random)  # shifts the outputs' addresses
        for arm in buffers if to_warm else ():  # else they ran before, or warm_up() runs them
            if self.times.first_s.get(arm.name, 0.0) < at_most_s:
                self.builder.run_once(arm)
        # Garbage collection could run code, such as __del__, that computes with values drawn ahead.
        # On a GPU it stays on, because garbage may hold much memory.
        draws_ahead = self.device.renews and not self.renews
        with gc_disabled() if draws_ahead else nullcontext():
            rounds, repeated = self._run(self._passes(buffers))
        self.bound.refuse_changed_settings(*self.calls)
        if self.renews:
            self._idle.refuse_work()
        self._last_seed = seed
        self._last_buffers = [] if self.renews else buffers
        del padding
        return Replicate(seed=seed, rounds=tuple(rounds), redone=repeated)

    def _passes(self, buffers: Sequence[ArmBuffers]) -> Iterator[Pass]:
        """Yield passes of lone calls, if there are any, then rounds, with a short block between."""
        batches = self._make_batches(buffers, self.calls)
        draw = self.bound.random
        self._blocks_until_kept = {name: draw.randrange(2 * self.rounds) for name in batches}
        if self.device.renews or not self.times.alone_s or self.bound.effects.updates:
            yield from self._lone_calls(buffers, 1)
            self._idle.ends()
        for arm in buffers if self.device.renews and not self.renews else ():
            self.builder.renew(arm, range(self.builder.sets))
        if self.metric is Metric.DEVICE:  # last: a pause would leave the device idle
            self.device.warm_up([batch.block for batch in batches.values()])
        self._state = self.device.telemetry()
        passes = [Pass(batches, is_new=self.renews)] * self.rounds
        for each in self._short_blocks(buffers):  # not only after lone calls, which announce them
            passes.insert(draw.randint(0, self.rounds), each)
        yield from passes

    def _lone_calls(self, buffers: Sequence[ArmBuffers], count: int) -> Iterator[Pass]:
        """Yield passes of single calls on new values."""
        calls = dict.fromkeys(self.calls, 1)
        for _ in range(0 if self.builder.is_large else count):
            try:
                batches = self._make_batches(buffers, calls)
            except CannotCapture as why:
                problem = f"calls can be captured together, not alone: {why}"
                raise InvalidMeasurement(problem) from why
            yield Pass(batches, is_new=True, calls=calls)

    def _short_blocks(self, buffers: Sequence[ArmBuffers]) -> Iterator[Pass]:
        """Yield a pass of blocks that end early, so that no arm leaves its work to the last call.

        A captured block, which always has the same length, is checked by lone calls only.
        """
        draw = self.bound.random
        calls = {n: draw.randint(2, c - 1) for n, c in self.calls.items() if c > 2}
        if calls and self.device.renews and not self.builder.is_large:
            yield Pass(self._make_batches(buffers, calls), is_new=self.renews, calls=calls)

    def _run(self, passes: Iterator[Pass]) -> tuple[list[Round], int]:
        """Run passes; return the rounds, and how many of them were repeated.

        All passes go through the same functions, so that an arm cannot tell from its call stack in
        which of them it runs.
        """
        rounds: list[Round] = []
        repeated = 0
        for each in passes:
            round_, repeats = self._undisturbed(each)
            if each.calls is None:
                rounds.append(round_)
                repeated += repeats
            elif each.is_lone:
                for name, seconds in round_.seconds.items():
                    self.times.alone_s.setdefault(name, []).extend(seconds)
        return rounds, repeated

    def _undisturbed(self, blocks: Pass) -> tuple[Round, int]:
        """Run a pass, and repeat a disturbed round; return its times and the number of repeats."""
        for repeat in range(MAX_REPEATS + 1):
            if repeat > 1:  # not yet at the first repeat: an idle GPU's clock may just have risen
                arm = next(iter(blocks.batches.values())).arm
                self.device.stabilize_clocks(arm.call(0))
                self._state = self.device.telemetry()
            round_, problem = self._round(blocks)
            if problem is None or blocks.calls:
                return round_, repeat
        raise InvalidMeasurement(
            f"a round was disturbed {MAX_REPEATS + 1} times, the last time by {problem}: "
            "let the GPU cool, stop other work on it, compile nothing in the calls, and run again"
        )

    def _next_rotation(self, names: list[str]) -> list[str]:
        """Return the arms in random order; over as many rounds, each arm takes each place once."""
        if not self._rotations:
            self.bound.random.shuffle(names)
            self._rotations = [names[i:] + names[:i] for i in range(len(names))]
            self.bound.random.shuffle(self._rotations)
        return self._rotations.pop()

    def _refuse_ranks_apart(self) -> None:
        """Raise if the ranks' draws differ: they would call different arms and wait forever."""
        ranks = self.device.ranks
        if ranks.count > 1:
            state = zlib.crc32(repr(self.bound.random.getstate()).encode())
            if not ranks.agree(state):
                problem = "the ranks have chosen different inputs or orders of arms"
                raise InvalidMeasurement(f"{problem}: please report this")

    def _round(self, blocks: Pass) -> tuple[Round, str | None]:
        """Run a mirrored round, or one other block of each arm; return it and what disturbed it."""
        order = list(blocks.batches)
        self._refuse_ranks_apart()
        if not blocks.calls:
            order = self._next_rotation(order)
            order += reversed(order)  # mirrored: a steady drift affects all arms equally
        seconds: dict[str, list[float]] = {name: [] for name in order}
        self._problem = None
        for name in order:
            count = (blocks.calls or self.calls)[name]
            seconds[name].append(self._time(blocks.batches[name], count, is_new=blocks.is_new))
        self._idle.ends()  # calls that warm up may follow
        before = self._state
        if self.metric is Metric.WALL:  # an arm that leaves the GPU idle may lower its clock
            before = replace(before, sm_mhz=None)
        if not blocks.calls:  # only a disturbed round is repeated
            self._state = self.device.telemetry()
        round_ = Round(
            order="".join(map(self.ladder.letter, order)),
            seconds={name: tuple(s) for name, s in seconds.items()},
            sm_mhz=self._state.sm_mhz,
            event_reasons=self._state.event_reasons,
        )
        problem = validity.round_problem(before, self._state) or self._problem
        if not self.device.ranks.all(problem is None):
            problem = problem or "a disturbance on another rank"
        return round_, problem

    def _time(self, batch: Batch, count: int, *, is_new: bool) -> float:
        """Time a batch of ``count`` calls; return the seconds per call."""
        arm, bound = batch.arm, self.bound
        outputs: list[NamedTensor] = []
        left: list[Contents] = []
        extras: dict[str, int] = {}
        is_kept = self._keeps(arm, is_new=is_new)
        peek = Peek(result_copies.UNKNOWN, reads=is_kept and not self.device.gpu)

        def before() -> None:
            started = time.monotonic()
            self._idle.ends()
            captured = self.mode is Mode.GRAPH
            order, keep = self._draw_order(arm, count) if not captured else (batch.order, 0)
            if is_new:
                if not captured:
                    batch.clear()
                self.builder.renew(arm, sorted({*order}))
                self._observe(arm, SideEffects.begin)
            if not captured:
                batch.load(order, keep)
            # a block of fewer calls than sets would find its inputs where the last one left them
            stays = bool(self.device.gpu) and count < self.builder.sets and not is_new
            if bound.claim.cache == "cold" and (self.renews or stays):
                self.device.flush()
            extras.update(validity.extras())
            self.drawing_s += time.monotonic() - started

        def after() -> None:
            args = arm.inputs[batch.kept_set].args
            peek.read((batch.block.kept, *args))
            problem = validity.extra_problem(extras, validity.extras())
            if is_kept:
                outputs[:], left[:] = result_copies.copy_result(bound, batch.block.kept, args)
                self.times.late.update([arm.name] * peek.has_changed())
            self._problem = self._problem or problem

        seconds = batch.block.run(before, after)
        self._note_values(batch, seconds, is_new=is_new)
        if is_new:
            self.bound.refuse_changed_settings(arm.name)
            self._observe(arm, SideEffects.end)
        if is_kept:
            i = batch.kept_set
            result_copies.copy_late_outputs(self.device, outputs)  # those are written only now
            when = TIMED_ON_NEW if is_new else TIMED
            self.ladder.verify_later(
                *(arm.name, outputs, arm.inputs[i].seed, when, arm.values.get(i)),
                left=left,
            )
        self._idle.begins()
        return seconds / len(batch.order)

    def _note_values(self, batch: Batch, seconds: float, *, is_new: bool) -> None:
        """Note which values are known now, and the time of a block if all were new, or all known.

        Lone calls do not count, nor blocks that always have new values.
        """
        arm, sets = batch.arm, {*batch.order}
        known = sets & arm.met
        arm.met |= sets
        if not is_new and known in (set(), sets):
            by_name = self.times.known_s if known else self.times.new_s
            by_name.setdefault(arm.name, []).append(seconds / len(batch.order))

    def _keeps(self, arm: ArmBuffers, *, is_new: bool) -> bool:
        """Whether the result of the arm's next block, on new or on known values, is kept."""
        # a call that updates its inputs has the right result only the first time
        updates = self.bound.effects.updates
        if self.builder.is_large or (updates and (arm.name in self.builder.stuck or not is_new)):
            return False
        if not is_new and not self.device.renews:
            self._blocks_until_kept[arm.name] -= 1
            return self._blocks_until_kept[arm.name] == -1
        return True

    def _observe(self, arm: ArmBuffers, step: Callable[[SideEffects, str], None]) -> None:
        for bound, role in self.ladder.owners(arm.name):
            step(bound.side_effects, role)

    def _call_again(self) -> None:
        """Call the arms on new values after timing, where blocks repeat theirs.

        An arm may skip the work of every n-th call, once it has been timed.
        """
        if self._last_buffers and not self.device.renews:
            call_s = sum(s + self.builder.set_s for s in self.times.first_s.values())
            few = self.device.ranks.max(CHECKED_CALLS * call_s) > CHECKING_S
            self._run(self._lone_calls(self._last_buffers, 2 if few else CHECKED_CALLS))
        self._last_buffers = []
        self.builder.prebuilt.clear()  # buffers of replicates that were not run

    def check_plausibility(self, timing: Timing) -> None:
        """Call the arms again, and look for times and results that show that an arm cheats."""
        self._typical_s = {
            name: statistics.geometric_mean(block_seconds(timing.replicates, name))
            for name in self.calls
        }
        self._call_again()
        self._checks = PlausibilityChecks(self.ladder, timing, self.times, renews=self.renews)
        self._checks.run()

    def finish(self) -> None:
        """Run the checks that need no blocks: on another seed, or on many more inputs."""
        if self.builder.is_large:
            self.device.release()
            self.ladder.check_anew(self._last_seed + 1)
        elif self.metric is Metric.WALL and self.device.ranks.count == 1:
            slowest = sorted(self.times.first_s.values())[-len(JUDGED) :]
            seed_s = len(JUDGED) * self.builder.set_s + sum(slowest)
            is_short = seed_s * FEWEST_SEEDS < SEARCHING_S
            self.ladder.search(self._typical_s, is_short=is_short)

    def unchecked(self) -> Iterator[str]:
        """Describe what could not be checked, beside what :meth:`Ladder.not_compared` does."""
        builder = self.builder
        if self._checks:
            yield from self._checks.unchecked()
        if builder.is_large:
            yield "results of timed calls: they are too large to keep, so another seed was checked"
        elif builder.stuck:
            paths = {path for paths in builder.stuck.values() for path in paths}
            labels = ", ".join(sorted(map(self.bound.effects.label, paths)))
            yield f"results on new values: {labels} could not be overwritten"
        elif self.device.renews and max(self.calls.values()) > builder.sets:
            slow = f"inputs() takes {si(builder.set_s, 's')} per set; draw the inputs faster"
            is_slow = not builder.renews_quickly(builder.sets + 1)
            yield (
                f"results cached by value: a block calls the same {builder.sets} sets of inputs "
                f"again, because {slow if is_slow else 'calls are short'}, or enlarge the work of "
                "a call"
            )

    def timing(self, replicates: tuple[Replicate, ...]) -> Timing:
        slower = slower_when_timed(replicates, self.times.first_s)
        return Timing(
            metric=self.metric,
            mode=self.mode,
            calls=self.calls,
            # few input sets of a host claim stay in the CPU's caches
            cache=self.bound.claim.cache if self.device.gpu else "warm",
            sets=self.builder.sets,
            replicates=replicates,
            notes=(*self.notes, *slower, *self.builder.notes()),
        )
