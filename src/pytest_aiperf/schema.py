"""Convert frozen dataclasses to JSON values and back; their fields and types are the schema."""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")


def to_json(value: object) -> Any:
    """Convert a dataclass to built-in types that both strict JSON and execnet accept."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    return value


def from_json(kind: type[T], value: object, where: str = "") -> T:
    """Build a dataclass from JSON values; a ValueError names the field that does not fit.

    Half of a surrogate pair, which JSON can hold and no file can, becomes "?".
    """
    return typing.cast("T", _read(kind, value, where or kind.__name__))


def _read(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if kind is Any:
        return value
    if kind is str and isinstance(value, str):
        return value.encode(errors="replace").decode()
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _read(next(a for a in arguments if a is not type(None)), value, where)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(
                f"{where}: {_cut(value)} is not one of {', '.join(map(repr, arguments))}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{where}: a list is needed, not {_cut(value)}")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_read(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
        if len(value) != len(arguments):
            raise ValueError(f"{where}: {len(arguments)} values are needed, not {len(value)}")
        return tuple(
            _read(a, v, f"{where}[{i}]")
            for i, (a, v) in enumerate(zip(arguments, value, strict=True))
        )
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: a mapping is needed, not {_cut(value)}")
        return {
            _read(str, k, where): _read(arguments[1], v, f"{where}.{k}") for k, v in value.items()
        }
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"{where}: {_cut(value)} is not one of {', '.join(kind)}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{where}: {_cut(value)} is too large") from None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}: {kind.__name__} is needed, not {_cut(value)}")
    return value


def _cut(value: object, text: Callable[[object], str] = repr) -> str:
    """Format a value in at most 80 characters."""
    return shown if len(shown := text(value)) <= 80 else f"{shown[:77]}..."


_hints = functools.cache(typing.get_type_hints)


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: a mapping is needed, not {_cut(value)}")
    hints = _hints(kind)
    unknown = sorted(set(map(str, value)) - set(hints))
    if unknown:
        names = _cut(", ".join(unknown), str)
        raise ValueError(f"{where}: unknown {names} (known: {', '.join(hints)})")
    for f in dataclasses.fields(kind):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in value:
            raise ValueError(f"{where}: {f.name} is missing")
    return kind(**{name: _read(hints[name], v, f"{where}.{name}") for name, v in value.items()})
