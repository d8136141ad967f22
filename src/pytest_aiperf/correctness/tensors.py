"""Finds, compares, poisons and overwrites the tensors in a value, whatever their library."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Score
from pytest_aiperf.rules.stats import covered
from pytest_aiperf.rules.validity import watched

Args = tuple[Any, ...]
NamedTensor = tuple[str, Any]  #: A leaf's path and value, which need not be an array.


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


def fingerprint(args: Args, skip: Collection[str] = ()) -> dict[str, Any]:
    """Copy the bits of the arrays, on their device."""
    return {p: backend_of(a).copy(as_int_bits(a)) for p, a in arrays(args).items() if p not in skip}


@watched
def changed(before: Mapping[str, Any], args: Args, skip: Collection[str] = ()) -> tuple[str, ...]:
    """Return the paths of arrays whose bits changed, or that were added or removed."""
    now = {p: as_int_bits(a) for p, a in arrays(args).items() if p not in skip}
    both = [p for p in now if p in before and signature(now[p]) == signature(before[p])]
    equal = [(p, (now[p] == before[p]).all()) for p in both]  # all enqueued before the first wait
    same = [p for p, flag in equal if bool(flag)]
    return tuple(p for p in dict.fromkeys((*now, *before)) if p not in (*same, *skip))


def poison(args: Args, paths: Collection[str]) -> None:
    """Fill the arrays at these paths with wrong values, but not the memory around a view."""
    for array in (a for p, a in arrays(args).items() if p in paths):
        if dtype(array) == "bool":
            flat = backend_of(array).module.zeros_like(array).reshape(-1)
            flat[1::2] = True
            array[...] = flat.reshape(array.shape)
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
