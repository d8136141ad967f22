"""Read expectations.yaml, and write accepted results into it."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from datetime import date
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine.cache_folder import create_tagged
from pytest_aiperf.machine.file_lock import locked
from pytest_aiperf.model import Expectation, Interval, Outcome, Recorded, Require, Result
from pytest_aiperf.rules import roofline
from pytest_aiperf.rules.evidence import broken, not_looked_at
from pytest_aiperf.rules.verdict import NOISY_FLOOR, is_parity, judge
from pytest_aiperf.schema import from_json

from .results import atomic_write, merge_results, read_results, writing
from .yaml_file import MAX_TEXT, ROOT, Document, is_text, last_line, parse, read

MAX_NOISE: Final = 0.02  #: Results are refused if identical arms differ by more than this.
HOST: Final = "cpu"
"""Key of host claims. Their figures are recorded to be shown: no run is judged by them, because
hosts differ."""
MAX_VALUES: Final = {
    "speedup": 1e9,
    "lowest": 1e9,
    "library": 1e9,
    "share": 2.0,
    "runs": 1e9,
}
"""Upper bounds of figures. A share of the limit may exceed 1, since the limit is measured."""
SCHEMA: Final = 1  #: Version of the file format; files of other versions are refused.
STACK: Final = ("torch", "CUDA", "driver")  #: Software whose versions an entry records, in order.
HOST_STACK: Final = ("Python", "NumPy", "torch", "processor")  #: The same for a host claim.
NEW_FILE: Final = """\
# What each claim must show. People write `require`; the lower end of the interval must reach it.
# `pytest --update-expectations` and `python -m pytest_aiperf accept` write the other entries.
schema: 1
claims: {}
"""
CLAIMS: Final = f"{ROOT}.claims"
Section = TypeVar("Section", Require, Recorded)
_json = partial(json.dumps, ensure_ascii=False)
_CLAIM = re.compile(r"[^\s/\[\]]+(/[^\s/\[\]]+)+(\[.+\])?")
_REQUIRED = {field.name for field in fields(Require)}
_KEY = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
# names that every YAML version reads as text even without quotes
_UNQUOTED = re.compile(r"cpu|([1-9]\d*x)?[A-Za-z_]+[\d/][\w./-]*(\[[\w./-]+\])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ClaimEntry:
    """The entry of one claim."""

    require: Require = field(default_factory=Require)  #: Written by people.
    require_on: Mapping[str, Require] = field(default_factory=dict)
    """What differs from ``require`` on a GPU (h100) or an architecture (sm90)."""
    recorded: Mapping[str, Recorded] = field(default_factory=dict)
    """Accepted figures, by GPU (h200), by architecture (sm90), or of a host (cpu)."""


@dataclass(frozen=True, slots=True)
class Expectations:
    """The content of expectations.yaml; empty if there is no file."""

    claims: Mapping[str, ClaimEntry] = field(default_factory=dict)

    def lookup(self, claim: str, key: str, arch: str, code: str) -> Expectation:
        """Return the expectation of a claim on a GPU; on a host, only what it requires.

        If the GPU has no entry, that of its architecture counts: sm90 for h200, 2xsm90 for 2xh200.
        What a claim requires was found on the GPUs that its entry names. On others, the claim must
        be FASTER, or at least the SAME if that is all that it requires.
        """
        entry = self.claims.get(claim, ClaimEntry())
        require, names = self.required(claim, key, arch), _names(key, arch)
        recorded_on = {*map(_model, entry.recorded)} - {HOST}
        known = recorded_on | {*map(_model, entry.require_on)}
        if key != HOST and recorded_on and not known & {*map(_model, names)}:
            bar = require.speedup if (require.speedup or math.inf) <= 1 else None
            require = Require(speedup=bar)
        for name in () if key == HOST else names:
            if recorded := entry.recorded.get(name):
                return Expectation(require, recorded, name, recorded.code != code)
        return Expectation(require)

    def required(self, claim: str, key: str, arch: str) -> Require:
        """Return what a result needs to be accepted on a GPU."""
        entry = self.claims.get(claim, ClaimEntry())
        found = filter(None, map(entry.require_on.get, _names(key, arch)))
        figures = asdict(next(found, Require()))
        return replace(entry.require, **{k: x for k, x in figures.items() if x is not None})

    def requires(self, claim: str, figure: str) -> bool:
        """Whether the entry of a claim requires a figure, such as "library", on any machine."""
        entry = self.claims.get(claim, ClaimEntry())
        required = (entry.require, *entry.require_on.values())
        return any(getattr(require, figure) is not None for require in required)


def _names(key: str, arch: str) -> tuple[str, str]:
    """Return the names under which a machine may have an entry: 2xh200 and 2xsm90."""
    return key, re.sub(r"^(\d+x)?.*", rf"\g<1>{arch}", key)


def _model(name: str) -> str:
    """Return the GPU that an entry is about, whatever their number: h200 for 2xh200."""
    return re.sub(r"^\d+x", "", name)


def load(path: Path) -> Expectations:
    """Read expectations; raise UsageError with line and column of the first mistake."""
    text = read(path)
    return Expectations({} if text is None else _claims(parse(path, text)))


def check(path: Path, collected: Collection[str], is_complete: Callable[[str], bool]) -> None:
    """Raise UsageError for mistakes in the file, and for claims in it that no longer exist.

    ``is_complete`` tells of a folder in a claim's id whether all its claims were collected.
    """
    text = read(path)
    if text is None:
        return
    unknown = []
    document = parse(path, text)
    _claims(document)
    for key, _ in document.nodes[CLAIMS].value:
        claim = str(key.value)
        if claim not in collected and is_complete(claim.partition("/")[0]):
            nearest = difflib.get_close_matches(claim, collected, 1)
            hint = f"did you mean {nearest[0]}?" if nearest else "remove it"
            unknown.append(f"{path}:{key.start_mark.line + 1}: no test is called {claim}: {hint}")
    if unknown:
        raise UsageError("\n".join(unknown))


def is_claim_id(name: str) -> bool:
    """Whether a name has the form of a claim id: ``folder/name`` or ``folder/name[param]``."""
    return is_text(name) and _CLAIM.fullmatch(name) is not None


def stack_line(stack: Mapping[str, str]) -> str:
    """Format software versions: "torch 2.9.0, CUDA 13.0, driver 580.65".

    If a new result's line differs from that of its entry, the entry's count of runs restarts.
    """
    versions = {name.lower(): version for name, version in stack.items()}
    names = HOST_STACK if "processor" in versions else STACK
    first = [(name, versions[name.lower()]) for name in names if name.lower() in versions]
    return ", ".join(" ".join(pair) for pair in first or sorted(stack.items())) or "unknown"


@dataclass(frozen=True, slots=True)
class _File:
    schema: int
    claims: Mapping[str, Mapping[str, Any]]


def _claims(document: Document) -> dict[str, ClaimEntry]:
    content = document.value
    schema = content.get("schema") if isinstance(content, dict) else None
    if isinstance(content, dict) and "schema" not in content:
        document.refuse(f"{ROOT}: schema is missing; begin the file with `schema: {SCHEMA}`")
    # checked first, since the fields of another version may cause misleading errors
    if isinstance(schema, int) and schema != SCHEMA:
        newer = f"written by a newer pytest-aiperf (schema {schema}); upgrade pytest-aiperf"
        document.refuse(f"{ROOT}.schema: {newer if schema > SCHEMA else f'must be {SCHEMA}'}")
    try:
        claims = from_json(_File, content, ROOT).claims
        return {claim: _claim_entry(claim, entries) for claim, entries in claims.items()}
    except ValueError as error:
        document.refuse(str(error))


def _claim_entry(claim: str, entries: Mapping[str, Any]) -> ClaimEntry:
    where = f"{CLAIMS}.{claim}"
    if not is_claim_id(claim):
        raise ValueError(f"{where}: {claim!r} is not folder/name[param]")
    require_on: dict[str, Require] = {}
    require, recorded = Require(), {}
    for key, entry in entries.items():
        if key == "require":
            require, require_on = _require(entry, f"{where}.{key}")
        elif difflib.get_close_matches(key, ["require"]):
            raise ValueError(f"{where}.{key}: unknown {key}; did you mean require?")
        elif isinstance(entry, dict) and entry and entry.keys() <= _REQUIRED:
            raise ValueError(
                f"{where}.{key}: --update-expectations writes what was recorded; to require "
                f"figures on {key}, write require: {{{key}: {{...}}}}"
            )
        elif _KEY.fullmatch(key):
            recorded[key] = _within_bounds(Recorded, entry, f"{where}.{key}")
            if sorted(recorded[key].speedup) != list(recorded[key].speedup):
                raise ValueError(f"{where}.{key}.speedup: [low, value, high] must ascend")
            if not _is_date(recorded[key].recorded):
                raise ValueError(f"{where}.{key}.recorded: a day is needed, such as 2026-01-31")
        else:
            raise ValueError(f"{where}.{key}: {key!r} is not a GPU such as h200")
    return ClaimEntry(require, require_on, recorded)


def _require(entry: object, where: str) -> tuple[Require, dict[str, Require]]:
    """Read what is required everywhere, and what differs on some GPUs."""
    on: dict[str, Require] = {}
    if isinstance(entry, dict):
        special = {key: value for key, value in entry.items() if isinstance(value, dict)}
        entry = {key: value for key, value in entry.items() if key not in special}
        for key, figures in special.items():
            if not _KEY.fullmatch(key) or key.startswith("sm_"):
                raise ValueError(f"{where}.{key}: {key!r} is not a GPU such as h100 or sm90")
            if near := difflib.get_close_matches(key, _REQUIRED, n=1):
                raise ValueError(f"{where}.{key}: {near[0]} is one number, such as 0.9")
            on[key] = _within_bounds(Require, figures, f"{where}.{key}")
    return _within_bounds(Require, entry, where), on


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text  # it also reads 20260131
    except ValueError:
        return False


def _within_bounds(kind: type[Section], entry: object, where: str) -> Section:
    section = from_json(kind, entry, where)
    for name, bound in MAX_VALUES.items():
        value = getattr(section, name, None)
        for figure in value if isinstance(value, tuple) else (value,):
            if figure is not None and not 0 < figure <= bound:
                raise ValueError(f"{where}.{name}: must be above 0 and at most {bound:g}")
    return section


def acceptable(result: Result, expectation: Expectation) -> str | None:
    """Return the reason why a result must not be recorded; None if it may be recorded.

    A result must meet ``require``, but its figure may differ from the recorded one. Parity is
    accepted only if parity was recorded before, or ``require`` allows it.
    """
    return next(itertools.chain(_unfit(result), _unmet(result, expectation)), None)


def _unfit(result: Result) -> Iterator[str]:
    if not is_claim_id(result.claim):
        yield "its id is not folder/name[param]"
    if result.outcome not in (Outcome.PASSED, Outcome.FAILED):
        yield f"it ended {result.outcome}" + (f": {result.message}" if result.message else "")
    if result.profiles:
        yield "it was captured under a profiler, not timed; measure it without --profile"
    if result.quick:
        yield "it was measured with --quick; measure it without"
    if "reproducible" in result.conditions:
        yield "it was measured with --reproducible: its algorithms differ; measure it without"
    if result.unchecked:
        yield f"not checked: {'; '.join(result.unchecked)}"
    yield from _misplaced(result)
    if not is_text(result.code) or not is_text(stack_line(result.stack)):
        yield "its code hash or its stack is missing or not printable"


def _misplaced(result: Result) -> Iterator[str]:
    gpu = result.gpu.key if result.gpu else ""
    if result.host and (gpu or result.key != HOST):
        yield f"it is a host claim, but its key is {result.key!r} and its GPU {gpu!r}"
    elif result.host and "processor" not in result.stack:
        yield "its record does not name the processor; measure it again"
    elif not result.host and not (
        _KEY.fullmatch(gpu) and re.fullmatch(rf"([1-9]\d*x)?{re.escape(gpu)}", result.key)
    ):
        yield f"its key {result.key!r} is not that of its GPU {gpu!r}"


def _unmet(result: Result, expectation: Expectation) -> Iterator[str]:
    figure = result.speedup
    if result.verdict is None and result.message:  # a result was wrong
        yield f"it failed before it was judged: {result.message}"
        return
    if figure is None or not 0 < figure.low <= figure.value <= figure.high <= MAX_VALUES["speedup"]:
        yield "it has no speedup with a finite interval"
        return
    if result.verdict is None:
        yield "it was not judged"
    if unmet := broken(result.evidence) or not_looked_at(result.evidence):
        yield unmet
    # no run is judged by a host's figure, and few hosts are as quiet as a GPU
    most = NOISY_FLOOR if result.host else MAX_NOISE
    if not 0 <= (noise := result.floor) <= most:
        limit = f"at most {100 * most:g} %"
        yield f"the session was noisy: identical arms differ by {noise:.1%} ({limit})"
    require, recorded = expectation.require, expectation.recorded
    if require.speedup is None and recorded and is_parity(Interval(*recorded.speedup)):
        require = replace(require, speedup=min(1.0, figure.low))
    share = roofline.optimized_share(result)
    judgement = judge(
        figure, result.floor, Expectation(require), library=result.library, share=share
    )
    if not judgement.holds:
        yield judgement.why


@dataclass(frozen=True, slots=True)
class Update:
    """A proposed change of expectations.yaml, not yet written."""

    path: Path
    before: str | None  #: The text of the file; None if there is no file.
    after: str | None  #: The new text.
    accepted: tuple[Result, ...]
    refused: tuple[tuple[Result, str], ...]  #: Refused results, with the reason for each.
    repeated: tuple[Result, ...]  #: Results that were accepted before.
    results: tuple[Result, ...]
    today: date

    def lines(self) -> list[str]:
        """List which results are accepted, which were before, and why the others are refused."""
        cold = " (--cold-start does not change the times of calls)"
        lines = [
            f"accepted {_name_on_gpu(r)}: {r.speedup}{cold * ('cold-start' in r.conditions)}"
            for r in self.accepted
        ]
        lines += [f"already accepted {_name_on_gpu(r)}: of run {r.run}" for r in self.repeated]
        lines += [f"refused {_name_on_gpu(r)}: {why}" for r, why in self.refused]
        return [_one_line(line) for line in lines]

    def diff(self) -> str:
        """Return the change as a unified diff; empty if nothing changes."""
        before, after = ((text or "").splitlines() for text in (self.before, self.after))
        old = os.devnull if self.before is None else str(self.path)
        return "\n".join(difflib.unified_diff(before, after, old, str(self.path), lineterm=""))

    def write(
        self, folder: Path | None = None, machine: Mapping[str, object] | None = None
    ) -> Update:
        """Write the accepted results into ``folder``, then expectations.yaml.

        The update is computed again under a lock, since another process may have changed the file;
        the new update is returned.
        """
        if not self.accepted:
            return self
        path = self.path.resolve()  # replace the file that a link points to, not the link
        lock = path.parent / ".aiperf" / f"{path.name}.lock"
        with writing(lock):
            create_tagged(lock.parent)
            lock.open("a").close()  # an error here, if it is another user's, is one sentence
        with locked(lock):
            update = propose_update(self.path, self.results, self.today, folder)
            if update.accepted and update.after is not None:
                # atomic_write renames a new file over the old one, even over a read-only one
                mode = path.stat().st_mode if path.exists() else None
                if mode is not None and not mode & 0o222:
                    raise UsageError(f"{path}: is read-only; make it writable, then accept again")
                if folder is not None:
                    merge_results(folder, update.accepted, machine or {})
                atomic_write(path, update.after)
                if mode is not None:
                    path.chmod(mode)
        return update


def _name_on_gpu(result: Result) -> str:
    return f"{result.claim} on {result.key}" if result.key else result.claim


def _one_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return "".join(c if c.isprintable() else "?" for c in line[: 2 * MAX_TEXT])


def propose_update(
    path: Path, results: Sequence[Result], today: date, folder: Path | None = None
) -> Update:
    """Compute how results change the file; nothing is written.

    Results that ``folder``, of accepted results, already has are left out.
    """
    before = read(path)
    document = parse(path, NEW_FILE if before is None else before)
    claims = _claims(document)
    expectations = Expectations(claims)
    latest = {(r.claim, r.key): r for r in sorted(results, key=lambda r: r.started)}
    accepted: list[Result] = []
    refused: list[tuple[Result, str]] = []
    repeated: list[Result] = []
    known = _accepted_before(folder, results)
    entries: dict[str, dict[str, Recorded]] = {}
    for result in results:
        arch = result.gpu.arch if result.gpu else ""
        expectation = expectations.lookup(result.claim, result.key, arch, result.code)
        required = expectations.required(result.claim, result.key, arch)
        expectation = replace(expectation, require=required)
        reason = acceptable(result, expectation) or _layout_problem(document, result)
        if latest[result.claim, result.key] is not result:
            reason = "there is a later result of this claim"
        if reason is not None:
            refused.append((result, reason))
            continue
        # an acceptable result failed only because it missed the figure that it now replaces, or
        # what was required of it before
        passed = replace(result, outcome=Outcome.PASSED, message="", expectation=expectation)
        old = claims.get(result.claim, ClaimEntry()).recorded.get(result.key)
        recorded = _entry(result, old, today)
        # compared, because a write may have failed between the results and the expectations
        same = old is not None and (old.speedup, old.code) == (recorded.speedup, recorded.code)
        if same and _identity(result) in known:
            repeated.append(result)
            continue
        accepted.append(result if result.outcome is Outcome.PASSED else passed)
        entries.setdefault(result.claim, {})[result.key] = recorded
    after = before
    if accepted:
        after = _edited(document, entries)
        expected = dict(claims)
        for claim, new in entries.items():
            entry = claims.get(claim, ClaimEntry())
            expected[claim] = replace(entry, recorded={**entry.recorded, **new})
        # an edit that also changed or lost something else is refused
        if _claims(parse(path, after)) != expected:
            raise UsageError(
                f"{path}: cannot be updated in place; write one claim and one GPU per line"
            )
    return Update(
        path,
        before,
        after,
        tuple(accepted),
        tuple(refused),
        tuple(repeated),
        tuple(results),
        today,
    )


def _accepted_before(
    folder: Path | None, results: Sequence[Result]
) -> set[tuple[str, str, str, str]]:
    """Return the identities of the accepted results in the files of these results' machines."""
    keys = {result.key for result in results if folder and _KEY.fullmatch(result.key)}
    files = [folder / f"{key}.json" for key in sorted(keys) if folder]
    return {_identity(r) for file in files if file.exists() for r in read_results(file)}


