"""expectations.yaml: what is expected of a claim, and which results may change it."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import date
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine.file_lock import locked
from pytest_aiperf.model import Expectation, Interval, Outcome, Recorded, Require, Result
from pytest_aiperf.rules.evidence import broken
from pytest_aiperf.rules.verdict import is_parity, judge
from pytest_aiperf.schema import from_json

from .results import atomic_write, merge_results, writing
from .yaml_file import MAX_TEXT, ROOT, Document, is_text, last_line, parse, read

NOISY: Final = 0.02
"""A session whose identical arms differ by more than this writes nothing."""

MOST: Final = {"speedup": 1e9, "library": 1e9, "share": 2.0, "runs": 1e9}
"""Every figure is above 0 and at most this; a share of a *measured* limit may well pass 1."""

SCHEMA: Final = 1
"""Version of expectations.yaml; another one is refused."""

STACK: Final = ("torch", "CUDA", "driver")

HEADER: Final = """\
# What is expected of each claim. `require` is yours: pytest-aiperf holds claims to it and never
# writes it. What stands under a GPU (h200), or under an architecture (sm90) for the GPUs without
# an entry of their own, was measured: `pytest --gpu --update-expectations` writes it.
schema: 1
claims: {}
"""

CLAIMS: Final = f"{ROOT}.claims"
_CLAIM = re.compile(r"[^\s/\[\]]+(/[^\s/\[\]]+)+(\[.+\])?")
_KEY = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_PLAIN = re.compile(  # names that no YAML reads as anything else; the others are quoted
    r"([1-9]\d*x)?[A-Za-z_]+[\d/][\w./-]*(\[[\w./-]+\])?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Written:
    """What the file says of one claim: what a human requires, and what was measured by key."""

    require: Require = field(default_factory=Require)
    recorded: Mapping[str, Recorded] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expectations:
    """The file as loaded; a missing file expects nothing."""

    claims: Mapping[str, Written] = field(default_factory=dict)

    def lookup(self, claim: str, key: str, arch: str, code: str) -> Expectation:
        """Say what is expected of a claim here.

        A GPU without an entry takes its architecture's: h200 takes sm90, 2xh200 takes 2xsm90.
        """
        written = self.claims.get(claim, Written())
        fallback = "" if key == "cpu" else re.sub(r"^(\d+x)?.*", rf"\g<1>{arch}", key)
        for name in (key, fallback):
            recorded = written.recorded.get(name)
            if recorded is not None:
                return Expectation(written.require, recorded, name, recorded.code != code)
        return Expectation(written.require)


def load(path: Path) -> Expectations:
    """Read expectations strictly; raise Misuse naming line and column of what does not fit."""
    text = read(path)
    return Expectations({} if text is None else _claims(parse(path, text)))


def is_claim_id(name: str) -> bool:
    """Whether this can be a claim's id: ``folder/name`` or ``folder/name[param]``."""
    return is_text(name) and _CLAIM.fullmatch(name) is not None


def stack_line(stack: Mapping[str, str]) -> str:
    """Say in one line what ran under a measurement; a change of it restarts the count of runs."""
    versions = {name.lower(): version for name, version in stack.items()}
    first = [(name, versions[name.lower()]) for name in STACK if name.lower() in versions]
    return ", ".join(" ".join(part) for part in first or sorted(stack.items())) or "unknown"


Noun = TypeVar("Noun", Require, Recorded)


@dataclass(frozen=True, slots=True)
class _File:
    schema: int
    claims: Mapping[str, Mapping[str, Any]]


def _claims(document: Document) -> dict[str, Written]:
    schema = document.value.get("schema") if isinstance(document.value, dict) else None
    if isinstance(schema, int) and schema != SCHEMA:  # told first: all the rest may differ too
        newer = f"written by a newer pytest-aiperf (schema {schema}); upgrade pytest-aiperf"
        document.refuse(f"{ROOT}.schema: {newer if schema > SCHEMA else f'must be {SCHEMA}'}")
    try:
        claims = from_json(_File, document.value, ROOT).claims
        return {claim: _written(claim, entries) for claim, entries in claims.items()}
    except ValueError as error:
        document.refuse(str(error))


