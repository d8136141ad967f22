"""A claim's own words: its explanation and the code of its arms, read from the test's file."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.model import ARMS

from .excerpt import excerpt, together

LONGEST: Final = 140
"""An arm's code is clipped after this many lines."""


@dataclass(frozen=True, slots=True)
class Code:
    """A piece of a file, in its language (``python`` or ``cuda``)."""

    text: str
    language: str
    where: str


@dataclass(frozen=True, slots=True)
class Source:
    """What a claim's file says of it; all of it empty where the file cannot be found."""

    explanation: tuple[str, ...] = ()
    rungs: tuple[str, ...] = ()
    arms: Mapping[str, tuple[Code, ...]] = field(default_factory=dict)


@functools.lru_cache(maxsize=2048)
def source(nodeid: str, root: Path) -> Source:
    """Read what the file below ``root`` says; files that moved or changed say less, never wrong."""
    path, _, name = nodeid.partition("::")
    module = _module(root / path, root)
    if module is None:
        return Source()
    lines = (ast.get_docstring(module.tree) or "").partition("\n")[2].strip()
    explanation = tuple(" ".join(part.split()) for part in re.split(r"\n\s*\n", lines) if part)
    test, _, parameter = name.rpartition("::")[2].partition("[")
    function = module.defined.get(test)
    if not isinstance(function, ast.FunctionDef):
        return Source(explanation)
    reader = _Reader(module, function, parameter.removesuffix("]"))
    return Source(explanation, reader.rungs, reader.arms())


@dataclass(frozen=True, slots=True)
class _Module:
    path: Path
    root: Path
    text: str
    tree: ast.Module
    defined: dict[str, ast.stmt] = field(default_factory=dict)
    values: dict[str, ast.expr] = field(default_factory=dict)
    imported: dict[str, tuple[Path, str]] = field(default_factory=dict)

    def note(self, node: ast.stmt) -> None:
        """Remember what a statement defines or imports."""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.defined[node.name] = node
        elif isinstance(node, ast.Assign):
            for name, value in _bound(node):
                self.defined[name], self.values[name] = node, value
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            source = getattr(node, "module", None) or ""
            for alias in node.names:
                file = Path(*(source or alias.name).split("."))
                self.imported[alias.asname or alias.name] = (file, alias.name if source else "")

    @property
    def where(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    def lines(self, node: ast.stmt) -> str:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(d.lineno for d in decorators)])
        return "\n".join(self.text.splitlines()[first - 1 : node.end_lineno])


@functools.lru_cache(maxsize=512)
def _module(path: Path, root: Path) -> _Module | None:
    text = _text(path, root, ".py")
    try:
        tree = ast.parse(text) if text is not None else None
    except (SyntaxError, ValueError, RecursionError):
        tree = None
    if text is None or tree is None:
        return None
    module = _Module(path, root, text, tree)
    for node in tree.body:
        module.note(node)
    return module


def _text(path: Path, root: Path, suffix: str) -> str | None:
    """Read a source file; what lies outside the root is no source, whatever a record says."""
    try:
        inside = path.resolve().is_relative_to(root.resolve())
        return path.read_text(encoding="utf-8") if inside and path.suffix == suffix else None
    except (OSError, ValueError, RuntimeError):
        return None


def _bound(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Name):
            yield target.id, node.value
        elif isinstance(target, ast.Tuple):
            whole = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(target.elts)
            values = node.value.elts if isinstance(node.value, ast.Tuple) and whole else []
            for one, value in zip(target.elts, values or [node.value] * 99, strict=False):
                if isinstance(one, ast.Name):
                    yield one.id, value


