"""The only YAML in the house: expectations.yaml, read strictly and updated in place."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, NoReturn

from .errors import Misuse
from .judge import judge
from .judge import verdict as says
from .model import SCHEMA, Expectation, Interval, Outcome, Recorded, Require, Result, Verdict

NOISY: Final = 0.02
"""A session whose identical arms differ by more than this writes nothing."""

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 20
MAX_NODES: Final = 100_000
MAX_RATIO: Final = 1e9
LOCK_SECONDS: Final = 60

HEADER: Final = """\
# What is expected of each claim. `require` is yours: pytest-aiperf holds claims to it and never
# writes it. What stands under a GPU (h200), or under an architecture (sm90) for the GPUs without
# an entry of their own, was measured: `pytest --gpu --update-expectations` writes it.
schema: 1
claims: {}
"""

_CLAIM = re.compile(r"[^\s/\[\]]+(/[^\s/\[\]]+)+(\[.+\])?")
_KEY = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_PLAIN_CLAIM = re.compile(r"[A-Za-z_][\w./-]*(\[[\w./-]+\])?", re.ASCII)
_PLAIN_KEY = re.compile(r"([1-9]\d*x)?[a-z]+\d[a-z0-9_]*")  # no YAML ever reads these otherwise
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
_DEEPER = re.compile("(?:\r\n|[\r\n\x85\u2028\u2029])( +)#[^\r\n\x85\u2028\u2029]*")


@dataclass(frozen=True, slots=True)
class Written:
    """What the file says of one claim: what a human requires, and what was measured by key."""

    require: Require = field(default_factory=Require)
    recorded: Mapping[str, Recorded] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expectations:
    """The file as loaded; a missing file expects nothing."""

    path: Path
    claims: Mapping[str, Written] = field(default_factory=dict)

    def lookup(self, claim: str, key: str, arch: str, code: str) -> Expectation:
        """Say what is expected of a claim here; a GPU without an entry takes its architecture's."""
        written = self.claims.get(claim, Written())
        for name in (key, arch):
            recorded = written.recorded.get(name)
            if recorded is not None:
                return Expectation(written.require, recorded, name, recorded.code != code)
        return Expectation(written.require)

    def unknown(self, claims: Iterable[str]) -> list[str]:
        """List the claims of the file that are none of these."""
        return sorted(set(self.claims) - set(claims))


def load(path: Path) -> Expectations:
    """Read expectations strictly; raise Misuse naming line and column of what does not fit."""
    text = _read(path)
    return Expectations(path, {} if text is None else _parse(path, text)[1])


def is_claim(name: str) -> bool:
    """Whether this can be a claim's id: ``folder/name`` or ``folder/name[param]``."""
    return len(name) <= 500 and name.isprintable() and _CLAIM.fullmatch(name) is not None


def stack_line(stack: Mapping[str, str]) -> str:
    """Say in one line what ran under a measurement; a change of it restarts the count of runs."""
    known = {name.lower(): version for name, version in stack.items()}
    named = [
        f"{word} {known[word.lower()]}"
        for word in ("torch", "CUDA", "driver")
        if word.lower() in known
    ]
    return ", ".join(named or [f"{k} {v}" for k, v in sorted(stack.items())]) or "unknown"


# Reading: YAML events become nodes with their place, and nodes become nouns. No YAML value is ever
# constructed, so no tag acts, and `no`, `012` and `1:30` stay what was typed.


@dataclass(frozen=True, slots=True)
class _Node:
    start: int
    end: int
    line: int
    column: int
    text: str | None = None
    plain: bool = False
    string: bool = False
    flow: bool = False
    pairs: tuple[tuple[_Node, _Node], ...] | None = None
    items: tuple[_Node, ...] | None = None

    def get(self, name: str) -> _Node | None:
        return next((value for key, value in self.pairs or () if key.text == name), None)

    def shown(self) -> str:
        if self.text is None:
            return "a mapping" if self.items is None else "a list"
        return repr(self.text[:40]) if self.text else "nothing"


