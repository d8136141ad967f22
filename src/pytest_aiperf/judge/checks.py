"""Checks of a judged solution beside those of every claim, and the bytes that a call must move."""

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.correctness import accuracy, tensors
from pytest_aiperf.correctness.accuracy import Expected
from pytest_aiperf.device.device import seed_all
from pytest_aiperf.errors import AiperfError, WrongResult
from pytest_aiperf.model import Bench, PrecisionName, Work

from . import forms
from .forms import Case

WIDER: Final = {
    "10 times the problem's inputs": lambda x: x * 10,
    "the problem's inputs plus 5": lambda x: x + 5,
}
"""Further inputs on which a solution must be right. On normally distributed values alone, a layer
normalization is nearly the identity, and a ReLU of uniform values does nothing."""
GROSS: Final = 0.05
"""A larger relative RMS error means another function, not rounding: that of fp16 is smaller on any
inputs."""
PROBED_CALLS = 12
"""Most successive calls that are made to find one whose result depends on earlier calls."""
PROBING_S = 20.0
"""Time limit for these calls."""
SAMPLED_ELEMENTS: Final = 8
"""Elements of an array that are changed one by one: if the result depends on each of so many, it
depends on more than two thirds of all with a probability of 96 %."""
INFLUENCE_CALLS: Final = 64  #: Most calls to find out which bytes a call must read.

_PATCHED: Final = ("torch", "torch.nn", "torch.nn.functional", "torch.cuda", "numpy")
"""Modules whose functions no solution may replace: the problem's code calls them as well."""

Values = Sequence[Any]


def functions(problem: object) -> dict[str, int]:
    """Return the addresses of the functions that the problem's code uses, by name."""
    scopes: dict[str, object] = {name: sys.modules.get(name) for name in _PATCHED}
    torch: Any = sys.modules.get("torch")
    scopes |= {"torch.Tensor": torch.Tensor} if torch else {}
    scopes["the problem"] = problem
    layers = vars(torch.nn).items() if torch else ()
    scopes |= {f"torch.nn.{name}": value for name, value in layers if isinstance(value, type)}
    scopes |= {
        f"the problem's {name}": value
        for name, value in vars(problem).items()
        if isinstance(value, type) and value.__module__ == getattr(problem, "__name__", "")
    }
    return {
        f"{scope}.{name}": id(value)
        for scope, owner in scopes.items()
        if owner is not None
        for name, value in list(vars(owner).items())
        if callable(value) or isinstance(value, (staticmethod, classmethod))
    }


def replaced(before: Mapping[str, int], problem: object) -> str:
    """Name a function that differs from ``before``; empty if there is none."""
    after = functions(problem)
    changed = (name for name, at in before.items() if after.get(name, at) != at)
    return next((name for name in changed if not _is_by_torch(name)), "")


def _is_by_torch(name: str) -> bool:
    """Whether torch has replaced a function by one of its own, as it does when it compiles."""
    *path, last = name.split(".")
    value: Any = sys.modules.get("torch")
    for part in (*path[1:], last) if path[:1] == ["torch"] else ():
        value = getattr(value, part, None)
    code = getattr(value, "__code__", None)
    home = Path(getattr(sys.modules.get("torch"), "__file__", None) or "").parent
    return code is not None and Path(code.co_filename).is_relative_to(home)


def not_plain(case: Case, device: str, seed: int) -> str:
    """Name the class of an output that is no plain array; empty if there is none.

    An array of a class of its own may compute its elements when they are read, after the call.
    """
    result = case.solution(*_args(case, device, seed))
    leaves = [x for _, x in tensors.walk(result, "result")]
    return next((type(x).__name__ for x in leaves if not tensors.as_array(x)), "")


def narrowness(case: Case, device: str, seed: int) -> str:
    """Name inputs on which a solution that is right on the problem's own is grossly wrong.

    Empty if there are none. Inputs on which the problem's own code is inexact do not count.
    """
    for name, change in WIDER.items():
        with suppress(AiperfError, ArithmeticError, ValueError, RuntimeError):
            args = _args(case, device, seed)
            wider = forms.changed(args, change)
            if not any(forms.is_float(x) for _, x in tensors.walk(args, "args")):
                return ""
            expected = accuracy.expect(case.reference(*forms.copies(wider)))
            if _distance(case.baseline(*forms.copies(wider)), expected) > GROSS / 5:
                continue
            if (rms := _distance(case.solution(*forms.copies(wider)), expected)) > GROSS:
                return f"{name} (relative RMS error {rms:.2g})"
    return ""


