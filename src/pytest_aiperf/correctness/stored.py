"""Reads the data that objects store without running code of their classes.

Otherwise an arm could return objects that compute the result only when they are read, after the
clock has stopped: in a property ``__class__`` or ``__dict__``, a descriptor, or the repr of a key.
This module therefore compares types by identity, and reads attributes where objects and classes
store them.
"""

import array
import collections
import contextlib
import contextvars
import dataclasses
import datetime as dt
import decimal
import fractions
import gc
import io
import mmap
import operator
import os
import stat
import sys
import types
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

BUFFERS = (bytearray, memoryview, array.array, mmap.mmap)
"""Types of memory beside arrays that a call may read and write."""
VALUES = (
    *(str, bytes, int, bool, float, complex, range, slice, type(None)),
    *(decimal.Decimal, fractions.Fraction, type(Path())),
    *(dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone),
)
"""Types whose values are equal if their texts are."""
_MRO = type.__dict__["__mro__"].__get__
_VARS = type.__dict__["__dict__"].__get__
HEAP_TYPE = 1 << 9  #: Flag of types that are not part of Python itself.
_KEYS = str, int, float, bool, bytes, type(None)  # types of keys whose repr is Python's own
FILES = (io.BytesIO, io.StringIO)  #: Types of files in memory.
ON_DISK = (io.FileIO, io.BufferedReader, io.BufferedRandom)
HEAD_BYTES = 1 << 20  #: Bytes that are read from the beginning of a file on a disk.
_CLOSED = -1
_CODE = (types.FunctionType, types.ModuleType)


def is_one_of(kind: type, kinds: Iterable[type]) -> bool:
    return id(kind) in map(id, kinds)


def attributes(value: object) -> dict[str, Any]:
    """Return the attributes that an object stores itself, not in its class or in slots."""
    for base in _MRO(type(value)):
        getter = _VARS(base).get("__dict__")
        # a member of a namespace's C structure
        if is_one_of(type(getter), (types.GetSetDescriptorType, types.MemberDescriptorType)):
            return {k: v for k, v in dict.items(getter.__get__(value)) if type(k) is str}
    return {}


def attributes_of_class(kind: type) -> dict[str, Any]:
    return {k: v for k, v in _VARS(kind).items() if type(k) is str}


def bases(kind: type) -> tuple[type, ...]:
    """Return a class and its bases, those of bases included, as Python looks them up."""
    return cast("tuple[type, ...]", _MRO(kind))


def own_member(kind: type, name: str) -> Any:
    """Return the value that a class itself, not one of its bases, stores under a name, or None.

    Descriptors in C belong to classes in C: calling one runs no Python code.
    """
    return _VARS(kind).get(name)


def slots(value: object) -> dict[str, Any]:
    """Return the attributes that an object stores in slots."""
    found: dict[str, Any] = {}
    for base in _MRO(type(value)):
        for name, member in _VARS(base).items():
            if type(member) is types.MemberDescriptorType and base.__flags__ & HEAP_TYPE:
                with contextlib.suppress(AttributeError):  # not set
                    found.setdefault(name, member.__get__(value))
    return found


def referents(value: Any) -> list[Any]:
    """Return the objects that an object of any type refers to, as the garbage collector sees them.

    Unlike the collector, follow weak references, and read context variables.
    """
    etree = sys.modules.get("xml.etree.ElementTree")
    if etree and issubclass(type(value), etree.TreeBuilder):
        return []  # its list of open elements has NULL items: reading them crashes the process
    found = gc.get_referents(value)
    if issubclass(type(value), weakref.ReferenceType):
        found.append(weakref.ReferenceType.__call__(value))
    elif type(value) is contextvars.ContextVar:
        found.append(value.get(None))
    return found


def position(value: Any) -> int | None:
    """Return how far a file or an iterator has been read; None for other objects."""
    kind, numpy = type(value), sys.modules.get("numpy")
    if kind is types.GeneratorType:
        return value.gi_frame.f_lasti if value.gi_frame else _CLOSED
    if is_one_of(kind, (*FILES, *ON_DISK)):
        return _place(value.tell)
    if numpy and kind is numpy.flatiter:
        return int(value.index)
    if numpy and kind is numpy.nditer:
        return _place(lambda: value.iterindex)
    hint = _VARS(kind).get("__length_hint__")
    if type(hint) is types.MethodDescriptorType:  # of an iterator in C
        with contextlib.suppress(TypeError):  # it has no end
            return int(hint(value))
    return None


def _place(read: Callable[[], int]) -> int:
    """Return a position, unless the file or the iterator is closed, or a pipe."""
    try:
        return int(read())
    except (OSError, ValueError):
        return _CLOSED