class _Reader:
    """One claim's test function with its parameters bound."""

    def __init__(self, module: _Module, test: ast.FunctionDef, parameter: str) -> None:
        self.module = module
        self.test = test
        self.local = dict(
            pair for n in ast.walk(test) if isinstance(n, ast.Assign) for pair in _bound(n)
        )
        self.inner = {n.name: n for n in test.body if isinstance(n, ast.FunctionDef)}
        self.rungs, self.bound = self._parameters(parameter)
        self.local |= self.bound

    def _parameters(self, parameter: str) -> tuple[tuple[str, ...], dict[str, ast.expr]]:
        """Find the rungs in their order, and what this claim's own are bound to."""
        found = [
            (names, self._sets(d.args[1]))
            for d in self.test.decorator_list
            if isinstance(d, ast.Call) and len(d.args) > 1
            if ast.unparse(d.func).endswith("parametrize") and (names := self.constant(d.args[0]))
        ]
        if len(found) != 1:  # ids of several are joined: which part is whose cannot be said
            return (), {}
        names, sets = found[0]
        ids = tuple(one for one, _ in sets)
        chosen = dict(sets).get(parameter)
        each = [name.strip() for name in names.split(",")]
        if chosen is None or (len(each) > 1 and len(chosen) != len(each)):
            return ids, {}
        return ids, dict(zip(each, chosen, strict=False))

    def _sets(self, node: ast.expr) -> list[tuple[str, list[ast.expr]]]:
        node = self.resolve(node)
        elements = list(getattr(node, "elts", getattr(node, "keys", [])))
        sets = []
        for element in filter(None, elements):
            values, said = [element], None
            if isinstance(element, ast.Call) and ast.unparse(element.func).endswith("param"):
                values = element.args
                said = next((k.value for k in element.keywords if k.arg == "id"), None)
            elif isinstance(element, (ast.Tuple, ast.List)):
                values = element.elts
            ids = [self.constant(v) or "?" for v in ([said] if said else values)]
            sets.append(("-".join(ids), values))
        return sets

    def resolve(self, node: ast.expr, depth: int = 0) -> ast.expr:
        """Follow names and look-ups in dicts to the expression that they stand for."""
        if depth > 8:
            return node
        if isinstance(node, ast.Name):
            value = self.local.get(node.id, self.module.values.get(node.id))
            return node if value is None else self.resolve(value, depth + 1)
        if isinstance(node, ast.Subscript):
            table, key = self.resolve(node.value, depth + 1), self.constant(node.slice)
            if isinstance(table, ast.Dict) and key is not None:
                for name, value in zip(table.keys, table.values, strict=True):
                    if name is not None and self.constant(name) == key:
                        return self.resolve(value, depth + 1)
            if isinstance(table, (ast.List, ast.Tuple)) and str(key).isdigit():
                return self.resolve(table.elts[int(str(key)) % len(table.elts)], depth + 1)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and node.args[1:]:
            attribute = self.constant(node.args[1])
            return ast.Attribute(node.args[0], attribute) if attribute else node
        return node

    def constant(self, node: ast.expr) -> str | None:
        """Work out what a name or an index stands for, without running anything."""
        try:
            found = self._value(node)
        except (LookupError, TypeError, ValueError):
            return None
        return str(found) if isinstance(found, (str, int, float)) else None

    def _value(self, node: ast.expr) -> Any:  # noqa: C901, PLR0911 (one dispatch over types)
        node = self.resolve(node)
        match node:
            case ast.Constant(value):
                return value
            case ast.List(elements) | ast.Tuple(elements):
                return [self._value(one) for one in elements]
            case ast.Dict(keys):
                return [self._value(one) for one in keys if one is not None]
            case ast.Subscript(several, index):
                return self._value(several)[self._value(index)]
            case ast.BinOp(left, ast.Add(), right):
                return self._value(left) + self._value(right)
            case ast.BinOp(left, ast.Sub(), right):
                return self._value(left) - self._value(right)
            case ast.UnaryOp(ast.USub(), operand):
                return -self._value(operand)
            case ast.Call(ast.Attribute(several, "index"), [one]):
                return self._value(several).index(self._value(one))
            case ast.Call(ast.Name("list" | "tuple"), [several]):
                return self._value(several)
            case ast.FormattedValue(inner):
                return str(self._value(inner))
            case ast.JoinedStr(parts):
                return "".join(str(self._value(part)) for part in parts)
        raise ValueError(ast.unparse(node))

    def arms(self) -> dict[str, tuple[Code, ...]]:
        call = next(
            (
                n
                for n in ast.walk(self.test)
                if isinstance(n, ast.Call) and ast.unparse(n.func) == "compare"
            ),
            None,
        )
        given = {k.arg: k.value for k in call.keywords} if call else {}
        found = {arm: self._arm(given[arm]) for arm in ARMS if arm in given}
        return {arm: code for arm, code in found.items() if code}

    def _arm(self, node: ast.expr) -> tuple[Code, ...]:
        launcher = self._launcher(node)
        if launcher is not None:
            return launcher
        node = self.resolve(node)
        names = self._names(node)
        head = ""
        if not _dotted(node):
            head = _dedent(ast.get_source_segment(self.module.text, node) or "")
            said = [f"{n} = {ast.unparse(v)}" for n, v in self.bound.items() if n in names]
            head = "\n".join([*(f"# {one}" for one in said), head])
        inner = [self.inner[name] for name in names if name in self.inner]
        inner.sort(key=lambda function: function.lineno)
        made = [textwrap.dedent(self.module.lines(function)) for function in inner]
        own = "\n\n".join(filter(None, [head, *made, _definitions(self.module, names)]))
        codes = [Code(own, "python", self.module.where)] if own else []
        codes += filter(None, [_imported(self.module, name) for name in names])
        codes += self._called(node, inner)
        return tuple(dict.fromkeys(clip(code) for code in codes))

    def _called(self, arm: ast.expr, inner: Sequence[ast.FunctionDef]) -> Iterator[Code]:
        """Find launchers that an arm in Python calls, named there or handed to its maker."""
        handed = [a for n in ast.walk(arm) if isinstance(n, ast.Call) for a in n.args]
        for node in (one for part in (arm, *inner) for one in ast.walk(part)):
            if isinstance(node, ast.Name) and node.id in self.local:
                yield from self._launcher(node) or ()
            if isinstance(node, ast.Subscript):
                keys = [node.slice] if self.constant(node.slice) else handed
                for key in keys:
                    yield from self._launcher(ast.Subscript(node.value, key)) or ()

    def _names(self, node: ast.expr) -> list[str]:
        """Name what an expression uses, through the test's own variables and functions."""
        found: dict[str, None] = {}
        waiting: list[ast.AST] = [node]
        while waiting:
            for one in ast.walk(waiting.pop()):
                name = _dotted(self.resolve(one) if isinstance(one, ast.Call) else one)
                if name and name not in found:
                    found[name] = None
                    waiting += filter(None, [self.local.get(name), self.inner.get(name)])
        return list(found)

    def _launcher(self, node: ast.expr) -> tuple[Code, ...] | None:
        node = self.resolve(node)
        if not isinstance(node, ast.Subscript):
            return None
        build, name = self.resolve(node.value), self.constant(node.slice)
        if not isinstance(build, ast.Call) or ast.unparse(build.func) != "nvcc":
            return None
        file = self.constant(build.args[0]) if build.args else None
        for folder in (self.module.path.parent, self.module.root / "kernels"):
            path = folder / str(file)
            text = _text(path, self.module.root, ".cu")
            part = excerpt(text, name) if text is not None and name else None
            if part:
                where = path.relative_to(self.module.root).as_posix()
                return (clip(Code(part, "cuda", where)),)
        return None


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""


