"""Finds, compares, poisons and overwrites the tensors in a value, whatever their library."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Score
from pytest_aiperf.rules.stats import covered
from pytest_aiperf.rules.validity import watched

Args = tuple[Any, ...]
NamedTensor = tuple[str, Any]  #: A leaf's path and value, which need not be an array.

CHUNK = 1 << 23  #: Elements in one part on a GPU: several fp64 temporaries take 64 MiB each.
HOST_CHUNK = 1 << 15
"""Elements in one part on the host: they fit in its caches, and torch uses one thread for so few.
Several threads would wait for one another while other claims keep the cores busy."""
_WEIGHTS: dict[Any, Any] = {}  #: Random weights of checksums by backend, device and number.


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """One set of inputs, as returned by one call of a claim's ``inputs``."""

    args: Args  #: The arguments of a call, without their ``static`` marks.
    dynamic: Sequence[int]  #: Positions of the arguments not marked ``static``.
    seed: int  #: Seed with which ``inputs`` drew the values.

    def overwrite(self, fresh: Inputs, positions: Sequence[int] | None = None) -> None:
        """Copy the dynamic arguments of ``fresh``, or those at ``positions``, into this set."""
        for i in self.dynamic if positions is None else positions:
            overwrite((self.args[i],), (fresh.args[i],))


def walk(value: Any, name: str) -> list[NamedTensor]:
    """Return the leaves in tuples, lists, dicts, dataclasses and modules.

    None is not a leaf, and neither is a Score, which is the judged figure and no part of the
    result. A tensor's ``.grad`` is one, because backward() writes it. Containers are read without
    their own methods, which an arm could override to compute the items after the timed call.
    """
    torch = sys.modules.get("torch")
    leaves: list[NamedTensor] = []
    children: dict[str, Any] = {}
    if value is None or isinstance(value, Score):
        pass
    elif isinstance(value, (tuple, list)):
        kind: Any = tuple if isinstance(value, tuple) else list
        children = {f"[{i}]": item for i, item in enumerate(kind.__iter__(value))}
    elif isinstance(value, dict):
        keys = sorted(dict.keys(value), key=repr)
        children = {f"[{key!r}]": dict.__getitem__(value, key) for key in keys}
    elif torch and isinstance(value, torch.nn.Module):
        named = (*value.named_parameters(), *value.named_buffers())
        children = {f".{key}": item for key, item in named}
    elif _is_plain_dataclass(value):
        children = {f".{f.name}": getattr(value, f.name) for f in dataclasses.fields(value)}
    else:
        leaves = [(name, value)]
        if torch and isinstance(value, torch.Tensor) and value.is_leaf:
            children = {".grad": value.grad}
    return leaves + [
        leaf for path_suffix, item in children.items() for leaf in walk(item, name + path_suffix)
    ]


