"""Finds the source code of a claim's arms, so that reports can show it."""

import ast
import contextlib
import functools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from pytest_aiperf.build.launcher import Kernels, Launcher
from pytest_aiperf.model import Prepared, Source

from . import cuda_source

_PLUGIN: Final = Path(__file__).parents[1]

_Code = ast.stmt | ast.expr


def locate(arms: Mapping[str, object], root: Path) -> dict[str, tuple[Source, ...]]:
    """Find the lines that define each arm, and whatever they use, in files below ``root``.

    A nested function is shown with the outermost function around it. A launcher is shown with the
    lines of the .cu file that it needs. An arm without lines below ``root`` is left out.
    """
    located = {}
    for arm, value in arms.items():
        search = _Search(root.resolve())
        search.visit(value)
        if sources := tuple(search.sources()):
            located[arm] = sources
    return located


class _File:
    """A Python file and what its statements define."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_bytes())
        self.classes = {n.name: n for n in self.tree.body if isinstance(n, ast.ClassDef)}
        self.assigned: dict[str, ast.stmt] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                self.imported |= {a.asname or a.name: (module, a.name) for a in node.names}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.assigned |= {name: node for t in targets for name in _Used(t).names}

    def definition(self, function: FunctionType) -> _Code | None:
        """Return the outermost non-test function around a function, or its lambda."""
        line = function.__code__.co_firstlineno
        starts = {place[::2] for place in function.__code__.co_positions()}
        for node in ast.walk(self.tree):  # outer nodes come first
            if isinstance(
                node, (ast.FunctionDef, ast.AsyncFunctionDef)
            ) and not node.name.startswith("test"):
                first, last = _span(node)
                if first <= line <= last:
                    return node
            elif isinstance(node, ast.Lambda) and node.lineno == line:
                body = node.body  # the body's position tells apart lambdas on one line
                if (body.lineno, body.col_offset) in starts:
                    return node
        return None


class _Used:
    """The names, attributes and strings in a piece of code."""

    def __init__(self, node: ast.AST) -> None:
        nodes = list(ast.walk(node))
        self.names = {n.id for n in nodes if isinstance(n, ast.Name)}
        self.attributes = frozenset(n.attr for n in nodes if isinstance(n, ast.Attribute))
        self.strings = {str(n.value) for n in nodes if isinstance(n, ast.Constant)}


class _Search:
    """The lines that one arm needs, by file."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[int, object] = {}  # by id; a value held here keeps its id
        self._files: dict[Path, _File | None] = {}
        self._named: set[tuple[Path, str, frozenset[str]]] = set()
        self._spans: dict[Path, set[tuple[int, int]]] = {}

    def sources(self) -> Iterator[Source]:
        for path, spans in self._spans.items():
            # not splitlines(), which splits at form feeds as well
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            for first, last in _merged(spans, lines):
                yield Source.of(path.relative_to(self._root).as_posix(), first, last, lines)

    def visit(self, value: Any, strings: Collection[str] = ()) -> None:
        """Add the lines of a callable; of Kernels or a dict, only of the keys in ``strings``."""
        value = _unwrapped(value)
        if isinstance(value, Kernels):
            for name in {*value} & {*strings}:
                self._add_launcher(value.source, name)
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Launcher):
            self._add_launcher(value.source, value.name)
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, (functools.partial, tuple, list, dict)):
            for part in _parts(value, strings):
                self.visit(part, strings)
        elif not isinstance(value, ModuleType):
            self._add_class(value if isinstance(value, type) else type(value))

    def _add_launcher(self, source: str, name: str) -> None:
        path = Path(source).resolve()
        if path.is_relative_to(self._root) and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            self._spans.setdefault(path, set()).update(cuda_source.needed(text, name))

    def _add_function(self, function: FunctionType) -> None:
        path = Path(function.__code__.co_filename)
        if (file := self._file(path)) and (node := file.definition(function)):
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            bound = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
            self._add(path, node, function.__globals__, bound)

    def _add_class(self, kind: type) -> None:
        module = sys.modules.get(kind.__module__)
        path = Path(getattr(module, "__file__", None) or "")
        if (file := self._file(path)) and (node := file.classes.get(kind.__name__)):
            self._add(path, node, vars(module), {})

    def _add(
        self, path: Path, node: _Code, namespace: Mapping[str, Any], bound: Mapping[str, Any]
    ) -> None:
        """Add the lines of a definition, and of everything that it names."""
        self._spans.setdefault(path.resolve(), set()).add(_span(node))
        used = _Used(node)
        strings = used.strings | {value for value in bound.values() if isinstance(value, str)}
        for name in sorted(used.names):
            if name in bound:
                self.visit(bound[name], strings)
            else:
                self._add_name(path, name, namespace, used.attributes)

    def _add_name(
        self, path: Path, name: str, namespace: Mapping[str, Any], attributes: frozenset[str]
    ) -> None:
        """Add a global name's definition; if it names a module, add the module's ``attributes``."""
        file = self._file(path)
        if file is None or name not in namespace or (path, name, attributes) in self._named:
            return
        self._named.add((path, name, attributes))
        value = namespace[name]
        module, original = file.imported.get(name, ("", ""))
        is_module = isinstance(value, ModuleType)
        if source := value if is_module else sys.modules.get(module):
            inner = Path(getattr(source, "__file__", None) or "")
            for part in sorted(attributes) if is_module else [original]:
                self._add_name(inner, part, vars(source), attributes)
        elif name in file.assigned:
            self._add(path, file.assigned[name], namespace, {})
        self.visit(value)

    def _file(self, path: Path) -> _File | None:
        """Read a Python file; None if it is a library's or this plugin's, or cannot be parsed."""
        if path not in self._files:
            self._files[path] = None
            real = path.resolve()
            project = real.suffix == ".py" and real.is_relative_to(self._root)
            library = "site-packages" in real.parts or real.is_relative_to(_PLUGIN)
            if project and not library:
                # somebody may have deleted the file, or be editing it
                with contextlib.suppress(OSError, ValueError, SyntaxError):
                    self._files[path] = _File(real)
        return self._files[path]


def _parts(value: Any, strings: Collection[str]) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return [part for key, part in value.items() if key in strings]
    return [part for part in value if not isinstance(part, (int, float, str))]


def _unwrapped(value: Any) -> Any:
    """Return the function that a prepared arm, a bound method or a compiled function wraps."""
    # getattr would not do: some objects return an attribute for every name
    attributes = getattr(value, "__dict__", {})
    inner: Any = attributes.get("__wrapped__")  # functools.wraps and torch.compile set it
    if isinstance(value, Prepared):
        inner = value.make
    elif isinstance(value, MethodType):
        inner = value.__func__
    elif type(value).__module__.startswith("triton."):
        inner = attributes.get("fn")
    elif type(value).__name__ == "OptimizedModule":  # from torch.compile(module)
        inner = attributes["_modules"]["_orig_mod"]
    return value if inner is None else _unwrapped(inner)


def _span(node: _Code) -> tuple[int, int]:
    """Return the first and last line of a piece of code, decorators included."""
    lines = [n.lineno for n in (node, *getattr(node, "decorator_list", []))]
    return min(lines), node.end_lineno or max(lines)


def _merged(spans: Collection[tuple[int, int]], lines: Sequence[str]) -> list[tuple[int, int]]:
    """Join spans with nothing but blank lines between them."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and not "".join(lines[merged[-1][1] : first - 1]).strip():
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
