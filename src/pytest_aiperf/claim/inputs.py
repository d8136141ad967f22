"""A claim on a clock: its inputs, its arms, and whether they agree."""

from __future__ import annotations

import gc
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytest_aiperf.device.device import Device, gc_disabled
from pytest_aiperf.errors import InvalidMeasurement, UsageError
from pytest_aiperf.model import Against, Bench, Error, Evidence, Metric, Prepared, Static, Work
from pytest_aiperf.rules import validity

from . import correctness, tensors
from .tensors import NamedTensor

SEEDS = 3
"""Agreement is checked on this many seeds before anything is timed."""

KEPT = 1 / 64
"""What timed calls left is kept for the oracle up to this part of the GPU's memory, or of"""
UNKNOWN = 64 << 30
"""so many bytes where that is not known."""

Arm = Callable[..., object] | Prepared
Args = tuple[Any, ...]
Left = tuple[Sequence[Mapping[str, list[NamedTensor]]], int, int | None, str]
"""Arms' results for the same inputs, the seeds of these, and when the results were left."""
Turn = Callable[[], AbstractContextManager[None]]
"""Enter one's turn on the device."""
Progress = Callable[..., None]
"""Report progress: a phase and the figures that go with it, as keywords."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one call of the ``compare`` fixture says, checked."""

    arms: Mapping[str, Arm]
    inputs: Callable[[Bench], object]
    reference: Callable[..., object]
    work: Callable[..., Work] | None = None
    metrics: tuple[Metric, ...] = (Metric.DEVICE,)
    against: Against = Against.IDIOMATIC
    cache: str = "cold"
    precision: str | None = None
    evidence: tuple[Evidence, ...] = ()


