"""YAML that means what it shows: strictly read, every value with its line and column."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from pytest_aiperf.errors import UsageError

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 20
MAX_NODES: Final = 100_000
MAX_TEXT: Final = 500

ROOT: Final = "file"
"""The path of the whole document; a field below it is named as `schema.from_json` names it."""

_NUMBER = re.compile(r"-?(0|[1-9]\d{0,15})(\.\d+)?", re.ASCII)
_NOT_ALLOWED = re.compile(  # nor are the rarer line breaks and the byte order mark: loaders differ
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
    "|\r(?!\n)"
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text, its value in dicts, lists, texts and numbers, and a PyYAML node for each path."""

    path: Path
    text: str
    value: Any
    nodes: Mapping[str, Any]

    def refuse(self, message: str) -> NoReturn:
        """Raise Misuse at the place of the field whose path the message begins with."""
        named = [where for where in self.nodes if message.startswith(f"{where}: ")]
        node = self.nodes[max(named, key=len, default=ROOT)]
        _refuse(self.path, node.start_mark, message)


def is_text(text: str) -> bool:
    """Whether a text may stand in a file: 1 to MAX_TEXT printable characters."""
    return 0 < len(text) <= MAX_TEXT and text.isprintable()


def read(path: Path) -> str | None:
    """Read the text of a file; None where there is no file."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: is not a file; name the file itself")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; make it readable") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: is larger than 1 MiB, which nobody wrote by hand; restore it")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        _refuse(path, _end(data[: error.start].decode()), "is not UTF-8; save it as UTF-8")
    if bad := _NOT_ALLOWED.search(text):
        place = _end(text[: bad.start()])
        _refuse(path, place, f"the character {bad[0]!r} is not allowed; remove it")
    return text


def parse(path: Path, text: str) -> Document:
    """Parse a text; raise Misuse at the line and column of what is torn, doubled or ambiguous."""
    import yaml  # late: a session without such a file must not pay for it

    # in C the loader is 25 times as fast; nothing is ever constructed, so no tag can act
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(path, yaml.parse(text, Loader=loader))
        root = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        found = error.problem_mark or error.context_mark
        end = _end(text)  # libyaml places what is torn off one line further
        place = min(_Place(found.line, found.column), end) if found else end
        why = ": ".join(filter(None, (error.context, error.problem)))
        _refuse(path, place, f"this is not YAML, {why}; the file is torn or mistyped")
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML lets a few others out
        _refuse(path, _end(text), f"this is not YAML, {error}; the file is torn or mistyped")
    if root is None:
        _refuse(path, _Place(0, 0), "is empty; write it or remove it")
    nodes: dict[str, Any] = {}
    return Document(path, text, _value(path, root, ROOT, nodes), nodes)


def last_line(node: Any) -> int:
    """Find the line on which a node ends; a block's own mark lies behind the comments after it."""
    if node.id == "scalar" or node.flow_style:
        return int(node.end_mark.line)
    last = node.value[-1]
    return last_line(last[1] if node.id == "mapping" else last)


class _Place(NamedTuple):
    line: int
    column: int


def _refuse(path: Path, place: Any, what: str) -> NoReturn:
    said = what.removeprefix(f"{ROOT}.")
    raise UsageError(f"{path}:{place.line + 1}:{place.column + 1}: {said}") from None


def _end(text: str) -> _Place:
    lines = text.split("\n")
    return _Place(len(lines) - 1, len(lines[-1]))


def _check_events(path: Path, events: Any) -> None:
    """Refuse what would act, explode or deceive, before any node is composed."""
    import yaml

    depth = count = 0
    for event in events:
        count += 1
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if getattr(event, "anchor", None) is not None:
            why = "anchors and aliases are refused; write the value out"
        elif (tag := getattr(event, "tag", None)) is not None:
            why = f"the tag {tag[:40]!r} is refused; write the bare value"
        elif depth > MAX_DEPTH or count > MAX_NODES:
            why = "nested too deeply or too long, which nobody wrote by hand; restore the file"
        elif getattr(event, "style", None) in ("|", ">"):
            why = "block text is refused; write it on one line in quotes"
        else:
            continue
        _refuse(path, event.start_mark, why)


def _value(path: Path, node: Any, where: str, nodes: dict[str, Any]) -> object:
    nodes[where] = node
    if node.id == "scalar":
        return _scalar(path, node, where)
    if node.id == "sequence":
        return [_value(path, n, f"{where}[{i}]", nodes) for i, n in enumerate(node.value)]
    made: dict[str, object] = {}
    for key, value in node.value:
        name = _scalar(path, key, where) if key.id == "scalar" else None
        if not isinstance(name, str):
            _refuse(path, key.start_mark, f"{where}: a name is needed here; quote it if it is one")
        if name in made:
            _refuse(path, key.start_mark, f"{where}: {name} stands twice; keep one")
        made[name] = _value(path, value, f"{where}.{name}", nodes)
    return made


def _scalar(path: Path, node: Any, where: str) -> str | int | float:
    """Take a number or a text as typed; what YAML reads as another thing was a mistake."""
    text = str(node.value)
    if not node.style and _NUMBER.fullmatch(text):
        return float(text) if "." in text else int(text)
    if node.tag == "tag:yaml.org,2002:str" and is_text(text):
        return text
    if len(text) > MAX_TEXT or node.style:
        why = f"a text has 1 to {MAX_TEXT} printable characters; shorten or retype it"
    elif not text:
        why = "nothing stands here; write a value, or remove the name too"
    else:
        why = f"a number such as 1.5 or a text is needed, not {text[:40]!r}; quote it if it is text"
    _refuse(path, node.start_mark, f"{where}: {why}")