def _identity(result: Result) -> tuple[str, str, str, str]:
    """Return what no other measurement of a claim has in common: its run and when it started."""
    return result.claim, result.key, result.run, result.started


def _entry(result: Result, old: Recorded | None, today: date) -> Recorded:
    assert result.speedup is not None
    # rounded outwards, so that the recorded interval contains the measured one
    directions = (ROUND_FLOOR, ROUND_HALF_EVEN, ROUND_CEILING)
    low, value, high = (
        float(Context(prec=4, rounding=direction).create_decimal(repr(x)))
        for direction, x in zip(directions, astuple(result.speedup), strict=True)
    )
    stack = stack_line(result.stack)
    runs, lowest = 1, None
    if old and (old.code, old.stack) == (result.code, stack):
        before = old.speedup[1] if old.lowest is None else old.lowest
        runs, lowest = old.runs + 1, before if before < value else None
    limit = result.limits.get("optimized")
    in_range = limit is not None and 0 < limit.share <= MAX_VALUES["share"]
    share = float(f"{limit.share:.3g}") if limit is not None and in_range else None
    return Recorded((low, value, high), runs, result.code, stack, today.isoformat(), share, lowest)


# The functions below edit the text line by line. To load and dump it with ruamel.yaml would change
# spaces and indentation in other lines, and lose comments inside braces.


