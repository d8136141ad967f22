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

import itertools
import math
import random
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pytest_aiperf.correctness import accuracy, argument_effects, tensors
from pytest_aiperf.correctness.contents import Contents
from pytest_aiperf.correctness.peek import Peek
from pytest_aiperf.correctness.tensors import Inputs, NamedTensor
from pytest_aiperf.device.device import (
    MAX_BLOCK_S,
    Call,
    Device,
    calls_per_block,
    choose_mode,
    gc_disabled,
    now,
)
from pytest_aiperf.errors import CannotCapture, InvalidMeasurement, is_out_of_memory
from pytest_aiperf.model import CacheName, Gpu, GpuState, Metric, Mode, Replicate, Round, Timing
from pytest_aiperf.rules import validity
from pytest_aiperf.text import si

from .bound_claim import (
    ASSUMED_MEMORY_BYTES,
    BEFORE_OTHERS,
    bind,
)
from .ladder import Ladder
from .search import FEWEST_SEEDS, JUDGED, SEARCHING_S
from .side_effects import SideEffects
from .stopping_rule import StoppingRule

MAX_REPEATS = 3
"""Most repeats of a disturbed round: the first at once, the others after the clocks are stable."""
PREBUILT_SHARE = 1 / 32
"""Fraction of the GPU's memory that inputs built before the exclusive lock is taken may fill."""
MISS_S = 2e-6
"""Latency of a GPU's memory for inputs that are not in the L2; a generous estimate."""
MISSED_BYTES_PER_S = 1e12
"""Bandwidth of a GPU's memory for inputs that are not in the L2; a low estimate."""
COLD_SHARE = 1e-3
"""If reading cold inputs takes less than this fraction of a call, they need not be kept cold."""
SLOWED = 1.5
"""An arm is reported if its timed calls take more than this many times as long as its first calls.
Smaller ratios are common on machines that do other work."""
LARGE_SHARE = 1 / 20
"""If one set of inputs and its result take more than this fraction of the GPU's memory, all arms
share one set and no outputs are kept. Claims that use up to 40 % of the memory then still leave
room for the reference's result."""
FILLING_SHARE = 1 / 2
"""If the input sets of all arms would fill more than this fraction of the GPU's memory, each arm
gets a single set. This requires that blocks of one call are valid, for example because the set is
so large that a call evicts the set's start from the L2."""
MIN_SETS = 3
"""Fewest input sets, however long they take to build, so that successive calls get other data."""
LONG_CALL_S = 0.1
"""A call that takes longer than this is not warmed up again between building its inputs and timing
it, because what a GPU and a CPU forget meanwhile costs them a few milliseconds at most."""
WARM_HOST_BYTES = 2 << 20
"""A host claim gets more than MIN_SETS input sets only while all of them fit into this many bytes:
the L2 of a CPU core."""
RENEWAL_S = 0.02
"""Most seconds for drawing the new values of one block, which limits the number of input sets. If
drawing takes longer, values are drawn once per replicate, and its blocks share them."""
MIN_PASS_S = 50e-6
"""A block of a single pass over the input sets takes at least this long, which is 100 times the
resolution of a GPU's events. If one pass is shorter, the block goes around the sets again."""
MAX_ROUNDS = 4
"""If few input sets make blocks short, up to this many rounds take the place of each round."""
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
CHECKED_CALLS = 5
"""Lone calls of each arm on new values after timing, if the timed blocks repeat their values."""
CHECKING_S = 1.0
"""If these lone calls of all arms, with drawing their values, would take longer than this, each arm
makes only two."""
TIMED = "in a timed block"
"""Names the call with a wrong result in error messages: calls may have met its values before."""
TIMED_ON_NEW = "on new values in a timed block"
"""Names the call with a wrong result in error messages: no call had met its values."""
LONG_SETS_S = 30.0  #: If building all sets of inputs took more seconds, a note says so.
LONG_BUILD_S = 1.0
"""If building a replicate takes longer than this, other claims may use the device meanwhile. On an
H200, it takes about as long to get the exclusive lock back, because all others must first end
their steps."""
validity.watched(now, __name__, "now")  # this module has a reference of its own to the function
_UNKNOWN = random.SystemRandom()  #: Draws numbers that an arm cannot derive from any seed.
SMALL_BYTES = 1 << 16
"""Results up to this size are copied first. While a larger result is copied, a thread that still
works could write a small one."""
COMPARED_RESULTS = 8
"""Number of successive results that are compared to find arms that reuse their output memory."""


