"""Compare two runs claim by claim."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pytest_aiperf.model import Interval, Result
from pytest_aiperf.rules.verdict import SESSIONS_APART, depends_on_host

MAX_VERSION = 80
"""Characters of a version that a difference shows: runs of many machines have many versions, and a
results file may hold anything."""


class State(StrEnum):
    """How a claim changed between two runs, in order from the worst state to the best."""

    REGRESSED = "regressed"
    GONE = "gone"  #: Measured in the old run only.
    STALE = "stale"  #: The test or the kernels of the claim changed.
    INCONCLUSIVE = "inconclusive"  #: The interval of the ratio is too wide to tell.
    MOVED = "moved"  #: Changed, perhaps because of a different host.
    IMPROVED = "improved"
    NEW = "new"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class Change:
    """The state of one claim in a comparison of two runs."""

    claim: str
    key: str
    state: State
    ratio: Interval | None = None  #: The new speedup divided by the old one.
    why: str = ""


def changes(old: Sequence[Result], new: Sequence[Result]) -> list[Change]:
    """Compare each claim on the same kind of GPU; return the worst changes first."""
    before, after = ({(r.claim, r.key): r for r in results} for results in (old, new))
    listed = [_change(before.get(k), after.get(k)) for k in {**before, **after}]
    order = list(State)
    return sorted(listed, key=lambda c: (order.index(c.state), c.key, c.claim))


def _change(old: Result | None, new: Result | None) -> Change:
    if new is None or (new.speedup is None and old is not None and old.speedup is not None):
        assert old is not None
        why = "" if new is None else f"{new.outcome}: {new.message}".splitlines()[0]
        return Change(old.claim, old.key, State.GONE, why=why)
    if old is None or new.speedup is None or old.speedup is None:
        if new.speedup is None and old is not None:
            return Change(new.claim, new.key, State.SAME, why="measured in neither run")
        return Change(new.claim, new.key, State.NEW)
    ratio = ratio_of(new.speedup, old.speedup)
    if old.code != new.code:
        why = "the claim's test or kernels changed"
        return Change(new.claim, new.key, State.STALE, ratio, why)
    state, why = State.SAME, ""
    if ratio.high < 1 - SESSIONS_APART:
        state = State.REGRESSED
    elif ratio.low > 1 + SESSIONS_APART:
        state = State.IMPROVED
    elif ratio.low < 1 - SESSIONS_APART or ratio.high > 1 + SESSIONS_APART:
        state = State.INCONCLUSIVE
        why = f"the interval is not within {SESSIONS_APART:.1%} of 1, nor outside"
    is_same_gpu = old.gpu and new.gpu and old.gpu.uuid == new.gpu.uuid != ""
    if state in (State.REGRESSED, State.IMPROVED) and depends_on_host(new) and not is_same_gpu:
        return Change(new.claim, new.key, State.MOVED, ratio, "it depends on the host")
    return Change(new.claim, new.key, state, ratio, why)


def ratio_of(new: Interval, old: Interval) -> Interval:
    """Divide two speedups of independent runs; relative errors add in quadrature."""
    if min(new.low, old.low) <= 0 or math.isinf(max(new.high, old.high)):
        return Interval(0.0, new.value / old.value, math.inf)
    low = math.hypot(math.log(new.value / new.low), math.log(old.high / old.value))
    high = math.hypot(math.log(new.high / new.value), math.log(old.value / old.low))
    value = new.value / old.value
    return Interval(value * math.exp(-low), value, value * math.exp(high))


def stack_changes(old: Sequence[Result], new: Sequence[Result]) -> list[str]:
    """List how software, GPU and conditions of two runs differ: ``torch 2.10.0 -> 2.11.0``."""
    before, after = (versions(results) for results in (old, new))
    return [
        f"{name} {_brief(before.get(name, 'none'))} -> {_brief(after.get(name, 'none'))}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _brief(version: str) -> str:
    if len(version) <= MAX_VERSION:
        return version
    return f"{version[:MAX_VERSION]}... ({len(version)} characters)"


def versions(results: Sequence[Result]) -> dict[str, str]:
    """Return software versions, GPUs and conditions, by name of the software, "GPU" or option."""
    by_name: dict[str, set[str]] = {}
    for result in results:
        for name, version in {**result.stack, **result.conditions}.items():
            by_name.setdefault(name, set()).add(version)
        if result.gpu is not None:
            by_name.setdefault("GPU", set()).add(result.gpu.name)
    return {name: ", ".join(sorted(values)) for name, values in by_name.items()}
