"""Do two results agree, and where not.

A call's result is the leaves of what it returns, followed by the argument leaves that it changed.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_aiperf.device.device import gc_disabled
from pytest_aiperf.errors import UsageError, WrongResult
from pytest_aiperf.model import Error, Prepared
from pytest_aiperf.rules.validity import watched

from . import tensors
from .tensors import Args, NamedTensor, backend_of, dtype, is_exact, signature

Arm = Callable[..., object] | Prepared
Make = Callable[[], Args]
Result = Sequence[NamedTensor]

Place = tuple[tuple[int, ...], Any, Any]
"""An element's index, and what stands there in a result and in the reference."""
_NOWHERE: Place = ((), 0.0, 0.0)

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
CACHED = 1 << 15
"""The same on the host: they stay in its caches, and torch uses one thread for so few. Many threads
wait for one another at each of many operations, for ages where other claims keep the cores busy."""


@dataclass(frozen=True, slots=True)
class ArgumentEffects:
    """What the baseline does to its arguments.

    ``written`` are the leaves that it changes, ``pure`` those of them that it does not read: they
    may be poisoned. ``names`` are the arguments' names, for messages.
    """

    mutated: tuple[str, ...]
    write_only: tuple[str, ...]
    names: tuple[str, ...] = ()

    def say(self, path: str) -> str:
        """Name an argument leaf as the claim's author does."""
        position, _, rest = path.removeprefix("args[").partition("]")
        return self.names[int(position)] + rest if int(position) < len(self.names) else path


def names(call: Callable[..., object]) -> tuple[str, ...]:
    """Names of a callable's positional parameters, as far as they are known."""
    code = getattr(call, "__code__", None)  # builtins and launchers have none
    own = int(hasattr(call, "__self__"))
    return code.co_varnames[own : code.co_argcount] if code else ()


def infer_effects(call: Arm, make: Make, names: Sequence[str] = ()) -> ArgumentEffects:
    """Find out which argument leaves a call changes, and which of them it does not read.

    ``make`` builds the same fresh arguments each time, from a seed that is used for nothing else:
    over a right answer that lies in freed memory, writing looks like leaving alone.
    """
    args = _filled(make)
    before = tensors.fingerprint(args)
    sizes = [(backend_of(a).module, a.nbytes) for a in tensors.arrays(args).values()]
    del args
    # numpy and cupy hand out freed memory as it was: let no right answer lie there
    spoilt = [m.full(n, 0x5A, dtype=m.uint8) for m, n in sizes if m.__name__ != "torch"]
    del spoilt
    args = _filled(make)
    unsettled = tensors.changed(before, args)
    may = {p for p, a in tensors.arrays(args).items() if p in unsettled or _is_harmless(a)}
    del before
    returned, written = _run(call, args, ArgumentEffects((), ()))
    contract = ArgumentEffects(written, (), tuple(names))
    own = [x for _, x in kept(result(returned, args, contract))]
    first = [x if is_exact(x) else backend_of(x).cast(x, "float64", x) for x in own]
    del returned, args, own
    if not first:
        raise UsageError("the baseline returns nothing and changes none of its arguments")

    def is_pure(path: str) -> bool:
        args = _filled(make)
        try:
            returned, _ = _run(call, args, replace(contract, write_only=(path,)))
            verify({"baseline": result(returned, args, contract)}, first)
        except Exception:  # noqa: BLE001  an arm may refuse a poisoned input in its own way
            return False
        return True

    pure = tuple(p for p in written if p in may and is_pure(p))
    loose = [contract.say(p) for p in unsettled if p not in pure]
    if loose:
        raise UsageError(
            f"inputs() gives different values for the same seed: {', '.join(loose)} (or the "
            "baseline leaves a part of it unwritten)"
        )
    return replace(contract, write_only=pure)


def _filled(make: Callable[[], Any]) -> Any:
    """Make inputs while torch.empty gives one known value: what inputs() leaves unset is seen."""
    torch = sys.modules.get("torch")
    if torch is None:
        return make()
    was = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings(action="ignore"):
        # not use_deterministic_algorithms(), which imports inductor: 3 to 5 s
        torch.set_deterministic_debug_mode("warn")
        try:
            return make()
        finally:
            torch.set_deterministic_debug_mode(was)


def _is_harmless(array: Any) -> bool:
    """Whether a leaf may be poisoned although the call may read it.

    Integers may not: as counters, flags or indices they let a kernel hang or fault. Those that
    nobody set may, and torch shows them.
    """
    module = backend_of(array).module
    if not is_exact(array) or module.__name__ != "torch":
        return not is_exact(array)
    return bool((array == _filled(lambda: module.empty_like(array))).all())


