"""Builds the inputs of each arm, in as many sets as its calls use in turn, and renews their values.

A replicate has new buffers. Those of the first one, and of later ones while memory allows, are
built before the exclusive lock is taken.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from pytest_aiperf.correctness import tensors
from pytest_aiperf.correctness.tensors import Inputs
from pytest_aiperf.device.device import MAX_BLOCK_S, Call, calls_per_block
from pytest_aiperf.errors import is_out_of_memory
from pytest_aiperf.model import CacheName, Gpu, Mode
from pytest_aiperf.rules import validity
from pytest_aiperf.text import si

from .bound_claim import ASSUMED_MEMORY_BYTES, bind
from .ladder import Ladder

PREBUILT_SHARE = 1 / 32
"""Fraction of the GPU's memory that inputs built before the exclusive lock is taken may fill."""
MISS_S = 2e-6
"""Latency of a GPU's memory for inputs that are not in the L2; a generous estimate."""
MISSED_BYTES_PER_S = 1e12
"""Bandwidth of a GPU's memory for inputs that are not in the L2; a low estimate."""
COLD_SHARE = 1e-3
"""If reading cold inputs takes less than this fraction of a call, they need not be kept cold."""
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
WARM_HOST_BYTES = 2 << 20
"""A host claim gets more than MIN_SETS input sets only while all of them fit into this many bytes:
the L2 of a CPU core."""
RENEWAL_S = 0.02
"""Most seconds for drawing the new values of one block, which limits the number of input sets. If
drawing takes longer, values are drawn once per replicate, and its blocks share them."""
LONG_SETS_S = 30.0  #: If building all sets of inputs took more seconds, a note says so.
LONG_BUILD_S = 1.0
"""If building a replicate takes longer than this, other claims may use the device meanwhile. On an
H200, it takes about as long to get the exclusive lock back, because all others must first end
their steps."""
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


def input_sets(gpu: Gpu | None, cache: CacheName, set_bytes: int) -> int:
    """Return the fewest input sets of ``set_bytes`` that successive calls must use in turn."""
    if gpu is None or cache == "warm":
        return MIN_SETS
    return validity.rotation(set_bytes, gpu.l2_bytes)