def head(file: Any) -> bytes:
    """Return the first bytes of a file on a disk, and leave its position as it is."""
    with contextlib.suppress(OSError, ValueError):  # it is closed, or cannot be read
        number = file.fileno()
        if stat.S_ISREG(os.fstat(number).st_mode):
            return os.pread(number, HEAD_BYTES, 0)
    return b""


def fields(value: object) -> dict[str, Any] | None:
    """Return the fields of a dataclass, if it stores all and computes none; None otherwise."""
    if id(type(value)) not in _DECLARED:
        _DECLARED[id(type(value))] = type(value), _declared(type(value))
    _, declared = _DECLARED[id(type(value))]
    if declared is None:
        return None
    own, found = attributes(value), {}
    for name, slot in declared.items():
        if name in own:
            found[name] = own[name]
        elif slot is not None:
            found[name] = slot.__get__(value)
        else:
            return None
    return found


_DECLARED: dict[int, tuple[type, dict[str, Any] | None]] = {}
"""Cache of the fields of each class, see :func:`_declared`. Inspecting the class again for each of
many objects would take most of the time of a walk. If the class changes later, stored values are
read anyway. Keys are ids, because a metaclass may define ``__hash__``; the class is stored as well,
so that no other class gets its id."""


def _declared(kind: type) -> dict[str, Any] | None:
    """Return each field's reader of its slot, or None without a slot; None if this is no dataclass.

    Classes that compute a field, or attributes in general, count as no dataclasses.
    """
    declared = _in_class(kind, "__dataclass_fields__")
    if type(declared) is not dict or not is_one_of(type(kind), (type, ABCMeta)):
        return None
    if not all(type(field) is dataclasses.Field for field in declared.values()):
        return None
    if _in_class(kind, "__getattribute__") is not object.__getattribute__:
        return None
    names = [field.name for field in dataclasses.fields(kind)]
    in_class = {name: _in_class(kind, name) for name in names}
    if property in map(type, in_class.values()):
        return None
    return {n: x if type(x) is types.MemberDescriptorType else None for n, x in in_class.items()}


def is_open_dataclass(value: object) -> bool:
    """Whether an object is of a dataclass whose fields can be assigned."""
    return fields(value) is not None and not _in_class(type(value), "__dataclass_params__").frozen


def is_open_object(value: object) -> bool:
    """Whether an object that is no dataclass has attributes that can be set.

    An object that is compared by its value and has a hash, such as a path, does not count.
    """
    kind = type(value)
    if is_one_of(kind, _CODE) or issubclass(kind, type) or fields(value) is not None:
        return False
    is_value = _in_class(kind, "__eq__") is not object.__eq__
    is_fixed = is_value and _in_class(kind, "__hash__") is not None
    return not is_fixed and bool(attributes(value) or slots(value))


def items(value: dict[Any, Any]) -> list[tuple[str, Any, Any]]:
    """Return label, key and value of each item of a dict, in the order of the labels."""
    labelled = [(_label(key, i), key, item) for i, (key, item) in enumerate(dict.items(value))]
    return sorted(labelled, key=operator.itemgetter(0))


def keys(value: dict[Any, Any]) -> list[Any]:
    """Return the keys of a dict in its order; an OrderedDict keeps one of its own."""
    return list(_base(value).__iter__(value))


def refill(value: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> None:
    """Replace the items of a dict."""
    base, new = _base(value), list(items)
    base.clear(value)
    for key, item in new:
        base.__setitem__(value, key, item)


def _base(value: dict[Any, Any]) -> Any:
    """Return the built-in class whose methods handle all data of a dict, such as its order."""
    is_ordered = issubclass(type(value), collections.OrderedDict)
    return collections.OrderedDict if is_ordered else dict


def text(value: Any) -> str:
    """Return the repr of a value in VALUES, or of a plain container, with integers of any length.

    Python refuses to write integers of more than 4300 decimal digits: those are hexadecimal here.
    """
    try:
        return repr(value)
    except ValueError:
        kind = type(value)
        if kind is int:
            return hex(value)
        if kind is fractions.Fraction:
            parts = [value.numerator, value.denominator]
        elif is_one_of(kind, (range, slice)):
            parts = [value.start, value.stop, value.step]
        else:
            parts = list(value)
        texts = list(map(text, parts))
        if is_one_of(kind, (set, frozenset)):
            texts.sort()  # equal sets may list their items in another order
        return f"{kind.__name__}({', '.join(texts)})"


def _label(key: Any, number: int) -> str:
    return text(key) if is_plain_key(key) else f"key {number}"


def is_plain_key(key: Any) -> bool:
    """Whether the text of a key determines the key."""
    parts = key if type(key) is tuple else (key,)
    return all(is_one_of(type(part), _KEYS) for part in parts)


def _in_class(kind: type, name: str) -> Any:
    """Return the value that a class or its first base with the name stores under it, or None."""
    return next((_VARS(base)[name] for base in _MRO(kind) if name in _VARS(base)), None)
