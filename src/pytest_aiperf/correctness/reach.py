"""Finds the memory that arguments reach through objects of any kind, and runs none of their code.

A result may be a view of memory in an attribute, a queue, a closure or a file in memory. To whoever
reads it, it is a view of the inputs as much as one of an array that is an argument itself.
"""

import contextlib
import ctypes
import functools
import io
import math
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import stored, tensors
from .tensors import Args

MAX_OBJECTS = 2_000_000  #: Objects that are looked at: as many take a second.
MIN_BYTES = 64  #: Bytes of a view that is looked at: a copy of fewer costs nothing.
_ATOMS = (bool, int, float, complex, str, type(None), range, slice)
_CODE = (
    *(type, types.ModuleType, types.CodeType, types.FrameType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType),
)
_IGNORED = frozenset(map(id, (*_ATOMS, *_CODE)))
_C_DATA: Any = ctypes.Array.__base__  # the base of all types of C
Spans = list[tuple[int, int]]


class Hidden:
    """The host memory that a call's arguments reach, looked for once a result has an array."""

    def __init__(self, args: Args, make: Callable[[], Args]) -> None:
        self._args, self._make = args, make
        self.is_cut = False  #: Whether there were more objects than are looked at.

    @functools.cached_property
    def _spans(self) -> Spans:
        spans, self.is_cut = _memory(self._args)
        return spans

    @functools.cached_property
    def _joined(self) -> Sequence[tuple[int, int]]:
        return tensors.joined(self._spans)

    def has_memory_of(self, array: Any) -> bool:
        """Whether an array lies in memory that the arguments reach."""
        return tensors.on_host(array) and tensors.overlaps(array, self._joined)

    def is_viewed_by(self, array: Any) -> bool:
        """Whether an array lies in memory of the inputs that the call has not written.

        What the call has written there, as into a workspace, is a result of its own. So the bytes
        are compared with those in new inputs of the same seed.
        """
        if not self.has_memory_of(array):
            return False
        low, high = tensors.span(array)
        data = ctypes.string_at(low, high - low)
        if len(data) < MIN_BYTES or not any(data):
            return False
        places = {(low - start, end - start) for start, end in self._spans if start <= low < end}
        fresh = self._make()
        return any(
            ctypes.string_at(start + offset, len(data)) == data
            for start, end in _memory(fresh)[0]
            for offset, size in places
            if end - start == size >= offset + len(data)
        )


def _memory(args: Args) -> tuple[Spans, bool]:
    """Return where memory is that the arguments reach, and whether the search was cut short."""
    spans: Spans = []
    modules = [m for m in tuple(sys.modules.values()) if type(m) is types.ModuleType]
    seen = {id(vars(module)) for module in modules}  # they lead to all that there is
    level: list[Any] = list(args)
    while level:
        new = {id(value): value for value in level}
        level = [new[key] for key in new.keys() - seen]
        seen.update(new)
        if len(seen) > MAX_OBJECTS:
            return spans, True
        level = [item for value in level for item in _inside(value, spans)]
    return spans, False


def _inside(value: Any, spans: Spans) -> Iterable[Any]:
    """Add the memory of an object itself; return the objects that it refers to."""
    kind = type(value)
    if id(kind) in _IGNORED or issubclass(kind, type) or tensors.is_number_list(value):
        return ()
    with contextlib.suppress(ValueError, BufferError):  # it is empty, closed or released
        spans.extend(_own(value, kind))
    if kind is types.FunctionType:  # without its globals, which lead to all of a module
        parts = (value.__closure__, value.__defaults__, value.__kwdefaults__)
        return (*(part for part in parts if part), *stored.attributes(value).values())
    if kind is sys.modules["numpy"].ndarray:
        return value.ravel().tolist() if value.dtype.hasobject else ()
    return [x for x in stored.referents(value) if id(type(x)) not in _IGNORED]


def _own(value: Any, kind: type) -> Spans:
    import numpy as np

    if tensors.backend_of(value):
        return [tensors.span(value)] if tensors.on_host(value) else []
    if issubclass(kind, np.ndarray):  # of texts, records or a class of its own
        value = np.ndarray.view(value, np.ndarray)
    elif issubclass(kind, _C_DATA):
        start = ctypes.addressof(value)
        return [(start, start + ctypes.sizeof(value))]
    elif issubclass(kind, io.BytesIO):
        # its bytes are copied once they are viewed: both may be what a call has viewed
        return [*_of_buffer(io.BytesIO.getvalue(value)), *_of_buffer(io.BytesIO.getbuffer(value))]
    elif not stored.is_one_of(kind, (bytes, *stored.BUFFERS)):
        return []
    return _of_buffer(value)


def _of_buffer(value: Any) -> Spans:
    import numpy as np

    array = value if type(value) is np.ndarray else np.asarray(memoryview(value))
    reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    if not math.prod(array.shape):
        return []
    low = array.ctypes.data + sum(min(0, r) for r in reach)
    return [(low, array.ctypes.data + sum(max(0, r) for r in reach) + array.itemsize)]
