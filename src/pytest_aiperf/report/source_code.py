"""The text of a claim's module docstring, and the source code of its arms."""

import ast
import difflib
import re
import subprocess
import textwrap
import tomllib
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.model import Result, Source

MAX_LINES: Final = 140
"""Maximum number of lines that a pane shows of an arm."""
_LANGUAGES: Final = {".py": "python", ".cu": "cuda", ".cuh": "cuda"}
"""File suffix to the name of its language in Pygments; other files are not shown."""
_COLORED: Final = (
    *("Comment", "Keyword", "Literal", "Operator.Word"),
    *("Name.Function", "Name.Class", "Name.Decorator"),
)
"""Kinds of tokens that are colored: only a few, because HTML tags enlarge the page."""
_REMOTE: Final = re.compile(
    r"(?:https?://(?:[^@/]*@)?|ssh://git@|git@)((?:[\w-]+\.)*(github|gitlab)[\w.-]*)[:/]([\w./~-]+?)(?:\.git)?/?"
)
"""Address of a repository on GitHub or GitLab; credentials in it are not part of a group."""
_SOURCE_URLS: Final = ("repository", "source", "source code", "homepage")
"""Names of project URLs that may lead to the repository."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an arm's source code."""

    file: str  #: Path relative to the project's root folder.
    number: int  #: Line number, counted from 1.
    text: str  #: Text without the indentation that its block has in common.


@dataclass(frozen=True, slots=True)
class Difference:
    """The lines that only one of two arms uses, aligned; and the lines that both use."""

    rows: tuple[tuple[Line | None, Line | None, bool], ...]
    """Pairs of lines of the baseline and the optimized arm, and whether they differ. None fills up
    the side that has no such line."""
    shared: tuple[Line, ...]  #: Lines that both arms use, such as helper functions.


