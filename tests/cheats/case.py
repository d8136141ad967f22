"""A corpus of dishonest and honest arms, and functions that measure and judge them."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from pytest_aiperf.claim.measure import ClaimContext, measure_claim
from pytest_aiperf.claim.stopping_rule import StoppingRule
from pytest_aiperf.device.device import HostDevice
from pytest_aiperf.errors import ClaimNotMet
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.model import Expectation, Outcome, Result
from pytest_aiperf.session.context import ItemContext
from tests.fake_gpu import CEILINGS, FAKE_GPU, FakeDevice, Fault, Noise
from tests.plugin.claims import a_claim

STEADY = replace(Noise.none(), white=0.001, layout=0.001)
RULE = StoppingRule(
    target_half_width=0.05,
    min_replicates=6,
    max_replicates=8,
    rounds_per_replicate=2,
    time_budget_s=1.0,
    undecided_replicates=0,
)
BLANK = Result("cheats/x", "t::x", "X", Outcome.ERROR, "fake", "run", "2026-01-01", 11)


@dataclass(frozen=True, slots=True)
class Entry:
    """One dishonest or honest arm."""

    name: str
    make: Callable[[], Mapping[str, object]]
    """Return the arguments in which its claim differs from the ordinary one; state is new."""
    caught: str = ""
    """Pattern of the error message that it must cause; empty for an honest arm."""
    clock: str = "fake"
    """Device on which the arm runs: "fake", "host" or "gpu"."""
    faults: tuple[Fault, ...] = ()
    """Faults that the fake device injects."""
    tries: int = 1
    """Measurements of which one must catch it: more where a guard looks at calls at random."""


@dataclass(slots=True)
class Corpus:
    """Entries by name, in the order of their definition."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def __call__(self, caught: str = "", **options: object) -> Callable[..., object]:
        """Return a decorator that adds an entry under the name of its ``make`` function."""

        def add(make: Callable[[], Mapping[str, object]]) -> Callable[[], object]:
            assert make.__name__ not in self.entries
            self.entries[make.__name__] = Entry(make.__name__, make, caught, **options)
            return make

        return add


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for this process's locks, which is removed at its end."""
    return tempfile.TemporaryDirectory(prefix="aiperf-cheats-")


@functools.cache
def _no_progress() -> Callable[..., None]:
    return lambda *_a, **_k: None


def measure_entry(
    entry: Entry, item: ItemContext | None = None, **fixtures: object
) -> tuple[Result, Exception | None]:
    """Measure and judge the claim of an entry as the compare fixture does.

    ``item`` is the context of a test on a real GPU. Its lock matters there: other work could delay
    the check until an arm has written its late result.
    """
    claim = a_claim(**entry.make(**fixtures))
    context = ClaimContext(
        record=BLANK,
        device=FakeDevice(FAKE_GPU, STEADY, entry.faults, seed=5),
        lock=GpuLock([], Path(_folder().name)),
        rule=RULE,
        progress=_no_progress(),
        noise_floor=0.002,
        expectation=Expectation(),
        code="c0de",
    )
    if item is not None:
        context = replace(context, device=item.device, lock=item.lock)
        session = item.session
        return session.figures.measure_ladder([(claim, context)], item.gpus, session.machine)[0]
    if entry.clock == "host":
        context = replace(context, device=HostDevice())
    else:
        context = replace(context, ceilings=CEILINGS)
    return measure_claim(claim, context)


HOST_TRIES = 5
"""On a busy machine a thread of an arm may get no CPU time in which a guard could see it, and times
may vary too much to decide a claim."""


def assert_caught(entry: Entry, item: ItemContext | None = None, **fixtures: object) -> None:
    """Assert that a guard refuses the entry with its message."""
    for _ in range(HOST_TRIES if entry.clock == "host" else entry.tries):
        try:
            result, problem = measure_entry(entry, item, **fixtures)
        except RuntimeError as crash:  # a CUDA error also refuses the arm
            result, problem = replace(BLANK, message=str(crash)), crash
        if problem is not None and not isinstance(problem, ClaimNotMet):
            break
    summary = f"{entry.name}: {result.outcome} {result.speedup} {result.message}"
    assert problem is not None, summary
    assert not isinstance(problem, ClaimNotMet), summary
    assert result.outcome in (Outcome.FAILED, Outcome.INVALID, Outcome.ERROR), summary
    assert re.search(entry.caught, result.message), summary


def assert_marked(entry: Entry) -> None:
    """Assert that the record names what was not checked: ``accept`` refuses such records."""
    for _ in range(HOST_TRIES if entry.clock == "host" else 1):
        result, problem = measure_entry(entry)
        named = any(re.match(entry.caught, text) for text in result.unchecked)
        if problem is None and named:
            break
    summary = f"{entry.name}: {result.outcome} {result.unchecked} {result.message}"
    assert problem is None, summary
    assert named, summary


def assert_honest(entry: Entry, item: ItemContext | None = None, **fixtures: object) -> Result:
    """Assert that no guard refuses the entry. On a real device, the arm need not be faster."""
    result, problem = measure_entry(entry, item, **fixtures)
    summary = f"{entry.name}: {result.outcome} {result.message}"
    if entry.clock == "fake":
        assert result.outcome is Outcome.PASSED, summary
    else:
        assert problem is None or isinstance(problem, ClaimNotMet), summary
    return result


class State(SimpleNamespace):
    """Mutable state that an arm keeps between calls."""