def _run(arm: Arm, args: Args, contract: ArgumentEffects) -> tuple[object, tuple[str, ...]]:
    """Call an arm on poisoned arguments; return what it returns and what else it changed.

    No garbage is collected meanwhile: a CUDA graph that went would spoil one being captured.
    """
    with gc_disabled():
        call = arm.make(*args) if isinstance(arm, Prepared) else arm
        tensors.poison(args, contract.write_only)
        before = tensors.fingerprint(args, contract.mutated)
        returned = call(*args)
    return returned, tensors.changed(before, args, contract.mutated)


def result(returned: object, args: Args, contract: ArgumentEffects) -> list[NamedTensor]:
    """Return a call's result; an argument that is both changed and returned counts once."""
    mine = tensors.arrays(args)
    wrote = [(contract.say(p), mine[p]) for p in contract.mutated if p in mine]
    views = [tensors.view(array) for _, array in wrote]
    own = tensors.walk(returned, "result")
    return [(p, x) for p, x in own if not backend_of(x) or tensors.view(x) not in views] + wrote


def kept(result: Result) -> list[NamedTensor]:
    """Copy a result: a later arm that writes into the same buffer must not repair it."""
    return [(path, backend_of(x).copy(x)) for path, value in result for x in [_numbers(value)]]


def agree(
    arms: Mapping[str, Arm],
    make: Make,
    reference: Callable[..., object],
    contract: ArgumentEffects,
    precision: str | None = None,
) -> list[Error]:
    """Hold all arms against the reference on one seed.

    The optimized arm runs first and the reference last, each on arguments of its own, so that no
    right answer lies around in freed memory. A Prepared arm prepares before the poisoning.
    """
    results = {}
    lent = {}
    for arm in sorted(arms, key=("optimized", "library", "baseline").index):
        args = make()
        returned, touched = _run(arms[arm], args, contract)
        if touched:
            which = ", ".join(repr(contract.say(p)) for p in touched)
            raise UsageError(
                f"{arm} changed argument {which}, which the baseline was seen to leave alone: "
                "an arm must not touch its inputs"
            )
        found = result(returned, args, contract)
        lent[arm] = [
            bool(backend_of(x)) and tensors.aliases_input(x, args, contract.mutated)
            for _, x in found
        ]
        results[arm] = kept(found)
        del args, returned, found
    args = make()
    tensors.poison(args, contract.write_only)
    errors = verify(results, reference(*args), precision)
    _hold_made(results, lent)
    return errors


def _hold_made(results: Mapping[str, Result], lent: Mapping[str, Sequence[bool]]) -> None:
    """Refuse a view of the inputs, or of few elements, where the baseline makes a result."""
    for arm, flags in lent.items():
        for (path, _), is_lent, allowed in zip(results[arm], flags, lent["baseline"], strict=True):
            if is_lent and not allowed and path.startswith("result"):
                raise WrongResult(
                    f"{arm} gives {path} as a view of its inputs or of few elements, the baseline "
                    "makes it: the work is left to whoever reads it, so let both arms go on to that"
                )


@watched
def verify(
    results: Mapping[str, Result],
    reference: object,
    precision: str | None = None,
    when: str = "",
    *,
    located: bool = True,
) -> list[Error]:
    """Hold the arms' results for one set of inputs against what the reference returns for it.

    Return each leaf's worst error in each arm, the baseline's first; one that is not allowed is a
    Disagreement, which says ``when``, and a wrong reference is Misuse. Without ``located`` the
    place of an error that is allowed is left out: a GPU that others use is waited for once only.
    """
    if precision not in (None, *BUDGET):
        raise UsageError(f"precision={precision!r}: known are {', '.join(BUDGET)}")
    base, want = results["baseline"], tensors.walk(reference, "reference")
    if len(base) != len(want):
        raise UsageError(
            f"the reference gives {_paths(want)}, but the baseline's result is {_paths(base)}: "
            "what a call returns, followed by the arguments that it changes"
        )
    arms = sorted(results, key=lambda arm: arm != "baseline")
    for arm in arms:
        if len(results[arm]) != len(base):
            given = f"{_paths(results[arm])}, the baseline's {_paths(base)}"
            raise WrongResult(f"{arm}'s result is {given}")
    return [
        error
        for i, (_, truth) in enumerate(want)
        for error in _compare(
            {arm: results[arm][i] for arm in arms}, truth, precision, when, located=located
        )
    ]


def _paths(result: Result) -> str:
    return f"({', '.join(path for path, _ in result)})"


