"""Do two results agree, and where not.

A call's result is the leaves of what it returns, followed by the argument leaves that it changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
import reprlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import Disagreement, Misuse
from .model import Error, Prepared, Score

Args = tuple[Any, ...]
Arm = Callable[..., object] | Prepared

K = 4
"""How many times the baseline's own error another arm's may be."""

BUDGET = {
    "fp64": 64 * 2.0**-52,
    "fp32": 64 * 2.0**-23,
    "tf32": 4 * 2.0**-10,
    "fp16": 2 * 2.0**-10,
    "bf16": 2 * 2.0**-7,
    "fp8_e5m2": 2 * 2.0**-2,
    "fp8": 2 * 2.0**-3,
}
"""Error that a precision may always make."""

SANITY, SANITY_CAP = 64, 0.1
"""How many budgets the baseline may need, and at most how much: a result of zeros has error 0.5."""

CHUNK = 1 << 23
"""Elements compared at a time: fp64 temporaries stay far below 1 GiB whatever the leaf's size."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array, or an opaque value, and where it was found."""

    path: str
    value: Any


@dataclass(frozen=True, slots=True)
class Contract:
    """What the baseline does to its arguments.

    ``written`` are the leaves that it changes, ``pure`` those of them that it does not read: they
    may be poisoned. ``names`` are the arguments' names, for messages.
    """

    written: tuple[str, ...]
    pure: tuple[str, ...]
    names: tuple[str, ...] = ()

    def say(self, path: str) -> str:
        """Name an argument leaf as the claim's author does."""
        position, _, rest = path.removeprefix("args[").partition("]")
        return self.names[int(position)] + rest if int(position) < len(self.names) else path


def names(call: Callable[..., object]) -> tuple[str, ...]:
    """Names of a callable's positional parameters, as far as they are known."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # builtins and launchers
        return ()
    return tuple(p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD)


# leaves


def leaves(value: Any, name: str) -> list[Leaf]:
    """Walk tuples, lists, dicts, dataclasses and modules down to arrays and opaque values.

    None is no leaf, and neither is a Score: it is the figure claimed, not a result. A gradient
    is one: backward() changes its arguments too.
    """
    if value is None or isinstance(value, Score):
        return []
    inner = _inner(value)
    found = [] if inner is not None else [Leaf(name, value)]
    if _is_torch(value) and value.is_leaf and value.grad is not None:
        inner = [(".grad", value.grad)]
    return found + [leaf for step, item in inner or () for leaf in leaves(item, name + step)]


def _inner(value: Any) -> list[tuple[str, Any]] | None:
    torch = sys.modules.get("torch")
    if isinstance(value, (tuple, list)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return [(f"[{key!r}]", value[key]) for key in sorted(value, key=repr)]
    if torch and isinstance(value, torch.nn.Module):
        named = (*value.named_parameters(), *value.named_buffers())
        return [(f".{name}", item) for name, item in named]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def _library(value: object) -> Any:
    """Return torch, numpy or cupy, whose array this is; one that is not loaded has no arrays."""
    for name, kind in (("torch", "Tensor"), ("numpy", "ndarray"), ("cupy", "ndarray")):
        library = sys.modules.get(name)
        if library and isinstance(value, getattr(library, kind, ())):
            return library
    return None


def _is_torch(value: object) -> bool:
    library = _library(value)
    return library is not None and library is sys.modules.get("torch")


def _dtype(value: Any) -> str:
    return str(getattr(value.dtype, "name", value.dtype)).removeprefix("torch.")


def _is_exact(value: Any) -> bool:
    return "int" in _dtype(value) or _dtype(value) == "bool"


def _is_plain(value: Any) -> bool:
    """Whether this is a dense array of numbers, and no subclass that computes when looked at."""
    library = _library(value)
    if library is None:
        return False
    if not re.match(r"bool|(b?float|complex|u?int)(8|16|32|64|128)", _dtype(value)):
        return False
    return not _is_torch(value) or (
        type(value) in (library.Tensor, library.nn.Parameter)
        and value.layout is library.strided
        and value.device.type != "meta"
    )


def _arguments(args: Args) -> dict[str, Any]:
    """Return the arguments' arrays by path; one that is passed twice counts once."""
    plain = [leaf for leaf in leaves(args, "args") if _is_plain(leaf.value)]
    first = {_view(leaf.value): leaf for leaf in reversed(plain)}
    return {leaf.path: leaf.value for leaf in reversed(first.values())}


