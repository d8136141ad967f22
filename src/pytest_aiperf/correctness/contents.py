"""Fingerprints what values hold beside arrays and numbers, which are compared element by element.

A call may write into a bytearray, a set or an attribute of an object. Such contents are compared
exactly: an arm must leave there what the baseline leaves.
"""

import collections
import contextlib
import ctypes
import datetime as dt
import decimal
import fractions
import hashlib
import random
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_aiperf.model import Score
from pytest_aiperf.rules import validity

from . import stored, tensors

MAX_OBJECTS = 100_000  #: Objects that are read of one argument; what is beyond is left out.
NUMBER_SIZE = 4
"""What a number counts: 16 different ones as much as a text of 64 characters. Fewer may be sizes
and options."""
SAMPLED_BYTES = 4096  #: Bytes of a buffer that are counted by their values: most may be zeros.
_SEQUENCES = (list, tuple, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_SETS = (set, frozenset)
_TEXTS = (
    *(str, bytes, int, bool, float, complex, range, slice, type(None)),
    *(decimal.Decimal, fractions.Fraction, dt.date, dt.datetime, dt.timedelta),
)
"""Types whose values are equal if their texts are."""
_FLOATS = (float, complex)
_CODE = (types.ModuleType, types.CodeType, types.FrameType)
_C_DATA: Any = ctypes.Array.__base__  # the base of all types of C
_C_SIMPLE: Any = ctypes.c_int.__base__
_C_ADDRESSES, _C_FLOATS = "zZPO", "efdgFD"  # codes of simple types, see also struct


@dataclass(frozen=True, slots=True)
class Contents:
    """Fingerprints of what one value holds beside arrays and numbers."""

    exact: str = ""  #: Of bytes, texts, sets, queues and other values of built-in types.
    objects: str = ""  #: Of the attributes of objects.
    has_floats: bool = False  #: Whether there are floats among the former.
    positions: tuple[int, ...] = ()  #: How far its files and iterators have been read.
    numbers: int = field(default=0, compare=False)  #: A hash of numbers, which others compare.
    size: int = field(default=0, compare=False)
    """Characters and bytes of all that differs from the rest of the value, and of its numbers."""

    @property
    def all(self) -> tuple[str, str, int]:
        """What the value holds beside dense arrays and long lists of numbers."""
        return self.exact, self.objects, self.numbers


def read(value: object) -> Contents:
    """Return the fingerprints of a value; no code of its classes runs."""
    reader = _Reader()
    try:
        reader.read(value, reader.exact, is_compared=True)
        reader.read_objects()
    except RecursionError:  # walk() refuses what contains itself
        return Contents()
    numbers = [x for x in reader.numbers if x == x]  # noqa: PLR0124  NaN has no hash of its own
    return Contents(
        *(reader.exact.hexdigest(), reader.objects.hexdigest(), reader.has_floats),
        tuple(reader.positions),
        hash(tuple(numbers)),
        reader.size + sum(map(len, reader.texts)) + NUMBER_SIZE * len({*numbers}),
    )


class _Reader:
    def __init__(self) -> None:
        self.exact, self.objects = hashlib.blake2b(), hashlib.blake2b()
        self.has_floats = False
        self.seen: dict[int, object] = {}
        self.containers: dict[int, object] = {}  # those that objects store
        self.positions: list[int] = []
        self.numbers: list[Any] = []
        self.texts: set[str | bytes] = set()
        self.size = 0  # of other contents
        self.arrays: dict[int, object] = {}  # those that walk() finds
        self.todo: collections.deque[object] = collections.deque()
        """What objects store, which is read later: a chain of objects may be long."""

    def read_objects(self) -> None:
        while self.todo:
            self.read(self.todo.popleft(), self.objects, is_compared=False)

    def read(self, value: Any, into: Any, *, is_compared: bool) -> None:
        """Add a value to a fingerprint; its arrays and numbers only unless they are compared."""
        kind = type(value)
        if is_compared and id(kind) in tensors.PLAIN_NUMBERS:  # most values in many rows
            self.numbers.append(value)
            return
        if stored.is_one_of(kind, stored.BUFFERS) or _is_c_data(kind):
            with contextlib.suppress(ValueError):  # it is closed or released
                data = memoryview(value)
                codes = _codes(kind) or {data.format.lstrip("<>=@!")}
                is_float = not codes.isdisjoint(_C_FLOATS)
                self.has_floats = self.has_floats or (into is self.exact and is_float)
                self._bytes(data, into)
        elif tensors.is_compared(value):
            self._numbers(value, into, is_compared=is_compared)
        elif stored.is_one_of(kind, _TEXTS):
            self._text(value, into)
            self.texts |= {value} if kind in {str, bytes} else set()
        elif stored.is_one_of(kind, (*_SEQUENCES, *_DICTS, *_SETS)):
            self._container(value, into, is_compared=is_compared)
        elif generator := _generator_state(value):
            self.has_floats = self.has_floats or into is self.exact  # may draw in another order
            self.read(generator, into, is_compared=False)
        elif parts := _parts(value):
            self.read(parts, into, is_compared=False)
        elif not issubclass(kind, (*_CODE, Score)):  # a score is the judged figure
            self._object(value, into, is_compared=is_compared)

    def _numbers(self, value: Any, into: Any, *, is_compared: bool) -> None:
        if not is_compared:
            if id(value) not in self.arrays:  # an object may refer to what is compared
                self._array(value, into)
        elif tensors.backend_of(value):
            self.arrays[id(value)] = value
        elif not tensors.is_number_list(value):
            self.numbers.append(value)
        self._attributes(stored.attributes(value))

    def _container(self, value: Any, into: Any, *, is_compared: bool) -> None:
        kind = type(value)
        if into is self.objects:  # what contains itself is read once
            if id(value) in self.containers:
                return
            self.containers[id(value)] = value
        if stored.is_one_of(kind, _SEQUENCES):
            self._text(len(value), into)
            for item in value:
                # walk() does not look into queues
                self.read(item, into, is_compared=is_compared and kind is not collections.deque)
        elif stored.is_one_of(kind, _DICTS):
            self.numbers += tensors.table(value).get("keys", ())
            labels = {}
            for label, key, item in stored.items(value):
                labels[id(key)] = label
                self._text(label, into)
                self.read(item, into, is_compared=is_compared)
                if not stored.is_plain_key(key):
                    self.todo.append(key)
            if kind is collections.OrderedDict:  # who uses this class, such as a cache, needs it
                self._text([labels.get(id(key)) for key in stored.keys(value)], into)
        else:
            simple = all(stored.is_one_of(type(item), _TEXTS) for item in value)
            texts = map(_text, value) if simple else map(self._item, value)
            self.has_floats = self.has_floats or (
                simple and into is self.exact and any(type(item) in _FLOATS for item in value)
            )
            self._text(sorted(texts), into)
            self.size += NUMBER_SIZE * len(value)

    def _object(self, value: Any, into: Any, *, is_compared: bool) -> None:
        """Add what an object stores. An object that is reached twice counts once."""
        if id(value) in self.seen or len(self.seen) >= MAX_OBJECTS:
            return
        self.seen[id(value)] = value
        if (position := stored.position(value)) is not None:
            self.positions.append(position)
            with contextlib.suppress(ValueError, AttributeError):  # it is closed, or no file
                self._text(value.getvalue(), into)
        if issubclass(type(value), (type, types.FunctionType)):
            self._attributes(_attributes_of_code(value))
            return
        walked = (tensors.children(value) or {}) if is_compared else {}
        for item in walked.values():
            self.read(item, into, is_compared=True)
        torch = sys.modules.get("torch")
        is_module = torch and issubclass(type(value), torch.nn.Module)
        own = stored.attributes(value) | stored.slots(value)
        named = _attributes_of_module(own) if is_module else own
        self._attributes({name: x for name, x in named.items() if f".{name}" not in walked})
        if issubclass(type(value), _C_DATA):
            self._c_fields(value)
        if not is_module and position is None:  # an iterator drops what it has read
            known = {*map(id, own.values()), *map(id, walked.values())}
            self.todo.extend(
                x
                for x in stored.referents(value)
                if id(x) not in known
                and not issubclass(type(x), type)
                and not (type(x) is dict and x.keys() == own.keys())
            )

    def _attributes(self, attributes: Mapping[str, object]) -> None:
        for name, item in sorted(attributes.items()):
            self._text(name, self.objects)
            self.todo.append(item)

    def _c_fields(self, value: Any) -> None:
        """Add the bytes of a structure of C, but for addresses: what they point to is kept."""
        kind = type(value)
        for name, field_kind in _fields(kind):
            if _is_c_data(field_kind):
                start = getattr(kind, name).offset
                data = memoryview(value).cast("B")[start : start + ctypes.sizeof(field_kind)]
                self._bytes(data, self.objects)

    def _item(self, item: object) -> str:
        """Return the fingerprint of an item of a set, which has no order."""
        one = _Reader()
        one.read(item, one.exact, is_compared=False)
        self.todo.extend(one.todo)
        self.has_floats = self.has_floats or one.has_floats
        return one.exact.hexdigest()

    def _text(self, value: object, into: Any) -> None:
        self.has_floats = self.has_floats or (into is self.exact and type(value) in _FLOATS)
        into.update(_text(value).encode("utf-8", "surrogatepass"))

    def _bytes(self, data: memoryview, into: Any) -> None:
        into.update(f"{data.format} {data.shape};".encode())
        is_plain = data.c_contiguous and data.nbytes
        plain = data.cast("B") if is_plain else memoryview(data.tobytes())
        into.update(plain)
        self.numbers += {*plain[:SAMPLED_BYTES]}

    def _array(self, value: Any, into: Any) -> None:
        if not tensors.as_array(value):  # an integer of more than 64 bits, or longdouble
            self._text(value, into)
            return
        kind, sums = tensors.identify(value)
        is_float = not tensors.is_exact(tensors.as_array(value)[0])
        self.has_floats = self.has_floats or (into is self.exact and is_float)
        shown = sums.tolist() if hasattr(sums, "tolist") else sums  # the text of a single number
        into.update(f"{kind} {shown};".encode())
        if tensors.backend_of(value):
            self.numbers += tensors.sample(value, 0)
        else:
            self.numbers += value if tensors.is_number_list(value) else [value]


def _text(value: object) -> str:
    return f"{type(value).__name__} {value!r};"


def _attributes_of_code(value: Any) -> dict[str, object]:
    """Return what a function or a class keeps; {} if a library defines it."""
    if type(value) is types.FunctionType:
        kept = (value.__closure__, value.__defaults__, value.__kwdefaults__)
        own, file = stored.attributes(value) | {"kept": kept}, value.__code__.co_filename
    else:
        own = stored.attributes_of_class(value)
        module = sys.modules.get(str(own.get("__module__")))
        file = str(stored.attributes(module).get("__file__", "<C>"))
    if file.startswith(("<", *validity.LIBRARIES)):
        return {}
    return {name: item for name, item in own.items() if not name.startswith(("__", "_abc_"))}


def _attributes_of_module(own: Mapping[str, Any]) -> dict[str, object]:
    """Return what a torch module keeps beside parameters, buffers and modules.

    Of its hooks, without their keys, which torch counts in the whole process.
    """
    usual = stored.attributes(sys.modules["torch"].nn.Module()).keys() | {"_compiled_call_impl"}
    hooks = {k: [*x.values()] for k, x in own.items() if k.endswith("_hooks") and type(x) in _DICTS}
    return {k: x for k, x in own.items() if k not in usual or k == "training"} | hooks


def _generator_state(value: Any) -> tuple[object, ...]:
    """Return the state of a generator of random numbers, in a tuple; () for other values."""
    kind, numpy, torch = type(value), sys.modules.get("numpy"), sys.modules.get("torch")
    if kind is random.Random:
        return (value.getstate(),)
    if numpy and kind is numpy.random.Generator:
        return (value.bit_generator.state,)
    if numpy and kind is numpy.random.RandomState:
        return (value.get_state(legacy=False),)
    if torch and kind is torch.Generator:
        return (value.get_state(),)
    return ()


def _parts(value: Any) -> tuple[object, ...]:
    """Return what arrays hold that are not compared by element; () for other values.

    They are sparse tensors, numpy's arrays of texts, objects, dates and records, masked arrays,
    and elements of XML.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy and type(value) is numpy.ndarray:
        return (value.tolist() if value.dtype.hasobject else value.tobytes(),)
    if numpy and type(value) is numpy.ma.MaskedArray:
        return _parts_of_masked(value)
    if _is_element(value):
        return _parts_of_element(value)
    is_tensor = torch and stored.is_one_of(type(value), (torch.Tensor, torch.nn.Parameter))
    # .data is without attributes: one could be called as a method
    parts = _parts_of_sparse(value.data) if is_tensor else ()
    return parts and (*parts, stored.attributes(value))


def _parts_of_sparse(value: Any) -> tuple[object, ...]:
    torch = sys.modules["torch"]
    if value.layout is torch.sparse_coo:
        return tuple(value.shape), value._indices(), value._values()  # noqa: SLF001  no copies
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tuple(value.shape), value.crow_indices(), value.col_indices(), value.values()
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tuple(value.shape), value.ccol_indices(), value.row_indices(), value.values()
    return ()


def _parts_of_masked(value: Any) -> tuple[object, ...]:
    """Return mask, fill value and data of a masked array, with zeros where it is masked.

    And what others have stored in it.
    """
    numpy, own = sys.modules["numpy"], stored.attributes(value)
    usual = stored.attributes(numpy.ma.array(0)).keys()
    data: Any = numpy.ndarray.view(value, numpy.ndarray)
    mask: Any = own.get("_mask")
    if type(mask) is numpy.ndarray and mask.dtype == bool and tensors.backend_of(data):
        data = numpy.where(mask, data.dtype.type(0), data)
    return data, mask, own.get("_fill_value"), {k: x for k, x in own.items() if k not in usual}


def _is_element(value: object) -> bool:
    etree = sys.modules.get("xml.etree.ElementTree")
    return etree is not None and type(value) is etree.Element


def _parts_of_element(root: Any) -> tuple[object, ...]:
    """Return depth, tag, text, tail and attributes of an element and of those in it.

    The attributes of one that has none may be an empty dict, or not exist.
    """
    todo, parts = [(0, root)], []
    while todo:
        depth, element = todo.pop()
        held = stored.referents(element)
        todo += [(depth + 1, x) for x in reversed(held) if _is_element(x)]
        rest = [x for x in held if not (_is_element(x) or issubclass(type(x), type))]
        parts.append((depth, *(x for x in rest if not (type(x) is dict and not x))))
    return tuple(parts)


def _is_c_data(kind: type) -> bool:
    """Whether this is a type of C whose bytes are numbers, and no addresses."""
    return issubclass(kind, _C_DATA) and _codes(kind).isdisjoint(_C_ADDRESSES)


def _codes(kind: Any) -> set[str]:
    """Return the codes of the simple types that a type of C consists of."""
    if not issubclass(kind, _C_DATA):
        return set()
    if issubclass(kind, (ctypes.Structure, ctypes.Union)):
        return set().union(*(_codes(field) for _, field in _fields(kind)))
    if issubclass(kind, ctypes.Array):
        return _codes(kind._type_)
    return {kind._type_} if issubclass(kind, _C_SIMPLE) else {"P"}


def _fields(kind: type) -> list[tuple[str, Any]]:
    """Return the fields of a structure of C and of its bases."""
    declared = (stored.attributes_of_class(base).get("_fields_", ()) for base in kind.__mro__)
    return [(field[0], field[1]) for fields in declared for field in fields]