def _args(case: Case, device: str, seed: int) -> tuple[Any, ...]:
    seed_all(seed)
    value = case.inputs(Bench(device, seed, full=True))
    return value if isinstance(value, tuple) else (value,)


def _outputs(result: object) -> Values:
    return accuracy.copies(tensors.walk(result, "result"))


def _distance(result: object, expected: Sequence[Expected]) -> float:
    outputs = _outputs(result)
    if not outputs or len(outputs) != len(expected):
        return float("inf")
    return max(d.rms for d in accuracy.compare(outputs, expected))


def history(
    make: Callable[[], Case], device: str, seed: int, precision: PrecisionName | None
) -> str:
    """Describe how the results of a solution depend on its earlier calls; empty if they do not.

    ``make`` loads the solution anew, without the memory of its earlier calls.
    """
    case, earlier = make(), list[tuple[Values, Values]]()
    until = time.monotonic() + PROBING_S
    for number in range(1, PROBED_CALLS + 1):
        args = _args(case, device, seed + number)
        result, expected, is_right = _call(case, args, precision)
        if not is_right:
            again = next((i for i, (r, _) in enumerate(earlier, 1) if _same(r, result)), 0)
            if again and not _same(earlier[again - 1][1], expected):
                if number == 2 and _is_wrong_afresh(make, device, seed + 1, precision):
                    return "it returns the same result whatever its inputs are"
                return f"call {number} returns the result of call {again}, on other inputs"
            if earlier and not _is_wrong_afresh(make, device, seed + number, precision):
                return (
                    f"call {number} gives a wrong result for inputs on which a first call is "
                    "right: the result depends on earlier calls"
                )
        earlier.append((result, expected))
        if time.monotonic() > until:
            break
    return ""


def _call(case: Case, args: Values, precision: PrecisionName | None) -> tuple[Values, Values, bool]:
    result = _outputs(case.solution(*forms.copies(args)))
    expected = case.reference(*forms.copies(args))
    try:
        results = {"baseline": _outputs(case.baseline(*forms.copies(args))), "optimized": result}
        accuracy.verify(results, expected, precision)
    except WrongResult:
        return result, _outputs(expected), False
    return result, _outputs(expected), True


def _is_wrong_afresh(
    make: Callable[[], Case], device: str, seed: int, precision: PrecisionName | None
) -> bool:
    case = make()
    return not _call(case, _args(case, device, seed), precision)[2]


def _same(first: Values, second: Values) -> bool:
    return len(first) == len(second) and all(
        tuple(a.shape) == tuple(b.shape)
        and tensors.same_identity(tensors.identify(a), tensors.identify(b))
        for (_, a), (_, b) in zip(first, second, strict=True)
    )


def bytes_to_move(case: Case, device: str, seed: int) -> Work:
    """Return the bytes that a call must read and write, so far as the result shows them.

    An array counts as read by the share of its sampled elements on which the result depends: of a
    table that is looked up, few do. Outputs count in full. Operations are not counted, because
    another algorithm may need fewer.
    """
    args = _args(case, device, seed)
    draw = random.Random(seed)  # noqa: S311  keeps no secrets
    arrays = [
        x
        for x in tensors.arrays((args, list(case.weights))).values()
        if forms.is_float(x) and x.nbytes
    ]
    arrays.sort(key=lambda x: -x.nbytes)
    before = _outputs(case.baseline(*args))
    read = 0.0
    for array in arrays[: INFLUENCE_CALLS // SAMPLED_ELEMENTS]:
        hits = 0
        data = array.data if hasattr(array, "data_ptr") else array
        for _ in range(SAMPLED_ELEMENTS):
            index = tuple(draw.randrange(n) for n in data.shape)
            old = data[index].item()
            data[index] = -3 * old + 7  # another sign, and another size
            hits += not _same(before, _outputs(case.baseline(*args)))
            data[index] = old
        read += array.nbytes * hits / SAMPLED_ELEMENTS
    written = sum(x.nbytes for _, x in before)
    return Work(read=read, written=float(written))