class Trial:
    """A claim on a clock: what measuring needs of it."""

    def __init__(
        self, claim: Claim, clock: Device, seed: int, *, full: bool, say: Progress
    ) -> None:
        self.claim = claim
        self.clock = clock
        self.seed = seed
        self.full = full
        self.say = say
        self.contract = correctness.ArgumentEffects((), ())
        self.flags = validity.flags()
        self.random = random.Random(seed)  # noqa: S311  orders of blocks, not secrets
        self._unverified: list[Left] = []
        self._kept = 0  # bytes of it

    # inputs and arms

    def make(self, seed: int) -> Args:
        """Build one set of inputs: the same seed gives the same values."""
        return tuple(a.value if isinstance(a, Static) else a for a in self._raw(seed))

    def _raw(self, seed: int) -> Args:
        self.clock.seed(seed)
        value = self.claim.inputs(Bench(self.clock.torch_device, seed, self.full))
        return value if isinstance(value, tuple) else (value,)

    def live(self, seed: int) -> list[int]:
        """Return the positions of the inputs that are not static."""
        return [i for i, a in enumerate(self._raw(seed)) if not isinstance(a, Static)]

    def other(self, seed: int, values: int) -> tuple[Args, list[int]]:
        """Build the inputs of a seed with live arrays as another seed gives them.

        Return them, and which of them can be copied over what an arm has. Where the two seeds
        differ in more than elements (shapes, numbers, files) the values are the seed's own, and
        where they cannot be overwritten (read-only, expanded) none is copied.
        """
        live, args, fresh = self.live(seed), self.make(seed), self.make(values)
        for source in (fresh, None) if tensors.alike(args, fresh) else (None,):
            try:
                overwrite(live, args, self.make(seed) if source is None else source)
            except (ValueError, RuntimeError):
                args = self.make(seed)
            else:
                return args, live
        return args, []

    def note_settings(self) -> None:
        """Note what holds for all arms in this turn: with others a claim has fewer threads."""
        self.flags = validity.flags()

    def hold_settings(self) -> None:
        """See that no arm changed what was noted."""
        changed = validity.changed_flags(self.flags, validity.flags())
        if changed:
            raise InvalidMeasurement(
                f"an arm changed global settings ({', '.join(changed)}): both arms would run "
                "under them; set them for one call only, or for the whole session"
            )

    def prepare(self, name: str, seed: int, args: Args) -> Callable[..., object]:
        """Return what is timed of an arm; a prepared arm sees its inputs' values only later."""
        arm = self.claim.arms[name]
        _check_signature(name, arm, args)
        if not isinstance(arm, Prepared):
            return arm
        live = self.live(seed)
        left = [p for i in live for p, _ in tensors.walk(args[i], f"args[{i}]")]
        if len(live) < len(args) and not set(left) - set(self.contract.write_only):
            raise UsageError(
                f"{name}: all inputs are static, and a prepared arm could do all its work while "
                "it prepares: mark as static only what a caller would hold (weights, tables)"
            )
        overwrite(live, args, self.make(seed + 500_009))
        with gc_disabled():  # as in agreement
            call = arm.make(*args)
        if not callable(call):
            raise UsageError(f"{name}: make(*inputs) of prepared(make) must return what is timed")
        overwrite(live, args, self.make(seed))
        tensors.poison(args, self.contract.write_only)
        return call

    def arm(self, name: str, seed: int) -> Prepared:
        """Return an arm for inputs of ``seed``; all arms prepare, most of them nothing."""
        return Prepared(lambda *args: self.prepare(name, seed, args))

    # agreement

    def agreement(self, turn: Turn = nullcontext) -> tuple[Error, ...]:
        """Check all arms against the oracle on several seeds; return each arm's worst error.

        Each seed has a ``turn`` of its own, so that nobody who waits to time waits for them all.
        """
        worst: dict[str, Error] = {}
        with turn():
            self.note_settings()
            self.contract = correctness.infer_effects(
                self.arm("baseline", self.seed),
                lambda: self.make(self.seed),
                correctness.names(self.claim.reference),
            )
            self.hold_settings()
            self._hold_seeded()
            self.clock.synchronize()
        seeds = range(self.seed + 1, self.seed + 1 + SEEDS)
        for seed in seeds:
            with turn():
                self.note_settings()
                self.say("agreeing", seed=seed)
                try:
                    found = correctness.agree(
                        {name: self.arm(name, seed) for name in self.claim.arms},
                        partial(self.make, seed),
                        self.claim.reference,
                        self.contract,
                        self.claim.precision,
                    )
                finally:
                    self.hold_settings()  # a changed one would explain whatever disagrees
                # memory is asked for and given back one process at a time: once is enough
                (self.clock.release if seed == seeds[-1] else self.clock.synchronize)()
            for error in found:
                kept = worst.get(error.arm)
                if kept is None or error.error * kept.allowed > kept.error * error.allowed:
                    worst[error.arm] = error
        if self.full:
            gc.freeze()  # collections between replicates look at what came after this only
        return tuple(worst.values())

    # what timed calls left

    def verify_later(
        self,
        results: Sequence[Mapping[str, list[NamedTensor]]],
        seed: int,
        when: str,
        other: int | None = None,
    ) -> None:
        """Keep arms' results on a seed's inputs, to be verified once nobody is kept waiting.

        The live arrays of those inputs may be as the seed ``other`` gives them. The oracle takes
        longer than the calls, and while a claim has the GPU alone all others wait. The results
        must be copies, which nobody writes to any more.
        """
        self._unverified.append((results, seed, other, when))
        found = (value for each in results for r in each.values() for _, value in r)
        self._kept += sum(getattr(value, "nbytes", 0) for value in found)
        gpu = self.clock.gpu
        if self._kept > KEPT * (gpu.memory_bytes if gpu and gpu.memory_bytes else UNKNOWN):
            self.verify()

    def verify(self) -> None:
        """Hold what was kept against the oracle; a Disagreement says when it was left."""
        known: tuple[int, int | None] | None = None
        want: object = None
        while self._unverified:
            results, seed, other, when = self._unverified[0]
            if known != (seed, other):  # the oracle takes longest
                want = None
                args = self.make(seed) if other is None else self.other(seed, other)[0]
                want, known = self.claim.reference(*args), (seed, other)
                del args
            for each in results:
                correctness.verify(each, want, self.claim.precision, when, located=False)
            del self._unverified[0]
        self._kept = 0

    def _hold_seeded(self) -> None:
        """See that the seed decides what the arms read: or a constant would be a right answer."""
        first, second = self.make(self.seed), self.make(self.seed + 1)
        arrays = tensors.arrays(first)
        written = [p for p in self.contract.mutated if p in arrays and tensors.is_exact(arrays[p])]
        skip = {*self.contract.write_only, *written}
        if not arrays.keys() - skip or not tensors.alike(first, second):
            return
        if not tensors.changed(tensors.fingerprint(first, skip), second, skip):
            raise UsageError(
                "inputs() gives the same values for every seed, and an arm that remembers its "
                "result would pass: draw them (the generators are seeded, and bench.seed says how)"
            )


def bind(call: Callable[..., object], args: Args) -> Callable[[], object]:
    return lambda: call(*args)


def overwrite(positions: Sequence[int], args: Args, fresh: Args) -> None:
    for i in positions:
        tensors.overwrite((args[i],), (fresh[i],))


def _check_signature(name: str, arm: Arm, args: Args) -> None:
    call = arm.make if isinstance(arm, Prepared) else arm
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # builtins and launchers check their own arguments
        return
    try:
        signature.bind(*args)
    except TypeError as why:
        raise UsageError(
            f"{name}={getattr(call, '__name__', 'arm')}{signature} does not take the {len(args)} "
            f"values that inputs() returns: {why}"
        ) from None