def _address(value: Any) -> int:
    if _is_torch(value):
        return int(value.data_ptr())
    return int(getattr(value.data, "ptr", None) or value.ctypes.data)


def _view(value: Any) -> tuple[object, ...]:
    """Return what is equal for two views of the same elements."""
    where = _address(value) if math.prod(value.shape) else id(value)
    strides = value.stride() if _is_torch(value) else value.strides
    return where, tuple(value.shape), tuple(strides), _dtype(value)


def nbytes(args: Args) -> int:
    """Bytes that the arguments' arrays reach; what several views share counts once."""
    reached: dict[int, int] = {}
    whole: dict[int, int] = {}
    for value in _arguments(args).values():
        if _is_torch(value):
            where, size = value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()
        else:
            owner = value
            while _library(owner.base) is not None:
                owner = owner.base
            where, size = _address(owner), owner.nbytes
        whole[where] = size
        reached[where] = reached.get(where, 0) + value.nbytes
    return sum(min(n, whole[where]) for where, n in reached.items())


# arguments: what changed, poison, fresh values


def fingerprint(args: Args, skip: Collection[str] = ()) -> dict[str, Any]:
    """Remember the arguments' bits, on the device where they are."""
    return {p: _bits(v, copy=True) for p, v in _arguments(args).items() if p not in skip}


def changed(before: Mapping[str, Any], args: Args, skip: Collection[str] = ()) -> tuple[str, ...]:
    """Return the leaves whose bits are not those of the fingerprint, new and lost ones included."""
    now = _arguments(args)
    paths = dict.fromkeys((*now, *before))
    return tuple(
        p
        for p in paths
        if p not in skip
        and not (p in now and p in before and _equal(before[p], _bits(now[p], copy=False)))
    )


def _bits(value: Any, *, copy: bool) -> Any:
    """View a value as integers: NaN equals NaN, and 0.0 is not -0.0."""
    strides = value.stride() if _is_torch(value) else value.strides
    once = [slice(1) if s == 0 else slice(None) for s in strides]
    value = _real(value[(*once, ...)])  # an expanded dimension is looked at once
    library = _library(value)
    if _is_torch(value):
        dense = value.clone(memory_format=library.contiguous_format) if copy else value.contiguous()
    else:
        dense = library.array(value, order="C") if copy else library.ascontiguousarray(value)
    kind = {1: "uint8", 2: "int16", 4: "int32"}.get(value.itemsize, "int64")
    return dense.reshape(-1).view(getattr(library, kind))


def _equal(a: Any, b: Any) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(_library(a).equal(a, b) if _is_torch(a) else _library(a).array_equal(a, b))


def _real(value: Any) -> Any:
    """Detach, and give a complex array's real and imaginary parts in a last dimension."""
    library = _library(value)
    if _is_torch(value):
        value = value.detach().resolve_conj().resolve_neg()
        return library.view_as_real(value) if value.is_complex() else value
    return library.stack([value.real, value.imag], axis=-1) if value.dtype.kind == "c" else value


def poison(args: Args, paths: Collection[str]) -> None:
    """Fill these leaves, and only the elements of their views, with what is no right answer."""
    for path, value in _arguments(args).items():
        if path in paths:
            _poison(value.detach() if _is_torch(value) else value)


def _poison(value: Any) -> None:
    library, dtype = _library(value), _dtype(value)
    if dtype == "bool":
        pattern = library.zeros_like(value).reshape(-1)
        pattern[1::2] = True
        value[...] = pattern.reshape(value.shape)
    elif "int" in dtype:
        signed = value.view(getattr(library, f"int{8 * value.itemsize}"))
        signed[...] = int.from_bytes(b"\xa5" * value.itemsize, "little", signed=True)
    else:
        value[...] = math.nan


def overwrite(live: Args, fresh: Args) -> None:
    """Copy fresh values into live arguments in place; gradients that are not fresh are dropped."""
    olds, news = _arguments(live), _arguments(fresh)
    for path, old in olds.items():
        new = news.get(path)
        if new is None and path.endswith(".grad"):
            olds[path.removesuffix(".grad")].grad = None
        elif new is None or _form(new) != _form(old):
            raise Misuse(
                f"inputs() gives another shape, dtype or device for another seed ({path}): a "
                "prepared arm needs them fixed"
            )
        else:
            (old.detach() if _is_torch(old) else old)[...] = new


# what the baseline does to its arguments