def _written(claim: str, entries: Mapping[str, Any]) -> Written:
    where = f"{CLAIMS}.{claim}"
    if not is_claim_id(claim):
        raise ValueError(f"{where}: {claim!r} is not folder/name[param]")
    require, recorded = Require(), {}
    for key, entry in entries.items():
        if key == "require":
            require = _checked(Require, entry, f"{where}.{key}")
        elif _KEY.fullmatch(key):
            recorded[key] = _checked(Recorded, entry, f"{where}.{key}")
            if sorted(recorded[key].speedup) != list(recorded[key].speedup):
                raise ValueError(f"{where}.{key}.speedup: rising [low, value, high] is needed")
        else:
            raise ValueError(f"{where}.{key}: {key!r} is no GPU such as h200")
    return Written(require, recorded)


def _checked(kind: type[Noun], entry: object, where: str) -> Noun:
    noun = from_json(kind, entry, where)
    for name, most in MOST.items():
        found = getattr(noun, name, None)
        for figure in found if isinstance(found, tuple) else (found,):
            if figure is not None and not 0 < figure <= most:
                raise ValueError(f"{where}.{name}: must be above 0 and at most {most:g}")
    return noun


# Deciding: which results may be written.


def acceptable(result: Result, expectation: Expectation | None = None) -> str | None:
    """Say why a result may not be recorded, or None.

    A result that failed may be recorded when a changed figure is all that failed it: it is judged
    anew by what is required today, without the recorded figure. Parity is accepted only where
    parity was recorded before or is required.
    """
    objections = itertools.chain(_unfit(result), _unproven(result, expectation or Expectation()))
    return next(objections, None)


def _unfit(result: Result) -> Iterator[str]:
    if not is_claim_id(result.claim):
        yield "its id is not folder/name[param]"
    if result.outcome not in (Outcome.PASSED, Outcome.FAILED):
        yield f"it ended {result.outcome}" + (f": {result.message}" if result.message else "")
    if result.host:
        yield "it is a host claim: hosts differ, so there only `require` is held"
    if result.profiles:
        yield "it was captured under a profiler, not timed; measure it without --profile"
    if result.quick:
        yield "it was measured with --quick; measure it without"
    gpu = result.gpu.key if result.gpu else ""
    if not _KEY.fullmatch(gpu) or not re.fullmatch(rf"([1-9]\d*x)?{re.escape(gpu)}", result.key):
        yield f"its key {result.key!r} is not that of its GPU {gpu!r}"
    if not is_text(result.code) or not is_text(stack_line(result.stack)):
        yield "its code hash or its stack is missing or not printable"


def _unproven(result: Result, expectation: Expectation) -> Iterator[str]:
    figure = result.speedup
    if figure is None or not 0 < figure.low <= figure.value <= figure.high <= MOST["speedup"]:
        yield "it has no speedup with a finite interval"
        return
    if not all(error.error <= error.allowed for error in result.agreement):
        yield "its arms do not agree with the reference"
    if unproven := broken(result.evidence):
        yield unproven
    if not 0 <= result.floor <= NOISY:
        yield f"the session was noisy: identical arms differ by {result.floor:.1%} (at most 2 %)"
    require, was = expectation.require, expectation.recorded
    if require.speedup is None and was is not None and is_parity(Interval(*was.speedup)):
        require = replace(require, speedup=min(1.0, figure.low))
    require = replace(require, share=None)  # of the figure that is recorded it says nothing
    judgement = judge(figure, result.floor, Expectation(require), library=result.library)
    if not judgement.holds:
        yield judgement.why