def _is_plain_dataclass(value: Any) -> bool:
    """Whether this is a dataclass that stores all fields and computes none when it is read."""
    kind = type(value)
    if not dataclasses.is_dataclass(kind) or kind.__getattribute__ is not object.__getattribute__:
        return False
    stored = vars(value) if hasattr(value, "__dict__") else {}
    attributes = {f.name: getattr(kind, f.name, None) for f in dataclasses.fields(kind)}
    return all(
        isinstance(attribute, types.MemberDescriptorType)
        or (name in stored and not isinstance(attribute, property))
        for name, attribute in attributes.items()
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayBackend:
    """Operations whose names differ between torch, numpy and cupy."""

    module: Any  #: The library's module.
    is_array: Callable[[Any], bool]
    """Whether a value is a dense array of numbers. Arrays of subclasses are excluded: they could
    compute their elements when they are read."""
    as_real_view: Callable[[Any], Any]
    """View an array without its gradient, and complex numbers as pairs of real numbers."""
    copy: Callable[[Any], Any]  #: Copy an array.
    cast: Callable[[Any, str, Any], Any]  #: Convert to a dtype, on the device of the last argument.
    address_and_strides: Callable[[Any], tuple[int, tuple[int, ...]]]  #: Strides are in bytes.


def _torch(torch: Any) -> ArrayBackend:
    def as_real_view(array: Any) -> Any:
        array = array.detach().resolve_conj().resolve_neg()
        return torch.view_as_real(array) if array.is_complex() else array

    return ArrayBackend(
        torch,
        lambda x: type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided,
        as_real_view,
        lambda x: x.clone(),
        lambda x, kind, at: torch.as_tensor(x, dtype=getattr(torch, kind), device=at.device),
        lambda x: (x.data_ptr(), tuple(s * x.element_size() for s in x.stride())),
    )


def _numpy(numpy: Any) -> ArrayBackend:
    """Adapt numpy, or cupy, which has the same functions."""
    types_ = (numpy.ndarray, getattr(numpy, "memmap", numpy.ndarray))
    return ArrayBackend(
        numpy,
        lambda x: type(x) in types_ and x.dtype.kind in "biufc",
        lambda x: x[..., None].view(x.real.dtype) if x.dtype.kind == "c" else x,
        lambda x: x.copy(),
        lambda x, kind, _: numpy.asarray(x, dtype=kind),
        lambda x: (getattr(x.data, "ptr", None) or x.ctypes.data, x.strides),
    )


BACKENDS = {"torch": _torch, "numpy": _numpy, "cupy": _numpy}


@functools.cache
def _backend(name: str) -> ArrayBackend:
    return BACKENDS[name](sys.modules[name])


def backend_of(value: Any) -> Any:
    """Return the backend of an array; None for another value."""
    loaded = (_backend(name) for name in BACKENDS if sys.modules.get(name))
    return next((backend for backend in loaded if backend.is_array(value)), None)


def dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def is_exact(array: Any) -> bool:
    return "int" in dtype(array) or dtype(array) == "bool"


def signature(array: Any) -> str:
    """Return an output's dtype, shape and device as text; they must be equal for all arms."""
    return f"{dtype(array)}{list(array.shape)} on {getattr(array, 'device', 'cpu')}"


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
    leaves = [(path, value) for path, value in walk(args, "args") if backend_of(value)]
    first = {view(value): (path, value) for path, value in reversed(leaves)}
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


def aliases_input(array: Any, args: Args, skip: Collection[str] = ()) -> bool:
    """Whether an array overlaps an argument in memory, or is expanded (has a stride of 0)."""
    low, high = _span(array)
    spans = [_span(a) for p, a in arrays(args).items() if p not in skip]
    _, strides = backend_of(array).address_and_strides(array)
    expanded = any(n > 1 and not stride for n, stride in zip(array.shape, strides, strict=True))
    return expanded or any(low < end and start < high for start, end in spans)


def _span(array: Any) -> tuple[int, int]:
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
        return first is second or bool(first == second)
    except Exception:  # noqa: BLE001  any class may define ==
        return False


@watched
def fingerprint(args: Args, skip: Collection[str] = ()) -> dict[str, tuple[str, Any]]:
    """Return the signature and the checksums of each array by path; arrays are not copied."""
    return {p: (signature(a), _checksums(a)) for p, a in arrays(args).items() if p not in skip}


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


@watched
def changed(
    before: Mapping[str, tuple[str, Any]], args: Args, skip: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the paths of arrays whose bits changed, or that were added or removed.

    ``before`` is an earlier :func:`fingerprint`.
    """
    now = fingerprint(args, skip)  # all is enqueued before the first wait for the GPU

    def same(path: str) -> bool:
        (kind, sums), (kind_before, sums_before) = now[path], before[path]
        return kind == kind_before and (sums is None or bool((sums == sums_before).all()))

    unchanged = [p for p in now if p in before and same(p)]
    return tuple(p for p in dict.fromkeys((*now, *before)) if p not in (*unchanged, *skip))


def poison(args: Args, paths: Collection[str]) -> None:
    """Fill the arrays at these paths with wrong values, but not the memory around a view."""
    for array in (a for p, a in arrays(args).items() if p in paths):
        if dtype(array) == "bool":
            for _, index in _slabs(tuple(array.shape), chunk(array)):
                flat = backend_of(array).module.zeros_like(array[index]).reshape(-1)
                flat[1::2] = True
                array[index] = flat.reshape(array[index].shape)
        elif is_exact(array):
            bits = int.from_bytes(b"\xa5" * array.itemsize, "little", signed=True)
            as_int_bits(array)[...] = bits
        else:
            backend_of(array).as_real_view(array)[...] = math.nan


def overwrite(live: Args, fresh: Args) -> None:
    """Copy fresh values into live arguments, in place; drop gradients that have no fresh value."""
    olds, news = arrays(live), arrays(fresh)
    for path, old in olds.items():
        new = news.get(path)
        if new is None and path.endswith(".grad"):
            olds[path.removesuffix(".grad")].grad = None
        elif new is None or signature(new) != signature(old):
            raise UsageError(
                f"inputs() gives another shape, dtype or device for another seed ({path}): a "
                "prepared arm needs them fixed"
            )
        else:
            as_int_bits(old)[...] = as_int_bits(new)
