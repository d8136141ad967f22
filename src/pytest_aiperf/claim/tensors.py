"""The arrays in a value: how to find them, look at them and write into them."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Score
from pytest_aiperf.rules.stats import covered
from pytest_aiperf.rules.validity import watched

Args = tuple[Any, ...]
NamedTensor = tuple[str, Any]
"""Where something was found, and what: an array, or a value of another kind."""


def walk(value: Any, name: str) -> list[NamedTensor]:
    """Find the leaves in tuples, lists, dicts, dataclasses and modules.

    None is no leaf, and neither is a Score: it is the figure claimed, not a result. A gradient
    is one: backward() changes its arguments too. What a container holds is looked at past its own
    methods: one that computes when it is read would do so outside the clock.
    """
    torch = sys.modules.get("torch")
    found: list[NamedTensor] = []
    inner: dict[str, Any] = {}
    if value is None or isinstance(value, Score):
        pass
    elif isinstance(value, (tuple, list)):
        kind: Any = tuple if isinstance(value, tuple) else list
        inner = {f"[{i}]": item for i, item in enumerate(kind.__iter__(value))}
    elif isinstance(value, dict):
        keys = sorted(dict.keys(value), key=repr)
        inner = {f"[{key!r}]": dict.__getitem__(value, key) for key in keys}
    elif torch and isinstance(value, torch.nn.Module):
        named = (*value.named_parameters(), *value.named_buffers())
        inner = {f".{key}": item for key, item in named}
    elif _holds_fields(value):
        inner = {f".{f.name}": getattr(value, f.name) for f in dataclasses.fields(value)}
    else:
        found = [(name, value)]
        if torch and isinstance(value, torch.Tensor) and value.is_leaf:
            inner = {".grad": value.grad}
    return found + [leaf for step, item in inner.items() for leaf in walk(item, name + step)]


def _holds_fields(value: Any) -> bool:
    """Whether this is a dataclass, and each field lies in it and is not computed when read."""
    kind = type(value)
    if not dataclasses.is_dataclass(kind) or kind.__getattribute__ is not object.__getattribute__:
        return False
    stored = vars(value) if hasattr(value, "__dict__") else {}
    own = {f.name: getattr(kind, f.name, None) for f in dataclasses.fields(kind)}
    return all(
        isinstance(found, types.MemberDescriptorType)
        or (name in stored and not isinstance(found, property))
        for name, found in own.items()
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayBackend:
    """What torch, numpy and cupy do not say in the same words."""

    module: Any
    has: Callable[[Any], bool]  # a dense array of numbers, no subclass that computes when read
    real: Callable[[Any], Any]  # a view without gradient, of complex numbers as pairs
    copy: Callable[[Any], Any]
    cast: Callable[[Any, str, Any], Any]  # to a dtype, and to where the last argument lies
    where: Callable[[Any], tuple[int, tuple[int, ...]]]  # address, and strides in bytes


def _torch(torch: Any) -> ArrayBackend:
    def real(array: Any) -> Any:
        array = array.detach().resolve_conj().resolve_neg()
        return torch.view_as_real(array) if array.is_complex() else array

    return ArrayBackend(
        torch,
        lambda x: type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided,
        real,
        lambda x: x.clone(),
        lambda x, kind, at: torch.as_tensor(x, dtype=getattr(torch, kind), device=at.device),
        lambda x: (x.data_ptr(), tuple(s * x.element_size() for s in x.stride())),
    )


def _numpy(numpy: Any) -> ArrayBackend:
    """Adapt numpy, or cupy, which follows it."""
    own = (numpy.ndarray, getattr(numpy, "memmap", numpy.ndarray))
    return ArrayBackend(
        numpy,
        lambda x: type(x) in own and x.dtype.kind in "biufc",
        lambda x: x[..., None].view(x.real.dtype) if x.dtype.kind == "c" else x,
        lambda x: x.copy(),
        lambda x, kind, _: numpy.asarray(x, dtype=kind),
        lambda x: (getattr(x.data, "ptr", None) or x.ctypes.data, x.strides),
    )


LIBRARIES = {"torch": _torch, "numpy": _numpy, "cupy": _numpy}


@functools.cache
def _library(name: str) -> ArrayBackend:
    return LIBRARIES[name](sys.modules[name])


def backend_of(value: Any) -> Any:
    """Return the Library whose array this is, or None; one that is not loaded has no arrays."""
    loaded = (_library(name) for name in LIBRARIES if sys.modules.get(name))
    return next((library for library in loaded if library.has(value)), None)


def dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def is_exact(array: Any) -> bool:
    return "int" in dtype(array) or dtype(array) == "bool"


def signature(array: Any) -> str:
    """Say dtype, shape and device: arms that do the same work give the same."""
    return f"{dtype(array)}{list(array.shape)} on {getattr(array, 'device', 'cpu')}"


def view(array: Any) -> tuple[Any, ...]:
    """Return what is equal for two views of the same elements."""
    return (signature(array), *backend_of(array).where(array))


def as_int_bits(array: Any) -> Any:
    """View an array as integers: NaN equals NaN, and 0.0 is not -0.0."""
    real = backend_of(array).real(array)
    return real.view(getattr(backend_of(array).module, f"int{8 * real.itemsize}"))


def arrays(args: Args) -> dict[str, Any]:
    """Return the arguments' arrays by path; one that is passed twice counts once."""
    found = [(path, value) for path, value in walk(args, "args") if backend_of(value)]
    first = {view(value): (path, value) for path, value in reversed(found)}
    return dict(reversed(first.values()))