def learn(call: Arm, make: Callable[[], Args], names: Sequence[str] = ()) -> Contract:
    """Find out which argument leaves a call changes, and which of them it does not read.

    ``make`` builds the same fresh arguments each time, from a seed that is used for nothing else:
    over a right answer that lies in freed memory, writing looks like leaving alone.
    """
    with _filled():
        one, two = make(), make()
        before = fingerprint(one)
        _scribble(_arguments(one), _arguments(two))
        del one, two
        args = make()
        unsettled = changed(before, args)
        may = {p for p, v in _arguments(args).items() if p in unsettled or _may_be_poisoned(v)}
    del before
    returned, written = _run(call, args, Contract((), ()))
    contract = Contract(written, (), tuple(names))
    first = [_wide(x.value) for x in _kept(result(returned, args, contract))]
    del returned, args
    if not first:
        raise Misuse("the baseline returns nothing and changes none of its arguments")

    def is_pure(paths: tuple[str, ...]) -> bool:
        with _filled():
            args = make()
        try:
            returned, _ = _run(call, args, replace(contract, pure=paths))
            verify({"baseline": result(returned, args, contract)}, first)
        except Exception:  # noqa: BLE001  an arm may refuse a poisoned input in its own way
            return False
        return True

    pure = tuple(p for p in written if p in may)
    if pure and not is_pure(pure):
        pure = tuple(p for p in pure if is_pure((p,))) if len(pure) > 1 else ()
    loose = [contract.say(p) for p in unsettled if p not in pure]
    if loose:
        raise Misuse(
            f"inputs() gives different values for the same seed: {', '.join(loose)} (or the "
            "baseline leaves a part of it unwritten)"
        )
    return replace(contract, pure=pure)


@contextlib.contextmanager
def _filled() -> Iterator[None]:
    """Let torch.empty give one known value while inputs are made: what it leaves is then seen."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    was = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # not use_deterministic_algorithms(), which imports inductor: 3 to 5 s
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(was)


def _scribble(one: Mapping[str, Any], two: Mapping[str, Any]) -> None:
    """Spoil what numpy and cupy will hand out again, but nothing that inputs() keeps for itself."""
    kept = set(map(_address, one.values())) & set(map(_address, two.values()))
    for value in (*one.values(), *two.values()):
        if _is_torch(value) or value.base is not None or _address(value) in kept:
            continue
        if getattr(value.flags, "writeable", True):
            _poison(value)


def _may_be_poisoned(value: Any) -> bool:
    """Whether a leaf that may be read can be poisoned without harm.

    Integers that inputs() set may be counters, flags or indices, with which a poisoned kernel
    hangs or faults; those that nobody set are safe.
    """
    if not _is_exact(value):
        return True
    if not _is_torch(value):
        return False
    return _equal(_bits(value, copy=False), _bits(_library(value).empty_like(value), copy=False))


def _run(arm: Arm, args: Args, contract: Contract) -> tuple[object, tuple[str, ...]]:
    """Call an arm on poisoned arguments; return what it returns and what else it changed."""
    call = arm.make(*args) if isinstance(arm, Prepared) else arm
    poison(args, contract.pure)
    before = fingerprint(args, contract.written)
    returned = call(*args)
    return returned, changed(before, args, contract.written)


def result(returned: object, args: Args, contract: Contract) -> tuple[Leaf, ...]:
    """Return a call's result; an argument that is both changed and returned counts once."""
    mine = _arguments(args)
    wrote = [Leaf(contract.say(p), mine[p]) for p in contract.written if p in mine]
    views = {_view(leaf.value) for leaf in wrote}
    own = leaves(returned, "result")
    return (*(x for x in own if not _is_plain(x.value) or _view(x.value) not in views), *wrote)