def _definitions(module: _Module, names: Sequence[str]) -> str:
    """Collect the definitions that names need, and those that these need, in the file's order."""
    found: dict[int, ast.stmt] = {}
    waiting = list(names)
    while waiting:
        node = module.defined.get(waiting.pop())
        if node is not None and node.lineno not in found:
            found[node.lineno] = node
            waiting += [name for one in ast.walk(node) if (name := _dotted(one))]
    return together([module.lines(found[line]) for line in sorted(found)])


def _imported(module: _Module, name: str) -> Code | None:
    first, _, attribute = name.partition(".")
    file, original = module.imported.get(first, (None, ""))
    if file is None:
        return None
    tries = [(file, original), (file / original, attribute)] if original else [(file, attribute)]
    for path, what in tries:
        for folder in (module.root, module.path.parent):
            other = _module(folder / path.with_suffix(".py"), module.root)
            if other and what and (text := _definitions(other, [what])):
                return Code(text, "python", other.where)
    return None


def _dedent(text: str) -> str:
    """Shift the lines after an expression's first to where they would stand on their own."""
    first, *rest = text.split("\n")
    indents = [len(line) - len(line.lstrip()) for line in rest if line.strip()]
    cut = min(indents, default=0)
    if rest and rest[-1].lstrip()[:1] not in (")", "]", "}"):
        cut = max(cut - 4, 0)
    return "\n".join([first, *(line[cut:] for line in rest)])


def clip(code: Code) -> Code:
    """Leave out what is too long to be read beside something else, and say so."""
    lines = code.text.splitlines()
    if len(lines) <= LONGEST:
        return code
    mark = "//" if code.language == "cuda" else "#"
    lines[LONGEST:] = [f"{mark} ... {len(lines) - LONGEST} more lines"]
    return Code("\n".join(lines), code.language, code.where)