def _read(path: Path) -> str | None:
    try:
        if path.exists() and not path.is_file():
            raise Misuse(f"{path}: is not a file; name the expectations.yaml itself")
        data = path.read_bytes() if not path.exists() or path.stat().st_size <= MAX_BYTES else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Misuse(f"{path}: cannot be read: {error.strerror}") from None
    if data is None or len(data) > MAX_BYTES:
        raise Misuse(f"{path}: is larger than 1 MiB; expectations of that size were not written")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        _refuse(path, *_place(data[: error.start].decode()), "is not UTF-8; save it as UTF-8")
    if bad := _UNPRINTABLE.search(text):
        what = f"the character {bad[0]!r} is not allowed in YAML; remove it"
        _refuse(path, *_place(text[: bad.start()]), what)
    return text


def _place(before: str) -> tuple[int, int]:
    lines = _BREAK.split(before)
    return len(lines) - 1, len(lines[-1])


def _refuse(path: Path, line: int, column: int, what: str) -> NoReturn:
    raise Misuse(f"{path}:{line + 1}:{column + 1}: {what}") from None


def _compose(path: Path, text: str) -> _Node:
    import yaml  # late: a session without expectations must not pay for it

    # Only events are taken from libyaml: it is 25 times as fast as the loader in Python.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    resolver = yaml.resolver.Resolver()
    count = 0

    def refuse(event: Any, what: str) -> NoReturn:
        _refuse(path, event.start_mark.line, event.start_mark.column, what)

    def node(events: Iterator[Any], event: Any, depth: int) -> _Node:
        nonlocal count
        count += 1
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            refuse(event, "anchors and aliases are refused; write the value out")
        if event.tag is not None:
            refuse(event, f"the tag {event.tag[:40]!r} is refused; write the bare value")
        if depth > MAX_DEPTH or count > MAX_NODES:
            refuse(event, "this is nested too deeply or too long; no expectations look like this")
        if isinstance(event, yaml.ScalarEvent):
            if event.style in ("|", ">"):
                refuse(event, "block text is refused; write it on one line in quotes")
            plain = event.style is None
            tag = resolver.resolve(yaml.ScalarNode, event.value, (plain, not plain))
            string = tag == "tag:yaml.org,2002:str"
            end = event.end_mark.index
            return _Node(mark.index, end, mark.line, mark.column, event.value, plain, string)
        ends = (yaml.MappingEndEvent, yaml.SequenceEndEvent)
        inner: list[_Node] = []
        last = next(events)
        while not isinstance(last, ends):
            inner.append(node(events, last, depth + 1))
            last = next(events)
        # a block's own end mark lies behind the comments that follow it
        end = last.end_mark.index if event.flow_style or not inner else inner[-1].end
        made = _Node(mark.index, end, mark.line, mark.column, flow=bool(event.flow_style))
        if isinstance(event, yaml.SequenceStartEvent):
            return dataclasses.replace(made, items=tuple(inner))
        return dataclasses.replace(made, pairs=tuple(zip(inner[::2], inner[1::2], strict=True)))

    try:
        events = iter(yaml.parse(text, Loader=loader))
        next(events)
        if isinstance(next(events), yaml.StreamEndEvent):
            _refuse(path, 0, 0, "is empty; remove it, or begin with `schema: 1` and `claims: {}`")
        root = node(events, next(events), 1)
        next(events)
        if not isinstance(after := next(events), yaml.StreamEndEvent):
            refuse(after, "a second document begins; keep one")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line, mark.column) if mark else _place(text)
        why = f"{error.context or 'this is not YAML'}: {error.problem or 'it ends too early'}"
        _refuse(path, line, column, f"{why}; the file is torn or mistyped, mend or restore it")
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        _refuse(path, *_place(text), f"this is not YAML: {error}; mend or restore it")
    return root