@dataclass(frozen=True, slots=True)
class Update:
    """A change of the file, planned but not written."""

    path: Path
    before: str | None
    after: str | None
    accepted: tuple[Result, ...]
    refused: tuple[tuple[Result, str], ...]
    plan: Callable[[], Update] = field(repr=False)

    def lines(self) -> list[str]:
        """Say of each result whether it is accepted, and if not, why."""
        lines = [f"accepted {_named(r)}: {r.speedup}" for r in self.accepted]
        lines += [f"refused {_named(r)}: {why}" for r, why in self.refused]
        return [_one_line(line) for line in lines]

    def diff(self) -> str:
        """Show the change as a unified diff; empty when nothing changes."""
        before, after = ((text or "").splitlines() for text in (self.before, self.after))
        was = os.devnull if self.before is None else str(self.path)
        return "\n".join(difflib.unified_diff(before, after, was, str(self.path), lineterm=""))

    def write(
        self, folder: Path | None = None, machine: Mapping[str, object] | None = None
    ) -> Update:
        """Write the change under a lock, and the accepted results into ``folder`` before it.

        A file that changed since the plan is planned anew, so that no other writer's figures are
        lost. Results that cannot be written leave the file alone. Returns what was written.
        """
        if not self.accepted:
            return self
        path = self.path.resolve()  # a link stays a link
        lock = path.parent / ".aiperf" / f"{path.name}.lock"
        with writing(lock):
            lock.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock):
            now = self if read(path) == self.before else self.plan()
            if now.accepted and now.after is not None:
                # renaming over a read-only file would work; its mode says that nobody wants that
                mode = path.stat().st_mode if path.exists() else None
                if mode is not None and not mode & 0o222:
                    raise UsageError(f"{path}: is read-only; make it writable, then accept again")
                if folder is not None:
                    merge_results(folder, now.accepted, machine or {})
                atomic_write(path, now.after)
                if mode is not None:
                    path.chmod(mode)
        return now


def _named(result: Result) -> str:
    return f"{result.claim} on {result.key}" if result.key else result.claim


def _one_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return "".join(c if c.isprintable() else "?" for c in line[: 2 * MAX_TEXT])


def propose_update(path: Path, results: Sequence[Result], today: date) -> Update:
    """Decide what results change in the file; nothing is written."""
    before = read(path)
    document = parse(path, HEADER if before is None else before)
    claims = _claims(document)
    expectations = Expectations(claims)
    last = {(r.claim, r.key): r for r in sorted(results, key=lambda r: r.started)}
    accepted: list[Result] = []
    refused: list[tuple[Result, str]] = []
    fresh: dict[str, dict[str, Recorded]] = {}
    for result in results:
        arch = result.gpu.arch if result.gpu else ""
        expected = expectations.lookup(result.claim, result.key, arch, result.code)
        why = acceptable(result, expected) or _laid_out_anew(document, result)
        if last[result.claim, result.key] is not result:
            why = "a later result of this claim is there"
        if why is not None:
            refused.append((result, why))
            continue
        accepted.append(_held(result))
        was = claims.get(result.claim, Written()).recorded.get(result.key)
        fresh.setdefault(result.claim, {})[result.key] = _entry(result, was, today)
    after = before
    if accepted:
        after = _edited(document, fresh)
        wanted = dict(claims)
        for claim, entries in fresh.items():
            old = claims.get(claim, Written())
            wanted[claim] = Written(old.require, {**old.recorded, **entries})
        if _claims(parse(path, after)) != wanted:  # an exotic layout: better no change than a wrong
            raise UsageError(
                f"{path}: cannot be updated in place; write one claim and one GPU a line"
            )
    again = partial(propose_update, path, results, today)
    return Update(path, before, after, tuple(accepted), tuple(refused), again)


def _held(result: Result) -> Result:
    """Return a result as it is once its figure is recorded: an older one was all that failed it."""
    passed = result.outcome is Outcome.PASSED
    return result if passed else replace(result, outcome=Outcome.PASSED, message="")


