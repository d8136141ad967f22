"""Finds, compares, poisons and overwrites the tensors in a value, whatever their library."""

from __future__ import annotations

import array as array_of_python
import bisect
import contextlib
import dataclasses
import functools
import math
import operator
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Score
from pytest_aiperf.rules.stats import covered
from pytest_aiperf.rules.validity import watched

from . import stored

Args = tuple[Any, ...]
NamedTensor = tuple[str, Any]  #: Path and value of a leaf; the value need not be an array.

CHUNK = 1 << 23  #: Elements in one part on a GPU: several fp64 temporaries take 64 MiB each.
HOST_CHUNK = 1 << 15
"""Elements in one part on the host. They fit in the caches, and torch uses one thread for so few:
several threads would wait for one another while other claims keep the cores busy."""
MANY = 16
"""A list of more numbers than this is compared as one array, with one scale for all elements. The
numbers of a shorter list may be unlike figures and are compared one by one."""
ROWS = "[:]"  #: Stands for all rows in the path of a column.
_NUMBER_TYPES = {bool, int, float, complex}
PLAIN_NUMBERS = frozenset(map(id, _NUMBER_TYPES))  #: Ids of these types.
_PLAIN_IDS = frozenset(map(id, (*stored.VALUES, list, tuple, bytearray, set, frozenset)))
"""Ids of types whose values are equal if their texts are."""
ORDINARY, INFERENCE = "an ordinary tensor", "an inference tensor"
ALIGNMENT = 16  #: Bytes; every allocator aligns arrays to at least as many.
SAMPLE = 64  #: Elements of an array that :func:`sample` reads.
_WEIGHTS: dict[Any, Any] = {}  #: Random weights of checksums by backend, device and number.


@dataclasses.dataclass(slots=True)
class Inputs:
    """One set of inputs, as returned by one call of a claim's ``inputs``."""

    args: Args
    """The arguments of a call, without their ``static`` marks."""
    dynamic: Sequence[int]  #: Positions of the arguments not marked ``static``.
    seed: int  #: Seed with which ``inputs`` drew the values.
    values_seed: int | None = None
    """Seed of the values that have overwritten the dynamic arguments since, if any have."""

    def overwrite(self, fresh: Inputs, positions: Sequence[int] | None = None) -> tuple[str, ...]:
        """Give this set the values of the dynamic arguments of ``fresh``, or of ``positions``.

        Nothing changes unless all values can change in place, because a captured graph or a
        prepared arm holds the old numbers and addresses. Return the paths of values that cannot
        change in place.
        """
        positions = self.dynamic if positions is None else positions
        trial = Overwriting(write=False)
        trial.items(self._at(positions), fresh._at(positions))
        if not (trial.stuck or trial.unbound):
            self.overwrite_in_place(fresh, positions)
        return (*trial.stuck, *trial.unbound)

    def overwrite_in_place(
        self, fresh: Inputs, positions: Sequence[int] | None = None
    ) -> list[str]:
        """Overwrite the values that can change in place, and leave the others as they are.

        Return the paths of the arrays that cannot.
        """
        positions = self.dynamic if positions is None else positions
        overwriting = Overwriting(write=True)
        overwriting.items(self._at(positions), fresh._at(positions))
        return overwriting.stuck

    def _at(self, positions: Sequence[int]) -> dict[str, Any]:
        return {f"args[{i}]": self.args[i] for i in positions}


def walk(value: Any, name: str, *, is_result: bool = False) -> list[NamedTensor]:
    """Return the leaves in tuples, lists, dicts, dataclasses and modules.

    None is not a leaf, and neither is a Score, which is the judged figure and no part of the
    result. A tensor's ``.grad`` is a leaf, because backward() writes it, and so is a long list of
    numbers. No code of the values' own classes runs: an arm could compute the items there, after
    the timed call. A container that contains itself raises UsageError.

    A result has further leaves: the keys and the values of a long dict that maps numbers to
    numbers, each column of many rows of numbers, and the count of None in a long container.
    Filling them may be the work.
    """
    leaves: list[NamedTensor] = []
    try:
        _walk(value, name, leaves, is_result=is_result)
    except RecursionError:
        raise UsageError(
            f"{name} is nested too deep, or contains itself: return numbers and arrays in tuples, "
            "lists, dicts or dataclasses"
        ) from None
    return leaves


def _walk(value: Any, name: str, leaves: list[NamedTensor], *, is_result: bool) -> None:
    items = children(value)
    if items is None:
        leaves.append((name, value))
        if (grad := _grad(value)) is not None:
            _walk(grad, name + ".grad", leaves, is_result=is_result)
    elif is_result and (columns := _columns(value, items.values())):
        leaves.extend((name + suffix, numbers) for suffix, numbers in columns.items())
    else:
        for path_suffix, item in items.items():
            _walk(item, name + path_suffix, leaves, is_result=is_result)
        many = items.values() if is_result and len(items) > MANY else ()
        if nones := sum(item is None for item in many):
            leaves.append((f"{name}, None", nones))


def tables(args: Args) -> Iterator[tuple[str, dict[str, Sequence[Any]]]]:
    """Yield path and columns, by suffix, of the long dicts and the many rows in arguments."""
    todo = [(f"args[{i}]", arg) for i, arg in enumerate(args)]
    while todo:
        path, value = todo.pop()
        items = children(value) or {}
        is_table = issubclass(type(value), (tuple, list)) or table(value)
        if is_table and (columns := _columns(value, items.values())):
            yield path, columns
        else:
            todo.extend((path + suffix, item) for suffix, item in items.items())