class _Reader:
    """The typed schema: every refusal names its line and column."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def refuse(self, node: _Node, what: str) -> NoReturn:
        _refuse(self.path, node.line, node.column, what)

    def mapping(self, node: _Node, what: str) -> dict[str, _Node]:
        if node.pairs is None:
            self.refuse(node, f"{what}: a mapping is needed, not {node.shown()}")
        seen: dict[str, _Node] = {}
        for key, value in node.pairs:
            if key.text == "<<" and key.plain:
                self.refuse(key, "merge keys are refused; write the values out")
            name = self.string(key, f"a name in {what}")
            if name in seen:
                self.refuse(key, f"{name} stands twice in {what}; keep one")
            seen[name] = value
        return seen

    def fields(
        self, node: _Node, what: str, required: Sequence[str], optional: Sequence[str] = ()
    ) -> dict[str, _Node]:
        found = self.mapping(node, what)
        known = ", ".join((*required, *optional))
        for key, _ in node.pairs or ():
            if key.text not in required and key.text not in optional:
                self.refuse(key, f"unknown {key.shown()} in {what} (known: {known})")
        if missing := [name for name in required if name not in found]:
            self.refuse(node, f"{', '.join(missing)} is missing in {what} (known: {known})")
        return found

    def string(self, node: _Node, what: str) -> str:
        if not node.text:
            self.refuse(node, f"{what}: text is needed, not {node.shown()}")
        if not node.string:
            self.refuse(node, f"{what}: YAML reads {node.shown()} as no text; put it in quotes")
        if not node.text.isprintable() or len(node.text) > 500:
            self.refuse(node, f"{what}: at most 500 printable characters are allowed")
        return node.text

    def number(self, node: _Node, what: str, most: float) -> float:
        if not node.plain or not _NUMBER.fullmatch(node.text or ""):
            self.refuse(node, f"{what}: a number such as 1.5 is needed, not {node.shown()}")
        value = float(node.text or "")
        if not 0 < value <= most:
            self.refuse(node, f"{what}: must be above 0 and at most {most:g}, not {node.shown()}")
        return value

    def document(self, root: _Node) -> dict[str, Written]:
        schema = root.get("schema")
        if schema is not None and schema.plain and re.fullmatch(r"\d{1,9}", schema.text or ""):
            version = int(schema.text or "")
            if version > SCHEMA:
                what = f"written by a newer pytest-aiperf (schema {version}); upgrade pytest-aiperf"
                self.refuse(schema, what)
        found = self.fields(root, "the file", ("schema", "claims"))
        if not found["schema"].plain or found["schema"].text != str(SCHEMA):
            what = f"schema: {SCHEMA} is needed, not {found['schema'].shown()}"
            self.refuse(found["schema"], what)
        claims = {}
        self.mapping(found["claims"], "claims (`{}` when there is none)")
        for key, value in found["claims"].pairs or ():
            if not is_claim(key.text or ""):
                self.refuse(key, f"{key.shown()} is no claim: folder/name[param] is needed")
            claims[key.text or ""] = self.claim(value, key.text or "")
        return claims

    def claim(self, node: _Node, claim: str) -> Written:
        require = Require()
        recorded = {}
        self.mapping(node, claim)
        for key, value in node.pairs or ():
            if key.text == "require":
                require = self.require(value, f"{claim} require")
            elif _KEY.fullmatch(key.text or ""):
                recorded[key.text or ""] = self.recorded(value, f"{claim} {key.text}")
            else:
                self.refuse(key, f"{key.shown()} is neither `require` nor a GPU such as h200")
        return Written(require, recorded)

    def require(self, node: _Node, what: str) -> Require:
        most = {"speedup": MAX_RATIO, "library": MAX_RATIO, "share": 1.0}
        found = self.fields(node, what, (), tuple(most))
        return Require(
            **{name: self.number(v, f"{what} {name}", most[name]) for name, v in found.items()}
        )

    def recorded(self, node: _Node, what: str) -> Recorded:
        required = ("speedup", "runs", "code", "stack", "recorded")
        found = self.fields(node, what, required, ("share",))
        speedup = found["speedup"]
        if speedup.items is None or len(speedup.items) != 3:
            self.refuse(speedup, f"{what} speedup: [low, value, high] is needed")
        low, value, high = (self.number(n, f"{what} speedup", MAX_RATIO) for n in speedup.items)
        if not low <= value <= high:
            self.refuse(speedup, f"{what} speedup: low <= value <= high is needed")
        share = found.get("share")
        unknown = share is None or (share.plain and share.text == "null")
        runs = found["runs"]
        if not runs.plain or not re.fullmatch(r"[1-9]\d{0,8}", runs.text or ""):
            self.refuse(runs, f"{what} runs: a count from 1 is needed, not {runs.shown()}")
        day = self.string(found["recorded"], f"{what} recorded")
        try:
            datetime.date.fromisoformat(day)
        except ValueError:
            self.refuse(
                found["recorded"], f'{what} recorded: a date such as "2026-11-21" is needed'
            )
        return Recorded(
            speedup=(low, value, high),
            share=None if share is None or unknown else self.number(share, f"{what} share", 2.0),
            runs=int(runs.text or ""),
            code=self.string(found["code"], f"{what} code"),
            stack=self.string(found["stack"], f"{what} stack"),
            recorded=day,
        )


def _parse(path: Path, text: str) -> tuple[_Node, dict[str, Written]]:
    root = _compose(path, text)
    return root, _Reader(path).document(root)


# Deciding: which results may be written.


def acceptable(
    result: Result, expectation: Expectation | None = None, share: float | None = None
) -> str | None:
    """Say why a result may not be recorded, or None.

    A result that failed may be recorded when a changed figure is all that failed it: it is judged
    anew by what is required today, without the recorded figure. Parity is accepted only where
    parity was recorded before or is required.
    """
    expectation = expectation or Expectation()
    figure, gpu = result.speedup, result.gpu
    if result.schema != SCHEMA:
        return f"its record has schema {result.schema}, this is schema {SCHEMA}"
    if not is_claim(result.claim):
        return "its id is not folder/name[param]"
    if result.outcome not in (Outcome.PASSED, Outcome.FAILED):
        return f"it ended {result.outcome}{result.message and ': '}{_first_line(result.message)}"
    if result.host:
        return "it is a host claim: hosts differ, so only `require` is held there"
    if result.quick:
        return "it was measured with --quick"
    if gpu is None or not re.fullmatch(rf"([1-9]\d*x)?{re.escape(gpu.key)}", result.key):
        return f"its GPU is not the one of its key {result.key!r}"
    if not _KEY.fullmatch(result.key) or result.key in ("cpu", "require"):
        return f"{result.key!r} is not a GPU's key"
    if figure is None or not 0 < figure.low <= figure.value <= figure.high <= MAX_RATIO:
        return "it has no speedup with a finite interval"
    if any(not e.error <= e.allowed for e in result.agreement):
        return "its arms do not agree with the reference"
    if result.verdict is None or result.verdict is Verdict.INCONCLUSIVE:
        return f"it is inconclusive: {figure}"
    if not 0 <= result.floor <= NOISY:
        return f"the session was noisy: identical arms differ by {result.floor:.1%} (at most 2 %)"
    stack = stack_line(result.stack)
    if not all(0 < len(t) <= 500 and t.isprintable() for t in (result.code, stack)):
        return "its code hash or stack is missing or not printable"
    if share is not None and not 0 < share <= 2:
        return f"its share of the limit cannot be {share:g}"
    was = expectation.recorded
    parity = was is not None and says(Interval(*was.speedup), 0.0) is Verdict.SAME
    itself = (
        dataclasses.replace(was, speedup=dataclasses.astuple(figure)) if was and parity else None
    )
    after = Expectation(expectation.require, itself, result.key)
    judgement = judge(figure, result.floor, after, library=result.library, share=share)
    return None if judgement.holds else judgement.why


def _first_line(message: str) -> str:
    line = message.strip().partition("\n")[0][:200]
    return "".join(c if c.isprintable() else "?" for c in line)


def _unknown_share(_: Result) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Update:
    """A change of the file, planned but not written."""

    path: Path
    before: str | None
    after: str | None
    accepted: tuple[Result, ...]
    refused: tuple[tuple[Result, str], ...]
    results: tuple[Result, ...]
    today: datetime.date
    share: Callable[[Result], float | None]

    def diff(self) -> str:
        """Show the change as a unified diff; empty when nothing changes."""
        before, after = ((text or "").splitlines() for text in (self.before, self.after))
        was = str(self.path) if self.before is not None else os.devnull
        return "\n".join(difflib.unified_diff(before, after, was, str(self.path), lineterm=""))

    def write(self, also: Callable[[Update], None] | None = None) -> Update:
        """Write the change under a lock; return what was written.

        A file that changed since the plan is planned anew, so that no other writer's figures are
        lost. ``also`` is called under the lock just before the file is replaced: what must be
        written together with it goes first, and its error leaves the file alone.
        """
        path = self.path.resolve()  # a link stays a link
        with _locked(path):
            now = self if _read(self.path) == self.before else self.planned_anew()
            if now.accepted and now.after is not None:
                _writable(path)
                if also is not None:
                    also(now)
                _replace(path, now.after)
        return now

    def planned_anew(self) -> Update:
        """Plan the same results against the file as it is now."""
        return plan(self.path, self.results, self.today, self.share)


def plan(
    path: Path,
    results: Sequence[Result],
    today: datetime.date,
    share: Callable[[Result], float | None] = _unknown_share,
) -> Update:
    """Decide what results change in the file; nothing is written.

    ``share`` gives a result's share of its limit, where that is known.
    """
    before = _read(path)
    root, claims = _parse(path, HEADER if before is None else before)
    expectations = Expectations(path, claims)
    last: dict[tuple[str, str], Result] = {}
    for result in results:
        other = last.get((result.claim, result.key))
        if other is None or other.started <= result.started:
            last[result.claim, result.key] = result
    accepted: list[Result] = []
    refused: list[tuple[Result, str]] = []
    fresh: dict[str, dict[str, Recorded]] = {}
    for result in results:
        known = share(result)
        arch = result.gpu.arch if result.gpu else ""
        expectation = expectations.lookup(result.claim, result.key, arch, result.code)
        if last[result.claim, result.key] is not result:
            why: str | None = "a later result of this claim is there"
        else:
            why = acceptable(result, expectation, known)
        if why is not None:
            refused.append((result, why))
            continue
        accepted.append(result)
        was = claims.get(result.claim, Written()).recorded.get(result.key)
        made = _recorded(result, was, known, today)
        fresh.setdefault(result.claim, {})[result.key] = made
    after = before
    if accepted:
        after = _spliced(HEADER if before is None else before, root, claims, fresh)
        wanted = dict(claims)
        for claim, entries in fresh.items():
            old = claims.get(claim, Written())
            wanted[claim] = Written(old.require, {**old.recorded, **entries})
        if _parse(path, after)[1] != wanted:  # an exotic layout: better no change than a wrong one
            raise Misuse(f"{path}: cannot be updated in place; write one claim and one GPU a line")
    return Update(
        path, before, after, tuple(accepted), tuple(refused), tuple(results), today, share
    )


def _recorded(
    result: Result, was: Recorded | None, share: float | None, today: datetime.date
) -> Recorded:
    assert result.speedup is not None
    figure, stack = result.speedup, stack_line(result.stack)
    again = was is not None and (was.code, was.stack) == (result.code, stack)
    return Recorded(
        speedup=(_round(figure.low), _round(figure.value), _round(figure.high)),
        share=None if share is None else _round(share),
        runs=was.runs + 1 if was is not None and again else 1,
        code=result.code,
        stack=stack,
        recorded=today.isoformat(),
    )


# Writing: new figures are spliced into the text at the places of the old ones, because a YAML
# round trip re-indents and re-wraps lines that nobody meant to change.


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _figure(value: float) -> str:
    text = format(Decimal(repr(value)), "f")
    return text if "." in text else f"{text}.0"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _scalars(entry: Recorded) -> dict[str, str]:
    low, value, high = map(_figure, entry.speedup)
    texts = {"speedup": f"[{low}, {value}, {high}]"}
    if entry.share is not None:
        texts["share"] = _figure(entry.share)
    texts |= {"runs": str(entry.runs), "code": _quoted(entry.code), "stack": _quoted(entry.stack)}
    return texts | {"recorded": _quoted(entry.recorded)}


def _flow(texts: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{name}: {text}" for name, text in texts.items()) + "}"


def _key(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) else _quoted(key)


class _Splice:
    def __init__(self, text: str) -> None:
        self.text = text
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.edits: list[tuple[int, int, str]] = []

    def result(self) -> str:
        done, pieces = 0, []
        for start, end, new in sorted(self.edits, key=lambda edit: edit[0]):
            pieces += [self.text[done:start], new]
            done = end
        return "".join([*pieces, self.text[done:]])

    def line_end(self, at: int) -> int:
        found = _BREAK.search(self.text, at)
        return found.start() if found else len(self.text)

    def add(self, parent: _Node, flow: str, lines: Sequence[str], behind: _Node | None) -> None:
        """Add an item to a mapping: ``flow`` between braces, else ``lines`` at its indent."""
        pairs = parent.pairs or ()
        if parent.flow and not pairs:
            self.edits.append((parent.start + 1, parent.start + 1, flow))
        elif parent.flow:
            at = pairs[-1][1].end
            self.edits.append((at, at, f", {flow}"))
        else:
            indent = pairs[0][0].column
            if behind is None:  # before the first item, but not between it and its comment
                at = _line_before(self.text, parent.start)
            else:
                at = self.line_end(behind.end)
                while (m := _DEEPER.match(self.text, at)) and len(m[1]) > indent:
                    at = m.end()  # a comment indented deeper still belongs to that item
            block = "".join(f"{self.newline}{' ' * indent}{line}" for line in lines)
            self.edits.append((at, at, block))

    def change(self, node: _Node, was: Recorded, entry: Recorded) -> None:
        """Change the scalars of an entry that differ, and nothing between them."""
        speedup = node.get("speedup")
        assert speedup is not None
        figures = zip(speedup.items or (), was.speedup, entry.speedup, strict=True)
        for scalar, old, new in figures:
            if old != new:
                self.edits.append((scalar.start, scalar.end, _figure(new)))
        for name, text in _scalars(entry).items():
            scalar_node = node.get(name)
            if scalar_node is None:
                item = f"{name}: {text}"
                self.add(node, item, [item], (node.pairs or ())[-1][1])
            elif name != "speedup" and getattr(was, name) != getattr(entry, name):
                self.edits.append((scalar_node.start, scalar_node.end, text))
        share = node.get("share")
        if share is not None and was.share is not None and entry.share is None:
            self.edits.append((share.start, share.end, "null"))


def _line_before(text: str, at: int) -> int:
    """Find the end of the last line before ``at`` that is neither blank nor a comment."""
    while True:
        breaks = list(_BREAK.finditer(text, 0, at))
        if not breaks:
            return 0
        start = breaks[-2].end() if len(breaks) > 1 else 0
        at = breaks[-1].start()
        line = text[start:at].strip()
        if line and not line.startswith("#"):
            return at


def _spliced(
    text: str,
    root: _Node,
    claims: Mapping[str, Written],
    fresh: Mapping[str, Mapping[str, Recorded]],
) -> str:
    splice = _Splice(text)
    parent = root.get("claims")
    assert parent is not None
    blocks: list[str] = []
    for claim in sorted(fresh):
        entries = fresh[claim]
        rendered = {key: f"{_key(key)}: {_flow(_scalars(e))}" for key, e in sorted(entries.items())}
        node = parent.get(claim)
        if node is not None:
            for key, entry in sorted(entries.items()):
                old = node.get(key)
                if old is not None:
                    splice.change(old, claims[claim].recorded[key], entry)
                else:
                    behind = node.pairs[-1][1] if node.pairs else None
                    splice.add(node, rendered[key], [rendered[key]], behind)
            continue
        name = claim if _PLAIN_CLAIM.fullmatch(claim) else _quoted(claim)
        lines = [f"{name}:", *(f"  {line}" for line in rendered.values())]
        if (
            parent.pairs
            or root.flow
            or not re.fullmatch(r"\{\s*\}", text[parent.start : parent.end])
        ):
            before = [value for key, value in parent.pairs or () if (key.text or "") < claim]
            flow = f"{_quoted(claim)}: {{{', '.join(rendered.values())}}}"
            splice.add(parent, flow, lines, before[-1] if before else None)
        else:
            blocks += lines
    if blocks:  # the first claims of a file: `claims: {}` gives way to a block
        start = len(text[: parent.start].rstrip(" "))
        block = "".join(f"{splice.newline}  {line}" for line in blocks)
        splice.edits.append((start, parent.end, block))
    return splice.result()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fasteners

    lock = path.parent / ".aiperf" / f"{path.name}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = fasteners.InterProcessLock(lock)
        if not held.acquire(timeout=LOCK_SECONDS):
            raise Misuse(f"{path}: another process has been writing it for {LOCK_SECONDS} s; retry")
    except OSError as error:
        raise Misuse(f"{path}: cannot be written: {lock.parent}: {error.strerror}") from None
    try:
        yield
    finally:
        held.release()


def _writable(path: Path) -> None:
    # renaming over a read-only file would work: its mode says that nobody wants this
    if path.exists() and not path.stat().st_mode & 0o222:
        raise Misuse(f"{path}: is read-only; make it writable to accept results")


def _replace(path: Path, text: str) -> None:
    """Replace the file in one step: after a crash it is the old one or the new one."""
    temporary = None
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else None
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(handle, "wb") as file:
            file.write(text.encode())
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise Misuse(f"{path}: cannot be written: {error.strerror}; it is unchanged") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