def _kept(result: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """Copy a result: a later arm that writes into the same buffer must not repair it."""
    return tuple(Leaf(x.path, _copy(x.value)) if _is_plain(x.value) else x for x in result)


def _copy(value: Any) -> Any:
    return value.detach().clone() if _is_torch(value) else value.copy()


def _wide(value: Any) -> Any:
    """Give an earlier result as the reference of a later one."""
    if not _is_plain(value) or _is_exact(value):
        return value
    return _cast(value, "complex128" if "complex" in _dtype(value) else "float64")


# agreement


def agree(
    arms: Mapping[str, Arm],
    make: Callable[[], Args],
    reference: Callable[..., object],
    contract: Contract,
    precision: str | None = None,
) -> tuple[Error, ...]:
    """Hold all arms against the reference on one seed; return each arm's worst error.

    The optimized arm runs first and the reference last, each on arguments of its own, so that no
    right answer lies around in freed memory. A Prepared arm prepares before the poisoning.
    """
    results = {}
    for arm in sorted(arms, key=("optimized", "library", "baseline").index):
        args = make()
        returned, touched = _run(arms[arm], args, contract)
        if touched:
            which = ", ".join(repr(contract.say(p)) for p in touched)
            raise Misuse(
                f"{arm} changed argument {which}, which the baseline was seen to leave alone: "
                "an arm must not touch its inputs"
            )
        results[arm] = _kept(result(returned, args, contract))
        del args, returned
    args = make()
    poison(args, contract.pure)
    return verify(results, reference(*args), precision)


def verify(
    results: Mapping[str, Sequence[Leaf]],
    reference: object,
    precision: str | None = None,
    when: str = "",
) -> tuple[Error, ...]:
    """Hold the arms' results for one set of inputs against what the reference returns for it.

    ``when`` ("after timing") goes into the messages. Returns each arm's worst error, the
    baseline's first; raises Disagreement at the first that is not allowed, Misuse where the
    reference itself is wrong.
    """
    if precision not in (None, *BUDGET):
        raise Misuse(f"precision={precision!r}: known are {', '.join(BUDGET)}")
    base, want = results["baseline"], leaves(reference, "reference")
    if len(base) != len(want):
        raise Misuse(
            f"the reference gives {_list(want)}, but the baseline's result is {_list(base)}: what "
            "a call returns, followed by the arguments that it changes"
        )
    for arm, result in results.items():
        if len(result) != len(base):
            raise Disagreement(f"{arm}'s result is {_list(result)}, the baseline's {_list(base)}")
    worst: dict[str, Error] = {}
    for i, truth in enumerate(want):
        for error in _compare({arm: r[i] for arm, r in results.items()}, truth, precision, when):
            known = worst.get(error.arm)
            if known is None or error.error * known.allowed > known.error * error.allowed:
                worst[error.arm] = error
    return tuple(worst.values())


def _list(result: Sequence[Leaf]) -> str:
    return f"({', '.join(x.path for x in result)})"


def _compare(
    results: Mapping[str, Leaf], want: Leaf, precision: str | None, when: str
) -> Iterator[Error]:
    """Compare one leaf of every arm, the baseline first: its error is the others' yardstick."""
    base = results["baseline"]
    arms = sorted(results, key=lambda arm: arm != "baseline")
    if _is_opaque(base.value) and _is_opaque(want.value):
        for arm in arms:
            path, got = results[arm].path, results[arm].value
            if not _is_opaque(got) or got != want.value:
                shown = reprlib.repr(got), reprlib.repr(want.value)
                raise Disagreement(_sentence(arm, when, path, *shown))
            yield Error(arm, path, (), 0.0, 0.0, 0.0, 0.0)
        return
    mine, truth = _array(base.value), _array(want.value)
    _check_reference(base.path, mine, truth)
    rms = _rms(truth, base.path)
    budget = 0.0 if _is_exact(mine) else max(_budget(mine), BUDGET.get(precision or "", 0.0))
    allowed = min(SANITY * budget, max(SANITY_CAP, budget))
    yardstick = 0.0
    for arm in arms:
        path, got = results[arm].path, _array(results[arm].value)
        if _form(got) != _form(mine):
            raise Disagreement(f"{arm} gives {_form(got)} for {path}, the baseline {_form(mine)}")
        error, index = _error(got, truth, rms)
        here, there = (_real(x)[index].item() if math.prod(x.shape) else 0.0 for x in (got, truth))
        index = index[: len(mine.shape)]
        if arm == "baseline":
            yardstick = error
        else:
            allowed = max(K * yardstick, budget)
        if error > allowed:
            said = [f"{x:.9g}" if isinstance(x, float) else str(x) for x in (here, there)]
            why = f" (error {error:.2g}; baseline's {yardstick:.2g}; allowed {allowed:.2g})"
            if not math.isfinite(here):
                why = " (never written, or computed so: results must be finite)"
            where = path + (str(list(index)) if index else "")
            raise Disagreement(_sentence(arm, when, where, *said) + why)
        yield Error(arm, path, index, float(here), float(there), error, allowed)


def _sentence(arm: str, when: str, where: str, got: str, want: str) -> str:
    who = f"{arm} disagrees with the reference"
    if arm == "baseline":
        who = "baseline and reference disagree, one of them is wrong"
    return f"{who}{when and ' ' + when}: {where} is {got}, expected {want}"


def _is_opaque(value: Any) -> bool:
    return not isinstance(value, (float, complex)) and not hasattr(value, "dtype")


def _array(value: Any) -> Any:
    """Return a result's leaf as an array of numbers."""
    if _library(value) is None:
        import numpy as np  # for Python's and numpy's scalars

        value = np.asarray(value)
    if not _is_plain(value):
        raise Misuse(
            f"a result of type {type(value).__name__} ({_dtype(value)}, "
            f"{getattr(value, 'layout', 'dense')}) cannot be compared: return plain, dense arrays "
            "of numbers"
        )
    return value


def _form(value: Any) -> str:
    """Say dtype, shape and device: arms that do the same work give the same."""
    library = _library(value).__name__
    device = value.device.type if library == "torch" else {"numpy": "cpu"}.get(library, "cuda")
    return f"{_dtype(value)}{list(value.shape)} on {device}"


def _budget(value: Any) -> float:
    name = _dtype(_real(value)).replace("bfloat", "bf").replace("float", "fp")
    return next((budget for key, budget in BUDGET.items() if name.startswith(key)), BUDGET["fp64"])


def _check_reference(path: str, mine: Any, truth: Any) -> None:
    if _real(mine).shape != _real(truth).shape:
        raise Misuse(f"the reference gives {_form(truth)} for {path}, the baseline {_form(mine)}")
    if _is_exact(truth) or _is_exact(mine) or _dtype(truth) in ("float64", "complex128"):
        return
    if _dtype(truth) != _dtype(mine) or _error(mine, truth, 0.0)[0]:
        raise Misuse(
            f"compute the reference in fp64: for {path} it gives {_dtype(truth)}, and not exactly "
            "the baseline's result"
        )


def _chunks(value: Any) -> Iterator[tuple[int, Any]]:
    flat = _real(value).reshape(-1)
    for start in range(0, len(flat), CHUNK):
        yield start, flat[start : start + CHUNK]


def _rms(want: Any, path: str) -> float:
    """Root mean square of a leaf of the reference, which must be finite."""
    total = 0.0
    for start, part in _chunks(want):
        square = _cast(part, "float64") ** 2
        total += float(square.sum())
        if not math.isfinite(total):
            square[~_library(square).isfinite(square)] = math.inf
            index = _index(start + int(square.argmax()), want)
            raise Misuse(
                f"the reference is {_real(want)[index].item()} at {path}{list(index)}: choose "
                "inputs, or a reference, whose results are finite"
            )
    return math.sqrt(total / max(math.prod(_real(want).shape), 1))


def _error(got: Any, want: Any, rms: float) -> tuple[float, tuple[int, ...]]:
    """Return the largest error of an element and the index where it is.

    The error is |got - want| / (|want| + rms): absolute for integers and where rms is 0, infinite
    where got is not finite.
    """
    library, exact = _library(got), _is_exact(got)
    kind = "int64" if exact and _is_exact(want) else "float64"
    worst, at = -1.0, 0
    for (start, mine), (_, truth) in zip(_chunks(got), _chunks(want), strict=True):
        g, w = _cast(mine, kind), _like(truth, got, kind)
        off = abs(_cast(g, "float64") - _cast(w, "float64"))
        if exact:
            off = library.maximum(off, _cast(g != w, "float64"))  # fp64 is blind beyond 2**53
        elif rms:
            off /= abs(w) + rms
        off[~library.isfinite(off)] = math.inf
        if float(off.max()) > worst:
            worst, at = float(off.max()), start + int(off.argmax())
    return max(worst, 0.0), _index(at, got)


def _index(at: int, value: Any) -> tuple[int, ...]:
    """Return the index of a flat position; of a complex element its part as well."""
    index: list[int] = []
    for size in reversed(_real(value).shape):
        at, i = divmod(at, max(size, 1))
        index.insert(0, i)
    return tuple(index)


def _cast(value: Any, kind: str) -> Any:
    return value.to(getattr(_library(value), kind)) if _is_torch(value) else value.astype(kind)


def _like(want: Any, got: Any, kind: str) -> Any:
    """Bring a part of the reference to the library and device of what it is held against."""
    want, library = _cast(want, kind), _library(got)
    if _is_torch(got):
        return library.as_tensor(want, device=got.device)
    if _is_torch(want):
        want = want.cpu().numpy()
    elif library.__name__ == "numpy" and not isinstance(want, library.ndarray):
        want = want.get()  # from cupy
    return library.asarray(want)
