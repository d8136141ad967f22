"""A claim on a clock: its inputs, its arms, and whether they agree."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import agree, guards, leaves
from .clock import Clock
from .errors import InvalidMeasurement, Misuse
from .model import (
    Against,
    Bench,
    Error,
    Metric,
    Prepared,
    Static,
    Work,
)

SEEDS = 3
"""Agreement is checked on this many seeds before anything is timed."""

Arm = Callable[..., object] | Prepared
Args = tuple[Any, ...]
Say = Callable[..., None]
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


class Trial:
    """A claim on a clock: what measuring needs of it."""

    def __init__(self, claim: Claim, clock: Clock, seed: int, *, full: bool, say: Say) -> None:
        self.claim = claim
        self.clock = clock
        self.seed = seed
        self.full = full
        self.say = say
        self.contract = agree.Contract((), ())
        self.random = random.Random(seed)  # noqa: S311  orders of blocks, not secrets

    # inputs and arms

    def make(self, seed: int) -> Args:
        """Build one set of inputs: the same seed gives the same values."""
        return tuple(a.value if isinstance(a, Static) else a for a in self._raw(seed))

    def _raw(self, seed: int) -> Args:
        self.clock.seed(seed)
        value = self.claim.inputs(Bench(self.clock.device, seed, self.full))
        return value if isinstance(value, tuple) else (value,)

    def prepare(self, name: str, seed: int, args: Args) -> Callable[..., object]:
        """Return what is timed of an arm; a prepared arm sees its inputs' values only later."""
        arm = self.claim.arms[name]
        _check_signature(name, arm, args)
        if not isinstance(arm, Prepared):
            return arm
        live = [i for i, a in enumerate(self._raw(seed)) if not isinstance(a, Static)]
        overwrite(live, args, self.make(seed + 500_009))
        call = arm.make(*args)
        if not callable(call):
            raise Misuse(f"{name}: make(*inputs) of prepared(make) must return what is timed")
        overwrite(live, args, self.make(seed))
        leaves.poison(args, self.contract.pure)
        return call

    def arm(self, name: str, seed: int) -> Prepared:
        """Return an arm for inputs of ``seed``; all arms prepare, most of them nothing."""
        return Prepared(lambda *args: self.prepare(name, seed, args))

    # agreement

    def agreement(self) -> tuple[Error, ...]:
        """Check all arms against the oracle on several seeds; return each arm's worst error."""
        worst: dict[str, Error] = {}
        self.contract = agree.learn(
            self.arm("baseline", self.seed),
            lambda: self.make(self.seed),
            agree.names(self.claim.reference),
        )
        for seed in range(self.seed + 1, self.seed + 1 + SEEDS):
            self.say("agreeing", seed=seed)
            before = guards.flags()
            found = agree.agree(
                {name: self.arm(name, seed) for name in self.claim.arms},
                partial(self.make, seed),
                self.claim.reference,
                self.contract,
                self.claim.precision,
            )
            changed = guards.changed_flags(before, guards.flags())
            if changed:
                raise InvalidMeasurement(
                    f"an arm changed global settings ({', '.join(changed)}): both arms would run "
                    "under them; set them for one call only, or for the whole session"
                )
            for error in found:
                kept = worst.get(error.arm)
                if kept is None or error.error * kept.allowed > kept.error * error.allowed:
                    worst[error.arm] = error
        self.clock.release()
        return tuple(worst.values())


def overwrite(positions: Sequence[int], args: Args, fresh: Args) -> None:
    for i in positions:
        leaves.overwrite((args[i],), (fresh[i],))


def _check_signature(name: str, arm: Arm, args: Args) -> None:
    call = arm.make if isinstance(arm, Prepared) else arm
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # builtins and launchers check their own arguments
        return
    try:
        signature.bind(*args)
    except TypeError as why:
        raise Misuse(
            f"{name}={getattr(call, '__name__', 'arm')}{signature} does not take the {len(args)} "
            f"values that inputs() returns: {why}"
        ) from None