def _columns(value: Any, items: Collection[Any]) -> dict[str, Sequence[Any]]:
    """Return the columns of a long dict of numbers, or of many rows of numbers; {} for others.

    Rows are tuples, lists or dataclasses. Comparing each number by itself would take minutes for
    60,000 rows.
    """
    if len(items) <= MANY:
        return {}
    if keyed := table(value):
        return {f", {what}": numbers for what, numbers in keyed.items()}
    numbers, kind = _number_types("ml_dtypes" in sys.modules), type(next(iter(items)))
    columns: dict[str, Sequence[Any]] = {}
    if issubclass(kind, (tuple, list)) and {*map(id, map(type, items))} == {id(kind)}:
        base: Any = tuple if issubclass(kind, tuple) else list
        lengths = {*map(base.__len__, items)}
        if len(lengths) == 1 and max(lengths) <= MANY:  # in C: most rows are tuples
            rows = zip(*map(base.__iter__, items), strict=True)
            columns = {f"{ROWS}[{i}]": column for i, column in enumerate(rows)}
    elif stored.fields(next(iter(items))) is not None:
        fields = [stored.fields(item) or {} for item in items]
        if all(row.keys() == fields[0].keys() for row in fields):
            columns = {f"{ROWS}.{name}": [row[name] for row in fields] for name in fields[0]}
    plain = (numbers.issuperset(map(id, map(type, column))) for column in columns.values())
    return columns if all(plain) else {}


def table(value: Any) -> dict[str, list[Any]]:
    """Return the keys and the values of a dict of many numbers by numbers; {} for others."""
    if not issubclass(type(value), dict):
        return {}
    items = stored.items(value)
    columns = {"keys": [key for _, key, _ in items], "values": [item for _, _, item in items]}
    return columns if all(map(is_number_list, columns.values())) else {}


def _grad(value: Any) -> Any:
    if is_number(value):
        return None
    torch = sys.modules.get("torch")
    is_tensor = torch and stored.is_one_of(type(value), (torch.Tensor, torch.nn.Parameter))
    return value.grad if is_tensor and value.is_leaf else None


def children(value: Any) -> dict[str, Any] | None:
    """Return the items of a container by the suffix of their path; None if it is a leaf."""
    torch, kind = sys.modules.get("torch"), type(value)
    found: dict[str, Any] | None = None
    if is_number(value):  # the most common value in inputs of many objects
        return None
    if value is None or issubclass(kind, Score):
        found = {}
    elif issubclass(kind, (tuple, list)) and not is_number_list(value):
        base: Any = tuple if issubclass(kind, tuple) else list
        found = {f"[{i}]": item for i, item in enumerate(base.__iter__(value))}
    elif issubclass(kind, dict):
        found = {f"[{label}]": item for label, _, item in stored.items(value)}
    elif torch and issubclass(kind, torch.nn.Module):
        # a compiled TorchScript module stores none of them in Python
        own = stored.attributes(value)
        parts: list[Any] = [own.get(key) for key in ("_parameters", "_buffers", "_modules")]
        items = [dict.items(part) for part in parts if issubclass(type(part), dict)]
        found = {f".{key}": item for part in items for key, item in part if type(key) is str}
    elif (fields := stored.fields(value)) is not None:
        found = {f".{name}": item for name, item in fields.items()}
    return found


def hidden_values(value: Any, name: str) -> str | None:
    """Return the path of a container that has attributes beside its items or fields, if any."""
    fields = stored.fields(value)
    is_container = fields is not None or issubclass(type(value), (list, tuple, dict))
    if is_container and stored.attributes(value).keys() - (fields or {}).keys():
        return name
    items = children(value) or {}
    found = (hidden_values(item, name + suffix) for suffix, item in items.items())
    return next(filter(None, found), None)


def is_number_list(value: Any) -> bool:
    """Whether this is a plain list or tuple of so many numbers that it is one leaf, not many."""
    if not stored.is_one_of(type(value), (list, tuple)) or len(value) <= MANY:
        return False
    return {*map(id, map(type, value))} <= _number_types("ml_dtypes" in sys.modules)


def is_number(value: Any) -> bool:
    return id(type(value)) in _number_types("ml_dtypes" in sys.modules)


@functools.cache
def _number_types(has_ml_dtypes: bool) -> frozenset[int]:
    """Return the ids of the types of numbers; ids, as an arm's class may claim to equal a type."""
    import numpy as np

    modules = [np, sys.modules["ml_dtypes"]] if has_ml_dtypes else [np]
    kinds = [kind for module in modules for kind in vars(module).values() if type(kind) is type]
    numbers = (k for k in kinds if issubclass(k, np.generic) and not _is_other_scalar(k))
    return frozenset(map(id, (*_NUMBER_TYPES, *numbers)))


def is_other_scalar(value: Any) -> bool:
    """Whether this is a text, a date or a long double of numpy, which no array of numbers holds."""
    numpy = sys.modules.get("numpy")
    kind = type(value)
    return bool(
        numpy
        and issubclass(kind, numpy.generic)
        and _is_other_scalar(kind)
        and kind is getattr(numpy, kind.__name__, None)  # no class of an arm
        and kind is not numpy.void
    )