def _layout_problem(document: Document, result: Result) -> str | None:
    """Return an error message if a result's entry cannot be written as a line of its own."""
    nodes, claim = document.nodes, f"{CLAIMS}.{result.claim}"
    parents = (nodes[ROOT], nodes[CLAIMS] if nodes[CLAIMS].value else None, nodes.get(claim))
    problems = [node for node in parents if node is not None and node.flow_style]
    entry = nodes.get(f"{claim}.{result.key}")
    if entry is not None and not (entry.flow_style and entry.start_mark.line == last_line(entry)):
        problems.append(entry)
    if not problems:
        return None
    place = f"{document.path.name}:{problems[0].start_mark.line + 1}"
    return f"{place}: this layout cannot be updated; write `{result.key}: {{...}}` on one line"


def _edited(document: Document, changes: Mapping[str, Mapping[str, Recorded]]) -> str:
    """Replace entries in the text; add new ones after the last line of their claim."""
    nodes, parent = document.nodes, document.nodes[CLAIMS]
    newline = "\r\n" if "\r\n" in document.text else "\n"
    text = document.text if document.text.endswith("\n") else document.text + newline
    lines = text.splitlines(keepends=True)
    indent = parent.value[0][0].start_mark.column if parent.value else 2
    if not parent.value:  # the `{}` of a file without claims
        _replace(lines, parent, "")
    added: list[tuple[int, int, list[str]]] = []  # (line, column, lines to add after it)
    for claim, entries in sorted(changes.items()):
        items = []
        for key, entry in sorted(entries.items()):
            if old := nodes.get(f"{CLAIMS}.{claim}.{key}"):
                _replace(lines, old, _flow(entry))
            else:
                items.append(f"{_name(key)}: {_flow(entry)}")
        if node := nodes.get(f"{CLAIMS}.{claim}"):
            added.append((last_line(node), node.value[0][0].start_mark.column, items))
            continue
        values = [value for key, value in parent.value if key.value < claim]
        values = values or [value for _, value in parent.value] or [parent]
        block = [f"{_name(claim)}:", *(f"  {item}" for item in items)]
        added.append((last_line(values[-1]), indent, block))
    added.sort(key=lambda place: (place[0], -place[1]))  # at the same line, most indented first
    for line, column, block in reversed(added):  # from the end, so that line numbers stay valid
        at = line + 1
        while at < len(lines) and re.match(rf" {{{column + 1},}}#", lines[at]):
            at += 1  # a more deeply indented comment belongs to the lines above
        lines[at:at] = [f"{' ' * column}{new}{newline}" for new in block]
    return "".join(lines)


def _replace(lines: list[str], node: Any, new: str) -> None:
    line = lines[node.start_mark.line]
    before, after = line[: node.start_mark.column], line[node.end_mark.column :]
    lines[node.start_mark.line] = (before + new).rstrip(" ") + after


def _flow(entry: Recorded) -> str:
    # texts are quoted, because YAML reads an unquoted hash such as 123456789012 as a number
    fields = [f"{name}: {_json(v)}" for name, v in asdict(entry).items() if v is not None]
    return f"{{{', '.join(fields)}}}"


def _name(text: str) -> str:
    return text if _UNQUOTED.fullmatch(text) else _json(text)
