"""Describes what a call does to the objects among its arguments, other than changing values.

Other code that holds such an object notices whether an item was updated in place or replaced,
whether a list now holds the inputs' own rows, and whether a buffer can still be written or resized.
"""

import array
import collections
import contextlib
import io
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import contents, stored, tensors
from .tensors import Args

_PLAIN = frozenset(map(id, (bool, int, float, complex, str, bytes, type(None))))
_RESIZABLE = (bytearray, array.array, io.BytesIO)
_OTHERS = (set, *_RESIZABLE)
"""Types that can be changed in place, other than arrays, lists, queues, dicts and objects."""
Found = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class State:
    """State of the arguments' objects after a call, without their values."""

    repeats: int  #: How often objects appear again in the arguments that the baseline changes.
    borrowed: int  #: How many of their objects belong to the other arguments.
    stale: frozenset[str]
    """Paths that hold a new object while the old object has other contents than the new one."""
    read_only: frozenset[str]  #: Paths of arrays that cannot be written.
    differentiable: frozenset[str]  #: Paths of tensors that require grad.
    hooked: frozenset[str]  #: Paths of tensors with hooks for autograd.
    locked: frozenset[str]  #: Paths of buffers that cannot be resized, because others view them.
    moved: frozenset[str]  #: Paths of arrays that have other memory than before the call.


class Originals:
    """The objects in the arguments that the baseline changes, before a call."""

    def __init__(self, args: Args, changed: Collection[int]) -> None:
        self._changed = changed  # positions of these arguments
        self._objects = _mutable({f"args[{i}]": args[i] for i in changed})
        arrays = ((p, x) for p, x in tensors.leaves(args).items() if tensors.backend_of(x))
        self._memory = [(path, x, tensors.view(x)) for path, x in arrays]

    def state_after(self, args: Args, results: Iterable[Any] = ()) -> State:
        """Compare with the arguments after the call, which has returned these arrays."""
        spans = tensors.joined(map(tensors.span, results))
        named = {f"args[{i}]": arg for i, arg in enumerate(args)}
        mine = {f"args[{i}]" for i in self._changed}
        found = _mutable({path: arg for path, arg in named.items() if path in mine})
        others = _mutable({path: arg for path, arg in named.items() if path not in mine})
        now = dict(found)
        return State(
            *_repeated_and_borrowed(found, others),
            frozenset(
                path
                for path, old in self._objects
                if now.get(path, old) is not old and not _have_same_contents(old, now[path])
            ),
            frozenset(path for path, x in (*found, *others) if tensors.is_read_only(x)),
            frozenset(path for path, x in (*found, *others) if tensors.requires_grad(x)),
            frozenset(path for path, x in (*found, *others) if tensors.has_hooks(x)),
            frozenset(path for path, x in (*found, *others) if _is_locked(x, spans)),
            frozenset(path for path, x, view in self._memory if tensors.view(x) != view),
        )


def _mutable(named: dict[str, Any]) -> Found:
    """Return the objects in values that can be changed in place, by path; repeated ones as well."""
    found: Found = []
    for path, value in named.items():
        _add(value, path, found)
    return found


def _add(value: Any, path: str, found: Found) -> None:
    kind = type(value)
    if id(kind) in _PLAIN:
        return
    if (items := _sequence(value)) is not None:
        if stored.is_one_of(kind, (list, collections.deque)):
            found.append((path, value))
        if not {*map(id, map(type, items))} <= _PLAIN:  # as fast as an array's elements
            for i, item in enumerate(items):
                _add(item, f"{path}[{i}]", found)
        return
    is_container = issubclass(kind, (list, dict)) or stored.is_open_dataclass(value)
    is_leaf = stored.is_one_of(kind, _OTHERS) or tensors.backend_of(value)
    if is_container or is_leaf or stored.is_open_object(value):
        found.append((path, value))
    for suffix, item in (tensors.children(value) or {}).items():
        _add(item, path + suffix, found)


def _sequence(value: Any) -> Iterable[Any] | None:
    """Return the items of a list, a tuple, a queue or an array of objects; None for others."""
    kind, numpy = type(value), sys.modules.get("numpy")
    items: Iterable[Any] | None = None
    if stored.is_one_of(kind, (list, tuple, collections.deque)):
        items = value
    elif numpy and kind is numpy.ndarray and value.dtype.hasobject:
        items = value.ravel().tolist()
    return items


def _repeated_and_borrowed(found: Found, others: Found) -> tuple[int, int]:
    own = [id(x) for _, x in found if not tensors.backend_of(x)]
    borrowed = len({*own} & {id(x) for _, x in others})
    # arrays are compared by their memory, because an item may be a view
    spans = tensors.joined(tensors.span(x) for _, x in others if tensors.backend_of(x))
    views = sum(tensors.overlaps(x, spans) for _, x in found if tensors.backend_of(x))
    return len(own) - len({*own}), borrowed + views


def _have_same_contents(old: Any, new: Any) -> bool:
    return not tensors.changed(tensors.fingerprint((old,)), (new,)) and (
        contents.read(old).exact == contents.read(new).exact
    )


def _is_locked(value: Any, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a buffer cannot be resized although no result lies in it; ``spans`` are the results'.

    The buffer has its own size again afterwards.
    """
    kind = type(value)
    if not stored.is_one_of(kind, _RESIZABLE):
        return False
    try:
        if kind is io.BytesIO:
            with contextlib.suppress(ValueError):  # it is closed
                value.truncate(len(value.getvalue()))
        elif value:
            value.append(value[0])
            value.pop()
    except BufferError:
        # not earlier: viewing a BytesIO without other views would move its bytes
        array = tensors.as_buffer(value.getbuffer() if kind is io.BytesIO else value)
        return array is None or not tensors.overlaps(array, spans)
    return False
