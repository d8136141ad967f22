"""The only YAML in the house: expectations.yaml, read strictly and updated in place."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from .errors import Misuse
from .judge import SAME_WITHIN, judge
from .model import SCHEMA, Expectation, Outcome, Recorded, Require, Result, Verdict

NOISY: Final = 0.02
"""A session whose identical arms differ by more than this writes nothing."""

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 20
MAX_NODES: Final = 100_000
MAX_TEXT: Final = 500
MAX_RATIO: Final = 1e9
MAX_SHARE: Final = 2.0  # measured against a measured ceiling, a share may come out above 1
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
_COUNT = re.compile(r"[1-9]\d{0,8}", re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?", re.ASCII)
_PLAIN_CLAIM = re.compile(r"[A-Za-z_][\w./-]*(\[[\w./-]+\])?", re.ASCII)
_PLAIN_KEY = re.compile(r"([1-9]\d*x)?[a-z]+\d[a-z0-9_]*")  # no YAML reads these otherwise
_UNPRINTABLE = re.compile(  # nor is a byte order mark, which the two loaders count differently
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
_COMMENT = re.compile(_BREAK.pattern.join(("(?:", ")( +)#[^\r\n\x85\u2028\u2029]*")))


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
        """Say what is expected of a claim here.

        A GPU without an entry takes its architecture's: h200 takes sm90, 2xh200 takes 2xsm90.
        """
        written = self.claims.get(claim, Written())
        several = re.match(r"(\d+x)?", key)
        fallback = "" if key == "cpu" or several is None else several[0] + arch
        for name in (key, fallback):
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
    return _is_text(name) and _CLAIM.fullmatch(name) is not None


def stack_line(stack: Mapping[str, str]) -> str:
    """Say in one line what ran under a measurement; a change of it restarts the count of runs."""
    versions = {name.lower(): version for name, version in stack.items()}
    named = [f"{n} {versions[n.lower()]}" for n in _STACK if n.lower() in versions]
    return ", ".join(named or [f"{n} {v}" for n, v in sorted(stack.items())]) or "unknown"


_STACK = ("torch", "CUDA", "driver")


def _is_text(text: str) -> bool:
    return 0 < len(text) <= MAX_TEXT and text.isprintable()


# Reading: YAML events become nodes with their places, and nodes become nouns. No YAML value is
# ever constructed, so no tag acts, and `no`, `012` and `1:30` stay what was typed.


@dataclass(frozen=True, slots=True)
class _Node:
    start: int
    end: int
    line: int
    column: int
    text: str = ""
    plain: bool = False
    string: bool = False
    flow: bool = False
    pairs: tuple[tuple[_Node, _Node], ...] | None = None
    items: tuple[_Node, ...] | None = None

    def get(self, name: str) -> _Node | None:
        return next((value for key, value in self.pairs or () if key.text == name), None)

    def __str__(self) -> str:
        if self.pairs is not None:
            return "a mapping"
        if self.items is not None:
            return "a list"
        return repr(self.text[:40]) if self.text else "nothing"


def _read(path: Path) -> str | None:
    try:
        if path.exists() and not path.is_file():
            raise Misuse(f"{path}: is not a file; name the expectations.yaml itself")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Misuse(f"{path}: cannot be read: {error.strerror}; make it readable") from None
    if len(data) > MAX_BYTES:
        raise Misuse(f"{path}: is larger than 1 MiB, which no expectations are; restore it")
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

    # only events are taken from PyYAML's safe loader: in C it is 25 times as fast
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        events = iter(yaml.parse(text, Loader=loader))
        next(events)
        if isinstance(next(events), yaml.StreamEndEvent):
            _refuse(path, 0, 0, "is empty; remove it, or begin with `schema: 1` and `claims: {}`")
        root = _Composer(path, events).node(next(events), 1)
        next(events)
        after: Any = next(events)
        if not isinstance(after, yaml.StreamEndEvent):
            mark = after.start_mark
            _refuse(path, mark.line, mark.column, "a second document begins; keep one")
    except yaml.MarkedYAMLError as error:
        found = error.problem_mark or error.context_mark
        end = _place(text)  # libyaml places what is torn off one line further
        line, column = min((found.line, found.column), end) if found else end
        why = ": ".join(filter(None, (error.context, error.problem)))
        _refuse(path, line, column, f"this is not YAML, {why}; the file is torn or mistyped")
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML lets a few others out
        _refuse(path, *_place(text), f"this is not YAML, {error}; the file is torn or mistyped")
    return root


class _Composer:
    def __init__(self, path: Path, events: Iterator[Any]) -> None:
        import yaml

        self.path, self.events, self.yaml, self.count = path, events, yaml, 0
        self.resolver: Any = yaml.resolver.Resolver()

    def node(self, event: Any, depth: int) -> _Node:
        self.count += 1
        yaml, mark, why = self.yaml, event.start_mark, ""
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            why = "anchors and aliases are refused; write the value out"
        elif event.tag is not None:
            why = f"the tag {event.tag[:40]!r} is refused; write the bare value"
        elif depth > MAX_DEPTH or self.count > MAX_NODES:
            why = "nested too deeply or too long, which no expectations are; restore the file"
        elif isinstance(event, yaml.ScalarEvent) and event.style in ("|", ">"):
            why = "block text is refused; write it on one line in quotes"
        if why:
            _refuse(self.path, mark.line, mark.column, why)
        made = _Node(mark.index, event.end_mark.index, mark.line, mark.column)
        if isinstance(event, yaml.ScalarEvent):
            plain = not event.style  # None in Python, empty in C
            tag = self.resolver.resolve(yaml.ScalarNode, event.value, (plain, not plain))
            string = tag == "tag:yaml.org,2002:str"
            return dataclasses.replace(made, text=event.value, plain=plain, string=string)
        inner: list[_Node] = []
        while not isinstance(last := next(self.events), yaml.CollectionEndEvent):
            inner.append(self.node(last, depth + 1))
        # a block's own end mark lies behind the comments that follow it
        end = last.end_mark.index if event.flow_style or not inner else inner[-1].end
        made = dataclasses.replace(made, end=end, flow=bool(event.flow_style))
        if isinstance(event, yaml.SequenceStartEvent):
            return dataclasses.replace(made, items=tuple(inner))
        return dataclasses.replace(made, pairs=tuple(zip(inner[::2], inner[1::2], strict=True)))


class _Reader:
    """The typed schema: every refusal names its line and column."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def refuse(self, node: _Node, what: str) -> NoReturn:
        _refuse(self.path, node.line, node.column, what)

    def mapping(
        self, node: _Node, what: str, wrong: Callable[[str], str | None]
    ) -> dict[str, _Node]:
        if node.pairs is None:
            self.refuse(node, f"{what}: a mapping is needed, not {node}")
        seen: dict[str, _Node] = {}
        for key, value in node.pairs:
            if key.text == "<<" and key.plain:
                self.refuse(key, f"{what}: merge keys are refused; write the values out")
            name = self.string(key, f"{what}: a name")
            if name in seen:
                self.refuse(key, f"{what}: {name} stands twice; keep one")
            if why := wrong(name):
                self.refuse(key, f"{what}: {why}")
            seen[name] = value
        return seen

    def fields(
        self, node: _Node, what: str, required: Sequence[str], optional: Sequence[str] = ()
    ) -> dict[str, _Node]:
        known = (*required, *optional)
        said = f"(known: {', '.join(known)})"
        found = self.mapping(
            node, what, lambda name: None if name in known else f"unknown {name!r} {said}"
        )
        if missing := [name for name in required if name not in found]:
            self.refuse(node, f"{what}: {', '.join(missing)} is missing {said}")
        return found

    def string(self, node: _Node, what: str) -> str:
        if not node.text:
            self.refuse(node, f"{what}: text is needed, not {node}")
        if not node.string:
            self.refuse(node, f"{what}: text is needed, and YAML reads {node} otherwise; quote it")
        if not _is_text(node.text):
            self.refuse(node, f"{what}: at most {MAX_TEXT} printable characters are allowed")
        return node.text

    def number(self, node: _Node, what: str, most: float) -> float:
        if not node.plain or not _NUMBER.fullmatch(node.text):
            self.refuse(node, f"{what}: a number such as 1.5 is needed, not {node}")
        value = float(node.text)
        if not 0 < value <= most:
            self.refuse(node, f"{what}: must be above 0 and at most {most:g}, not {node}")
        return value

    def count(self, node: _Node, what: str) -> int:
        if not node.plain or not _COUNT.fullmatch(node.text):
            self.refuse(node, f"{what}: a whole number from 1 is needed, not {node}")
        return int(node.text)

    def document(self, root: _Node) -> dict[str, Written]:
        schema = root.get("schema")
        if schema is not None and (version := self.count(schema, "schema")) > SCHEMA:
            what = f"written by a newer pytest-aiperf (schema {version}); upgrade pytest-aiperf"
            self.refuse(schema, what)
        found = self.fields(root, "the file", ("schema", "claims"))
        claims = self.mapping(
            found["claims"],
            "claims",
            lambda name: None if is_claim(name) else f"{name!r} is not folder/name[param]",
        )
        return {claim: self.claim(node, claim) for claim, node in claims.items()}

    def claim(self, node: _Node, claim: str) -> Written:
        found = self.mapping(
            node,
            claim,
            lambda name: None if _KEY.fullmatch(name) else f"{name!r} is no GPU such as h200",
        )
        require = found.pop("require", None)
        return Written(
            Require() if require is None else self.require(require, f"{claim}: require"),
            {key: self.recorded(value, f"{claim}: {key}") for key, value in found.items()},
        )

    def require(self, node: _Node, what: str) -> Require:
        most = {"speedup": MAX_RATIO, "library": MAX_RATIO, "share": 1.0}
        found = self.fields(node, what, (), tuple(most))
        return Require(
            **{name: self.number(v, f"{what}: {name}", most[name]) for name, v in found.items()}
        )

    def recorded(self, node: _Node, what: str) -> Recorded:
        required = ("speedup", "runs", "code", "stack", "recorded")
        found = self.fields(node, what, required, ("share",))
        figures = found["speedup"].items or ()
        limits = [self.number(n, f"{what}: speedup", MAX_RATIO) for n in figures]
        if len(limits) != len(("low", "value", "high")) or sorted(limits) != limits:
            self.refuse(found["speedup"], f"{what}: speedup: rising [low, value, high] is needed")
        share = found.get("share")
        if share is not None and share.plain and share.text == "null":
            share = None
        day = self.string(found["recorded"], f"{what}: recorded")
        try:
            date.fromisoformat(day)
        except ValueError:
            example = f'{what}: recorded: a date such as "2026-11-21" is needed, not {day!r}'
            self.refuse(found["recorded"], example)
        return Recorded(
            speedup=(limits[0], limits[1], limits[2]),
            share=None if share is None else self.number(share, f"{what}: share", MAX_SHARE),
            runs=self.count(found["runs"], f"{what}: runs"),
            code=self.string(found["code"], f"{what}: code"),
            stack=self.string(found["stack"], f"{what}: stack"),
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
    objections = (_unfit(result), _unproven(result, expectation or Expectation(), share))
    return next((why for kind in objections for why in kind), None)


def _unfit(result: Result) -> Iterator[str]:
    if result.schema != SCHEMA:
        yield f"its record has schema {result.schema}, this is schema {SCHEMA}"
    if not is_claim(result.claim):
        yield "its id is not folder/name[param]"
    if result.outcome not in (Outcome.PASSED, Outcome.FAILED):
        yield f"it ended {result.outcome}" + (f": {result.message}" if result.message else "")
    if result.host:
        yield "it is a host claim: hosts differ, so there only `require` is held"
    if result.quick:
        yield "it was measured with --quick; measure it without"
    gpu = result.gpu.key if result.gpu else ""
    if not _KEY.fullmatch(gpu) or not re.fullmatch(rf"([1-9]\d*x)?{re.escape(gpu)}", result.key):
        yield f"its key {result.key!r} is not that of its GPU {gpu!r}"
    if not _is_text(result.code) or not _is_text(stack_line(result.stack)):
        yield "its code hash or its stack is missing or not printable"


def _unproven(result: Result, expectation: Expectation, share: float | None) -> Iterator[str]:
    figure = result.speedup
    if figure is None or not 0 < figure.low <= figure.value <= figure.high <= MAX_RATIO:
        yield "it has no speedup with a finite interval"
        return
    if not all(error.error <= error.allowed for error in result.agreement):
        yield "its arms do not agree with the reference"
    if result.verdict is None or result.verdict is Verdict.INCONCLUSIVE:
        yield f"it is inconclusive: {figure}"
    if not 0 <= result.floor <= NOISY:
        yield f"the session was noisy: identical arms differ by {result.floor:.1%} (at most 2 %)"
    if share is not None and not 0 < share <= MAX_SHARE:
        yield f"its share of the limit cannot be {share:g}"
    require, was = expectation.require, expectation.recorded
    if require.speedup is None and was is not None and _is_parity(was):
        require = dataclasses.replace(require, speedup=min(1.0, figure.low))
    judgement = judge(
        figure, result.floor, Expectation(require), library=result.library, share=share
    )
    if not judgement.holds:
        yield judgement.why


def _is_parity(was: Recorded) -> bool:
    low, _, high = was.speedup
    return low >= 1 - SAME_WITHIN and high <= 1 + SAME_WITHIN


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
    plan: Callable[[], Update] = field(repr=False)

    def lines(self) -> list[str]:
        """Say of each result whether it is accepted, and if not, why."""
        lines = [f"accepted {r.claim} on {r.key}: {r.speedup}" for r in self.accepted]
        lines += [f"refused {r.claim} on {r.key}: {why}" for r, why in self.refused]
        return [_one_line(line) for line in lines]

    def diff(self) -> str:
        """Show the change as a unified diff; empty when nothing changes."""
        before, after = ((text or "").splitlines() for text in (self.before, self.after))
        was = os.devnull if self.before is None else str(self.path)
        return "\n".join(difflib.unified_diff(before, after, was, str(self.path), lineterm=""))

    def write(self, also: Callable[[Update], None] | None = None) -> Update:
        """Write the change under a lock; return what was written.

        A file that changed since the plan is planned anew, so that no other writer's figures are
        lost. ``also`` is called under the lock just before the file is replaced: what must be
        written together with it goes first, and its error leaves the file alone.
        """
        if not self.accepted:
            return self
        path = self.path.resolve()  # a link stays a link
        with _locked(path):
            now = self if _read(path) == self.before else self.plan()
            if now.accepted and now.after is not None:
                _check_writable(path)
                if also is not None:
                    also(now)
                _replace(path, now.after)
        return now


def _one_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return "".join(c if c.isprintable() else "?" for c in line[: 2 * MAX_TEXT])


def plan(
    path: Path,
    results: Sequence[Result],
    today: date,
    share: Callable[[Result], float | None] = _unknown_share,
) -> Update:
    """Decide what results change in the file; nothing is written.

    ``share`` gives a result's share of its limit, where that is known.
    """
    before = _read(path)
    text = HEADER if before is None else before
    root, claims = _parse(path, text)
    expectations = Expectations(path, claims)
    last: dict[tuple[str, str], Result] = {}
    for result in sorted(results, key=lambda r: r.started):
        last[result.claim, result.key] = result
    accepted: list[Result] = []
    refused: list[tuple[Result, str]] = []
    fresh: dict[str, dict[str, Recorded]] = {}
    for result in results:
        known = share(result)
        arch = result.gpu.arch if result.gpu else ""
        expectation = expectations.lookup(result.claim, result.key, arch, result.code)
        why = acceptable(result, expectation, known)
        if last[result.claim, result.key] is not result:
            why = "a later result of this claim is there"
        if why is not None:
            refused.append((result, why))
            continue
        accepted.append(result)
        was = claims.get(result.claim, Written()).recorded.get(result.key)
        fresh.setdefault(result.claim, {})[result.key] = _recorded(result, was, known, today)
    after = before
    if accepted:
        after = _spliced(text, root, claims, fresh)
        wanted = dict(claims)
        for claim, entries in fresh.items():
            old = claims.get(claim, Written())
            wanted[claim] = Written(old.require, {**old.recorded, **entries})
        if _parse(path, after)[1] != wanted:  # an exotic layout: better no change than a wrong one
            raise Misuse(f"{path}: cannot be updated in place; write one claim and one GPU a line")
    again = partial(plan, path, results, today, share)
    return Update(path, before, after, tuple(accepted), tuple(refused), again)


def _recorded(result: Result, was: Recorded | None, share: float | None, today: date) -> Recorded:
    assert result.speedup is not None
    figure, stack = result.speedup, stack_line(result.stack)
    again = was is not None and (was.code, was.stack) == (result.code, stack)
    return Recorded(
        speedup=(_rounded(figure.low), _rounded(figure.value), _rounded(figure.high)),
        share=None if share is None else _rounded(share),
        runs=was.runs + 1 if was is not None and again else 1,
        code=result.code,
        stack=stack,
        recorded=today.isoformat(),
    )


# Writing: new figures are spliced into the text at the places of the old ones, because a YAML
# round trip re-indents and re-wraps lines that nobody meant to change.


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _figure(value: float) -> str:
    text = format(Decimal(repr(value)), "f")
    return text if "." in text else f"{text}.0"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _fields(entry: Recorded) -> dict[str, str]:
    """Render each field; text is quoted, because a hash such as 123456789012 reads as a number."""
    texts = {"speedup": f"[{', '.join(map(_figure, entry.speedup))}]"}
    if entry.share is not None:
        texts["share"] = _figure(entry.share)
    texts |= {"runs": str(entry.runs), "code": _quoted(entry.code), "stack": _quoted(entry.stack)}
    return texts | {"recorded": _quoted(entry.recorded)}


def _item(key: str, entry: Recorded) -> str:
    name = key if _PLAIN_KEY.fullmatch(key) else _quoted(key)
    return f"{name}: {{{', '.join(f'{n}: {text}' for n, text in _fields(entry).items())}}}"


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

    def put(self, node: _Node, text: str) -> None:
        self.edits.append((node.start, node.end, text))

    def block(self, at: int, indent: int, lines: Iterable[str]) -> None:
        new = "".join(f"{self.newline}{' ' * indent}{line}" for line in lines)
        self.edits.append((at, at, new))

    def add(self, parent: _Node, lines: Sequence[str], flow: str, behind: _Node | None) -> None:
        """Add an item to a mapping: ``flow`` between braces, else ``lines`` behind an item."""
        if not parent.pairs:
            at = parent.start + 1
            others = any(start == at for start, _, _ in self.edits)
            self.edits.append((at, at, f", {flow}" if others else flow))
            return
        behind = behind or parent.pairs[-1][1]
        if parent.flow:
            self.edits.append((behind.end, behind.end, f", {flow}"))
            return
        indent = parent.pairs[0][0].column
        found = _BREAK.search(self.text, behind.end)
        at = found.start() if found else len(self.text)
        while (comment := _COMMENT.match(self.text, at)) and len(comment[1]) > indent:
            at = comment.end()  # a comment that is indented deeper belongs to the item above
        self.block(at, indent, lines)

    def change(self, node: _Node, was: Recorded, entry: Recorded) -> None:
        """Change the scalars of an entry that differ, and nothing between them."""
        for name, text in _fields(entry).items():
            old = node.get(name)
            if old is None:
                self.add(node, [f"{name}: {text}"], f"{name}: {text}", None)
            elif name == "speedup":
                for place, figure in zip(old.items or (), entry.speedup, strict=True):
                    if figure != float(place.text):
                        self.put(place, _figure(figure))
            elif getattr(was, name) != getattr(entry, name):
                self.put(old, text)
        share = node.get("share")
        if share is not None and entry.share is None:
            self.put(share, "null")


def _spliced(
    text: str,
    root: _Node,
    claims: Mapping[str, Written],
    fresh: Mapping[str, Mapping[str, Recorded]],
) -> str:
    splice = _Splice(text)
    parent = root.get("claims")
    assert parent is not None
    empty = not root.flow and re.fullmatch(r"\{\s*\}", text[parent.start : parent.end])
    if empty:  # the first claims of a file: `claims: {}` gives way to a block
        start = len(text[: parent.start].rstrip(" "))
        splice.edits.append((start, parent.end, ""))
    for claim, entries in sorted(fresh.items()):
        node = parent.get(claim)
        items = {key: _item(key, entry) for key, entry in sorted(entries.items())}
        if node is None:
            name = claim if _PLAIN_CLAIM.fullmatch(claim) else _quoted(claim)
            lines = [f"{name}:", *(f"  {item}" for item in items.values())]
            if empty:
                splice.block(parent.end, 2, lines)
                continue
            smaller = [value for key, value in parent.pairs or () if key.text < claim]
            flow = f"{_quoted(claim)}: {{{', '.join(items.values())}}}"
            splice.add(parent, lines, flow, smaller[-1] if smaller else None)
            continue
        for key, item in items.items():
            old = node.get(key)
            if old is None:
                splice.add(node, [item], item, None)
            else:
                splice.change(old, claims[claim].recorded[key], entries[key])
    return splice.result()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fasteners

    lock = path.parent / ".aiperf" / f"{path.name}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = fasteners.InterProcessLock(lock)
        if not held.acquire(timeout=LOCK_SECONDS):
            raise Misuse(f"{path}: another process has been writing for {LOCK_SECONDS} s; retry")
    except OSError as error:
        why = f"cannot lock {lock}: {error.strerror}; make the folder writable"
        raise Misuse(f"{path}: cannot be written, {why}") from None
    try:
        yield
    finally:
        held.release()


def _check_writable(path: Path) -> None:
    # renaming over a read-only file would work; its mode says that nobody wants that
    if path.exists() and not path.stat().st_mode & 0o222:
        raise Misuse(f"{path}: is read-only; make it writable, then accept again")


def _replace(path: Path, text: str) -> None:
    """Replace the file in one step: after a crash it is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        why = f"cannot be written: {error.strerror}; free space or make the folder writable"
        raise Misuse(f"{path}: {why}") from None