def _compare(
    results: Mapping[str, NamedTensor],
    reference: object,
    precision: str | None,
    when: str,
    *,
    located: bool,
) -> Iterator[Error]:
    """Compare one leaf of every arm, the baseline first: its error is the others' yardstick."""
    mine, want = _numbers(results["baseline"][1]), _numbers(reference)
    rms = _check_reference(results["baseline"][0], mine, want)
    name = dtype(mine).replace("bfloat", "bf").replace("float", "fp")
    known = [known for key, known in BUDGET.items() if name.startswith(key) or key == precision]
    budget = 0.0 if is_exact(mine) else max(known)
    allowed = min(SANITY * budget, max(SANITY_CAP, budget))
    yardstick = 0.0
    for arm, (path, value) in results.items():
        got = _numbers(value)
        if signature(got) != signature(mine):
            raise WrongResult(
                f"{arm} gives {signature(got)} for {path}, the baseline {signature(mine)}"
            )
        error, locate = _worst(got, want, rms)
        if arm == "baseline":
            yardstick, who = error, "baseline and reference disagree, one of them is wrong"
        else:
            allowed, who = max(K * yardstick, budget), f"{arm} disagrees with the reference"
        index, here, there = locate() if located or error > allowed else _NOWHERE
        if error > allowed:
            said = [f"{x:.9g}" if isinstance(x, float) else str(x) for x in (here, there)]
            why = f"error {error:.2g}; baseline's {yardstick:.2g}; allowed {allowed:.2g}"
            if math.isinf(error):
                why = "never written, or computed so: results must be finite"
            raise WrongResult(
                f"{who}{when and ' ' + when}: {path}{list(index) or ''} is {said[0]}, expected "
                f"{said[1]} ({why})"
            )
        yield Error(arm, path, index, float(here), float(there), error, allowed)


def _numbers(value: Any) -> Any:
    """Return a result's leaf as an array of real numbers."""
    import numpy as np

    if isinstance(value, (int, float, complex, np.generic)):
        value = np.asarray(value)
    if not backend_of(value):
        raise UsageError(
            f"a result of type {type(value).__name__} cannot be compared: return numbers, or "
            "plain, dense arrays of them"
        )
    return backend_of(value).real(value)


def _check_reference(path: str, mine: Any, want: Any) -> float:
    """See that the reference has the same shape, is fp64 or exact, and finite; return its RMS."""
    if mine.shape != want.shape:
        raise UsageError(
            f"the reference gives {signature(want)} for {path}, the baseline {signature(mine)}"
        )
    exact = is_exact(want) or is_exact(mine) or dtype(want) == "float64"
    if not exact and (dtype(want) != dtype(mine) or _worst(mine, want, 0.0)[0]):
        raise UsageError(
            f"compute the reference in fp64: for {path} it gives {dtype(want)}, and not exactly "
            "the baseline's result"
        )
    parts = _parts(want, _chunk(want))
    squares = (backend_of(part).cast(part, "float64", part) ** 2 for part in parts)
    rms = math.sqrt(float(sum(s.sum() for s in squares)) / max(math.prod(want.shape), 1))
    if not math.isfinite(rms):
        index, value, _ = _worst(want, want, 0.0)[1]()
        where = f"{value} at {path}{list(index)}"
        raise UsageError(f"the reference is {where}: choose inputs whose results are finite")
    return rms


def _worst(got: Any, want: Any, rms: float) -> tuple[float, Callable[[], Place]]:
    """Return the largest error of an element, and what looks for its index and both values there.

    The error is |got - want| / (|want| + rms), or 1 where integers differ, and infinite where got
    is not finite.
    """
    import numpy as np

    library, exact = backend_of(got), is_exact(got)
    kind = "int64" if exact and is_exact(want) else "float64"
    # what an arm copied to the host is compared where the reference is: a GPU, most likely
    ours = _on_host(got) and backend_of(want) is library
    home = want if ours else got
    size = _chunk(home)
    pairs = list(zip(_parts(got, size), _parts(want, size), strict=True))

    def errors(part: Any, truth: Any) -> Any:
        g = library.cast(part, kind, home)
        w = library.cast(backend_of(truth).cast(truth, kind, truth), kind, home)
        with np.errstate(invalid="ignore"):  # infinite in both: not finite, as below
            off = library.cast(g != w, "float64", home) if exact else abs(g - w)
        if rms and not exact:
            off /= abs(w) + rms
        off[~library.module.isfinite(off)] = math.inf
        return off

    if not pairs:
        return 0.0, lambda: _NOWHERE
    tops = library.module.stack([errors(*pair).max() for pair in pairs])

    def locate() -> Place:
        i = int(tops.argmax())
        part, truth = pairs[i]
        at = int(errors(part, truth).argmax())
        index = np.unravel_index(i * size + at, tuple(got.shape))
        return tuple(map(int, index)), part[at].item(), truth[at].item()

    return float(tops.max()), locate  # a GPU is waited for once, however many parts there are


def _on_host(array: Any) -> bool:
    return str(getattr(array, "device", "cpu")) == "cpu"


def _chunk(array: Any) -> int:
    return CACHED if _on_host(array) else CHUNK


def _parts(array: Any, size: int) -> Iterator[Any]:
    flat = array.reshape(-1)
    return (flat[start : start + size] for start in range(0, len(flat), size))
