"""What a claim is made of, and one hash of what that says to a compiler."""

from __future__ import annotations

import ast
import hashlib
import io
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# strings are kept, and what looks like a comment in them
_C = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|//[^\n]*|/\*.*?\*/""", re.DOTALL)


def files(module: ModuleType | None, root: Path) -> list[Path]:
    """Name the files below a folder that a module is made of, with all that it imports there."""
    ours = __name__.partition(".")[0]
    found: dict[str, Path] = {}
    wanted = [module]
    while wanted:
        known = wanted.pop()
        path = getattr(known, "__file__", None)
        if known is None or not path or known.__name__ in found:
            continue
        if known.__name__.partition(".")[0] == ours or "site-packages" in path:
            continue  # the plugin's own changes do not change a claim
        if not Path(path).is_relative_to(root):
            continue
        found[known.__name__] = Path(path)
        for value in list(vars(known).values()):
            module = value if isinstance(value, ModuleType) else None
            wanted.append(module or sys.modules.get(str(getattr(value, "__module__", ""))))
    return list(found.values())


def identity(paths: Iterable[Path]) -> str:
    """Hash files: not what only people read, so that words may follow what was measured."""
    digest = hashlib.sha256()
    for path in sorted(set(paths)):
        text = path.read_text(encoding="utf-8", errors="replace")
        said = _python(text) if path.suffix == ".py" else _C.sub(_unless_comment, text)
        lines = [line.rstrip() for line in said.splitlines()]
        digest.update("\n".join([path.name, *filter(None, lines), ""]).encode())
    return digest.hexdigest()[:12]


def _unless_comment(found: re.Match[str]) -> str:
    return " " if found[0][0] == "/" else found[0]


def _python(text: str) -> str:
    """Drop comments and docstrings; how the rest is laid out stays."""
    lines = text.splitlines(keepends=True)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spans = [(*t.start, *t.end) for t in tokens if t.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            words: Any = node.body[0]
            begin = _characters(lines[words.lineno - 1], words.col_offset)
            end = _characters(lines[words.end_lineno - 1], words.end_col_offset)
            spans += [(words.lineno, begin, words.end_lineno, end)]
    for first_line, begin, last_line, end in sorted(spans, reverse=True):
        rest = lines[last_line - 1][end:]
        lines[first_line - 1 : last_line] = [lines[first_line - 1][:begin] + rest]
    return "".join(lines)


def _characters(line: str, count: int) -> int:
    """Count the characters of so many bytes."""
    return len(line.encode()[:count].decode())
