"""What a cheat and an honest look-alike are, and how both are put to the plugin."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from pytest_aiperf.claim.compare import Case, run
from pytest_aiperf.claim.plan import Plan
from pytest_aiperf.errors import Unproven
from pytest_aiperf.machine.lease import Lease
from pytest_aiperf.model import Expectation, Outcome, Result
from pytest_aiperf.timing.clock import HostClock
from pytest_aiperf.timing.fake import FAKE_GPU, FakeClock, Fault, Noise
from tests.plugin.claims import a_claim

STEADY = replace(Noise.none(), white=0.001, layout=0.001)
PLAN = Plan(half_width=0.05, least=6, most=8, rounds=2, seconds=1.0)
BLANK = Result("cheats/x", "t::x", "X", Outcome.ERROR, "fake", "run", "2026-01-01", 11)


@dataclass(frozen=True, slots=True)
class Arms:
    """One entry of the corpus: ``make`` builds the words of its claim anew, with fresh state.

    ``caught`` is part of the sentence that must catch it; an honest arm has none. ``clock`` is
    what it runs on: the fake device, the real host clock, or a GPU.
    """

    name: str
    make: Callable[[], Mapping[str, object]]
    caught: str = ""
    clock: str = "fake"
    faults: tuple[Fault, ...] = ()


@dataclass(slots=True)
class Corpus:
    """The entries in the order in which they are written down."""

    entries: dict[str, Arms] = field(default_factory=dict)

    def __call__(self, caught: str = "", **words: object) -> Callable[..., object]:
        """Enter what a function builds: the words of a claim that differ from an ordinary one."""

        def enter(make: Callable[[], Mapping[str, object]]) -> Callable[[], object]:
            assert make.__name__ not in self.entries
            self.entries[make.__name__] = Arms(make.__name__, make, caught, **words)
            return make

        return enter

    def on(self, *clocks: str) -> list[str]:
        return [name for name, entry in self.entries.items() if entry.clock in clocks]


@dataclass(slots=True)
class _Lease:
    """All leases at once, for a claim that is alone."""

    time_device: object = contextlib.nullcontext
    time_host: object = contextlib.nullcontext
    prepare: object = contextlib.nullcontext
    waited: float = 0.0


@functools.cache
def _nothing() -> Callable[..., None]:
    return lambda *_a, **_k: None


def put(entry: Arms, clock: object = None, **more: object) -> tuple[Result, Exception | None]:
    """Measure and judge an entry's claim as the compare fixture does."""
    if clock is None:
        fake = FakeClock(FAKE_GPU, STEADY, entry.faults, seed=5)
        clock = HostClock() if entry.clock == "host" else fake
    claim = a_claim(**entry.make(**more))
    case = Case(
        blank=BLANK,
        clock=clock,
        # others on the GPU may delay what is looked at until a late arm has worked
        lease=Lease([clock.gpu.uuid]) if entry.clock == "gpu" else _Lease(),
        plan=PLAN,
        say=_nothing(),
        floor=lambda _: 0.002,
        expected=lambda _: Expectation(),
        code=lambda: "c0de",
        ceilings=lambda clock: clock.ceilings(_nothing()),
    )
    return run(claim, case)


def assert_caught(entry: Arms, clock: object = None, **more: object) -> None:
    """A guard refuses the entry, and says what is wrong with it."""
    try:
        result, problem = put(entry, clock, **more)
    except RuntimeError as crash:  # of CUDA: it ends the claim's process
        result, problem = replace(BLANK, message=str(crash)), crash
    said = f"{entry.name}: {result.outcome} {result.speedup} {result.message}"
    assert problem is not None, said
    assert not isinstance(problem, Unproven), said
    assert result.outcome in (Outcome.FAILED, Outcome.INVALID, Outcome.ERROR), said
    assert re.search(entry.caught, result.message), said


def assert_honest(entry: Arms, clock: object = None, **more: object) -> None:
    """No guard minds the entry; whether a real clock finds it faster is not the question."""
    result, problem = put(entry, clock, **more)
    said = f"{entry.name}: {result.outcome} {result.message}"
    if entry.clock == "fake":
        assert result.outcome is Outcome.PASSED, said
    else:
        assert problem is None or isinstance(problem, Unproven), said


class Bunch(SimpleNamespace):
    """A box for what an arm keeps between calls."""
