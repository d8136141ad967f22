"""Seconds of an arm: stands that are warmed, timed in mirrored rounds, verified and challenged."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from pytest_aiperf.device.device import MAX_BLOCK_S, Block, calls_per_block, choose_mode
from pytest_aiperf.errors import CannotCapture, InvalidMeasurement, is_out_of_memory
from pytest_aiperf.model import GpuState, Metric, Mode, Replicate, Round, Timing
from pytest_aiperf.rules import validity

from . import correctness, tensors
from .inputs import UNKNOWN, Args, Trial, bind, overwrite
from .stopping_rule import StoppingRule
from .tensors import NamedTensor

REDO = 3
"""How often a disturbed round is measured again: at once, then twice after the clocks settled."""

IN_A_ROW = 5
"""Calls in a row that are looked at one by one, once a measurement; two where a call is slow."""
SLOW = 0.01

AHEAD = 1 / 32
"""The inputs of replicates are made before a claim's turn up to this part of the GPU's memory."""

WARM_SETS = 3
"""Input sets of a GPU claim that declares a warm cache: other data at other addresses each call."""


@dataclass(slots=True)
class ArmBuffers:
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


class Sampler:
    """Seconds of a call: blocks of calls in mirrored rounds over rotated input sets."""

    def __init__(self, trial: Trial, metric: Metric, plan: StoppingRule) -> None:
        self.trial = trial
        self.clock = trial.clock
        self.plan = plan
        self.metric = metric
        self._updated = set(trial.contract.mutated) - set(trial.contract.write_only)
        self.notes: list[str] = []
        self._ahead: dict[int, list[ArmBuffers]] = {}
        self._last: tuple[int, list[ArmBuffers]] | None = None

    def prepare(self, seeds: Sequence[int]) -> None:
        """Make the stands of the first replicate, and of others for which there is room.

        While they are made others may use the device. In what is timed alone they would be half
        of the time. What needs all threads of the host, or meets other ranks, is not made ahead.
        """
        clock = self.clock
        self.trial.say("preparing")
        self._ahead.clear()
        self.sets, self.least_calls = self._count_sets()
        first = self._ahead[seeds[0]] = self._warmed(seeds[0])
        if clock.gpu is None or clock.ranks.count > 1:
            return
        slow = max(clock.block(s.calls[:1], Mode.WALL).run() for s in first)
        if self.least_calls == 1 and slow > 2 * MAX_BLOCK_S:  # beside others it may take twice
            self.sets = 1  # a slow call is alone in its block
        size = sum(tensors.nbytes(args) for stand in first for args in stand.args[: self.sets])
        room = AHEAD * (clock.gpu.memory_bytes or UNKNOWN)
        for seed in seeds[1 : int(room / max(1, size))]:
            if clock.free_bytes() < clock.gpu.memory_bytes / 2:
                break  # this claim's calls need memory as well, and other claims
            try:
                self._ahead[seed] = self._warmed(seed)
            except Exception as why:
                if not is_out_of_memory(why):
                    raise
                clock.release()
                break

    def begin(self) -> None:
        """Settle the clocks, and choose how many calls are timed in which mode."""
        stands = next(iter(self._ahead.values()))
        seconds = self._warm(stands)
        fast, slow = min(seconds.values()), max(seconds.values())
        self.mode = choose_mode(self.metric, fast)
        self.calls = self._count_calls(fast, slow)
        took = self._settle_mode(stands, fast, slow)
        self.sets = min(self.sets, self.calls)  # a slow call may be alone in its block
        self.in_a_row = IN_A_ROW if slow < SLOW else 2
        # a backlog's calls may take the host longer to enqueue than the GPU to do
        took = self.clock.ranks.max(took)  # or ranks would run different numbers of rounds
        once = max(sum(seconds.values()) * 2 * self.calls, 2 * took)
        plan = self.plan
        self.rounds_per_replicate = max(
            1,
            min(plan.rounds_per_replicate, int(plan.time_budget_s / (plan.min_replicates * once))),
        )

    def _count_sets(self) -> tuple[int, int]:
        """Count the input sets, and the calls that a block needs to go round them."""
        gpu = self.clock.gpu
        if gpu is None:
            return 1, 1  # a host claim: the medium's cache is part of what it says
        if self.trial.claim.cache == "warm":
            return WARM_SETS, 1
        size = tensors.nbytes(self.trial.make(self.trial.seed))
        sets = validity.rotation(size, gpu.l2_bytes)
        # a set of several times the L2 evicts itself: one call a block is cold, too
        return sets, 1 if size >= validity.L2_SPANS * gpu.l2_bytes else sets

    def _count_calls(self, fast: float, slow: float) -> int:
        return max(self.least_calls, calls_per_block(self.mode, fast, slow))

    def _stand(self, seed: int) -> list[ArmBuffers]:
        trial = self.trial
        names = list(trial.claim.arms)
        trial.random.shuffle(names)  # whose buffers come first must not favour an arm
        stands = []
        for name in names:
            pad = self.clock.random_padding(trial.random)
            args, calls = [], []
            for i in range(self.sets):
                made = trial.make(seed + i)
                tensors.poison(made, trial.contract.write_only)
                call = trial.prepare(name, seed + i, made)
                args.append(made)
                calls.append(bind(call, made))
            stands.append(ArmBuffers(name, pad, args, calls))
        return stands

    def _warmed(self, seed: int) -> list[ArmBuffers]:
        """Make stands and run each call once."""
        stands = self._stand(seed)
        for stand in stands:
            self._run_each(stand)
        return stands

    def _warm(self, stands: list[ArmBuffers]) -> dict[str, float]:
        """Let the clocks settle under all arms, and return the seconds of one call of each."""
        self.trial.say("warming up")
        firsts = [stand.calls[0] for stand in stands]
        self.clock.stabilize_clocks(lambda: [call() for call in firsts])
        return {s.name: self._once(s.calls) for s in stands}

    def _once(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the seconds of one call: of short ones the least of three, as one may stumble."""
        found = math.inf
        for call in (*calls, *calls, *calls)[:3]:
            wall = self.metric is Metric.WALL
            once = (
                self.clock.block([call], Mode.WALL).run() if wall else self.clock.estimate_s(call)
            )
            found = min(found, once)
            if found > MAX_BLOCK_S:
                break
        return found

    def _run_each(self, stand: ArmBuffers) -> None:
        """Run each call once on the clock's own stream, where libraries keep their workspaces."""
        self.clock.block(stand.calls[: self.sets], Mode.WALL).run()

    def _settle_mode(self, stands: list[ArmBuffers], fast: float, slow: float) -> float:
        """Fall back until both arms run in one mode: graph, backlog, plain.

        Return the host's seconds of a first run of all blocks, where that may fail.
        """
        while True:
            try:
                self._blocks(stands)
                begun = time.monotonic()
                for stand in stands if self.mode in (Mode.GRAPH, Mode.BACKLOG) else ():
                    stand.ready.run()
                return time.monotonic() - begun
            except (CannotCapture, InvalidMeasurement) as why:
                if self.mode not in (Mode.GRAPH, Mode.BACKLOG):
                    raise
                lower = Mode.BACKLOG if self.mode is Mode.GRAPH else Mode.PLAIN
                self.notes.append(f"not timed by {self.mode}: {why}")
                self.mode = lower
                self.calls = self._count_calls(fast, slow)

    def _blocks(self, stands: list[ArmBuffers]) -> None:
        for stand in stands:
            calls = [stand.calls[i % self.sets] for i in range(self.calls)]
            stand.block = self.clock.block(calls, self.mode)

    def replicate(self, seed: int) -> Replicate:
        stands = self._ahead.pop(seed, [])
        # what comes next allocates afresh; a graph has its own memory, and where a caller waits,
        # asking the driver for memory would be all that the first block shows
        if not stands or self.mode in (Mode.BACKLOG, Mode.PLAIN):
            self.clock.release()
        to_warm = self.mode is Mode.WALL or (self.mode is Mode.GRAPH and not stands)
        stands = stands or self._stand(seed)
        pad = self.clock.random_padding(self.trial.random)  # for results, which lie behind it
        for stand in stands if to_warm else ():  # waking warms the others
            self._run_each(stand)
        self._blocks(stands)
        if self.metric is Metric.DEVICE:
            self.clock.warm_up([stand.ready for stand in stands])
        by_name = {s.name: s for s in stands}
        rounds: list[Round] = []
        redone = 0
        senses = self.clock.telemetry()
        for _ in range(self.plan.rounds_per_replicate):
            done, problem, senses = self._round(by_name, senses)
            for again in range(REDO):
                if problem is None:
                    break
                redone += 1
                if again:  # at once helps where a clock rose from its rest, and nothing else
                    self.clock.stabilize_clocks(stands[0].calls[0])
                    senses = self.clock.telemetry()
                done, problem, senses = self._round(by_name, senses)
            if problem is not None:
                raise InvalidMeasurement(
                    f"a round was disturbed {REDO + 1} times, the last time by {problem}: "
                    "let the GPU cool, stop other work on it and in the calls, and run again"
                )
            rounds.append(done)
        self._verify(stands, seed)
        self._last = seed, stands
        del pad
        return Replicate(seed, tuple(rounds), redone)

    def _round(
        self, stands: Mapping[str, ArmBuffers], before: GpuState
    ) -> tuple[Round, str | None, GpuState]:
        """Run a mirrored round: what it gave, what disturbed it, and the senses at its end."""
        half = list(stands)
        self.trial.random.shuffle(half)
        order = [*half, *reversed(half)]  # mirrored: a steady drift meets all arms alike
        seconds: dict[str, list[float]] = {name: [] for name in stands}
        extras = validity.extras()
        for name in order:
            seconds[name].append(stands[name].ready.run() / self.calls)
        after = self.clock.telemetry()
        done = Round(
            "".join(name[0].upper() for name in order),
            {name: tuple(s) for name, s in seconds.items()},
            after.sm_mhz,
            after.event_reasons,
        )
        problem = validity.round_problem(before, after)
        problem = problem or validity.extra_problem(extras, validity.extras())
        if not self.clock.ranks.all(problem is None):
            problem = problem or "what another rank felt"
        return done, problem, after

    def _verify(self, stands: Sequence[ArmBuffers], seed: int) -> None:
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
            results[stand.name] = correctness.kept(
                correctness.result(returned, args, trial.contract)
            )
        trial.verify_later([results], seed + last, "after timing")

    def challenge(self) -> None:
        """Put other values into the timed inputs, in place: what an arm remembers is now wrong.

        Calls in a row meet one set of values and another in turn, and each is looked at: an arm
        that works at some calls only skips one of them. A result is taken in the order of its
        stream, without a wait that would hide what still runs; then the timed block itself is run
        on those values.
        """
        trial, clock = self.trial, self.clock
        self._ahead.clear()  # of replicates that were not needed
        if self._last is None:
            return  # none was timed
        seed, timed = self._last
        stands = {stand.name: stand for stand in timed}
        last = (self.calls - 1) % self.sets

        def put(stand: ArmBuffers, values: Args) -> None:
            overwrite(live, stand.args[last], values)
            tensors.poison(stand.args[last], trial.contract.write_only)

        other, live = trial.other(seed + last, seed + 250_031)
        turns = (other, trial.make(seed + last))
        in_order = sorted(stands, key=("optimized", "library", "baseline").index)
        found: list[dict[str, list[NamedTensor]]] = [{} for _ in range(self.in_a_row)]
        for name in in_order:
            for i, results in enumerate(found):
                put(stands[name], turns[i % 2])
                taken = clock.block([partial(self._taken, stands[name], last)], Mode.WALL)
                taken.run()
                results[name] = correctness.kept(cast("list[NamedTensor]", taken.last))

        when = "on values that were put into the timed inputs"
        trial.verify_later(found[1::2], seed + last, when)
        trial.verify_later(found[::2], seed + last, when, other=seed + 250_031)
        again: dict[str, list[NamedTensor]] = {}
        # where a block updates its inputs, it does so as often as it calls
        for name in in_order if not self._updated else ():
            put(stands[name], other)
            stands[name].ready.run_untimed()
            returned, args = stands[name].ready.last, stands[name].args[last]
            again[name] = correctness.kept(correctness.result(returned, args, trial.contract))
        if again:
            when = "when the timed block ran on other values"
            trial.verify_later([again], seed + last, when, other=seed + 250_031)
        self._last = None

    def _taken(self, stand: ArmBuffers, i: int) -> list[NamedTensor]:
        """Call an arm and take its result at once, in the order of the clock's stream."""
        found = correctness.result(stand.calls[i](), stand.args[i], self.trial.contract)
        if self.clock.torch_device == "cpu":
            return correctness.kept(found)
        # what a GPU copies to the host is there only after a wait
        ours = [leaf for leaf in found if str(getattr(leaf[1], "device", "cpu")) != "cpu"]
        kept = dict(correctness.kept(ours))
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
