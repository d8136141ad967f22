"""Hash of a claim's source code without comments and docstrings."""

import ast
import contextlib
import hashlib
import importlib.util
import io
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def files(module: ModuleType | None, root: Path) -> list[Path]:
    """Return the Python files below ``root`` of a module and of everything that it imports.

    Compiled modules are left out: they differ between machines and versions of Python.
    """
    package, standard = __name__.partition(".")[0], sysconfig.get_path("stdlib")
    paths: dict[str, Path] = {}
    queue = [module]
    while queue:
        current = queue.pop()
        path = getattr(current, "__file__", None)
        if current is None or not path or current.__name__ in paths:
            continue
        foreign = current.__name__.partition(".")[0] == package or "site-packages" in path
        # the environment may be a folder of the project, and have Python's own modules
        foreign = foreign or Path(path).is_relative_to(standard)
        if foreign or Path(path).suffix != ".py" or not Path(path).is_relative_to(root):
            continue  # a change of the plugin or of a library does not change the claim
        paths[current.__name__] = Path(path)
        for value in list(vars(current).values()):
            module = value if isinstance(value, ModuleType) else None
            queue.append(module or sys.modules.get(str(getattr(value, "__module__", ""))))
        queue += _named_in_imports(current)  # a number or a table does not know its module
    return list(paths.values())


def _named_in_imports(module: ModuleType) -> Iterator[ModuleType]:
    """Yield the loaded modules that a module's import statements name."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_bytes())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            # the module has caught this error as well, when it was imported
            with contextlib.suppress(ImportError):
                name = importlib.util.resolve_name(relative, module.__package__)
                names = [name, *(f"{name}.{alias.name}" for alias in node.names)]
        yield from (sys.modules[name] for name in names if name in sys.modules)


def identity(paths: Iterable[Path]) -> str:
    """Return a hash of the files' code, which does not depend on comments and docstrings."""
    digest = hashlib.sha256()
    for path in sorted(set(paths)):
        if path.suffix == ".py":
            with tokenize.open(path) as file:  # in the encoding that its first lines declare
                code = _python_code(file.read())
        else:
            code = _cpp_code(path.read_text(encoding="utf-8", errors="replace"))
        lines = [line.rstrip() for line in code.splitlines()]
        digest.update("\n".join([path.name, *filter(None, lines), ""]).encode())
    return digest.hexdigest()[:12]


def _cpp_code(text: str) -> str:
    """Replace each comment by a space."""
    from pygments.lexers.c_cpp import CppLexer  # imported here: only CUDA claims need it
    from pygments.token import Comment

    return "".join(
        " " + "\n" * value.endswith("\n") if kind in (Comment.Single, Comment.Multiline) else value
        for kind, value in CppLexer(stripnl=False, ensurenl=False).get_tokens(text)
    )


def _python_code(text: str) -> str:
    """Remove comments and docstrings, but keep the layout of the rest."""
    lines = io.StringIO(text).readlines()  # not splitlines(), which splits at form feeds as well
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spans = [(*t.start, *t.end) for t in tokens if t.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            doc: Any = node.body[0]
            start = _characters(lines[doc.lineno - 1], doc.col_offset)
            end = _characters(lines[doc.end_lineno - 1], doc.end_col_offset)
            spans.append((doc.lineno, start, doc.end_lineno, end))
    for first, start, last, end in sorted(spans, reverse=True):
        lines[first - 1 : last] = [lines[first - 1][:start] + lines[last - 1][end:]]
    return "".join(lines)


def _characters(line: str, count: int) -> int:
    """Return the number of characters in the first ``count`` bytes of a line."""
    return len(line.encode()[:count].decode())