def _entry(result: Result, was: Recorded | None, today: date) -> Recorded:
    assert result.speedup is not None
    # outwards, or a figure without spread would lie outside of its own record
    context = (ROUND_FLOOR, ROUND_HALF_EVEN, ROUND_CEILING)
    low, value, high = (
        float(Context(prec=4, rounding=way).create_decimal(repr(x)))
        for way, x in zip(context, astuple(result.speedup), strict=True)
    )
    stack = stack_line(result.stack)
    again = was is not None and (was.code, was.stack) == (result.code, stack)
    runs = was.runs + 1 if was is not None and again else 1
    limit = result.limits.get("optimized")
    known = limit is not None and 0 < limit.share <= MOST["share"]
    share = float(f"{limit.share:.3g}") if limit is not None and known else None
    return Recorded((low, value, high), runs, result.code, stack, today.isoformat(), share)


# Writing: an entry is one line, and the tool replaces or adds such lines; a YAML round trip would
# re-indent and re-wrap lines that nobody meant to change.


def _laid_out_anew(document: Document, result: Result) -> str | None:
    """Say where a human has laid the file out so that an entry has no line of its own."""
    nodes, claim = document.nodes, f"{CLAIMS}.{result.claim}"
    blocks = (nodes[ROOT], nodes[CLAIMS] if nodes[CLAIMS].value else None, nodes.get(claim))
    odd = [node for node in blocks if node is not None and node.flow_style]
    entry = nodes.get(f"{claim}.{result.key}")
    if entry is not None and not (entry.flow_style and entry.start_mark.line == last_line(entry)):
        odd.append(entry)
    if not odd:
        return None
    place = f"{document.path.name}:{odd[0].start_mark.line + 1}"
    return f"{place} is laid out anew; write `{result.key}: {{...}}` on one line below its claim"


def _edited(document: Document, fresh: Mapping[str, Mapping[str, Recorded]]) -> str:
    """Replace the entries that are there; add the others behind the last line of their claim."""
    newline = "\r\n" if "\r\n" in document.text else "\n"
    text = document.text if document.text.endswith("\n") else document.text + newline
    lines = text.splitlines(keepends=True)
    parent, indent = document.nodes[CLAIMS], 2
    if parent.value:
        indent = parent.value[0][0].start_mark.column
    else:  # the first claims of a file: `claims: {}` gives way to a block
        _put(lines, parent, "")
    added: list[tuple[int, int, list[str]]] = []
    for claim, entries in sorted(fresh.items()):
        items = []
        for key, entry in sorted(entries.items()):
            old = document.nodes.get(f"{CLAIMS}.{claim}.{key}")
            if old is None:
                items.append(f"{_name(key)}: {_flow(entry)}")
            else:
                _put(lines, old, _flow(entry))
        node = document.nodes.get(f"{CLAIMS}.{claim}")
        if node is not None:
            added.append((last_line(node), node.value[0][0].start_mark.column, items))
            continue
        smaller = [value for key, value in parent.value if key.value < claim]
        behind = smaller or [value for _, value in parent.value] or [parent]
        block = [f"{_name(claim)}:", *(f"  {item}" for item in items)]
        added.append((last_line(behind[-1]), indent, block))
    added.sort(key=lambda place: (place[0], -place[1]))  # behind one line the deeper comes first
    for line, column, block in reversed(added):  # from the end, so that line numbers stay true
        at = line + 1
        while at < len(lines) and re.match(rf" {{{column + 1},}}#", lines[at]):
            at += 1  # a comment that is indented deeper belongs to what is above it
        lines[at:at] = [f"{' ' * column}{new}{newline}" for new in block]
    return "".join(lines)


def _put(lines: list[str], node: Any, new: str) -> None:
    line = lines[node.start_mark.line]
    before, behind = line[: node.start_mark.column], line[node.end_mark.column :]
    lines[node.start_mark.line] = (before + new).rstrip(" ") + behind


def _flow(entry: Recorded) -> str:
    # as JSON: figures of a speedup that may be recorded never have an exponent, and texts are
    # quoted, because a hash such as 123456789012 reads as a number
    fields = {n: _json(value) for n, value in asdict(entry).items() if value is not None}
    return f"{{{', '.join(f'{name}: {text}' for name, text in fields.items())}}}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _name(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else _json(text)
