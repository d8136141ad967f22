"""Fingerprints the contents of values other than arrays and numbers.

Arrays and numbers are compared element by element elsewhere. A call may also write into a
bytearray, a set or an attribute of an object. Such contents are compared exactly: an arm must leave
there what the baseline leaves.
"""

import collections
import contextlib
import ctypes
import enum
import functools
import hashlib
import random
import re
import struct
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_aiperf.model import Score
from pytest_aiperf.rules import validity

from . import stored, tensors

MAX_OBJECTS = 100_000  #: Most objects that are read of one argument; further ones are left out.
NUMBER_SIZE = 4
"""Size that a number, a date, a slice or a field of a dtype adds to ``Contents.size``: 16 different
ones count as much as a text of 64 characters. Fewer may be sizes and options."""
SAMPLED_BYTES = 4096
"""Bytes of a buffer whose different values count as numbers; a buffer may be mostly zeros."""
_SEQUENCES = (list, tuple, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_SETS = (set, frozenset)
_FLOATS = ("float", "complex", "longdouble", "clongdouble")
_LEFT_OUT = (types.FrameType, Score)  # a score is the judged figure
_LEFT_OUT_OF_OBJECTS = (*_LEFT_OUT, types.ModuleType)  # modules lead to all that there is
_WITHOUT_STATE = (
    *(type(threading.Lock()), type(threading.RLock()), re.Pattern, struct.Struct),
    *(types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType),
)
"""Types in C whose objects never change; also locks, because a call leaves none locked."""
_CACHED = type(functools.lru_cache(len))
"""Type of functions with a cache. A class's cached results are not compared: nobody else reads
them."""
_DYNAMO = "_dynamo_", "_torchdynamo_", "_is_torch_compile"
"""Prefixes of attributes that torch.compile sets on tensors, modules and functions."""
_MEMBERS = types.GetSetDescriptorType, types.MemberDescriptorType
_METHODS = types.MethodDescriptorType, types.WrapperDescriptorType, types.BuiltinFunctionType
_READABLE = sys.stdlib_module_names - {"builtins", "itertools", "_io"}
"""Modules whose objects in C are read by their attributes. Files and most iterators have a position
instead, and the names of files may differ between seeds."""
_MODULE = type.__dict__["__module__"].__get__
_C_DATA: Any = ctypes.Array.__base__  # the base of all types of C
_C_SIMPLE: Any = ctypes.c_int.__base__
_C_ADDRESSES, _C_FLOATS = "zZPO", "efdgFD"  # codes of simple types, see also struct


@dataclass(frozen=True, slots=True)
class Contents:
    """Fingerprints of the contents of one value, without its arrays and numbers."""

    exact: str = ""  #: Fingerprint of bytes, texts, sets, queues and other built-in types.
    objects: str = ""  #: Fingerprint of the attributes of objects.
    has_floats: bool = False  #: Whether ``exact`` covers floats.
    positions: tuple[int, ...] = ()  #: How far the files and iterators have been read.
    is_part: bool = False
    """Whether contents are missing: there are too many objects, or an object in C hides its own."""
    numbers: int = field(default=0, compare=False)  #: Hash of numbers that are compared elsewhere.
    size: int = field(default=0, compare=False)
    """Characters and bytes of the distinct texts, plus NUMBER_SIZE per distinct number or item."""

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
    except RecursionError:  # walk() refuses values that contain themselves
        return Contents()
    numbers = [x for x in reader.numbers if x == x]  # noqa: PLR0124  NaN has no hash of its own
    return Contents(
        *(reader.exact.hexdigest(), reader.objects.hexdigest(), reader.has_floats),
        tuple(reader.positions),
        reader.is_part,
        hash(tuple(numbers)),
        sum(reader.sizes.values()) + NUMBER_SIZE * (reader.items + len({*numbers})),
    )


class _Reader:
    def __init__(self) -> None:
        self.exact, self.objects = hashlib.blake2b(), hashlib.blake2b()
        self.has_floats = self.is_part = False
        self.seen: dict[int, object] = {}
        self.classes: dict[int, type] = {}  # classes of objects, and their metaclasses
        self.in_c: dict[int, _InC] = {}  # by the id of the class of an object
        self.containers: dict[int, object] = {}  # containers that objects store
        self.positions: list[int] = []
        self.numbers: list[Any] = []
        self.sizes: dict[str | bytes, int] = {}  # sizes of texts, decimals, dates and slices
        self.items = 0  # number of items of sets
        self.arrays: dict[int, object] = {}  # arrays that walk() finds
        self.todo: collections.deque[object] = collections.deque()
        """Values stored in objects, to be read later: a chain of objects may be too long for
        recursion."""

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
        elif sizes := _sizes(value):
            self._text(value, into)
            self.sizes |= sizes
        elif stored.is_one_of(kind, (*_SEQUENCES, *_DICTS, *_SETS)):
            self._container(value, into, is_compared=is_compared)
        elif generator := _generator_state(value):
            self.has_floats = self.has_floats or into is self.exact  # may draw in another order
            self.read(generator, into, is_compared=False)
        elif parts := _parts(value):
            self.read(parts, into, is_compared=False)
        elif not issubclass(kind, _LEFT_OUT if into is self.exact else _LEFT_OUT_OF_OBJECTS):
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
            if kind is collections.OrderedDict:  # its users, such as caches, rely on the order
                self._text([labels.get(id(key)) for key in stored.keys(value)], into)
        else:
            simple = all(stored.is_one_of(type(item), stored.VALUES) for item in value)
            texts = map(_text, value) if simple else map(self._item, value)
            self.has_floats = self.has_floats or (
                simple and into is self.exact and any(map(_is_float, value))
            )
            # the type counts: only a frozenset can be a key of a dict
            self._text((kind.__name__, sorted(texts)), into)
            self.items += len(value)

    def _object(self, value: Any, into: Any, *, is_compared: bool) -> None:
        """Add what an object stores. An object that is reached twice counts once."""
        is_full = len(self.seen) >= MAX_OBJECTS
        self.is_part = self.is_part or is_full
        if is_full or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        if (position := stored.position(value)) is not None:
            self.positions.append(position)
            self._file(value, into)
        if issubclass(type(value), (type, types.FunctionType, types.ModuleType)):
            self._attributes(_attributes_of_code(value))
            return
        self._class(type(value))
        walked = (tensors.children(value) or {}) if is_compared else {}
        for item in walked.values():
            self.read(item, into, is_compared=True)
        torch = sys.modules.get("torch")
        is_module = torch and issubclass(type(value), torch.nn.Module)
        own = stored.attributes(value) | stored.slots(value)
        in_c = self._in_c(type(value))
        state = in_c.state(value)
        named = _attributes_of_module(own) if is_module else own | in_c.attributes(value) | state
        self._attributes({name: x for name, x in named.items() if f".{name}" not in walked})
        if issubclass(type(value), _C_DATA):
            self._c_fields(value)
        if not is_module and position is None:  # an iterator drops what it has read
            known = {*map(id, own.values()), *map(id, walked.values())}
            held = [
                x
                for x in stored.referents(value)
                if id(x) not in known
                and not issubclass(type(x), (type, types.CodeType))
                and not (type(x) is dict and x.keys() == own.keys())
            ]
            self.todo.extend(held)
            is_shown = held or walked or state or issubclass(type(value), _C_DATA)
            self.is_part = self.is_part or not (is_shown or in_c.has_no_state)

    def _in_c(self, kind: type) -> "_InC":
        if id(kind) not in self.in_c:
            self.in_c[id(kind)] = _InC.of(kind)
        return self.in_c[id(kind)]

    def _class(self, kind: type) -> None:
        """Add the attributes of an object's class, of its bases and of their metaclasses.

        They do not add to ``numbers`` and ``size``: constants of a class are the same for all
        seeds.
        """
        if id(kind) in self.classes:
            return
        reader = _Reader()
        reader.seen, reader.classes = self.seen, self.classes
        for base in stored.bases(kind):
            for each in (base, type(base)):
                self.classes[id(each)] = each
                reader._attributes(_attributes_of_code(each))
        reader.read_objects()
        self.objects.update(reader.objects.digest())

    def _attributes(self, attributes: Mapping[str, object]) -> None:
        for name, item in sorted(attributes.items()):
            if not name.startswith(_DYNAMO):
                self._text(name, self.objects)
                self.todo.append(item)

    def _file(self, value: Any, into: Any) -> None:
        """Add the contents of a file; for a file on a disk, only to the numbers and sizes."""
        data: str | bytes = b""
        if stored.is_one_of(type(value), stored.FILES):
            with contextlib.suppress(ValueError):  # it is closed
                self._text(data := value.getvalue(), into)
        elif stored.is_one_of(type(value), stored.ON_DISK):
            data = stored.head(value)
            self.numbers.append(hash(data))
        written = data.strip("\0") if isinstance(data, str) else data.strip(b"\0")
        self.sizes[written] = len(written)

    def _c_fields(self, value: Any) -> None:
        """Add the bytes of a structure of C without its addresses."""
        kind = type(value)
        for name, field_kind in _fields(kind):
            if _is_c_data(field_kind):
                start = getattr(kind, name).offset
                data = memoryview(value).cast("B")[start : start + ctypes.sizeof(field_kind)]
                self._bytes(data, self.objects)

    def _item(self, item: object) -> str:
        """Return the fingerprint of an item of a set, which has no order."""
        reader = _Reader()
        reader.read(item, reader.exact, is_compared=False)
        self.todo.extend(reader.todo)
        self.has_floats = self.has_floats or reader.has_floats
        self.is_part = self.is_part or reader.is_part
        return reader.exact.hexdigest()

    def _text(self, value: object, into: Any) -> None:
        self.has_floats = self.has_floats or (into is self.exact and _is_float(value))
        into.update(_text(value).encode("utf-8", "surrogatepass"))

    def _bytes(self, data: memoryview, into: Any) -> None:
        into.update(f"{data.format} {data.shape};".encode())
        is_plain = data.c_contiguous and data.nbytes
        plain = data.cast("B") if is_plain else memoryview(data.tobytes())
        into.update(plain)
        self.numbers += {*plain[:SAMPLED_BYTES]}

    def _array(self, value: Any, into: Any) -> None:
        if tensors.is_number(value):  # as an array, it would take ten times as long
            is_float = id(type(value)) not in tensors.integer_types()
            self.has_floats = self.has_floats or (into is self.exact and is_float)
            into.update(_text(value).encode())
            self.numbers.append(value)
            return
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


@dataclass(frozen=True, slots=True)
class _InC:
    """What the objects of one class have from those of its bases that are written in C."""

    members: tuple[tuple[str, Any], ...]
    """Attributes that the standard library's classes in C define, and their descriptors."""
    reduces: tuple[Any, ...]  #: Their methods that pickle an object.
    has_no_state: bool
    """Whether the objects have no state other than attributes, or never change."""

    @classmethod
    def of(cls, kind: type) -> "_InC":
        readable = [base for base in stored.bases(kind) if _is_readable(base)]
        members = (item for base in readable for item in stored.attributes_of_class(base).items())
        reduces = (stored.own_member(base, "__reduce__") for base in readable)
        return cls(
            tuple((k, v) for k, v in members if type(v) in _MEMBERS and not k.startswith("_")),
            tuple(x for x in reduces if type(x) is types.MethodDescriptorType),
            stored.is_one_of(kind, _WITHOUT_STATE)
            or _MODULE(kind) == "torch"  # dtypes and devices
            or not any(map(_is_in_c, stored.bases(kind)[:-1])),
        )

    def attributes(self, value: Any) -> dict[str, object]:
        attributes: dict[str, object] = {}
        for name, member in self.members:
            with contextlib.suppress(Exception):  # the attribute has no value now
                attributes[name] = member.__get__(value)
        return attributes

    def state(self, value: Any) -> dict[str, object]:
        """Return the state of an object, as its class in C pickles it."""
        for reduced in self.reduces:
            with contextlib.suppress(Exception):  # the object cannot be pickled
                return {"__reduce__": reduced(value)}
        return {}


def _text(value: object) -> str:
    return f"{type(value).__name__} {stored.text(value)};"


def _is_float(value: object) -> bool:
    return type(value).__name__ in _FLOATS


def _sizes(value: Any) -> dict[str | bytes, int]:
    """Return the sizes of a value that its text describes completely; {} for other values."""
    if stored.is_one_of(type(value), (str, bytes)):
        return {value: len(value)}
    if stored.is_one_of(type(value), stored.VALUES) or tensors.is_other_scalar(value):
        return {_text(value): NUMBER_SIZE * (value is not None)}
    numpy = sys.modules.get("numpy")
    if numpy and issubclass(type(value), numpy.dtype):
        return dict.fromkeys(map(repr, (value.fields or {"": value}).items()), NUMBER_SIZE)
    return {}


def _attributes_of_code(value: Any) -> dict[str, object]:
    """Return what a function, a class or a module keeps; {} if a library defines it."""
    if type(value) is types.FunctionType:
        kept = (value.__closure__, value.__defaults__, value.__kwdefaults__)
        own, file = stored.attributes(value) | {"kept": kept}, value.__code__.co_filename
    elif issubclass(type(value), types.ModuleType):
        own = stored.attributes(value)
        made = own.get("__spec__") is None  # one that code has made has no file
        file = str(own.get("__file__", "" if made else "<C>"))
    else:
        own = stored.attributes_of_class(value)
        module = sys.modules.get(str(own.get("__module__")))
        file = str(stored.attributes(module).get("__file__", "<C>"))
    if file.startswith(("<", *validity.LIBRARIES)):
        return {}
    is_enum = issubclass(type(value), enum.EnumMeta)  # its private dicts cache combined members
    return {
        name: item
        for name, item in own.items()
        if not name.startswith("_" if is_enum else ("__", "_abc_"))
        if type(item) is not _CACHED
    }


def _is_in_c(kind: type) -> bool:
    """Whether a class is written in C: the methods of a Python class are Python functions."""
    return any(type(x) in _METHODS for x in stored.attributes_of_class(kind).values())


def _is_readable(kind: type) -> bool:
    """Whether a class is written in C and part of the standard library."""
    return _is_in_c(kind) and _MODULE(kind) in _READABLE


def _attributes_of_module(own: Mapping[str, Any]) -> dict[str, object]:
    """Return the attributes of a torch module other than parameters, buffers and modules.

    Hooks are returned without their keys, which torch counts across the whole process.
    """
    usual = stored.attributes(sys.modules["torch"].nn.Module()).keys() | {"_compiled_call_impl"}
    hooks = {k: [*x.values()] for k, x in own.items() if k.endswith("_hooks") and type(x) in _DICTS}
    return {k: x for k, x in own.items() if k not in usual or k == "training"} | hooks


def _generator_state(value: Any) -> tuple[object, ...]:
    """Return the state of a generator of random numbers, or of seeds; () for other values."""
    kind, numpy, torch = type(value), sys.modules.get("numpy"), sys.modules.get("torch")
    if kind is random.Random:
        return (value.getstate(),)
    if numpy and kind is numpy.random.Generator:
        return (value.bit_generator.state,)
    if numpy and kind is numpy.random.RandomState:
        return (value.get_state(legacy=False),)
    if torch and kind is torch.Generator:
        return (value.get_state(),)
    state = stored.own_member(kind, "state")
    if type(state) is types.GetSetDescriptorType:
        with contextlib.suppress(Exception):  # it has none now
            return (state.__get__(value),)
    return ()


def _parts(value: Any) -> tuple[object, ...]:
    """Return the parts of a value that is not compared element by element; () for other values.

    Such values are sparse tensors, numpy's arrays of texts, objects, dates and records, masked
    arrays, storages of torch, elements of XML, hashes, code, and members of enumerations.
    """
    numpy = sys.modules.get("numpy")
    if numpy and stored.is_one_of(type(value), (numpy.ndarray, numpy.void)):
        return _parts_of_array(numpy.asarray(value))
    if numpy and type(value) is numpy.ma.MaskedArray:
        return _parts_of_masked(value)
    return _parts_of_torch(value) or _parts_of_object(value)


def _parts_of_torch(value: Any) -> tuple[object, ...]:
    torch = sys.modules.get("torch")
    if torch and type(value) is torch.UntypedStorage:
        return (torch.empty(0, dtype=torch.uint8, device=value.device).set_(value),)
    is_tensor = torch and stored.is_one_of(type(value), (torch.Tensor, torch.nn.Parameter))
    # .data is without attributes: one could be called as a method
    parts = _parts_of_sparse(value.data) if is_tensor else ()
    return parts and (*parts, stored.attributes(value))


def _parts_of_object(value: Any) -> tuple[object, ...]:
    if _is_element(value):
        return _parts_of_element(value)
    digest = stored.own_member(type(value), "digest")
    if type(digest) is types.MethodDescriptorType:
        return _hash_of_digest(value, digest)
    if type(value) is types.CodeType:
        return hash(value.co_code), value.co_consts, value.co_names
    if issubclass(type(type(value)), enum.EnumMeta):  # its class has all members
        own = stored.attributes(value)
        return own.get("_name_"), {k: x for k, x in own.items() if not k.startswith("_")}
    return ()


def _hash_of_digest(value: Any, digest: Callable[..., bytes]) -> tuple[object, ...]:
    for length in (), (64,):  # some have no length of their own
        with contextlib.suppress(Exception):
            return (hash(digest(value, *length)),)
    return ()


def _parts_of_array(value: Any) -> tuple[object, ...]:
    """Return the elements of an array that holds no usual numbers, without padding bytes."""
    numpy, kind = sys.modules["numpy"], value.dtype
    if kind.names:
        return tuple(value[name] for name in kind.names)
    if kind.kind == "c":
        return value.real, value.imag
    if kind.kind == "f":  # of more than 64 bits, in two doubles
        with numpy.errstate(invalid="ignore"):
            fraction, exponent = numpy.frexp(value)
            high = fraction.astype(float)
            low = (fraction - high).astype(float)
        return high, low, numpy.where(numpy.isfinite(value), exponent, 0)
    return (value.tolist() if kind.hasobject else value.tobytes(),)


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
    """Return data, mask, fill value and further attributes of a masked array.

    The data have zeros where the array is masked.
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
    """Return depth, tag, text, tail and attributes of an element and of the elements in it.

    An element without attributes may have an empty dict of them, or none, so empty dicts are left
    out.
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