@dataclass(slots=True)
class ArmBuffers:
    """One arm's buffers in one replicate."""

    name: str
    padding: object  #: Random-sized allocation that shifts the addresses of the inputs.
    in_place: bool
    """Whether new values overwrite the inputs, because calls that are prepared or captured keep
    their inputs' addresses. Otherwise each block gets inputs that the arm has not seen before."""
    inputs: list[Inputs] = field(default_factory=list)  #: The input sets.
    functions: list[Callable[..., object]] = field(default_factory=list)
    """The function to call for each set, with the set's arguments."""
    values: dict[int, int] = field(default_factory=dict)
    """Seed of the values that overwrote a set of a prepared arm, by the set's index."""
    met: set[int] = field(default_factory=set)
    """Indices of the sets whose current values a call has already met."""

    def call(self, i: int) -> Call:
        return bind(self.functions[i], self.inputs[i].args)


class Batch:
    """Calls of one arm that are timed together."""

    def __init__(
        self, device: Device, arm: ArmBuffers, mode: Mode, order: list[int], keep: int
    ) -> None:
        self.arm, self.order, self.kept_set = arm, order, order[keep]
        self.calls = [arm.call(i) for i in order]
        self.block = device.block(self.calls, mode, keep)

    def clear(self) -> None:
        """Drop the references to the arm's buffers."""
        del self.calls[:]
        self.block.kept = None

    def load(self, order: list[int], keep: int) -> None:
        """Call the sets in this order, and keep the result of call number ``keep``."""
        self.order, self.kept_set, self.block.keep = order, order[keep], keep
        self.calls[:] = map(self.arm.call, order)


@dataclass(frozen=True, slots=True)
class Pass:
    """Blocks of the arms: those of a round, or blocks of other lengths, whose times do not count.

    An arm cannot tell these from blocks of a round, so it does not know which call is the last.
    """

    batches: Mapping[str, Batch]
    is_new: bool  #: Whether each block gets values that no call has met.
    calls: Mapping[str, int] | None = None  #: Calls in each block; None in a round.

    @property
    def is_lone(self) -> bool:
        """Whether each block has a single call."""
        return self.calls is not None and max(self.calls.values()) == 1


