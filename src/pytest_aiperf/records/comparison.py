"""Two sets of results against each other: what got better, what got worse, what cannot be said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pytest_aiperf.model import Interval, Result
from pytest_aiperf.rules.verdict import SESSIONS_APART, is_hosts


class State(StrEnum):
    """What became of a claim, the worst first.

    ``moved`` are figures that depend on the host as much as on the GPU, where it is not known that
    both runs had the same host.
    """

    REGRESSED = "regressed"
    GONE = "gone"
    STALE = "stale"
    MOVED = "moved"
    IMPROVED = "improved"
    NEW = "new"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class Change:
    """One claim in two runs; ``ratio`` is its new speedup over its old one."""

    claim: str
    key: str
    state: State
    ratio: Interval | None = None
    why: str = ""


def changes(old: Sequence[Result], new: Sequence[Result]) -> list[Change]:
    """Compare claim by claim, each on its own kind of GPU; the worst come first."""
    before, after = ({(r.claim, r.key): r for r in results} for results in (old, new))
    found = [_change(before.get(k), after.get(k)) for k in {**before, **after}]
    order = list(State)
    return sorted(found, key=lambda c: (order.index(c.state), c.key, c.claim))


def _change(old: Result | None, new: Result | None) -> Change:
    if new is None or (new.speedup is None and old is not None and old.speedup is not None):
        assert old is not None
        why = "" if new is None else f"{new.outcome}: {new.message}".splitlines()[0]
        return Change(old.claim, old.key, State.GONE, why=why)
    if old is None or new.speedup is None or old.speedup is None:
        if new.speedup is None and old is not None:
            return Change(new.claim, new.key, State.SAME, why="measured in neither run")
        return Change(new.claim, new.key, State.NEW)
    ratio = over(new.speedup, old.speedup)
    if old.code != new.code:
        why = "the claim's test or kernels changed"
        return Change(new.claim, new.key, State.STALE, ratio, why)
    state = State.SAME
    if ratio.high < 1 - SESSIONS_APART:
        state = State.REGRESSED
    elif ratio.low > 1 + SESSIONS_APART:
        state = State.IMPROVED
    if state is not State.SAME and is_hosts(new) and not _on_one_machine(old, new):
        return Change(new.claim, new.key, State.MOVED, ratio, "it depends on the host")
    return Change(new.claim, new.key, state, ratio)


def _on_one_machine(old: Result, new: Result) -> bool:
    return old.gpu is not None and new.gpu is not None and old.gpu.uuid == new.gpu.uuid != ""


def over(new: Interval, old: Interval) -> Interval:
    """Ratio of two ratios, known from different runs: their relative errors add in squares."""
    if min(new.low, old.low) <= 0 or math.isinf(max(new.high, old.high)):
        return Interval(0.0, new.value / old.value, math.inf)
    low = math.hypot(math.log(new.value / new.low), math.log(old.high / old.value))
    high = math.hypot(math.log(new.high / new.value), math.log(old.value / old.low))
    middle = new.value / old.value
    return Interval(middle * math.exp(-low), middle, middle * math.exp(high))


def environment(old: Sequence[Result], new: Sequence[Result]) -> list[str]:
    """List what the two runs ran on differently: ``torch 2.10.0 -> 2.11.0``."""
    before, after = (versions(results) for results in (old, new))
    return [
        f"{name} {before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def versions(results: Sequence[Result]) -> dict[str, str]:
    """Name all that results ran on, and which versions of it: the stack, and the GPU."""
    found: dict[str, set[str]] = {}
    for result in results:
        for name, version in result.stack.items():
            found.setdefault(name, set()).add(version)
        if result.gpu is not None:
            found.setdefault("GPU", set()).add(result.gpu.name)
    return {name: ", ".join(sorted(known)) for name, known in found.items()}