def _is_other_scalar(kind: type) -> bool:
    import numpy as np

    others = (np.flexible, np.datetime64, np.timedelta64, np.longdouble, np.clongdouble)
    return issubclass(kind, others)


@functools.cache
def integer_types() -> frozenset[int]:
    """Return the ids of Python's and numpy's types of integers."""
    import numpy as np

    kinds = [kind for kind in vars(np).values() if type(kind) is type]
    integers = (k for k in kinds if issubclass(k, (np.integer, np.bool_)))
    return frozenset(map(id, (bool, int, *integers)))


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayBackend:
    """Operations whose names differ between torch, numpy and cupy."""

    module: Any  #: The library's module.
    is_array: Callable[[Any], bool]
    """Whether a value is a dense array of numbers. Arrays of subclasses are excluded: they could
    compute their elements when they are read."""
    as_real_view: Callable[[Any], Any]
    """View an array without its gradient, complex numbers as pairs of real numbers, and packed
    numbers of 4 bits as bytes."""
    copy: Callable[[Any], Any]  #: Copy an array.
    cast: Callable[[Any, str, Any], Any]  #: Convert to a dtype, on the device of the last argument.
    address_and_strides: Callable[[Any], tuple[int, tuple[int, ...]]]  #: Strides are in bytes.


def _torch(torch: Any) -> ArrayBackend:
    def is_array(x: Any) -> bool:
        if not stored.is_one_of(type(x), (torch.Tensor, torch.nn.Parameter)):
            return False
        return x.layout is torch.strided and not (x.is_quantized or x.is_nested or x.is_meta)

    # .data has none of the attributes of its tensor: an arm could have overridden a method there

    packed = getattr(torch, "float4_e2m1fn_x2", None)  # two numbers per byte; no operator takes it

    def as_real_view(array: Any) -> Any:
        array = array.data.resolve_conj().resolve_neg()
        if array.dtype is packed:
            return array.view(torch.uint8)
        return torch.view_as_real(array) if array.is_complex() else array

    return ArrayBackend(
        torch,
        is_array,
        as_real_view,
        lambda x: x.data.clone(),
        lambda x, kind, at: torch.as_tensor(x, dtype=getattr(torch, kind), device=at.device),
        lambda x: (x.data.data_ptr(), tuple(s * x.itemsize for s in x.data.stride())),
    )


def _numpy(numpy: Any) -> ArrayBackend:
    """Adapt numpy, or cupy, which has the same functions."""
    types_ = (numpy.ndarray, getattr(numpy, "memmap", numpy.ndarray))
    return ArrayBackend(
        numpy,
        # longdouble has no integer of its size, in which its bits could be compared
        lambda x: (
            stored.is_one_of(type(x), types_)
            and x.dtype.kind in "biufc"
            and x.dtype.itemsize <= (16 if x.dtype.kind == "c" else 8)
        ),
        lambda x: x[..., None].view(x.real.dtype) if x.dtype.kind == "c" else x,
        lambda x: numpy.array(x, order="C"),  # a memmap may have a method copy of its own
        lambda x, kind, _: numpy.asarray(x, dtype=kind),
        lambda x: (getattr(x.data, "ptr", None) or x.ctypes.data, x.strides),
    )


BACKENDS = {"torch": _torch, "numpy": _numpy, "cupy": _numpy}


@functools.cache
def _backend(name: str) -> ArrayBackend:
    return BACKENDS[name](sys.modules[name])


def backend_of(value: Any) -> Any:
    """Return the backend of an array; None for another value."""
    if is_number(value):  # the most common value in inputs of many objects
        return None
    for name in BACKENDS:
        if sys.modules.get(name) and (backend := _backend(name)).is_array(value):
            return backend
    return None


def dtype(array: Any) -> str:
    return _dtype_name(array.dtype)


@functools.cache  # numpy puts a dtype's name together anew each time
def _dtype_name(kind: Any) -> str:
    if getattr(kind, "isnative", True):
        return str(kind).removeprefix("torch.")
    return f"{kind.name} (byte-swapped)"  # numpy writes ">f8"


def is_exact(array: Any) -> bool:
    return "int" in dtype(array) or dtype(array) == "bool"


def signature(array: Any) -> str:
    """Return an output's dtype, shape and device as text; they must be equal for all arms."""
    return f"{dtype(array)}{list(array.shape)} on {device_name(array)}"


def device_name(array: Any) -> str:
    return str(getattr(array, "device", "cpu"))


def view(array: Any) -> tuple[Any, ...]:
    """Return a key that is equal for two views of the same elements."""
    return (signature(array), *backend_of(array).address_and_strides(array))