def nbytes(args: Args) -> int:
    """Bytes that the arguments' arrays reach; what several views share counts once."""
    spans = []
    for array in arrays(args).values():
        start, strides = backend_of(array).where(array)
        once = [n for n, stride in zip(array.shape, strides, strict=True) if stride]
        spans.append((start, start + math.prod(once) * array.itemsize))  # expanded ones lie once
    return int(covered(spans))


def aliases_input(array: Any, args: Args, skip: Collection[str] = ()) -> bool:
    """Whether an array lies in an argument's memory, or shows one element in many places."""
    low, high = _span(array)
    spans = [_span(a) for p, a in arrays(args).items() if p not in skip]
    _, strides = backend_of(array).where(array)
    once = all(n < 2 or stride for n, stride in zip(array.shape, strides, strict=True))
    return not once or any(low < end and start < high for start, end in spans)


def _span(array: Any) -> tuple[int, int]:
    if not math.prod(array.shape):
        return 0, 0
    start, strides = backend_of(array).where(array)
    reach = [(n - 1) * stride for n, stride in zip(array.shape, strides, strict=True)]
    low = start + sum(min(0, r) for r in reach)
    return low, start + sum(max(0, r) for r in reach) + array.itemsize


def alike(first: Args, second: Args) -> bool:
    """Whether arguments differ in nothing but the elements of their arrays."""
    pairs = list(zip(walk(first, "args"), walk(second, "args"), strict=False))
    return len(walk(first, "args")) == len(walk(second, "args")) == len(pairs) and all(
        p == q
        and (signature(x) == signature(y) if backend_of(x) and backend_of(y) else _equal(x, y))
        for (p, x), (q, y) in pairs
    )


def _equal(first: object, second: object) -> bool:
    try:
        return first is second or bool(first == second)
    except Exception:  # noqa: BLE001  whatever they are, they are not known to be equal
        return False


def fingerprint(args: Args, skip: Collection[str] = ()) -> dict[str, Any]:
    """Remember the arguments' bits, on the device where they are."""
    return {p: backend_of(a).copy(as_int_bits(a)) for p, a in arrays(args).items() if p not in skip}


@watched
def changed(before: Mapping[str, Any], args: Args, skip: Collection[str] = ()) -> tuple[str, ...]:
    """Return the leaves whose bits are not those of the fingerprint, new and lost ones included."""
    now = {p: as_int_bits(a) for p, a in arrays(args).items() if p not in skip}
    both = [p for p in now if p in before and signature(now[p]) == signature(before[p])]
    equal = [(p, (now[p] == before[p]).all()) for p in both]  # a GPU does all before it is asked
    same = [p for p, flag in equal if bool(flag)]
    return tuple(p for p in dict.fromkeys((*now, *before)) if p not in (*same, *skip))


def poison(args: Args, paths: Collection[str]) -> None:
    """Fill these leaves, and only the elements of their views, with what is no right answer."""
    for array in (a for p, a in arrays(args).items() if p in paths):
        if dtype(array) == "bool":
            flat = backend_of(array).module.zeros_like(array).reshape(-1)
            flat[1::2] = True
            array[...] = flat.reshape(array.shape)
        elif is_exact(array):
            as_int_bits(array)[...] = int.from_bytes(
                b"\xa5" * array.itemsize, "little", signed=True
            )
        else:
            backend_of(array).real(array)[...] = math.nan


def overwrite(live: Args, fresh: Args) -> None:
    """Copy fresh values into live arguments in place; gradients that are not fresh are dropped."""
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
