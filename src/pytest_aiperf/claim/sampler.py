"""Times the arms of a claim: blocks of calls, in mirrored rounds, on rotated input sets."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from pytest_aiperf.correctness import agreement, tensors
from pytest_aiperf.correctness.tensors import Inputs, NamedTensor
from pytest_aiperf.device.device import MAX_BLOCK_S, Block, calls_per_block, choose_mode
from pytest_aiperf.errors import CannotCapture, InvalidMeasurement, is_out_of_memory
from pytest_aiperf.model import CacheName, Gpu, GpuState, Metric, Mode, Replicate, Round, Timing
from pytest_aiperf.rules import validity
from pytest_aiperf.text import si

from .bound_claim import ASSUMED_MEMORY_BYTES, bind
from .ladder import Ladder
from .stopping_rule import StoppingRule

MAX_REPEATS = 3
"""Most repeats of a disturbed round: the first at once, the others after the clocks are stable."""
CHECKED_CALLS = 5  #: Successive calls to check: an arm may skip the work of every n-th call.
SLOW_CALL_S = 0.01
"""Of calls slower than this, only two are checked, to save time; of large ones, to save memory."""
PREBUILT_SHARE = 1 / 32
"""Fraction of the GPU's memory for inputs that are built before the exclusive lock is taken."""
MISS_S, MISSED_BYTES_PER_S = 2e-6, 1e12
"""Generous latency and low bandwidth of a GPU's memory, for inputs that are not in the L2."""
COLD_SHARE = 1e-3  #: Fraction of a call below which reading its inputs anew does not matter.
SLOWED = 1.3
"""An arm whose timed calls take this many times as long as its first calls is reported."""
LARGE_SHARE = 1 / 20
"""Fraction of the GPU's memory above which the arms use one set of inputs in turn, and their
outputs are not kept: up to 40 % of the memory, this leaves room for the reference's result."""
WARM_SETS = 3  #: Input sets with a warm cache: successive calls get different data.
NEW_VALUES_OFFSET = 250_031
"""Added to a set's seed to draw the new values of ``check_with_new_inputs``."""


@dataclass(slots=True)
class ArmBuffers:
    """One arm's buffers in one replicate."""

    name: str
    padding: object  #: Random-sized allocation that shifts the addresses of the inputs.
    inputs: list[Inputs]  #: The input sets.
    calls: list[Callable[[], object]]  #: One call per input set.
    block: Block = field(init=False)
    """The timed block: it cycles through the calls and ends with the last one."""


def input_sets(gpu: Gpu | None, cache: CacheName, set_bytes: int) -> int:
    """Return the number of input sets of ``set_bytes`` that successive calls must use in turn."""
    if gpu is None:
        return 1  # a host claim has one input set: the CPU's caches stay warm
    return WARM_SETS if cache == "warm" else validity.rotation(set_bytes, gpu.l2_bytes)


