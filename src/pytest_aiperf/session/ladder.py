"""Find the ladders of a session, and measure all rungs of a ladder in one process."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Generic, TypeVar

import pytest

# pytest has no public function that runs the three phases of one item, nor a class to inherit.
from _pytest.outcomes import Skipped
from _pytest.runner import runtestprotocol

from pytest_aiperf.machine import requirements
from pytest_aiperf.model import Result

C = TypeVar("C")  #: A claim with everything that its measurement needs.
Reports = list[pytest.TestReport]
Judged = tuple[Result, Exception | None]  #: A claim's record, and the error that its test raises.


class Learned(Skipped):
    """Ends the first run of a test at its ``compare``, when its arms are known."""


@dataclass(slots=True)
class LadderRun(Generic[C]):
    """The rungs that one process measures together."""

    claims: dict[str, C] = field(default_factory=dict)
    """The claim of each rung, by the test's nodeid."""
    measured: dict[str, Judged] = field(default_factory=dict)
    """Record and error of each rung, by nodeid; empty until all rungs are known."""

    def compare(self, nodeid: str, claim: C) -> Judged:
        """Return the record of a test's claim; before it is measured, note it and end the test."""
        if nodeid in self.measured:
            return self.measured[nodeid]
        self.claims[nodeid] = claim
        raise Learned("its ladder is measured first")

    def run(
        self,
        items: Sequence[pytest.Item],
        measure: Callable[[Sequence[C]], Sequence[Judged]],
        report: Callable[[pytest.Item, Reports], object],
    ) -> None:
        """Run each test up to its ``compare``, measure all of them, then run each to its end."""
        for item, upcoming in zip(items, (*items[1:], items[0]), strict=True):
            # the upcoming item keeps fixtures of wider scopes than a function alive
            reports = runtestprotocol(item, log=False, nextitem=upcoming)
            if item.nodeid not in self.claims:
                report(item, reports)
        rungs = [item for item in items if item.nodeid in self.claims]
        outcomes: Sequence[Judged] = []
        if rungs:
            with _captured(rungs[0]):
                outcomes = measure([self.claims[item.nodeid] for item in rungs])
        self.measured = dict(zip(self.claims, outcomes, strict=True))
        for item, nextitem in zip_longest(rungs, rungs[1:]):
            report(item, runtestprotocol(item, log=False, nextitem=nextitem))


@contextmanager
def _captured(item: pytest.Item) -> Iterator[None]:
    """Add what is printed meanwhile to a test's report, as pytest does while a test runs."""
    manager = item.config.pluginmanager.getplugin("capturemanager")
    with nullcontext() if manager is None else manager.item_capture("call", item):
        yield


def ladders(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Group the claims that can be measured together, by the id of their ladder."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = requirements.ladder_id(item)
        if name and requirements.is_claim(item) and not any(item.iter_markers("skip")):
            name += requirements.ranks_suffix(item.nodeid)
            groups.setdefault(name, []).append(item)
    return {
        name: rungs for name, rungs in groups.items() if len(rungs) > 1 and not torn_down(rungs[0])
    }


def torn_down(item: pytest.Item) -> bool:
    """Whether a fixture, or a finalizer that the test adds, is torn down with the test.

    The rungs of such a test are measured one by one: the first run of the test's body would tear
    the fixture down before the arms are timed.
    """
    definitions = (definition for _, definition in requirements.fixture_definitions(item))
    functions = [definition.func for definition in definitions if definition.scope == "function"]
    return any(map(_tears_down, [*functions, getattr(item, "obj", None)]))


def _tears_down(function: Callable[..., object] | None) -> bool:
    """Whether a fixture yields its value, or a function adds a finalizer itself."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return inspect.isgeneratorfunction(function) or "addfinalizer" in names