def explanation(nodeid: str, root: Path) -> tuple[str, ...]:
    """Return the paragraphs below the title in a test file's docstring; () without the file."""
    try:
        tree = ast.parse(_read(root, nodeid.partition("::")[0]))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return ()
    text = (ast.get_docstring(tree) or "").partition("\n")[2].strip()
    return tuple(" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part)


def arms(result: Result, root: Path) -> dict[str, tuple[Line, ...]]:
    """Return the lines of each arm's code; files that have changed since the run are left out."""
    lines = {arm: tuple(_lines(sources, root)) for arm, sources in result.sources.items()}
    return {arm: each for arm, each in lines.items() if each}


def _lines(sources: Sequence[Source], root: Path) -> Iterator[Line]:
    for file in dict.fromkeys(source.file for source in sources):
        try:
            content = _read(root, file).split("\n")  # other characters end no line of a compiler
        except (OSError, ValueError):
            continue
        parts = [s.found(content) for s in sources if s.file == file]
        if None in parts:
            continue
        for first, lines in filter(None, parts):
            text = textwrap.dedent("\n".join(lines))
            for number, line in enumerate(text.split("\n"), first):
                yield Line(file, number, line)


def _read(root: Path, file: str) -> str:
    """Read a source file that a record names; raise ValueError if it lies outside ``root``."""
    path = (root / file).resolve()
    if not path.is_relative_to(root.resolve()) or path.suffix not in _LANGUAGES:
        raise ValueError(f"{file} is not a source file of the project")
    return path.read_text(encoding="utf-8")


def difference(baseline: Sequence[Line], optimized: Sequence[Line]) -> Difference:
    """Compare the code of two arms.

    Kernels of one file often share most of their lines; those say nothing about the difference and
    are kept apart. The other lines are aligned as by ``diff``, without regard to indentation, file
    by file: the files of both arms first, then the others in their order. A line with number 0
    stands for a gap in a file, or, if it has text, for the beginning of a file.
    """
    places = [{(line.file, line.number) for line in arm} for arm in (baseline, optimized)]
    both = places[0] & places[1]
    by_file: list[dict[str, list[Line]]] = [
        _by_file(line for line in arm if (line.file, line.number) not in both)
        for arm in (baseline, optimized)
    ]
    common = [file for file in by_file[0] if file in by_file[1]]
    orders = [[*common, *(file for file in arm if file not in common)] for arm in by_file]
    rows: list[tuple[Line | None, Line | None, bool]] = []
    for left, right in zip_longest(*orders, fillvalue=""):
        if max(map(len, orders)) > 1:
            heads = [Line(file, 0, file) if file else None for file in (left, right)]
            rows.append((heads[0], heads[1], False))
        rows += _aligned(by_file[0].get(left, []), by_file[1].get(right, []))
    shared = _by_file(line for line in optimized if (line.file, line.number) in both)
    return Difference(tuple(rows), tuple(chain.from_iterable(shared.values())))


def _aligned(
    left: Sequence[Line], right: Sequence[Line]
) -> Iterator[tuple[Line | None, Line | None, bool]]:
    matcher = difflib.SequenceMatcher(
        lambda text: not re.search(r"\w", text),  # a closing brace alone aligns nothing
        [line.text.strip() for line in left],
        [line.text.strip() for line in right],
        autojunk=False,
    )
    for _, a, b, c, d in matcher.get_opcodes():
        for pair in zip_longest(left[a:b], right[c:d]):
            texts = {line.text.strip() if line else None for line in pair}
            yield (*pair, len(texts) > 1)


def _by_file(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Group lines by file; remove blank lines around each gap, and put a line 0 into it."""
    files: dict[str, list[Line]] = {}
    for run in _runs(list(lines)):
        filled = [i for i, line in enumerate(run) if line.text.strip()]
        if filled:
            file = files.setdefault(run[0].file, [])
            file += [Line(run[0].file, 0, "")] * bool(file)
            file += run[filled[0] : filled[-1] + 1]
    return files


def _runs(lines: Sequence[Line]) -> list[list[Line]]:
    """Split lines wherever the file changes or line numbers are missing."""
    split: list[list[Line]] = [[*lines[:1]]] if lines else []
    for before, line in pairwise(lines):
        if (line.file, line.number) != (before.file, before.number + 1):
            split.append([])
        split[-1].append(line)
    return split


def highlight(lines: Sequence[Line]) -> Mapping[Line, str]:
    """Return each numbered line as HTML; tokens have the CSS classes of Pygments."""
    from pygments import format as to_html  # imported late: only reports need it
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.token import Text

    def colored(kind: Any) -> bool:
        return str(kind).removeprefix("Token.").startswith(_COLORED)

    html: dict[Line, str] = {}
    for file in dict.fromkeys(line.file for line in lines):
        part = [line for line in lines if line.file == file and line.number]
        lexer = get_lexer_by_name(_LANGUAGES[Path(file).suffix], stripnl=False)
        tokens = lexer.get_tokens("\n".join(line.text for line in part))
        marked = ((kind if colored(kind) else Text, text) for kind, text in tokens)
        formatted = str(to_html(marked, HtmlFormatter(nowrap=True))).split("\n")
        html |= dict(zip(part, formatted, strict=False))
    return html


def repository(root: Path, commit: str = "HEAD") -> str:
    """Return the address below which the repository's files are shown; empty if it is unknown.

    It comes from the project URLs in pyproject.toml or from the git remote "origin". Only GitHub
    and GitLab are known.
    """
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        urls = [str(url) for name, url in project["urls"].items() if name.lower() in _SOURCE_URLS]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        urls = []
    prefix = _git(root, "rev-parse", "--show-prefix")
    for url in [*urls, _git(root, "remote", "get-url", "origin")]:
        if match := _REMOTE.fullmatch(url):
            host, kind, path = match.groups()
            blob = "-/blob" if kind == "gitlab" else "blob"
            return f"https://{host}/{path}/{blob}/" + urllib.parse.quote(f"{commit}/{prefix}")
    return ""


def _git(root: Path, *arguments: str) -> str:
    command = ("git", "-C", str(root), *arguments)
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def place(lines: Sequence[Line], address: str = "") -> tuple[str, str]:
    """Return ``path:line`` of lines of one file, and their URL below ``address``, or ""."""
    file, first, last = lines[0].file, lines[0].number, lines[-1].number
    url = f"{address}{urllib.parse.quote(file)}#L{first}-L{last}" if address else ""
    return f"{file}:{first}", url