def input_sets(gpu: Gpu | None, cache: CacheName, set_bytes: int) -> int:
    """Return the fewest input sets of ``set_bytes`` that successive calls must use in turn."""
    if gpu is None or cache == "warm":
        return MIN_SETS
    return validity.rotation(set_bytes, gpu.l2_bytes)


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
        self._warm: list[ArmBuffers] = []  # buffers on which all arms were just called
        self._most_prebuilt = 1
        self._first_s: dict[str, float] = {}  # seconds of each arm's first calls
        self._reusing: set[str] = set()  # arms whose later results overwrite earlier ones
        self._stuck: dict[str, tuple[str, ...]] = {}  # by arm: paths of inputs not overwritable
        self._set_s = math.inf  # seconds of the fastest build of one set
        self._all_sets_s = 0.0  # seconds to build all sets so far
        self._replicate_s = math.inf  # seconds to build and warm up a replicate's buffers
        self.drawing_s = 0.0
        """Seconds spent on drawing new values. The time budget excludes them: it decides how narrow
        the interval becomes."""
        self._alone_s: dict[str, list[float]] = {}  # seconds of each arm's lone calls
        self._late: set[str] = set()  # arms whose results changed after the clock, on the host
        self._rotations: list[list[str]] = []  # orders of the arms in the next rounds
        # by baseline or library: its times, if another arm may slow it down
        self._slowed_baselines: dict[str, str] = {}
        # by baseline: its times, if it is slow only while it is timed
        self._slow_when_timed: dict[str, str] = {}
        # by baseline: its times, if inputs() may slow it down
        self._slowing_inputs: dict[str, str] = {}
        self._typical_s: dict[str, float] = {}  # by arm: geometric mean of its blocks
        # by arm: seconds per call of the blocks whose values are all new
        self._new_s: dict[str, list[float]] = {}
        # by arm: seconds per call of the blocks in which all values have returned
        self._known_s: dict[str, list[float]] = {}
        self._keeping: dict[str, str] = {}  # by arm: its times, if new values slow it down
        self._idle = validity.IdleTime()
        self._last_buffers: list[ArmBuffers] = []  # buffers of the last replicate
        self._blocks_until_kept: dict[str, int] = {}  # by arm: blocks until a result is kept
        self._problem: str | None = None  # what disturbed the running round
        self._state = GpuState()  # state after the last round

    def prepare(self, seeds: Sequence[int]) -> None:
        """Build the buffers of the first replicate, and of later ones while memory allows.

        This runs before the exclusive lock is taken, so that other claims can use the device
        meanwhile: building takes as long as timing. Host claims and multi-GPU claims build only
        the first replicate here.
        """
        device = self.device
        self.bound.progress("building inputs")
        self._prebuilt.clear()
        self.sets = 1
        memory_bytes = device.gpu.memory_bytes if device.gpu else 0
        self.large = bool(memory_bytes) and self.bound.effects.nbytes > LARGE_SHARE * memory_bytes
        first = self._prebuilt[seeds[0]] = self._build_and_warm(seeds[0])
        for arm in first:
            block = device.block([arm.call(0)], Mode.WALL)
            self._first_s[arm.name] = min(block.run(), block.run())
        self._choose_sets()
        self._build(seeds[0], first)
        for arm in first:
            self._run_once(arm)
        if device.gpu is None or device.ranks.count > 1:
            return
        size = sum(tensors.nbytes(i.args) for arm in first for i in arm.inputs)
        budget = PREBUILT_SHARE * (device.gpu.memory_bytes or ASSUMED_MEMORY_BYTES)
        self._most_prebuilt = max(1, int(budget / max(1, size)))
        self._prebuild(seeds[1 : self._most_prebuilt])

    def _prebuild(self, seeds: Sequence[int]) -> None:
        """Build the buffers of replicates while memory allows."""
        device = self.device
        for seed in seeds:
            if device.gpu and device.free_bytes() < device.gpu.memory_bytes / 2:
                break  # leave memory for the calls and for other claims
            try:
                self._prebuilt[seed] = self._build_and_warm(seed)
            except Exception as why:
                if not is_out_of_memory(why):
                    raise
                device.release()
                break

    def builds_long(self, seed: int) -> bool:
        """Whether others should use the device while the missing buffers of a replicate are built.

        That is so if building takes long. All ranks of a multi-GPU claim would have to build at the
        same time, so they build while they measure.
        """
        is_slow = self._replicate_s > LONG_BUILD_S and self.device.ranks.count == 1
        return is_slow and seed not in self._prebuilt

    @property
    def builds_quickly(self) -> bool:
        """Whether preparing arms is so quick that the lock may be held meanwhile."""
        is_quick = self._replicate_s <= LONG_BUILD_S * self.sets
        return is_quick and not self.large and self.device.ranks.count == 1

    def prepare_more(self, seeds: Sequence[int]) -> None:
        """Build the next replicate's buffers and, while memory allows, those of later ones."""
        self.bound.progress("building inputs")
        self._last_buffers = []  # frees them
        self.device.release()
        self._prebuilt[seeds[0]] = self._build_and_warm(seeds[0])
        self._prebuild(seeds[1 : self._most_prebuilt])

    def _choose_sets(self) -> None:
        """Choose the number of input sets: as many as a block has calls, if that is affordable."""
        gpu, size = self.device.gpu, max(1, self.bound.set_bytes)
        fastest = min(self._first_s.values())
        least = input_sets(gpu, self.bound.claim.cache, self.bound.set_bytes)
        needed = least * size * len(self.ladder.arms)
        fills = gpu is not None and needed > FILLING_SHARE * (gpu.memory_bytes or math.inf)
        # twice the limit: other claims on the GPU may have slowed the calls down
        if self.large or ((fills or fastest > 2 * MAX_BLOCK_S) and self._min_calls(fastest) == 1):
            self.sets = 1  # a block will hold one call, which needs one input set
            return
        room = WARM_HOST_BYTES
        if gpu is not None:
            memory_bytes = gpu.memory_bytes or ASSUMED_MEMORY_BYTES
            room = int(PREBUILT_SHARE * memory_bytes / len(self.ladder.arms))
            if self.bound.claim.cache == "warm" and gpu.l2_bytes:
                room = min(room, gpu.l2_bytes // 2)
        mode = choose_mode(self.metric, fastest)
        wanted = calls_per_block(mode, fastest, fastest) if self.device.renews else 1
        affordable = min(
            room // size, int(RENEWAL_S / max(self._set_s, 1e-6)), validity.MAX_INPUT_SETS
        )
        # the slowest rank decides for all
        self.sets = int(-self.device.ranks.max(-max(least, min(wanted, affordable))))

    def begin(self) -> None:
        """Wait for stable clocks; choose the mode, the calls per block and the rounds."""
        self.bound.progress("warming up")
        buffers = self._warm = next(iter(self._prebuilt.values()))
        for arm in buffers if self.metric is Metric.DEVICE else ():
            try:
                self.device.refuse_unjoined(arm.call(0))
            except InvalidMeasurement as why:
                raise InvalidMeasurement(f"{arm.name}: {why}") from None
        first_calls = [arm.call(0) for arm in buffers]
        self.device.stabilize_clocks(lambda: [call() for call in first_calls])
        seconds = {arm.name: self._estimate_s(arm) for arm in buffers}
        self.mode = choose_mode(self.metric, min(seconds.values()))
        self._count_calls(seconds)
        first_run_s = self._choose_mode(buffers, seconds)
        if not self.device.renews:
            self.sets = min(self.sets, max(self.calls.values()))  # at most one set per call
        # calls that update their inputs need the original values anyway
        is_cheap = self._set_s * min(MIN_SETS, max(self.calls.values())) <= RENEWAL_S
        self.renews = self.device.ranks.all(is_cheap) or self._updates
        self.renews = self.renews and self.device.renews
        # A round takes at least as long as the host needs to enqueue its blocks. The maximum over
        # the ranks makes all of them choose the same number of rounds.
        blocks_s = sum(2 * calls * seconds[name] for name, calls in self.calls.items())
        renewals_s = 2 * self.renews * self._set_s * sum(self.calls.values())
        round_s = self.device.ranks.max(max(blocks_s, 2 * first_run_s) + renewals_s)
        rounds = self.rule.rounds_per_replicate * self._short
        affordable = int(self.rule.time_budget_s / (self.rule.min_replicates * round_s))
        self.rounds = max(1, min(rounds, affordable))

    def _count_calls(self, seconds: Mapping[str, float]) -> None:
        """Choose each arm's calls per block: the same for all arms that are about as fast."""
        fastest = min(seconds.values())
        self.calls, self._short = {}, 1
        for name, call_s in seconds.items():
            enough = calls_per_block(self.mode, fastest, call_s)
            count = enough
            if self.device.renews:
                count = min(enough, max(self.sets, math.ceil(MIN_PASS_S / max(call_s, 1e-9))))
            if self.device.renews and self._updates:
                count = min(count, self.sets)  # a second call on a set has another result
            self._short = max(self._short, min(MAX_ROUNDS, enough // count))
            self.calls[name] = max(self._min_calls(call_s), count)

    @property
    def _updates(self) -> bool:
        """Whether a second call on the same values does other work or returns another result."""
        return self.bound.effects.updates or bool(self.bound.effects.objects)

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

    def _build(self, seed: int, buffers: list[ArmBuffers] | None = None) -> list[ArmBuffers]:
        """Build each arm's buffers, or the sets that are missing in ``buffers``."""
        bound = self.bound
        if buffers is None:
            names = self.ladder.arms
            bound.random.shuffle(names)  # the order of allocation must not favor an arm
            buffers = []
            for name in names:
                padding = self.device.random_padding(bound.random)
                in_place = self.ladder.is_prepared(name)
                buffers.append(self._add_sets(ArmBuffers(name, padding, in_place), seed, buffers))
        else:
            for arm in buffers:
                self._add_sets(arm, seed, buffers)
        return buffers

    def _add_sets(self, arm: ArmBuffers, seed: int, others: Sequence[ArmBuffers]) -> ArmBuffers:
        for i in range(len(arm.inputs), self.sets):
            shared = self.large and others
            inputs = others[0].inputs[0] if shared else self._make_inputs(seed + i)
            self.bound.effects.poison(inputs.args)
            arm.functions.append(self.ladder.prepare(arm.name, inputs))
            arm.inputs.append(inputs)
        return arm

    def _make_inputs(self, seed: int) -> Inputs:
        started = time.monotonic()
        inputs = self.bound.make_inputs(seed)
        spent = time.monotonic() - started
        self._set_s = min(self._set_s, spent)
        self._all_sets_s += spent
        return inputs

    def _build_and_warm(self, seed: int) -> list[ArmBuffers]:
        started = time.monotonic()
        buffers = self._build(seed)
        for arm in buffers:
            self._run_once(arm)
        self._replicate_s = min(self._replicate_s, time.monotonic() - started)
        return buffers

    def _run_once(self, arm: ArmBuffers) -> None:
        """Run each call once on the timed stream: libraries allocate workspaces per stream."""
        results: list[object] = []
        calls = [arm.call(i) for i in range(self.sets)]
        compared = min(len(calls), COMPARED_RESULTS)
        if compared * self.bound.effects.nbytes > self.bound.kept_bytes:
            compared = 0
            self._reusing.add(arm.name)

        def collecting(call: Call) -> Call:
            return lambda: results.append(call())

        calls[:compared] = map(collecting, calls[:compared])
        self.device.block(calls, Mode.WALL).run()
        self._refuse_changed_settings(arm.name)
        spans = sorted(s for i, r in enumerate(results) for s in _spans(r, i))
        is_new = all(b[0] >= a[1] or a[2] == b[2] for a, b in itertools.pairwise(spans))
        if not self.device.ranks.all(is_new):
            self._reusing.add(arm.name)

    def _estimate_s(self, arm: ArmBuffers) -> float:
        """Return the shortest of three estimates of the seconds per call; of one, if it is slow.

        Each estimate is made on values that no call has met. Calls of an arm that caches results
        would otherwise look shorter than they are, and the arm would get blocks that repeat values.
        """
        shortest = math.inf
        is_renewed = self.device.renews and self.device.ranks.all(self._set_s <= RENEWAL_S)
        for i in range(3):
            if is_renewed:
                self._renew(arm, [i % self.sets])
            call = arm.call(i % self.sets)
            if self.metric is Metric.WALL:
                seconds = self.device.block([call], Mode.WALL).run()
            else:
                seconds = self.device.estimate_s(call)
            shortest = min(shortest, seconds)
            if shortest > MAX_BLOCK_S:
                break
        self._refuse_changed_settings(arm.name)
        return shortest

    def _choose_mode(self, buffers: list[ArmBuffers], seconds: Mapping[str, float]) -> float:
        """Fall back from graph to backlog mode, then to plain mode, until all arms run in one.

        Graph and backlog mode can fail, so each block runs once to try them. Return the host's
        seconds for these runs; they are about 0 in the other modes, which need no try.
        """
        while True:
            try:
                batches = self._make_batches(buffers, self.calls)
                started = time.monotonic()
                for batch in batches.values() if self.mode in (Mode.GRAPH, Mode.BACKLOG) else ():
                    batch.block.run()
                    if self.mode is Mode.GRAPH and not self.large and self.device.renews:
                        self._renew(batch.arm, [0])
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
        if arm.name in self._stuck and not self.ladder.is_prepared(arm.name):
            paths = ", ".join(map(self.bound.effects.label, self._stuck.pop(arm.name)))
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
        draw = self.bound.random
        if not self.device.renews:
            # a block ends with the last set, so that the next one starts with the coldest
            last = self.sets if count > 1 else draw.randint(1, self.sets)
            return [(last - count + i) % self.sets for i in range(count)], count - 1
        order = draw.sample(range(self.sets), self.sets)
        order.sort(key=arm.met.__contains__)  # values return as late as possible
        order = [order[i % self.sets] for i in range(count)]
        if arm.name not in self._reusing:
            return order, draw.choice((draw.randrange(count), count - 1))
        if draw.random() < 0.5:
            order = order[: draw.randint(1, count)]
        return order, len(order) - 1

    def replicate(self, seed: int) -> Replicate:
        """Time each arm on its own buffers, and queue results of its blocks for verification."""
        self._last_buffers = []  # frees them
        buffers = self._prebuilt.pop(seed, [])
        # Free cached memory, so that new buffers, or outputs allocated in the calls, get new
        # addresses. With prebuilt buffers, graph and wall mode skip this: a graph owns its memory,
        # and wall mode would time the driver's allocation.
        if not buffers or self.mode in (Mode.BACKLOG, Mode.PLAIN):
            self.device.release()
        is_warm = bool(buffers) and buffers is self._warm
        to_warm = not is_warm if self.mode is Mode.WALL else self.mode is Mode.GRAPH and not buffers
        at_most_s = LONG_CALL_S if buffers else math.inf  # calls that build() has warmed up
        buffers = buffers or self._build(seed)
        self._warm = []
        padding = self.device.random_padding(self.bound.random)  # shifts the outputs' addresses
        for arm in buffers if to_warm else ():  # else they ran before, or warm_up() runs them
            if self._first_s.get(arm.name, 0.0) < at_most_s:
                self._run_once(arm)
        # Garbage collection could run code, such as __del__, that computes with values drawn ahead.
        # On a GPU it stays on, because garbage may hold much memory.
        draws_ahead = self.device.renews and not self.renews
        with gc_disabled() if draws_ahead else nullcontext():
            rounds, repeated = self._run(self._passes(buffers))
        self._refuse_changed_settings(*self.calls)
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
        if self.device.renews or not self._alone_s or self.bound.effects.updates:
            yield from self._lone_calls(buffers, 1)
            self._idle.ends()
        for arm in buffers if self.device.renews and not self.renews else ():
            self._renew(arm, range(self.sets))
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
        for _ in range(0 if self.large else count):
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
        if calls and self.device.renews and not self.large:
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
                    self._alone_s.setdefault(name, []).extend(seconds)
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
        peek = Peek(_UNKNOWN, reads=is_kept and not self.device.gpu)

        def before() -> None:
            started = time.monotonic()
            self._idle.ends()
            captured = self.mode is Mode.GRAPH
            order, keep = self._draw_order(arm, count) if not captured else (batch.order, 0)
            if is_new:
                if not captured:
                    batch.clear()
                self._renew(arm, sorted({*order}))
                self._observe(arm, SideEffects.begin)
            if not captured:
                batch.load(order, keep)
            # a block of fewer calls than sets would find its inputs where the last one left them
            stays = bool(self.device.gpu) and count < self.sets and not is_new
            if bound.claim.cache == "cold" and (self.renews or stays):
                self.device.flush()
            extras.update(validity.extras())
            self.drawing_s += time.monotonic() - started

        def after() -> None:
            peek.read((batch.block.kept, *arm.inputs[batch.kept_set].args))
            problem = validity.extra_problem(extras, validity.extras())
            if is_kept:
                outputs[:], left[:] = self._take(batch)
                self._late.update([arm.name] * peek.has_changed())
            self._problem = self._problem or problem

        seconds = batch.block.run(before, after)
        self._note_values(batch, seconds, is_new=is_new)
        if is_new:
            self._refuse_changed_settings(arm.name)
            self._observe(arm, SideEffects.end)
        if is_kept:
            i = batch.kept_set
            self._copy(outputs, self._is_late)  # a GPU has written those only now
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
            by_name = self._known_s if known else self._new_s
            by_name.setdefault(arm.name, []).append(seconds / len(batch.order))

    def _take(self, batch: Batch) -> tuple[list[NamedTensor], list[Contents]]:
        """Copy the result that a block has kept, and what its call has left in its arguments."""
        args, effects = batch.arm.inputs[batch.kept_set].args, self.bound.effects
        outputs = argument_effects.outputs_of(batch.block.kept, args, effects)
        self._copy(outputs, lambda value: _is_small(value) and not self._is_late(value))
        left = argument_effects.contents_of(args, effects)
        self._copy(outputs, lambda value: not _is_small(value) and not self._is_late(value))
        return outputs, left

    def _is_late(self, value: object) -> bool:
        """Whether a GPU claim's result is in host memory, which the GPU may write after timing."""
        return bool(self.device.gpu) and tensors.on_host(value)

    def _copy(self, outputs: list[NamedTensor], chosen: Callable[[object], bool]) -> None:
        """Replace the chosen results by copies.

        The order is random, so that a thread that still works cannot stay ahead of the copies.
        """
        with self.device.separate_memory():
            for i in _UNKNOWN.sample(range(len(outputs)), len(outputs)):
                if chosen(outputs[i][1]):
                    outputs[i] = _copy(*outputs[i])

    def _keeps(self, arm: ArmBuffers, *, is_new: bool) -> bool:
        """Whether the result of the arm's next block, on new or on known values, is kept."""
        # a call that updates its inputs has the right result only the first time
        updates = self.bound.effects.updates
        if self.large or (updates and (arm.name in self._stuck or not is_new)):
            return False
        if not is_new and not self.device.renews:
            self._blocks_until_kept[arm.name] -= 1
            return self._blocks_until_kept[arm.name] == -1
        return True

    def _observe(self, arm: ArmBuffers, step: Callable[[SideEffects, str], None]) -> None:
        for bound, role in self.ladder.owners(arm.name):
            step(bound.side_effects, role)

    def _refuse_changed_settings(self, *names: str) -> None:
        try:
            self.bound.refuse_changed_settings()
        except InvalidMeasurement as why:
            raise InvalidMeasurement(f"{' or '.join(names)}: {why}") from None

    def _renew(self, arm: ArmBuffers, sets: Sequence[int]) -> None:
        """Give sets values that the arm has not met, in new buffers or in place."""
        if arm.name in self._stuck or self.large:
            return
        is_prepared = self.ladder.is_prepared(arm.name)
        in_place = arm.in_place or not self.device.renews
        for i in sets:
            seed = self.bound.random.getrandbits(31)
            inputs = arm.inputs[i]
            positions = inputs.dynamic if is_prepared else range(len(inputs.args))
            fresh = partial(self._make_inputs, seed)
            left = self.bound.overwrite(inputs, fresh, positions) if in_place else ()
            if left and arm.in_place:
                self._stuck[arm.name] = left
                return
            arm.met.discard(i)
            if left or not in_place:
                del inputs
                arm.inputs[i] = Inputs((), (), seed)  # frees them before new ones are made
                arm.inputs[i] = self._make_inputs(seed)
                self.bound.effects.poison(arm.inputs[i].args)
            elif is_prepared:
                arm.values[i] = seed
            else:
                inputs.seed = seed

    def _call_again(self) -> None:
        """Call the arms on new values after timing, where blocks repeat theirs.

        An arm may skip the work of every n-th call, once it has been timed.
        """
        if self._last_buffers and not self.device.renews:
            call_s = sum(s + self._set_s for s in self._first_s.values())
            few = self.device.ranks.max(CHECKED_CALLS * call_s) > CHECKING_S
            self._run(self._lone_calls(self._last_buffers, 2 if few else CHECKED_CALLS))
        self._last_buffers = []
        self._prebuilt.clear()  # buffers of replicates that were not run

    def compare_lone_calls(self, replicates: Sequence[Replicate]) -> None:
        """Refuse arms whose calls are faster in a block than alone, by more than the baseline's.

        Such an arm does the work of several calls at once, or that of later ones in the first.
        """
        self._typical_s = {
            name: statistics.geometric_mean(_seconds(replicates, name)) for name in self.calls
        }
        self._call_again()
        self._find_slowed_baselines(replicates)
        self._find_slowed_by_others(replicates)
        self._find_slowing_inputs(replicates)
        self._find_kept_work()
        blocks = {n: statistics.median(_seconds(replicates, n)) for n in self._alone_s}
        extra = {n: min(alone) - blocks[n] for n, alone in self._alone_s.items()}
        waiting_s = 0.0  # a graph, or a kernel in front of the call, hides the launch
        if self.mode in (Mode.WALL, Mode.PLAIN):
            waiting_s = LAUNCHING_S if self.device.gpu else WAKING_S
        for rung in self.ladder.rungs if extra else ():
            name, base = rung.arms["optimized"], rung.arms["baseline"]
            own_s = LONE_CALL_TIMES * blocks[name] + LONE_CALL_S
            allowed = min(LONE_CALL_SHARE * blocks[base], own_s)
            allowed += waiting_s + 3 * max(0.0, extra[base])
            if blocks[name] < blocks[base] and extra[name] > allowed:
                alone, many = (si(s, "s") for s in (min(self._alone_s[name]), blocks[name]))
                rung.suspicion = InvalidMeasurement(
                    f"optimized takes {many} per call in a block, but {alone} in a call that is "
                    "timed alone, and the baseline shows no such difference: each call must do all "
                    "of its own work, and none of another call's"
                )
        self._suspect_late_results()

    def _suspect_late_results(self) -> None:
        for rung in self.ladder.rungs:
            if rung.arms["optimized"] in self._late:
                rung.suspicion = InvalidMeasurement(
                    "optimized's result changed after the clock had stopped: a call must finish "
                    "its work before it returns"
                )

    def _find_slowed_baselines(self, replicates: Sequence[Replicate]) -> None:
        for rung in self.ladder.rungs if self.metric is Metric.WALL else ():
            name = rung.arms["baseline"]
            ways = rung.bound.baseline_alone_s
            alone_s = min(ways.values(), default=math.inf)
            blocks = list(_seconds(replicates, name))
            noise = statistics.median(blocks) / min(blocks)
            timed_s = min(*blocks, *self._alone_s.get(name, ()))
            slowed_s = (timed_s - WAKING_S) / (SLOWED_BASELINE * noise)
            if alone_s >= slowed_s:
                continue
            how = next(how for how, s in ways.items() if s <= ALIKE * alone_s)
            by_others = how == BEFORE_OTHERS
            # other work on the machine may have begun after the calls before timing
            if by_others or rung.bound.time_baseline(how) < slowed_s:
                reports = self._slowed_baselines if by_others else self._slow_when_timed
                reports[name] = f"{si(timed_s, 's')}, but {si(alone_s, 's')} {how}"

    def _find_slowed_by_others(self, replicates: Sequence[Replicate]) -> None:
        """Compare blocks that follow another arm's with those that follow one of the same arm.

        In a mirrored round, the arm in the middle has two adjacent blocks: the first follows
        another arm's block, the second its own. The second block of the arm at the ends follows the
        blocks of all others. On the host, new values are drawn before each block.
        """
        on_gpu = self.device.gpu is not None
        if self.metric is not Metric.DEVICE if on_gpu else not self.renews:
            return
        times, waking_s = (SLOWED_ON_GPU, 0.0) if on_gpu else (SLOWED_BY_OTHERS, WAKING_S)
        rounds = [round_ for replicate in replicates for round_ in replicate.rounds]
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

    def _find_slowing_inputs(self, replicates: Sequence[Replicate]) -> None:
        if not self.device.renews or self._updates:
            return  # no values are drawn between blocks, or the second call has other work
        timed = {name: min(_seconds(replicates, name)) for name in self._first_s}
        for rung in self.ladder.rungs:
            name, optimized = rung.arms["baseline"], rung.arms["optimized"]
            was, is_ = self._first_s[name], timed[name]
            usual = max(1.0, timed[optimized] / self._first_s[optimized])
            if is_ > SLOWED_BY_INPUTS * usual * was + WAKING_S:
                times = f"{si(is_, 's')} after inputs(), but {si(was, 's')} when it was repeated"
                self._slowing_inputs[name] = times

    def _find_kept_work(self) -> None:
        """Compare blocks on new values with those in which all values have returned."""
        if self.renews or not self.device.renews:
            return
        arms = self._known_s.keys() & self._new_s.keys()
        for rung in self.ladder.rungs if arms >= self.calls.keys() else ():
            name, base = rung.arms["optimized"], rung.arms["baseline"]
            known_s = {arm: statistics.median(self._known_s[arm]) for arm in (name, base)}
            usual = max(1.0, statistics.median(self._new_s[base]) / known_s[base])
            new_s = sorted(self._new_s[name])
            quartile = new_s[len(new_s) // 4]
            if quartile > KEPT * usual * known_s[name] + WAKING_S:
                is_, was = si(statistics.median(new_s), "s"), si(known_s[name], "s")
                self._keeping[name] = f"{is_} on new values, but {was}"

    def finish(self) -> None:
        """Run the checks that need no blocks: on another seed, or on many more inputs."""
        if self.large:
            self.device.release()
            self.ladder.check_anew(self._last_seed + 1)
        elif self.metric is Metric.WALL and self.device.ranks.count == 1:
            slowest = sorted(self._first_s.values())[-len(JUDGED) :]
            seed_s = len(JUDGED) * self._set_s + sum(slowest)
            is_short = seed_s * FEWEST_SEEDS < SEARCHING_S
            self.ladder.search(self._typical_s, is_short=is_short)

    def unchecked(self) -> Iterator[str]:
        """Describe what could not be checked, beside what :meth:`Ladder.not_compared` does."""
        for name, times in self._slowed_baselines.items():
            role = "library" if name.startswith("library") else "baseline"
            yield f"whether another arm slows the {role} down: {name} took {times}"
        for name, times in self._slow_when_timed.items():
            yield f"whether the baseline is slow only while it is timed: {name} took {times}"
        for name, times in self._slowing_inputs.items():
            yield f"whether inputs() slows the baseline down: {name} took {times}"
        for name, times in self._keeping.items():
            yield (
                f"results cached by value: {name} took {times} when they returned, as inputs() "
                "takes too long for new values in each block; draw the inputs faster"
            )
        if self.large:
            yield "results of timed calls: they are too large to keep, so another seed was checked"
        elif self._stuck:
            paths = {path for paths in self._stuck.values() for path in paths}
            labels = ", ".join(sorted(map(self.bound.effects.label, paths)))
            yield f"results on new values: {labels} could not be overwritten"
        elif self.device.renews and max(self.calls.values()) > self.sets:
            slow = f"inputs() takes {si(self._set_s, 's')} per set; draw the inputs faster"
            is_slow = (self.sets + 1) * self._set_s > RENEWAL_S
            yield (
                f"results cached by value: a block calls the same {self.sets} sets of inputs "
                f"again, because {slow if is_slow else 'calls are short'}, or enlarge the work of "
                "a call"
            )

    def timing(self, replicates: tuple[Replicate, ...]) -> Timing:
        return Timing(
            metric=self.metric,
            mode=self.mode,
            calls=self.calls,
            # few input sets of a host claim stay in the CPU's caches
            cache=self.bound.claim.cache if self.device.gpu else "warm",
            sets=self.sets,
            replicates=replicates,
            notes=(*self.notes, *self._slowed(replicates), *self._long_inputs()),
        )

    def _long_inputs(self) -> Iterator[str]:
        """Yield a note if building the inputs, and looking at each of their values, took long."""
        if self._all_sets_s > LONG_SETS_S:
            one, in_all = si(self._set_s, "s"), si(self._all_sets_s, "s")
            yield (
                f"building inputs took {in_all}, {one} for each set: numbers in arrays or lists "
                "take less than those in many objects"
            )

    def _slowed(self, replicates: tuple[Replicate, ...]) -> Iterator[str]:
        """Report arms that are always much slower when they are timed than when first called."""
        for name, first_s in self._first_s.items():
            timed_s = min(_seconds(replicates, name))
            if timed_s > SLOWED * first_s:
                was, is_ = (si(seconds, "s") for seconds in (first_s, timed_s))
                yield f"{name} took {was} in repeated calls before timing, and {is_} when timed"


def _seconds(replicates: Sequence[Replicate], name: str) -> Iterator[float]:
    """Yield an arm's seconds per call in each block."""
    return (s for r in replicates for b in r.rounds for s in b.seconds[name])


def _copy(path: str, value: object) -> NamedTensor:
    (copy,) = accuracy.copies([(path, value)])
    return copy


def _is_small(value: Any) -> bool:
    if tensors.backend_of(value):
        return bool(value.nbytes <= SMALL_BYTES)
    return 8 * len(value) <= SMALL_BYTES if tensors.is_number_list(value) else True


def _spans(result: object, i: int) -> Iterator[tuple[int, int, int]]:
    """Yield the addresses of a result's arrays, with the number of the result."""
    for _, value in tensors.walk(result, "", is_result=True):
        if (backend := tensors.backend_of(value)) and value.nbytes:
            start, _ = backend.address_and_strides(value)
            yield start, start + value.nbytes, i
