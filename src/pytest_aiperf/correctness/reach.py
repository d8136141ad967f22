"""Finds the memory that arguments reach through objects of any kind, and runs none of their code.

A result may be a view of memory in an attribute, a queue, a closure or a file in memory. For its
reader, that is a view of the inputs just like a view of an array argument.
"""

import contextlib
import ctypes
import functools
import io
import math
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import stored, tensors
from .tensors import Args

MAX_OBJECTS = 2_000_000  #: Most objects that are searched, which takes a second.
MIN_BYTES = 64  #: Smallest view that counts: copying fewer bytes costs nothing.
_ATOMS = (bool, int, float, complex, str, type(None), range, slice)
_CODE = (
    *(type, types.ModuleType, types.CodeType, types.FrameType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType),
)
_IGNORED = frozenset(map(id, (*_ATOMS, *_CODE)))
_C_DATA: Any = ctypes.Array.__base__  # the base of all types of C
Spans = list[tuple[int, int]]


class Hidden:
    """The memory that a call's arguments reach; it is searched once a result has an array."""

    def __init__(self, args: Args, make: Callable[[], Args]) -> None:
        self._args, self._make = args, make
        self.is_cut = False  #: Whether there were more than MAX_OBJECTS objects.

    @functools.cached_property
    def _memory(self) -> "_Memory":
        memory = _reached(self._args)
        self.is_cut = memory.is_cut
        return memory

    @functools.cached_property
    def _joined(self) -> Sequence[tuple[int, int]]:
        return tensors.joined((*self._memory.spans, *map(tensors.span, self._memory.on_gpus)))

    def has_memory_of(self, array: Any) -> bool:
        """Whether an array lies in memory that the arguments reach."""
        return tensors.overlaps(array, self._joined)

    def is_viewed_by(self, array: Any) -> bool:
        """Whether an array lies in memory of the inputs that the call has not written.

        If the call has written there, for example into a workspace, the array is a result of its
        own. So the bytes are compared with those in new inputs of the same seed.
        """
        if not self.has_memory_of(array):
            return False
        if not tensors.on_host(array):
            return self._is_unwritten_on_gpu(array)
        low, high = tensors.span(array)
        data = ctypes.string_at(low, high - low)
        if len(data) < MIN_BYTES or not any(data):
            return False
        spans = self._memory.spans
        places = {(low - start, end - start) for start, end in spans if start <= low < end}
        fresh = self._make()
        return any(
            ctypes.string_at(start + offset, len(data)) == data
            for start, end in _reached(fresh).spans
            for offset, size in places
            if end - start == size >= offset + len(data)
        )

    def _is_unwritten_on_gpu(self, array: Any) -> bool:
        """Whether an array on a GPU lies in an argument's array that the call has not changed."""
        if array.nbytes < MIN_BYTES or not bool((tensors.as_int_bits(array) != 0).any()):
            return False
        fresh = self._make()  # kept until its arrays have been compared
        return any(
            tensors.overlaps(array, [tensors.span(old)])
            and tensors.same_identity(tensors.identify(old), tensors.identify(new))
            for old, new in zip(self._memory.on_gpus, _reached(fresh).on_gpus, strict=False)
        )


@dataclass(slots=True)
class _Memory:
    """The memory that arguments reach."""

    spans: Spans = field(default_factory=list)  #: Address ranges on the host.
    on_gpus: list[Any] = field(default_factory=list)  #: Arrays on GPUs.
    is_cut: bool = False  #: Whether the search was cut short.


def _reached(args: Args) -> _Memory:
    memory = _Memory()
    modules = [m for m in tuple(sys.modules.values()) if type(m) is types.ModuleType]
    seen = {id(vars(module)) for module in modules}  # modules lead to all objects there are
    level: list[Any] = list(args)
    while level:
        new = {id(value): value for value in level}
        level = [value for key, value in new.items() if key not in seen]
        seen.update(new)
        if len(seen) > MAX_OBJECTS:
            memory.is_cut = True
            break
        level = [item for value in level for item in _inside(value, memory)]
    return memory


def _inside(value: Any, memory: _Memory) -> Iterable[Any]:
    """Add the memory of an object itself; return the objects that it refers to."""
    kind = type(value)
    if id(kind) in _IGNORED or issubclass(kind, type) or tensors.is_number_list(value):
        return ()
    with contextlib.suppress(ValueError, BufferError):  # it is empty, closed or released
        if tensors.backend_of(value) and not tensors.on_host(value):
            memory.on_gpus.append(value)
        else:
            memory.spans.extend(_own(value, kind))
    if kind is types.FunctionType:  # without its globals, which lead to all of a module
        parts = (value.__closure__, value.__defaults__, value.__kwdefaults__)
        return (*(part for part in parts if part), *stored.attributes(value).values())
    if kind is sys.modules["numpy"].ndarray:
        return value.ravel().tolist() if value.dtype.hasobject else ()
    return [x for x in stored.referents(value) if id(type(x)) not in _IGNORED]


def _own(value: Any, kind: type) -> Spans:
    import numpy as np

    if tensors.backend_of(value):
        return [tensors.span(value)]
    if issubclass(kind, np.ndarray):  # of texts, records or a class of its own
        value = np.ndarray.view(value, np.ndarray)
    elif issubclass(kind, _C_DATA):
        start = ctypes.addressof(value)
        return [(start, start + ctypes.sizeof(value))]
    elif issubclass(kind, io.BytesIO):
        # a view makes BytesIO copy its bytes: a call may have viewed either copy
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
