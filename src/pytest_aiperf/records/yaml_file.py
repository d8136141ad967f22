"""Read YAML that has only numbers and texts as values; errors name line and column."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from pytest_aiperf.errors import UsageError

MAX_BYTES: Final = 1 << 20  #: Largest file: 1 MiB holds thousands of claims.
MAX_DEPTH: Final = 20  #: Deepest nesting; expectations use five levels.
MAX_NODES: Final = 100_000  #: Maximum of parser events: even small files can have many.
MAX_TEXT: Final = 500  #: Longest text, in characters.
ROOT: Final = "file"  #: Name of the whole document in paths such as ``file.claims``.
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,15})(\.\d+)?", re.ASCII)
# control characters, and line breaks and marks that YAML loaders treat differently
_FORBIDDEN = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
    "|\r(?!\n)"
)


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed YAML file."""

    path: Path
    text: str
    value: Any  #: The content in dicts, lists, texts and numbers.
    nodes: Mapping[str, Any]  #: The PyYAML node of each field, by a path such as ``file.a[0]``.

    def refuse(self, message: str) -> NoReturn:
        """Raise UsageError with the line and column of the field whose path begins ``message``."""
        paths = [path for path in self.nodes if message.startswith(f"{path}: ")]
        node = self.nodes[max(paths, key=len, default=ROOT)]
        _refuse(self.path, node.start_mark, message)


def is_text(text: str) -> bool:
    """Whether a text is allowed in a file: 1 to MAX_TEXT printable characters."""
    return 0 < len(text) <= MAX_TEXT and text.isprintable()


def read(path: Path) -> str | None:
    """Return the text of a file; None if it does not exist."""
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
        raise UsageError(f"{path}: is larger than 1 MiB, so it is damaged; restore it")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        _refuse(path, _end(data[: error.start].decode()), "is not UTF-8; save it as UTF-8")
    if character := _FORBIDDEN.search(text):
        place = _end(text[: character.start()])
        _refuse(path, place, f"the character {character[0]!r} is not allowed; remove it")
    return text


def parse(path: Path, text: str) -> Document:
    """Parse a text; raise UsageError at the line and column of the first mistake."""
    import yaml  # imported late: only a session with such a file needs it

    # the C loader is 25 times as fast; both are safe, since no Python object is constructed
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(path, yaml.parse(text, Loader=loader))
        root = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        end = _end(text)  # libyaml may report a place one line past the end
        place = min(_Place(mark.line, mark.column), end) if mark else end
        problem = ": ".join(filter(None, (error.context, error.problem)))
        _refuse(path, place, f"this is not YAML, {problem}; the file is incomplete or mistyped")
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML raises all three
        _refuse(path, _end(text), f"this is not YAML, {error}; the file is incomplete or mistyped")
    if root is None:
        _refuse(path, _Place(0, 0), "is empty; write it or remove it")
    nodes: dict[str, Any] = {}
    return Document(path, text, _value(path, root, ROOT, nodes), nodes)


def last_line(node: Any) -> int:
    """Return the last line of a node, without the comments that PyYAML counts as part of it."""
    if node.id == "scalar" or node.flow_style:
        return int(node.end_mark.line)
    last = node.value[-1]
    return last_line(last[1] if node.id == "mapping" else last)


class _Place(NamedTuple):
    line: int
    column: int


def _refuse(path: Path, place: Any, message: str) -> NoReturn:
    message = message.removeprefix(f"{ROOT}.")
    raise UsageError(f"{path}:{place.line + 1}:{place.column + 1}: {message}") from None


def _end(text: str) -> _Place:
    lines = text.split("\n")
    return _Place(len(lines) - 1, len(lines[-1]))


def _check_events(path: Path, events: Any) -> None:
    """Refuse anchors, tags, block texts and huge documents before PyYAML builds nodes from them."""
    import yaml

    depth = count = 0
    for event in events:
        count += 1
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if getattr(event, "anchor", None) is not None:
            problem = "anchors and aliases are refused; write the value out"
        elif (tag := getattr(event, "tag", None)) is not None:
            problem = f"the tag {tag[:40]!r} is refused; write the bare value"
        elif depth > MAX_DEPTH or count > MAX_NODES:
            problem = "nested too deeply or too long, so it is damaged; restore the file"
        elif getattr(event, "style", None) in ("|", ">"):
            problem = "block text is refused; write it on one line in quotes"
        else:
            continue
        _refuse(path, event.start_mark, problem)


def _value(path: Path, node: Any, where: str, nodes: dict[str, Any]) -> object:
    nodes[where] = node
    if node.id == "scalar":
        return _scalar(path, node, where)
    if node.id == "sequence":
        return [_value(path, n, f"{where}[{i}]", nodes) for i, n in enumerate(node.value)]
    mapping: dict[str, object] = {}
    for key, value in node.value:
        name = _scalar(path, key, where) if key.id == "scalar" else None
        if not isinstance(name, str):
            _refuse(path, key.start_mark, f"{where}: a name is needed here; quote it if it is text")
        if name in mapping:
            _refuse(path, key.start_mark, f"{where}: {name} occurs twice; keep one")
        mapping[name] = _value(path, value, f"{where}.{name}", nodes)
    return mapping


def _scalar(path: Path, node: Any, where: str) -> str | int | float:
    """Return a number or a text; refuse what YAML reads as another type, such as `no`."""
    text = str(node.value)
    if not node.style and _NUMBER.fullmatch(text):
        return float(text) if "." in text else int(text)
    if node.tag == "tag:yaml.org,2002:str" and is_text(text):
        return text
    if len(text) > MAX_TEXT or node.style:
        problem = f"a text has 1 to {MAX_TEXT} printable characters; shorten or retype it"
    elif not text:
        problem = "the value is missing; write one, or remove the name too"
    else:
        problem = f"write a number such as 1.5 or a text, not {text[:40]!r}; quote it if it is text"
    _refuse(path, node.start_mark, f"{where}: {problem}")