class Sampler:
    """Samples the seconds per call of each arm."""

    def __init__(self, ladder: Ladder, metric: Metric, rule: StoppingRule) -> None:
        self.ladder = ladder
        self.bound = ladder.bound
        self.device = ladder.bound.device
        self.rule = rule
        self.metric = metric
        self.notes: list[str] = []
        self._prebuilt: dict[int, list[ArmBuffers]] = {}
        self._timed: tuple[int, dict[str, ArmBuffers]] | None = None
        self._first_s: dict[str, float] = {}  # of each arm's first calls

    def prepare(self, seeds: Sequence[int]) -> None:
        """Build the buffers of the first replicate, and of later ones while memory allows.

        This runs before the exclusive lock is taken, so that other claims can use the device
        meanwhile: building takes as long as timing. Host claims and multi-GPU claims build only
        the first replicate here.
        """
        device = self.device
        self.bound.progress("preparing")
        self._prebuilt.clear()
        self.sets = input_sets(device.gpu, self.bound.claim.cache, self.bound.set_bytes)
        memory_bytes = device.gpu.memory_bytes if device.gpu else 0
        self.large = bool(memory_bytes) and self.bound.effects.nbytes > LARGE_SHARE * memory_bytes
        if self.large:
            self.sets = 1
            self.notes.append(
                "too large to keep the outputs of timed calls: the arms were checked once more"
            )
        first = self._prebuilt[seeds[0]] = self._build_and_warm(seeds[0])
        for arm in first:
            block = device.block(arm.calls[:1], Mode.WALL)
            self._first_s[arm.name] = min(block.run(), block.run())
        if device.gpu is None or device.ranks.count > 1:
            return
        fastest = min(self._first_s.values())
        # twice the limit: other claims on the GPU may have slowed the calls down
        if fastest > 2 * MAX_BLOCK_S and self._min_calls(fastest) == 1:
            self.sets = 1  # a block will hold one call, which needs one input set
        size = sum(tensors.nbytes(i.args) for b in first for i in b.inputs[: self.sets])
        budget = PREBUILT_SHARE * (device.gpu.memory_bytes or ASSUMED_MEMORY_BYTES)
        for seed in seeds[1 : int(budget / max(1, size))]:
            if device.free_bytes() < device.gpu.memory_bytes / 2:
                break  # leave memory for the calls and for other claims
            try:
                self._prebuilt[seed] = self._build_and_warm(seed)
            except Exception as why:
                if not is_out_of_memory(why):
                    raise
                device.release()
                break

    def begin(self) -> None:
        """Wait for stable clocks; choose the mode, the calls per block and the rounds."""
        self.bound.progress("warming up")
        buffers = next(iter(self._prebuilt.values()))
        for arm in buffers if self.metric is Metric.DEVICE else ():
            try:
                self.device.refuse_unjoined(arm.calls[0])
            except InvalidMeasurement as why:
                raise InvalidMeasurement(f"{arm.name}: {why}") from None
        first_calls = [b.calls[0] for b in buffers]
        self.device.stabilize_clocks(lambda: [call() for call in first_calls])
        seconds = {b.name: self._estimate_s(b.calls) for b in buffers}
        self.mode = choose_mode(self.metric, min(seconds.values()))
        self._count_calls(seconds)
        first_run_s = self._choose_mode(buffers, seconds)
        # a block uses at most one set per call
        self.sets = min(self.sets, max(self.calls.values()))
        outputs = self.bound.effects.nbytes * len(self.ladder.arms)
        is_cheap = max(seconds.values()) < SLOW_CALL_S and outputs < self.bound.kept_bytes
        self.checked_calls = CHECKED_CALLS if is_cheap else 2
        # A round takes at least as long as the host needs to enqueue its blocks. The maximum over
        # the ranks makes all of them choose the same number of rounds.
        first_run_s = self.device.ranks.max(first_run_s)
        blocks_s = sum(2 * calls * seconds[name] for name, calls in self.calls.items())
        round_s = max(blocks_s, 2 * first_run_s)
        affordable = int(self.rule.time_budget_s / (self.rule.min_replicates * round_s))
        self.rounds = max(1, min(self.rule.rounds_per_replicate, affordable))

    def _count_calls(self, seconds: Mapping[str, float]) -> None:
        """Choose each arm's calls per block: the same for all arms that are about as fast."""
        fastest = min(seconds.values())
        self.calls = {
            name: max(self._min_calls(call_s), calls_per_block(self.mode, fastest, call_s))
            for name, call_s in seconds.items()
        }

    def _min_calls(self, call_s: float) -> int:
        """Return the fewest calls per block of an arm that keep its inputs out of the L2."""
        gpu, size = self.device.gpu, self.bound.set_bytes
        if gpu is None or self.bound.claim.cache == "warm":
            return 1
        # one call on so large a set evicts the set's start from the L2: the next call is cold
        if size >= validity.L2_SPANS * gpu.l2_bytes:
            return 1
        miss_s = MISS_S + size / MISSED_BYTES_PER_S
        return 1 if miss_s < COLD_SHARE * call_s else self.sets

    def _build(self, seed: int) -> list[ArmBuffers]:
        bound = self.bound
        names = self.ladder.arms
        bound.random.shuffle(names)  # the order of allocation must not favour an arm
        buffers: list[ArmBuffers] = []
        for name in names:
            padding = self.device.random_padding(bound.random)
            sets, calls = [], []
            for i in range(self.sets):
                shared = self.large and buffers
                inputs = buffers[0].inputs[0] if shared else bound.make_inputs(seed + i)
                tensors.poison(inputs.args, bound.effects.write_only)
                call = self.ladder.prepare(name, inputs)
                sets.append(inputs)
                calls.append(bind(call, inputs.args))
            buffers.append(ArmBuffers(name, padding, sets, calls))
        return buffers

    def _build_and_warm(self, seed: int) -> list[ArmBuffers]:
        buffers = self._build(seed)
        for arm in buffers:
            self._run_once(arm)
        return buffers

    def _run_once(self, arm: ArmBuffers) -> None:
        """Run each call once on the timed stream: libraries allocate workspaces per stream."""
        self.device.block(arm.calls[: self.sets], Mode.WALL).run()

    def _estimate_s(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the least seconds per call of three estimates, or of one if the call is slow."""
        shortest = math.inf
        for call in (*calls, *calls, *calls)[:3]:
            if self.metric is Metric.WALL:
                seconds = self.device.block([call], Mode.WALL).run()
            else:
                seconds = self.device.estimate_s(call)
            shortest = min(shortest, seconds)
            if shortest > MAX_BLOCK_S:
                break
        return shortest

    def _choose_mode(self, buffers: list[ArmBuffers], seconds: Mapping[str, float]) -> float:
        """Fall back from graph to backlog mode, then to plain mode, until all arms run in one.

        Graph and backlog mode can fail, so each block runs once to try them. Return the host's
        seconds for these runs; they are about 0 in the other modes, which need no try.
        """
        while True:
            try:
                self._make_blocks(buffers)
                started = time.monotonic()
                for arm in buffers if self.mode in (Mode.GRAPH, Mode.BACKLOG) else ():
                    arm.block.run()
                return time.monotonic() - started
            except (CannotCapture, InvalidMeasurement) as why:
                if self.mode not in (Mode.GRAPH, Mode.BACKLOG):
                    raise
                self.notes.append(f"not timed by {self.mode}: {why}")
                self.mode = Mode.BACKLOG if self.mode is Mode.GRAPH else Mode.PLAIN
                self._count_calls(seconds)

    def _make_blocks(self, buffers: list[ArmBuffers]) -> None:
        for arm in buffers:
            count = self.calls[arm.name]
            # all blocks end with the last set, so that the arms' outputs have the same inputs
            calls = [arm.calls[(i - count) % self.sets] for i in range(count)]
            arm.block = self.device.block(calls, self.mode)

    def replicate(self, seed: int) -> Replicate:
        """Time each arm on its own buffers, and queue the last outputs for verification."""
        self._timed = None  # frees the buffers of the previous replicate
        buffers = self._prebuilt.pop(seed, [])
        # Free cached memory, so that new buffers, or outputs allocated in the calls, get new
        # addresses. With prebuilt buffers, graph and wall mode skip this: a graph owns its memory,
        # and wall mode would time the driver's allocation.
        if not buffers or self.mode in (Mode.BACKLOG, Mode.PLAIN):
            self.device.release()
        to_warm = self.mode is Mode.WALL or (self.mode is Mode.GRAPH and not buffers)
        buffers = buffers or self._build(seed)
        padding = self.device.random_padding(self.bound.random)  # shifts the outputs' addresses
        for arm in buffers if to_warm else ():  # else they ran before, or warm_up() runs them
            self._run_once(arm)
        self._make_blocks(buffers)
        if self.metric is Metric.DEVICE:
            self.device.warm_up([arm.block for arm in buffers])
        by_name = {arm.name: arm for arm in buffers}
        rounds: list[Round] = []
        repeated = 0
        state = self.device.telemetry()
        for _ in range(self.rounds):
            round_, repeats, state = self._undisturbed_round(by_name, state)
            rounds.append(round_)
            repeated += repeats
        if not self.large:
            self._verify_later(buffers, seed)
        self._timed = seed, by_name
        del padding
        return Replicate(seed=seed, rounds=tuple(rounds), redone=repeated)

    def _undisturbed_round(
        self, buffers: Mapping[str, ArmBuffers], state: GpuState
    ) -> tuple[Round, int, GpuState]:
        """Run a round until it is undisturbed; return it, its repeats and the GPU's state."""
        for repeat in range(MAX_REPEATS + 1):
            if repeat > 1:  # not yet at the first repeat: an idle GPU's clock may just have risen
                self.device.stabilize_clocks(next(iter(buffers.values())).calls[0])
                state = self.device.telemetry()
            round_, problem, state = self._round(buffers, state)
            if problem is None:
                return round_, repeat, state
        raise InvalidMeasurement(
            f"a round was disturbed {MAX_REPEATS + 1} times, the last time by {problem}: "
            "let the GPU cool, stop other work on it, compile nothing in the calls, and run again"
        )

    def _round(
        self, buffers: Mapping[str, ArmBuffers], before: GpuState
    ) -> tuple[Round, str | None, GpuState]:
        """Run a mirrored round; return it, what disturbed it, and the GPU's state after it."""
        half = list(buffers)
        self.bound.random.shuffle(half)
        order = [*half, *reversed(half)]  # mirrored: a steady drift affects all arms equally
        seconds: dict[str, list[float]] = {name: [] for name in buffers}
        extras = validity.extras()
        for name in order:
            seconds[name].append(buffers[name].block.run() / self.calls[name])
        after = self.device.telemetry()
        round_ = Round(
            order="".join(map(self.ladder.letter, order)),
            seconds={name: tuple(s) for name, s in seconds.items()},
            sm_mhz=after.sm_mhz,
            event_reasons=after.event_reasons,
        )
        problem = validity.round_problem(before, after)
        problem = problem or validity.extra_problem(extras, validity.extras())
        if not self.device.ranks.all(problem is None):
            problem = problem or "a disturbance on another rank"
        return round_, problem, after

    def _verify_later(self, buffers: Sequence[ArmBuffers], seed: int) -> None:
        """Queue the outputs of each arm's last timed call."""
        last = self.sets - 1
        results = {}
        for arm in buffers:
            inputs, returned = arm.inputs[last], arm.block.last
            if self.bound.effects.updates:
                returned = self.bound.call_again(inputs, arm.calls[last])
            results[arm.name] = self.bound.output_copies(returned, inputs)
        self.ladder.verify_later([results], seed + last, "after timing")

    def check_with_new_inputs(self) -> None:
        """Overwrite the timed inputs with new values and queue the outputs for verification.

        An arm that cached its results fails. Successive calls get two sets of values in turn, and
        each call's output is checked, because an arm may skip the work of some calls. Outputs are
        copied in stream order: a wait before the copy would hide work that the stream does not
        wait for. Then the timed block runs on the new values, and the buffers are freed.
        """
        self._prebuilt.clear()  # buffers of replicates that were not run
        if self._timed is None:
            return
        seed = self._timed[0] + self.sets - 1  # the seed of the last set
        if self.large:
            self._timed = None
            self.device.release()
            self.ladder.check_anew(seed)
            return
        values_seed = seed + NEW_VALUES_OFFSET
        results, block_results = self._call_with_new_values(seed, values_seed)
        self._timed = None  # leaves the memory of the buffers to the reference
        when = "on values that were put into the timed inputs"
        self.ladder.verify_later(results[1::2], seed, when)
        self.ladder.verify_later(results[::2], seed, when, values_seed)
        when = "when the timed block ran on other values"
        self.ladder.verify_later(block_results, seed, when, values_seed)

    def _call_with_new_values(
        self, seed: int, values_seed: int
    ) -> tuple[list[dict[str, list[NamedTensor]]], list[dict[str, list[NamedTensor]]]]:
        """Return copies of the arms' results, of successive calls and of the timed block.

        Successive calls get the values of ``values_seed`` and of ``seed`` in turn, the block the
        former. The block is left out if its calls update their inputs: the reference does it once.
        """
        assert self._timed is not None
        _, buffers = self._timed
        bound, last = self.bound, self.sets - 1
        new = bound.make_inputs_with(seed, values_seed)
        values = (new, bound.make_inputs(seed))

        def overwrite(arm: ArmBuffers, fresh: Inputs) -> None:
            arm.inputs[last].overwrite(fresh, new.dynamic)
            tensors.poison(arm.inputs[last].args, bound.effects.write_only)

        # the baselines come last: no arm can find their correct results in freed memory
        names = sorted(buffers, key=lambda name: name.startswith("baseline"))
        results: list[dict[str, list[NamedTensor]]] = [{} for _ in range(self.checked_calls)]
        for name in names:
            for i, outputs in enumerate(results):
                overwrite(buffers[name], values[i % 2])
                block = self.device.block([partial(self._call, buffers[name], last)], Mode.WALL)
                block.run()
                outputs[name] = agreement.copies(cast("list[NamedTensor]", block.last))
        if bound.effects.updates:
            return results, []
        block_results: dict[str, list[NamedTensor]] = {}
        for name in names:
            arm = buffers[name]
            overwrite(arm, new)
            arm.block.run_untimed()
            block_results[name] = bound.output_copies(arm.block.last, arm.inputs[last])
        return results, [block_results]

    def _call(self, arm: ArmBuffers, i: int) -> list[NamedTensor]:
        """Call an arm and copy its outputs at once, in the order of the device's stream."""
        outputs = agreement.outputs_of(arm.calls[i](), arm.inputs[i].args, self.bound.effects)
        if self.device.torch_device == "cpu":
            return agreement.copies(outputs)
        # outputs in host memory are complete only after a wait: the caller copies them then
        on_gpu = [(p, x) for p, x in outputs if str(getattr(x, "device", "cpu")) != "cpu"]
        copies = dict(agreement.copies(on_gpu))
        return [(path, copies.get(path, value)) for path, value in outputs]

    def timing(self, replicates: tuple[Replicate, ...]) -> Timing:
        return Timing(
            metric=self.metric,
            mode=self.mode,
            calls=self.calls,
            # a host claim's single input set stays in the CPU's caches
            cache=self.bound.claim.cache if self.device.gpu else "warm",
            sets=self.sets,
            replicates=replicates,
            notes=(*self.notes, *self._slowed(replicates)),
        )

    def _slowed(self, replicates: tuple[Replicate, ...]) -> Iterator[str]:
        """Report arms that are always much slower when they are timed than when first called."""
        for name, first_s in self._first_s.items():
            timed_s = min(s for r in replicates for b in r.rounds for s in b.seconds[name])
            if timed_s > SLOWED * first_s:
                was, is_ = (si(seconds, "s") for seconds in (first_s, timed_s))
                yield f"{name} took {was} when it was first called, and {is_} when it was timed"
