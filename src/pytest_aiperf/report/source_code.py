"""The text of a claim's module docstring, and the source code of its arms."""

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.model import Result, Source

MAX_LINES: Final = 140
"""Maximum number of lines from one file that the page shows for an arm."""
_LANGUAGES: Final = {".py": "python", ".cu": "cuda", ".cuh": "cuda"}
"""File suffix to the name of its language in Pygments; other files are not shown."""
_COLORED: Final = (
    *("Comment", "Keyword", "Literal", "Operator.Word"),
    *("Name.Function", "Name.Class", "Name.Decorator"),
)
"""Kinds of tokens that the page colors: only a few, because HTML tags enlarge the page."""


@dataclass(frozen=True, slots=True)
class Code:
    """Lines of a file that belong to one arm."""

    text: str
    language: str  #: Language for Pygments: "python" or "cuda".
    where: str  #: Path of the file, relative to the project's root folder.


def explanation(nodeid: str, root: Path) -> tuple[str, ...]:
    """Return the paragraphs below the title in a test file's docstring; () without the file."""
    try:
        tree = ast.parse(_read(root, nodeid.partition("::")[0]))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return ()
    text = (ast.get_docstring(tree) or "").partition("\n")[2].strip()
    return tuple(" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part)


def arms(result: Result, root: Path) -> dict[str, tuple[Code, ...]]:
    """Return each arm's code, one Code per file; omit code that changed since the run."""
    codes = {arm: tuple(_codes(sources, root)) for arm, sources in result.sources.items()}
    return {arm: files for arm, files in codes.items() if files}


def _codes(sources: Sequence[Source], root: Path) -> Iterator[Code]:
    for file in dict.fromkeys(source.file for source in sources):
        try:
            lines = _read(root, file).splitlines()
        except (OSError, ValueError):
            continue
        texts = [source.text(lines) for source in sources if source.file == file]
        if None not in texts:
            text = "\n\n".join(textwrap.dedent(text) for text in texts if text)
            yield clip(Code(text, _LANGUAGES[Path(file).suffix], file))


def _read(root: Path, file: str) -> str:
    """Read a source file that a record names; raise ValueError if it lies outside ``root``."""
    path = (root / file).resolve()
    if not path.is_relative_to(root.resolve()) or path.suffix not in _LANGUAGES:
        raise ValueError(f"{file} is not a source file of the project")
    return path.read_text(encoding="utf-8")


def clip(code: Code) -> Code:
    """Keep the first MAX_LINES lines, and append a comment with the number of omitted lines."""
    lines = code.text.splitlines()
    if len(lines) <= MAX_LINES:
        return code
    mark = "//" if code.language == "cuda" else "#"
    lines[MAX_LINES:] = [f"{mark} ... {len(lines) - MAX_LINES} more lines"]
    return replace(code, text="\n".join(lines))


def highlight(code: Code) -> str:
    """Return code as HTML; tokens have the CSS classes of Pygments."""
    from pygments import format as to_html  # imported late: only reports need it
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.token import Text

    def colored(kind: Any) -> bool:
        return str(kind).removeprefix("Token.").startswith(_COLORED)

    tokens = get_lexer_by_name(code.language, stripnl=False).get_tokens(code.text)
    marked = ((kind if colored(kind) else Text, text) for kind, text in tokens)
    return str(to_html(marked, HtmlFormatter(nowrap=True))).rstrip("\n")