def as_int_bits(array: Any) -> Any:
    """View an array's bits as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    real = backend_of(array).as_real_view(array)
    return real.view(getattr(backend_of(array).module, f"int{8 * real.itemsize}"))


def on_host(array: Any) -> bool:
    return str(getattr(array, "device", "cpu")) == "cpu"


def chunk(array: Any) -> int:
    """Return how many elements a part of this array has at most."""
    return HOST_CHUNK if on_host(array) else CHUNK


def parts(array: Any, size: int = 0) -> Iterator[tuple[int, Any]]:
    """Split an array in row-major order into flat parts, so that temporaries stay small.

    Yield the flat index of each part's first element, and the part, which is a view if its memory
    allows and else a copy. Arrays of one shape are split alike, whatever their strides. A part has
    at most ``size`` elements, by default ``chunk(array)``.
    """
    for start, index in _slabs(tuple(array.shape), size or chunk(array)):
        yield start, array[index].reshape(-1)


def _slabs(shape: tuple[int, ...], size: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield the flat index of each part's first element, and the index that selects the part."""
    if not shape:
        yield 0, (...,)
    elif (row := math.prod(shape[1:])) > size:
        for i in range(shape[0]):
            for start, index in _slabs(shape[1:], size):
                yield i * row + start, (i, *index)
    elif row:
        for i in range(0, shape[0], size // row):
            yield i * row, (slice(i, i + size // row),)


def arrays(args: Args) -> dict[str, Any]:
    """Return the arrays in arguments by path; an array that is passed twice appears once."""
    return {path: value for path, value in leaves(args).items() if backend_of(value)}


def nudge(args: Args) -> None:
    """Make each element of arrays of fp64 larger by one rounding error: sums that cancel change."""
    for array in arrays(args).values():
        if str(array.dtype).endswith("float64"):
            with contextlib.suppress(ValueError, RuntimeError):  # read-only arrays stay as they are
                array[...] = array + 2.0**-52 * abs(array)


def leaves(args: Args) -> dict[str, Any]:
    """Return the leaves in arguments by path; an array that is passed twice appears once."""
    named = [(p, x, view(x) if backend_of(x) else p) for p, x in walk(args, "args")]
    first = {key: (path, value) for path, value, key in reversed(named)}
    return dict(reversed(first.values()))


def nbytes(args: Args) -> int:
    """Return the bytes that the arrays span; memory that several views share counts once."""
    spans = []
    for array in arrays(args).values():
        start, strides = backend_of(array).address_and_strides(array)
        # an expanded dimension has stride 0 and needs no memory
        stored = [n for n, stride in zip(array.shape, strides, strict=True) if stride]
        spans.append((start, start + math.prod(stored) * array.itemsize))
    return int(covered(spans))


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a call's arguments, with which many results are compared."""

    arrays: Sequence[Any]  #: The arguments' arrays, and their bytes as arrays.
    spans: Sequence[tuple[int, int]]  #: Address ranges in order; overlapping ones are merged.

    @functools.cached_property
    def maps(self) -> Sequence[tuple[int, int, int, str]]:
        """The mapped files of this process, in order: only results in host memory need them."""
        return _file_mappings()

    @functools.cached_property
    def file_ranges(self) -> Sequence[tuple[str, int, int]]:
        """The parts of files that are arguments."""
        return [_file_range(array, self.maps) for array in self.arrays if on_host(array)]


def memory_of(args: Args, skip: Collection[str] = ()) -> Memory:
    """Return the memory of the arguments, but for those at the paths ``skip``."""
    leaves = [(path, x) for path, x in walk(args, "args") if path not in skip]
    buffers = (as_buffer(x) for _, x in leaves)
    others = [x for _, x in leaves if backend_of(x)] + [x for x in buffers if x is not None]
    return Memory(others, joined(map(span, others)))


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans in order, with overlapping spans merged."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            start, end = merged[-1][0], max(end, merged.pop()[1])  # noqa: PLW2901
        merged.append((start, end))
    return merged


def overlaps(array: Any, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether an array lies, in part, in one of the spans of a :class:`Memory`."""
    low, high = span(array)
    before = bisect.bisect_left(spans, (high,))  # spans that start before the array's end
    return before > 0 and low < spans[before - 1][1]


def is_deferred(array: Any, memory: Memory) -> bool:
    """Whether some of an array's elements are not in memory of their own, which defers work.

    That is so if the array overlaps an argument (arrays or bytes), repeats elements, has a pending
    conjugation or sign, or maps a file. Memory that is shared with another process is the array's
    own, unless an argument maps it as well.
    """
    low, high = span(array)
    if high - low < math.prod(array.shape) * array.itemsize or _is_pending(array):
        return True
    if overlaps(array, memory.spans):
        return True
    if not on_host(array):
        return False
    name, start, end = _file_range(array, memory.maps)
    is_file = name.startswith("/") and not name.startswith(_MEMORY_FILES) and ".so" not in name
    ranges = memory.file_ranges if name else ()
    return is_file or any(name == n and start < e and s < end for n, s, e in ranges)


def as_buffer(value: Any) -> Any:
    """Return bytes, or memory of another kind, as an array on the same memory; None for others."""
    import numpy as np

    with contextlib.suppress(ValueError):  # it is empty, released or closed
        if type(value) is memoryview:
            # of a released one, numpy makes an array of objects, and its shape cannot be read
            return np.asarray(value).reshape(value.shape)
        if stored.is_one_of(type(value), (bytes, *stored.BUFFERS)):
            return np.frombuffer(value, np.uint8)
    return None


_MEMORY_FILES = ("/dev/", "/memfd:", "/anon_hugepage", "/SYSV")
"""Names in /proc/self/maps of memory that belongs to no file on a disk."""


def _file_mappings() -> list[tuple[int, int, int, str]]:
    """Return start, end, offset and name of the mapped files of this process, in order."""
    try:
        # a name may be in any encoding, and have characters at which splitlines() splits
        lines = os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n")
    except OSError:  # not Linux
        return []
    rows = [line.split(maxsplit=5) for line in lines if "/" in line]
    spans = [(row[0].split("-"), int(row[2], 16), row[5]) for row in rows]
    return [(int(start, 16), int(end, 16), offset, name) for (start, end), offset, name in spans]


def _file_range(array: Any, maps: Sequence[tuple[int, int, int, str]]) -> tuple[str, int, int]:
    """Return the file that an array's memory maps, and the range of its bytes there."""
    low, high = span(array)
    at = bisect.bisect_right(maps, low, key=operator.itemgetter(0)) - 1
    start, end, offset, name = maps[at] if at >= 0 else (0, 0, 0, "")
    return (name, offset + low - start, offset + high - start) if low < end else ("", 0, 0)


def _is_pending(array: Any) -> bool:
    """Whether a torch tensor is marked as conjugated or negated."""
    is_torch = backend_of(array).module.__name__ == "torch"
    return bool(is_torch and (array.data.is_conj() or array.data.is_neg()))


def is_lazy_copy(leaf: Any) -> bool:
    """Whether a torch tensor shares its memory until one of its owners writes to it."""
    torch = sys.modules.get("torch")
    is_lazy = getattr(torch and torch._C, "_is_cow_tensor", None)  # noqa: SLF001  has no public name
    is_tensor = bool(backend_of(leaf)) and backend_of(leaf).module is torch
    return bool(is_lazy and is_tensor and is_lazy(leaf))


def is_read_only(leaf: Any) -> bool:
    return bool(backend_of(leaf)) and not getattr(getattr(leaf, "flags", None), "writeable", True)


def is_unaligned(leaf: Any) -> bool:
    return bool(backend_of(leaf)) and not getattr(getattr(leaf, "flags", None), "aligned", True)


def boxed_numbers(value: Any) -> int:
    """Return how many numbers are objects of a library, and not of Python."""
    is_list = stored.is_one_of(type(value), (list, tuple))
    kinds = {*map(id, map(type, value))} if is_list else {id(type(value))}
    if kinds <= PLAIN_NUMBERS or not kinds <= _number_types("ml_dtypes" in sys.modules):
        return 0
    return sum(id(type(x)) not in PLAIN_NUMBERS for x in (value if is_list else (value,)))


def has_odd_truths(leaf: Any) -> bool:
    """Whether truth values have bytes other than 0 and 1, which sums take as those numbers."""
    backend = backend_of(leaf)
    if not backend or dtype(leaf) != "bool":
        return False
    return bool((backend.as_real_view(leaf).view(backend.module.uint8) > 1).any())


def has_graph(leaf: Any) -> bool:
    """Whether a leaf is a torch tensor that autograd can differentiate."""
    is_torch = bool(backend_of(leaf)) and backend_of(leaf).module.__name__ == "torch"
    return bool(is_torch and leaf.grad_fn is not None)


def autograd_trait(leaf: Any) -> str:
    """Return what limits the use of a torch tensor; an empty text if nothing does."""
    if not backend_of(leaf) or backend_of(leaf).module.__name__ != "torch":
        return ""
    if leaf.is_inference():
        return INFERENCE
    return "a tensor that requires grad" if leaf.requires_grad else ""


def hooks(value: Any) -> int:
    """Return how many hooks the torch modules in a value have."""
    torch, todo, count = sys.modules.get("torch"), [value], 0
    while torch and todo:
        value = todo.pop()
        todo.extend((children(value) or {}).values())
        if issubclass(type(value), torch.nn.Module):
            own = stored.attributes(value)
            kept = (x for name, x in own.items() if name.endswith("_hooks"))
            count += sum(len(x) for x in kept if issubclass(type(x), dict))
    return count


def requires_grad(leaf: Any) -> bool:
    """Whether autograd computes gradients for a torch tensor; False for other values."""
    return autograd_trait(leaf) not in ("", INFERENCE)


def has_hooks(leaf: Any) -> bool:
    """Whether a torch tensor has hooks that autograd calls; False for other values."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return requires_grad(leaf) and any(getattr(leaf, name, None) for name in names)


def storage(array: Any) -> tuple[int, int]:
    """Return the address range that an array keeps alive: the memory of the array that it views."""
    torch = sys.modules.get("torch")
    if torch and isinstance(array, torch.Tensor):
        memory = array.data.untyped_storage()
        return memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    while isinstance(array.base, type(array)):
        array = array.base
    base = array.base.obj if type(array.base) is memoryview else array.base
    if torch and isinstance(base, torch.Tensor):
        return storage(base)
    buffer = as_buffer(base)
    return span(array if buffer is None or not on_host(array) else buffer)


def shared_bytes(arrays: Sequence[Any]) -> int:
    """Return by how many bytes arrays are larger than the memory that they span together."""
    views = {view(array): array for array in arrays}
    in_all, distinct = (
        sum(int(math.prod(a.shape) * a.itemsize) for a in group)
        for group in (arrays, views.values())
    )
    return in_all - distinct + max(0, distinct - int(covered(map(span, views.values()))))


def containers(value: Any) -> Counter[int]:
    """Count how often each container that can be changed appears in a value, by id."""
    counts: Counter[int] = Counter()
    rest, torch = [value], sys.modules.get("torch")
    while rest:
        item = rest.pop()
        kind = type(item)
        is_module = torch and issubclass(kind, torch.nn.Module)
        if issubclass(kind, (list, dict)) or stored.is_open_dataclass(item) or is_module:
            counts[id(item)] += 1
            if counts[id(item)] > 1:
                continue
        items = (children(item) or {}).values()
        rest.extend(x for x in items if id(type(x)) not in PLAIN_NUMBERS)
    return counts


def repeated_containers(value: Any) -> int:
    """Return how often lists, dicts, dataclasses and modules in a value appear again."""
    counts = containers(value)
    return counts.total() - len(counts)


def shared_containers(value: Any, args: Args) -> int:
    """Return how many lists, dicts, dataclasses and modules in a value belong to arguments."""
    own = containers(value)
    return len(own.keys() & containers(args).keys()) if own else 0


def layout(array: Any) -> tuple[Any, ...]:
    """Return the properties of an array, other than its values, that may affect a call's time."""
    address, strides = backend_of(array).address_and_strides(array)
    if backend_of(array).module.__name__ == "torch":
        kind: tuple[Any, ...] = array.requires_grad, array.data.is_pinned(), _is_pending(array)
    else:
        kind = type(array), getattr(array.flags, "writeable", True)
    return signature(array), strides, address % ALIGNMENT, kind


def sample(array: Any, entropy: int) -> list[float]:
    """Return a few elements, at positions that depend on ``entropy`` and the shape alone."""
    shape = tuple(array.shape) or (1,)
    if not math.prod(shape):
        return []
    backend = backend_of(array)
    key = backend.module.__name__, device_name(array), shape, entropy
    if key not in _positions:  # cached: drawing and copying takes ten times as long as using them
        _positions[key] = tuple(backend.cast(i, "int64", array) for i in _drawn(shape, entropy))
    real = backend.as_real_view(array.reshape(shape))[_positions[key]]
    return list(map(float, backend.cast(real, "float64", array).reshape(-1).tolist()))


def sample_of_list(numbers: Sequence[Any], entropy: int) -> list[float]:
    """Return hashes of a few items of a long list of numbers, as :func:`sample` reads an array."""
    (positions,) = _drawn((len(numbers),), entropy)
    return [float(hash(numbers[i])) for i in positions]


_positions: dict[Hashable, tuple[Any, ...]] = {}
"""The positions that :func:`sample` reads, as one array per dimension, by shape and device."""


def _drawn(shape: tuple[int, ...], entropy: int) -> tuple[Any, ...]:
    import numpy as np

    count = math.prod(shape)
    drawn = np.random.default_rng((entropy, *shape))
    at = drawn.integers(0, count, SAMPLE) if count > SAMPLE else np.arange(count)
    return np.unravel_index(at, shape)


def span(array: Any) -> tuple[int, int]:
    """Return where the memory of an array's elements begins and ends."""
    if not math.prod(array.shape):
        return 0, 0
    start, strides = backend_of(array).address_and_strides(array)
    reach = [(n - 1) * stride for n, stride in zip(array.shape, strides, strict=True)]
    low = start + sum(min(0, r) for r in reach)
    return low, start + sum(max(0, r) for r in reach) + array.itemsize


def alike(first: Args, second: Args) -> bool:
    """Whether two sets of arguments differ at most in the elements of their arrays."""
    a, b = walk(first, "args"), walk(second, "args")
    return [path for path, _ in a] == [path for path, _ in b] and all(
        signature(x) == signature(y) if backend_of(x) and backend_of(y) else _equal(x, y)
        for (_, x), (_, y) in zip(a, b, strict=True)
    )


def _equal(first: object, second: object) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # scipy's sparse arrays are slow to compare
            return first is second or bool(first == second)
    except Exception:  # noqa: BLE001  any class may define ==
        return False


@watched
def fingerprint(args: Args, skip: Collection[str] = ()) -> dict[str, tuple[str, Any]]:
    """Return each leaf's type and the key by which its value is compared; arrays are not copied."""
    skipped = frozenset(skip)
    return {path: identify(leaf) for path, leaf in leaves(args).items() if path not in skipped}


def identify(leaf: Any) -> tuple[str, Any]:
    """Return a leaf's type and the checksums of its elements, or its text if it has no elements.

    Objects of unknown types, which may not even be immutable, have no text.
    """
    if stored.is_one_of(type(leaf), _NUMBER_TYPES):  # as an array, it would take ten times as long
        return type(leaf).__name__, stored.text(leaf)
    if array := as_array(leaf):
        return signature(array[0]), _checksums(array[0])
    is_plain = id(type(leaf)) in _PLAIN_IDS or is_other_scalar(leaf)
    return type(leaf).__name__, stored.text(leaf) if is_plain else None


def is_compared(leaf: Any) -> bool:
    """Whether a leaf is an array or numbers, which are compared element by element."""
    return is_number(leaf) or bool(backend_of(leaf)) or is_number_list(leaf)


def as_array(leaf: Any) -> tuple[Any, ...]:
    """Return a leaf as an array, in a tuple; () if it is neither an array nor numbers.

    Integers that no integer type of numpy holds become rows of words of 64 bits: numpy would round
    them to doubles, or store objects.
    """
    import numpy as np

    if is_number(leaf) or is_number_list(leaf):
        numbers = np.asarray(leaf)
        if numbers.dtype.kind in "fO":
            numbers = _exact_or_doubles(leaf, numbers)
        leaf = numbers
    return (leaf,) if backend_of(leaf) else ()


def _exact_or_doubles(leaf: Any, numbers: Any) -> Any:
    """Return numbers, which numpy has made doubles or objects, as words or as doubles."""
    import numpy as np

    items = (leaf,) if is_number(leaf) else leaf
    # most lists of doubles begin with one: to look at all types would double the time
    if id(type(items[0])) in integer_types() and {*map(id, map(type, items))} <= integer_types():
        size = 8 * (max(int(x).bit_length() for x in items) // 64 + 1)
        data = b"".join([int(x).to_bytes(size, "little", signed=True) for x in items])
        return np.frombuffer(data, "<i8").reshape(*numbers.shape, size // 8)
    if numbers.dtype.kind == "O":
        with contextlib.suppress(OverflowError, TypeError, ValueError):
            return np.asarray(leaf, float)
    return numbers


def _checksums(array: Any) -> Any:
    """Return the checksum of each part of an array's bits, on its device; None if it is empty.

    A checksum is the sum of the bits, as integers of at most 32 bits, times random odd weights.
    Whatever changes in a part, its checksum stays equal with a probability of at most 2**-32. (An
    integer of 64 bits times an odd weight would lose this: two flipped signs would cancel.)
    """
    backend = backend_of(array)
    sums = []
    for _, part in parts(backend.as_real_view(array)):
        bits = as_int_bits(part)
        if bits.itemsize == 8:
            bits = backend.copy(bits).view(backend.module.int32)  # a contiguous copy
        sums.append((backend.cast(bits, "int64", array) * _weights(array, len(bits))).sum())
    return backend.module.stack(sums) if sums else None


def _weights(array: Any, count: int) -> Any:
    import numpy as np

    size = 1 << (count - 1).bit_length()
    backend = backend_of(array)
    key = backend.module.__name__, str(getattr(array, "device", "cpu")), size
    if key not in _WEIGHTS:
        drawn = np.random.default_rng().integers(-(2**63), 2**63 - 1, size)
        _WEIGHTS[key] = backend.cast(drawn | 1, "int64", array)
    return _WEIGHTS[key][:count]


def same_identity(first: tuple[str, Any], second: tuple[str, Any]) -> bool:
    (kind, value), (other_kind, other) = first, second
    return kind == other_kind and bool(
        value == other if value is None or isinstance(value, str) else (value == other).all()
    )


@watched
def changed(
    before: Mapping[str, tuple[str, Any]], args: Args, skip: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the paths of leaves whose value changed, or that were added or removed.

    ``before`` is an earlier :func:`fingerprint`.
    """
    now = fingerprint(args, skip)  # all is enqueued before the first wait for the GPU

    def same(path: str) -> bool:
        return same_identity(now[path], before[path])

    left_out = {*skip, *(p for p in now if p in before and same(p))}
    return tuple(p for p in dict.fromkeys((*now, *before)) if p not in left_out)


def poison(args: Args, paths: Collection[str], value: float = math.nan) -> None:
    """Fill the arrays and buffers at these paths with wrong values, but not memory around a view.

    ``value`` is written into arrays of real and complex numbers.
    """
    for leaf in (x for p, x in (leaves(args) if paths else {}).items() if p in paths):
        _fill(leaf, value)


def _fill(array: Any, value: float) -> None:
    if not backend_of(array):
        _fill_other(array, value)
    elif dtype(array) == "bool":
        for _, index in _slabs(tuple(array.shape), chunk(array)):
            flat = backend_of(array).module.zeros_like(array[index]).reshape(-1)
            flat[1::2] = True
            array[index] = flat.reshape(array[index].shape)
    elif is_exact(array):
        bits = int.from_bytes(b"\xa5" * array.itemsize, "little", signed=True)
        as_int_bits(array)[...] = bits
    else:
        backend_of(array).as_real_view(array)[...] = value


def _fill_other(array: Any, value: float) -> None:
    """Fill an array of other values than numbers, a buffer or a list of numbers."""
    import numpy as np

    if type(array) is list:
        array[:] = [value] * len(array)
    elif stored.is_one_of(type(array), stored.BUFFERS):
        _fill(as_buffer(array), value)
    elif components := _components(array):
        for part in components:
            if part.dtype.kind not in "iu":  # it may be an index
                _fill(part, value)
    elif array.dtype.kind in "fc":
        array[...] = value
    elif array.dtype.kind in "OUS":
        array[...] = "Z" * max(1, array.itemsize)  # a text whose end is cut off
    else:  # of dates, or of bytes without a meaning
        array[...] = np.frombuffer(b"\xa5" * array.itemsize, array.dtype)


def _components(array: Any) -> list[Any]:
    """Return data and mask of a masked array, or the fields of records; [] for other arrays."""
    import numpy as np

    if type(array) is np.ma.MaskedArray:
        both = np.ndarray.view(array, np.ndarray), stored.attributes(array).get("_mask")
        return [part for part in both if type(part) is np.ndarray]
    return [array[name] for name in array.dtype.names or ()]


def can_be_filled(leaf: Any) -> bool:
    """Whether a leaf that is no array of numbers can get wrong values in place.

    Only lists of floats, and buffers of floats and bytes, can: with wrong integers, a counting loop
    might never end, and a function in C might read beyond its memory.
    """
    import numpy as np

    if type(leaf) is list and is_number_list(leaf):
        return {*map(id, map(type, leaf))} == {id(float)}
    buffers = bytearray, array_of_python.array
    if stored.is_one_of(type(leaf), (*buffers, memoryview)):
        buffer = as_buffer(leaf)
        if buffer is None or not backend_of(buffer) or is_read_only(buffer):
            return False
        if type(leaf) is not bytearray and memoryview(leaf).format not in "bBcfd":
            return False
        # a mapped file is left alone
        return type(leaf) is not memoryview or stored.is_one_of(type(leaf.obj), buffers)
    if backend_of(leaf) or not stored.is_one_of(type(leaf), (np.ndarray, np.ma.MaskedArray)):
        return False
    return bool(leaf.dtype.itemsize) and bool(leaf.flags.writeable)


def touch(args: Args) -> None:
    """Write to all memory of arguments on the host, and keep its values.

    Memory such as that of ``np.zeros`` has no pages before it is written. Mapped files are left
    alone.
    """
    memory = memory_of(args)
    for array in filter(on_host, memory.arrays):
        elements = stored_elements(array, array)
        if elements is not None and not _file_range(array, memory.maps)[0]:
            with contextlib.suppress(ValueError, RuntimeError):  # it is read-only
                bits = as_int_bits(elements)
                bits |= 0


@dataclasses.dataclass(slots=True)
class Overwriting:
    """Gives live values those of fresh ones, in place; works for all that :func:`walk` reads.

    Arrays are written through an alias, so that torch's version counters stay as they are.
    """

    write: bool  #: False to find only what can change in place.
    stuck: list[str] = dataclasses.field(default_factory=list)
    """Paths of arrays that cannot change: read-only, or of another shape, dtype or device."""
    unbound: list[str] = dataclasses.field(default_factory=list)
    """Paths of other values that cannot change: numbers in tuples, files, functions."""

    def items(self, live: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
        """Overwrite the values of ``live``, which has the same paths as ``fresh``.

        Return the values that are valid now, by path: live ones, or fresh ones where the live one
        cannot change.
        """
        return {path: self._value(path, value, fresh[path]) for path, value in live.items()}

    def _value(self, path: str, live: Any, fresh: Any) -> Any:
        olds, news = children(live), children(fresh)
        if live is fresh:
            right = live
        elif backend_of(live):
            right = self._array(path, live, fresh)
        elif type(live) is not type(fresh) or olds is None or news is None:
            right = self._leaf(path, live, fresh)
        else:
            olds, news = ({path + k: x for k, x in items.items()} for items in (olds, news))
            right = self._container(path, live, fresh, olds, news)
        return right

    def _container(
        self, path: str, live: Any, fresh: Any, olds: Mapping[str, Any], news: Mapping[str, Any]
    ) -> Any:
        torch = sys.modules.get("torch")
        unbound = len(self.unbound)
        items = news
        if olds.keys() == news.keys():
            items = self.items(olds, news)
            has_order = issubclass(type(live), dict)  # the order of its keys may have changed
            if all(items[key] is olds[key] for key in items) and not has_order:
                return live
        else:
            has_arrays = any(backend_of(leaf) for _, leaf in walk(fresh, path))
            (self.stuck if has_arrays else self.unbound).append(path)
        if isinstance(live, tuple):
            return tuple.__new__(type(live), items.values())
        if torch and isinstance(live, torch.nn.Module):
            return fresh
        del self.unbound[unbound:]  # this container can store the fresh values
        if self.write:
            refill(live, fresh, items.values())
        return live

    def _array(self, path: str, live: Any, fresh: Any) -> Any:
        if backend_of(fresh) is not backend_of(live) or signature(fresh) != signature(live):
            self.stuck.append(path)
            return fresh
        target, source = stored_elements(live, live), stored_elements(fresh, live)
        if target is None or source is None:
            if same_identity(identify(live), identify(fresh)):
                return live
            self.stuck.append(path)
            return fresh
        if self.write:
            as_int_bits(target)[...] = as_int_bits(source)
            gradient, new_gradient = _grad(live), _grad(fresh)
            if gradient is not None or new_gradient is not None:
                live.grad = self._value(f"{path}.grad", gradient, new_gradient)
        return live

    def _leaf(self, path: str, live: Any, fresh: Any) -> Any:
        if type(live) is type(fresh) and type(live) in (list, bytearray):
            if self.write:
                live[:] = fresh
            return live
        if type(live) is type(fresh) and _equal(live, fresh):
            return live
        self.unbound.append(path)
        return fresh


def refill(live: Any, fresh: Any, items: Iterable[Any]) -> None:
    """Store the items of a list, dict or dataclass, in the order of :func:`children`."""
    if isinstance(live, list):
        list.__setitem__(live, slice(None), items)
    elif isinstance(live, dict):
        by_key = dict(zip((key for _, key, _ in stored.items(fresh)), items, strict=True))
        stored.refill(live, [(key, by_key[key]) for key in stored.keys(fresh)])
    else:
        for field, item in zip(dataclasses.fields(live), items, strict=True):
            object.__setattr__(live, field.name, item)


def stored_elements(array: Any, live: Any) -> Any:
    """View the elements of an array that ``live`` stores; None if they cannot be written there.

    Of a dimension that ``live`` repeats (its stride is 0), only the first element is stored.
    """
    backend = backend_of(array)
    if backend.module.__name__ == "torch":
        array = array.data.conj() if live.is_conj() else array.data
    elif backend.module.__name__ == "numpy" and not live.flags.writeable:
        return None
    strides = backend.address_and_strides(live)[1]
    repeated = [i for i, n in enumerate(live.shape) if n > 1 and not strides[i]]
    if any(backend.address_and_strides(array)[1][i] for i in repeated):
        return None
    return array[(*(slice(int(i in repeated) or None) for i in range(len(strides))), ...)]