class BufferBuilder:
    """Builds the buffers of a ladder's arms.

    Call :meth:`build_first`, :meth:`choose_sets` and :meth:`complete` in this order.
    """

    def __init__(self, ladder: Ladder) -> None:
        self.ladder = ladder
        self.bound = ladder.bound
        self.device = ladder.bound.device
        self.sets = 1  #: Number of input sets of each arm.
        self.is_large = False  #: Whether all arms share one set, and no outputs are kept.
        self.reusing: set[str] = set()  #: Arms whose later results overwrite earlier ones.
        self.stuck: dict[str, tuple[str, ...]] = {}
        """By arm: paths of inputs that cannot be overwritten."""
        self.set_s = math.inf  #: Seconds of the fastest build of one set.
        self.prebuilt: dict[int, list[ArmBuffers]] = {}  #: Replicates built in advance, by seed.
        self._most_prebuilt = 1
        self._all_sets_s = 0.0  # seconds to build all sets so far
        self._sets_built = 0
        self._replicate_s = math.inf  # seconds to build and warm up a replicate's buffers

    def build_first(self, seed: int) -> list[ArmBuffers]:
        """Build the first replicate's buffers with a single set."""
        gpu = self.device.gpu
        self.bound.progress("building inputs")
        self.prebuilt.clear()
        self.sets = 1
        memory_bytes = gpu.memory_bytes if gpu else 0
        share_bytes = LARGE_SHARE * memory_bytes
        self.is_large = bool(memory_bytes) and self.bound.effects.nbytes > share_bytes
        buffers = self.prebuilt[seed] = self._build_and_warm(seed)
        return buffers

    def choose_sets(self, fastest_s: float, mode: Mode) -> None:
        """Choose the number of input sets: as many as a block has calls, if that is affordable.

        A call of the fastest arm takes ``fastest_s``.
        """
        gpu, size = self.device.gpu, max(1, self.bound.set_bytes)
        least = input_sets(gpu, self.bound.claim.cache, self.bound.set_bytes)
        needed = least * size * len(self.ladder.arms)
        fills = gpu is not None and needed > FILLING_SHARE * (gpu.memory_bytes or math.inf)
        # twice the limit: other claims on the GPU may have slowed the calls down
        if self.is_large or (
            (fills or fastest_s > 2 * MAX_BLOCK_S) and self.min_calls(fastest_s) == 1
        ):
            self.sets = 1  # a block will hold one call, which needs one input set
            return
        room = WARM_HOST_BYTES
        if gpu is not None:
            memory_bytes = gpu.memory_bytes or ASSUMED_MEMORY_BYTES
            room = int(PREBUILT_SHARE * memory_bytes / len(self.ladder.arms))
            if self.bound.claim.cache == "warm" and gpu.l2_bytes:
                room = min(room, gpu.l2_bytes // 2)
        wanted = calls_per_block(mode, fastest_s, fastest_s) if self.device.renews else 1
        affordable = min(
            room // size, int(RENEWAL_S / max(self.set_s, 1e-6)), validity.MAX_INPUT_SETS
        )
        # the slowest rank decides for all
        self.sets = int(-self.device.ranks.max(-max(least, min(wanted, affordable))))

    def complete(self, seeds: Sequence[int]) -> None:
        """Build the first replicate's other sets, and later replicates while memory allows.

        Host claims and multi-GPU claims build only the first replicate here.
        """
        device = self.device
        first = self.prebuilt[seeds[0]]
        for arm in first:
            self._add_sets(arm, seeds[0], first)
        for arm in first:
            self.run_once(arm)
        if device.gpu is None or device.ranks.count > 1:
            return
        size = sum(tensors.nbytes(i.args) for arm in first for i in arm.inputs)
        budget = PREBUILT_SHARE * (device.gpu.memory_bytes or ASSUMED_MEMORY_BYTES)
        self._most_prebuilt = max(1, int(budget / max(1, size)))
        self._prebuild(seeds[1 : self._most_prebuilt])

    def build_more(self, seeds: Sequence[int]) -> None:
        """Build the next replicate's buffers and, while memory allows, those of later ones."""
        self.bound.progress("building inputs")
        self.device.release()
        self.prebuilt[seeds[0]] = self._build_and_warm(seeds[0])
        self._prebuild(seeds[1 : self._most_prebuilt])

    def _prebuild(self, seeds: Sequence[int]) -> None:
        """Build the buffers of replicates while memory allows."""
        device = self.device
        for seed in seeds:
            if device.gpu and device.free_bytes() < device.gpu.memory_bytes / 2:
                break  # leave memory for the calls and for other claims
            try:
                self.prebuilt[seed] = self._build_and_warm(seed)
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
        return is_slow and seed not in self.prebuilt

    @property
    def builds_quickly(self) -> bool:
        """Whether preparing arms is so quick that the lock may be held meanwhile."""
        is_quick = self._replicate_s <= LONG_BUILD_S * self.sets
        return is_quick and not self.is_large and self.device.ranks.count == 1

    def renews_quickly(self, sets: int) -> bool:
        """Whether new values for so many sets can be drawn before each block."""
        return sets * self.set_s <= RENEWAL_S

    def min_calls(self, call_s: float) -> int:
        """Return the fewest calls per block of an arm that keep its inputs out of the L2."""
        gpu, size = self.device.gpu, self.bound.set_bytes
        if gpu is None or self.bound.claim.cache == "warm":
            return 1
        # one call on so large a set evicts the set's start from the L2: the next call is cold
        if size >= validity.L2_SPANS * gpu.l2_bytes:
            return 1
        miss_s = MISS_S + size / MISSED_BYTES_PER_S
        return 1 if miss_s < COLD_SHARE * call_s else self.sets

    def build(self, seed: int) -> list[ArmBuffers]:
        """Build each arm's buffers in a replicate."""
        bound = self.bound
        names = self.ladder.arms
        bound.random.shuffle(names)  # the order of allocation must not favor an arm
        buffers: list[ArmBuffers] = []
        for name in names:
            padding = self.device.random_padding(bound.random)
            in_place = self.ladder.is_prepared(name)
            buffers.append(self._add_sets(ArmBuffers(name, padding, in_place), seed, buffers))
        return buffers

    def _add_sets(self, arm: ArmBuffers, seed: int, others: Sequence[ArmBuffers]) -> ArmBuffers:
        """Build the sets that an arm's buffers lack."""
        for i in range(len(arm.inputs), self.sets):
            shared = self.is_large and others
            inputs = others[0].inputs[0] if shared else self._make_inputs(seed + i)
            self.bound.effects.poison(inputs.args)
            arm.functions.append(self.ladder.prepare(arm.name, inputs))
            arm.inputs.append(inputs)
        return arm

    def _make_inputs(self, seed: int) -> Inputs:
        started = time.monotonic()
        inputs = self.bound.make_inputs(seed)
        spent = time.monotonic() - started
        self.set_s = min(self.set_s, spent)
        self._all_sets_s += spent
        self._sets_built += 1
        return inputs

    def _build_and_warm(self, seed: int) -> list[ArmBuffers]:
        started = time.monotonic()
        buffers = self.build(seed)
        for arm in buffers:
            self.run_once(arm)
        self._replicate_s = min(self._replicate_s, time.monotonic() - started)
        return buffers

    def run_once(self, arm: ArmBuffers) -> None:
        """Run each call once on the timed stream: libraries allocate workspaces per stream."""
        results: list[object] = []
        calls = [arm.call(i) for i in range(self.sets)]
        compared = min(len(calls), COMPARED_RESULTS)
        if compared * self.bound.effects.nbytes > self.bound.kept_bytes:
            compared = 0
            self.reusing.add(arm.name)

        def collecting(call: Call) -> Call:
            return lambda: results.append(call())

        calls[:compared] = map(collecting, calls[:compared])
        self.device.block(calls, Mode.WALL).run()
        self.bound.refuse_changed_settings(arm.name)
        spans = sorted(s for i, r in enumerate(results) for s in _spans(r, i))
        is_new = all(b[0] >= a[1] or a[2] == b[2] for a, b in itertools.pairwise(spans))
        if not self.device.ranks.all(is_new):
            self.reusing.add(arm.name)

    def renew(self, arm: ArmBuffers, sets: Sequence[int]) -> None:
        """Give sets values that the arm has not met, in new buffers or in place."""
        if arm.name in self.stuck or self.is_large:
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
                self.stuck[arm.name] = left
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

    def notes(self) -> Iterator[str]:
        """Yield a note if building the inputs, and looking at each of their values, took long."""
        if self._all_sets_s > LONG_SETS_S:
            quickest, in_all = si(self.set_s, "s"), si(self._all_sets_s, "s")
            yield (
                f"building {self._sets_built} sets of inputs took {in_all}, the quickest "
                f"{quickest}: draw fewer random numbers, for example by repeating a block of them, "
                "and keep numbers in arrays or lists instead of many objects"
            )


def _spans(result: object, i: int) -> Iterator[tuple[int, int, int]]:
    """Yield the addresses of a result's arrays, with the number of the result."""
    for _, value in tensors.walk(result, "", is_result=True):
        if (backend := tensors.backend_of(value)) and value.nbytes:
            start, _ = backend.address_and_strides(value)
            yield start, start + value.nbytes, i
