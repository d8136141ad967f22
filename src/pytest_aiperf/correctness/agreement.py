"""Checks that the arms' results agree with the reference.

A call's result: the tensors in its return value, followed by the argument tensors that it changed.
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
from pytest_aiperf.model import Error, PrecisionName
from pytest_aiperf.rules.validity import watched

from . import tensors
from .tensors import Args, Inputs, NamedTensor, backend_of, dtype, is_exact, signature

Prepare = Callable[[Inputs], Callable[..., object]]  #: Prepares an arm for one set of inputs.
Make = Callable[[], Inputs]  #: Builds the same inputs anew each time.
Outputs = Sequence[NamedTensor]
Element = tuple[tuple[int, ...], Any, Any]  #: Index, value in a result, value in the reference.
_NOWHERE: Element = ((), 0.0, 0.0)

MAX_ERROR_RATIO = 4
"""An arm's error may be this many times the baseline's: another summation order adds less."""
ERROR_BUDGETS: Mapping[PrecisionName, float] = {
    "fp64": 64 * 2.0**-52,
    "fp32": 64 * 2.0**-23,
    "tf32": 4 * 2.0**-10,
    "fp16": 2 * 2.0**-10,
    "bf16": 2 * 2.0**-7,
    "fp8_e5m2": 2 * 2.0**-2,
    "fp8": 2 * 2.0**-3,
}
"""Relative error that is always allowed at a precision: a few units in the last place."""
MAX_BASELINE_BUDGETS = 64  #: The baseline's error may be this many times its budget.
MAX_BASELINE_ERROR = 0.1
"""Limit of the baseline's error, unless its budget is larger; a result of zeros has error 0.5."""
CHUNK = 1 << 23  #: Elements compared at a time on a GPU, so that fp64 temporaries stay small.
HOST_CHUNK = 1 << 15
"""Elements compared at a time on the host: they fit in its caches, and torch uses one thread for so
few. Several threads would wait for one another while other claims keep the cores busy."""


@dataclass(frozen=True, slots=True)
class ArgumentEffects:
    """What the baseline does to its arguments."""

    mutated: tuple[str, ...] = ()  #: Paths of the argument tensors that the baseline changes.
    write_only: tuple[str, ...] = ()  #: Paths in ``mutated`` that the baseline never reads.
    names: tuple[str, ...] = ()  #: Names of the parameters, for messages.

    @property
    def updates(self) -> bool:
        """Whether a call reads an argument that it changes: a second call has another result."""
        return bool(set(self.mutated) - set(self.write_only))

    def label(self, path: str) -> str:
        """Return a tensor's path with the parameter's name in place of ``args[i]``."""
        position, _, rest = path.removeprefix("args[").partition("]")
        return self.names[int(position)] + rest if int(position) < len(self.names) else path


def parameter_names(call: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of the positional parameters; () for builtins and launchers."""
    code = getattr(call, "__code__", None)
    bound = int(hasattr(call, "__self__"))
    return code.co_varnames[bound : code.co_argcount] if code else ()


def infer_effects(prepare: Prepare, make: Make, names: Sequence[str] = ()) -> ArgumentEffects:
    """Find out which argument tensors a call changes, and which of the changed ones it never reads.

    ``make`` must use a seed that no call has used yet: reused memory could still hold the call's
    output from before, and writing equal values would not be noticed.
    """
    inputs = _make_filled(make)
    before = tensors.fingerprint(inputs.args)
    sizes = [(backend_of(a).module, a.nbytes) for a in tensors.arrays(inputs.args).values()]
    del inputs
    # numpy and cupy hand out freed memory as it is: overwrite any results left in it
    scrubbed = [m.full(n, 0x5A, dtype=m.uint8) for m, n in sizes if m.__name__ != "torch"]
    del scrubbed
    inputs = _make_filled(make)
    unseeded = tensors.changed(before, inputs.args)
    arrays = tensors.arrays(inputs.args)
    candidates = {p for p, a in arrays.items() if p in unseeded or _may_poison(a)}
    del before, arrays
    returned, mutated = _run(prepare, inputs, ArgumentEffects())
    effects = ArgumentEffects(mutated, (), tuple(names))
    outputs = [x for _, x in copies(outputs_of(returned, inputs.args, effects))]
    expected = [x if is_exact(x) else backend_of(x).cast(x, "float64", x) for x in outputs]
    del returned, inputs, outputs
    if not expected:
        raise UsageError("the baseline returns nothing and changes none of its arguments")

    def is_write_only(path: str) -> bool:
        inputs = _make_filled(make)
        try:
            returned, _ = _run(prepare, inputs, replace(effects, write_only=(path,)))
            verify({"baseline": outputs_of(returned, inputs.args, effects)}, expected)
        except Exception:  # noqa: BLE001  an arm may raise anything for a poisoned input
            return False
        return True

    write_only = tuple(p for p in mutated if p in candidates and is_write_only(p))
    unseeded_names = [effects.label(p) for p in unseeded if p not in write_only]
    if unseeded_names:
        raise UsageError(
            f"inputs() gives different values for the same seed: {', '.join(unseeded_names)} (or "
            "the baseline leaves a part of it unwritten)"
        )
    return replace(effects, write_only=write_only)


def _make_filled(make: Callable[[], Any]) -> Any:
    """Build inputs while torch.empty() fills its memory, so that unset values can be recognized."""
    torch = sys.modules.get("torch")
    if torch is None:
        return make()
    mode = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings(action="ignore"):
        # use_deterministic_algorithms() would import inductor, which takes 3 to 5 s
        torch.set_deterministic_debug_mode("warn")
        try:
            return make()
        finally:
            torch.set_deterministic_debug_mode(mode)


def _may_poison(array: Any) -> bool:
    """Whether a tensor may be poisoned to find out whether the call reads it.

    Poisoned counters, flags or indices could make a kernel hang or fault. So an integer tensor is
    poisoned only if inputs() left it unset, which is known only for torch.
    """
    module = backend_of(array).module
    if not is_exact(array) or module.__name__ != "torch":
        return not is_exact(array)
    return bool((array == _make_filled(lambda: module.empty_like(array))).all())


def _run(
    prepare: Prepare, inputs: Inputs, effects: ArgumentEffects
) -> tuple[object, tuple[str, ...]]:
    """Call an arm on inputs whose write-only arguments are poisoned.

    Return what it returned, and the paths of arguments that it changed but ``effects.mutated``
    lacks. Garbage collection is off: destroying a CUDA graph would break a capture in progress.
    """
    with gc_disabled():
        call = prepare(inputs)
        tensors.poison(inputs.args, effects.write_only)
        before = tensors.fingerprint(inputs.args, effects.mutated)
        returned = call(*inputs.args)
    return returned, tensors.changed(before, inputs.args, effects.mutated)


def outputs_of(returned: object, args: Args, effects: ArgumentEffects) -> list[NamedTensor]:
    """Return a call's result; an argument that is both changed and returned counts once."""
    arrays = tensors.arrays(args)
    mutated = [(effects.label(p), arrays[p]) for p in effects.mutated if p in arrays]
    views = [tensors.view(array) for _, array in mutated]
    outputs = tensors.walk(returned, "result")
    outputs = [(p, x) for p, x in outputs if not backend_of(x) or tensors.view(x) not in views]
    return outputs + mutated


def copies(result: Outputs) -> list[NamedTensor]:
    """Copy a result: a later arm may write its own result into the same buffer."""
    return [(path, backend_of(x).copy(x)) for path, value in result for x in [_numbers(value)]]


def agree(
    arms: Mapping[str, Prepare],
    make: Make,
    reference: Callable[..., object],
    effects: ArgumentEffects,
    precision: PrecisionName | None = None,
) -> list[Error]:
    """Check all arms against the reference on one seed.

    The optimized arm runs first and the reference last, each on new inputs: the optimized arm
    cannot find a correct result in freed memory. A prepared arm prepares before its arguments are
    poisoned.
    """
    results, aliases = {}, {}
    for arm in sorted(arms, key=("optimized", "library", "baseline").index):
        inputs = make()
        returned, changed = _run(arms[arm], inputs, effects)
        if changed:
            names = ", ".join(repr(effects.label(p)) for p in changed)
            raise UsageError(
                f"{arm} changed argument {names}, which the baseline left unchanged: an arm must "
                "not change its inputs"
            )
        outputs = outputs_of(returned, inputs.args, effects)
        aliases[arm] = [
            bool(backend_of(x)) and tensors.aliases_input(x, inputs.args, effects.mutated)
            for _, x in outputs
        ]
        results[arm] = copies(outputs)
        del inputs, returned, outputs
    inputs = make()
    tensors.poison(inputs.args, effects.write_only)
    errors = verify(results, reference(*inputs.args), precision)
    _refuse_views(results, aliases)
    return errors


def _refuse_views(results: Mapping[str, Outputs], aliases: Mapping[str, Sequence[bool]]) -> None:
    """Refuse outputs that are views of inputs or expanded, unless the baseline's are so, too."""
    for arm, flags in aliases.items():
        rows = zip(results[arm], flags, aliases["baseline"], strict=True)
        for (path, _), is_view, allowed in rows:
            if is_view and not allowed and path.startswith("result"):
                raise WrongResult(
                    f"{arm} returns {path} as a view of its inputs or of few elements, but the "
                    "baseline computes it: whatever reads the view does the work, so time that "
                    "step in both arms"
                )


@watched
def verify(
    results: Mapping[str, Outputs],
    reference: object,
    precision: PrecisionName | None = None,
    when: str = "",
    *,
    located: bool = True,
) -> list[Error]:
    """Check the arms' results for one set of inputs against the reference's result.

    Return the worst error of each output in each arm, the baseline's first. An error that is not
    allowed raises WrongResult, with ``when`` in its message; a wrong reference raises UsageError.
    ``located=False`` leaves out where an allowed error is, because finding it waits for the GPU.
    """
    base, want = results["baseline"], tensors.walk(reference, "reference")
    if len(base) != len(want):
        raise UsageError(
            f"the reference returns {_paths(want)}, but the baseline's result is {_paths(base)}: "
            "the values that a call returns, followed by the arguments that it changes"
        )
    arms = sorted(results, key=lambda arm: arm != "baseline")
    for arm in arms:
        if len(results[arm]) != len(base):
            given = f"{_paths(results[arm])}, the baseline's {_paths(base)}"
            raise WrongResult(f"{arm}'s result is {given}")
    errors: list[Error] = []
    for i, (_, truth) in enumerate(want):
        values = {arm: results[arm][i] for arm in arms}
        errors += _compare(values, truth, precision, when, located=located)
    return errors


def _paths(result: Outputs) -> str:
    return f"({', '.join(path for path, _ in result)})"


def _compare(
    results: Mapping[str, NamedTensor],
    reference: object,
    precision: PrecisionName | None,
    when: str,
    *,
    located: bool,
) -> Iterator[Error]:
    """Compare one output of every arm; the baseline comes first, as its error limits the others."""
    base, want = _numbers(results["baseline"][1]), _numbers(reference)
    rms = _check_reference(results["baseline"][0], base, want)
    name = dtype(base).replace("bfloat", "bf").replace("float", "fp")
    budgets = [b for key, b in ERROR_BUDGETS.items() if name.startswith(key) or key == precision]
    budget = 0.0 if is_exact(base) else max(budgets)
    allowed = min(MAX_BASELINE_BUDGETS * budget, max(MAX_BASELINE_ERROR, budget))
    baseline_error = 0.0
    for arm, (path, value) in results.items():
        got = _numbers(value)
        if signature(got) != signature(base):
            raise WrongResult(
                f"{arm} gives {signature(got)} for {path}, the baseline {signature(base)}"
            )
        error, locate = _worst(got, want, rms)
        if arm == "baseline":
            baseline_error = error
            problem = "baseline and reference disagree, one of them is wrong"
        else:
            allowed = max(MAX_ERROR_RATIO * baseline_error, budget)
            problem = f"{arm} disagrees with the reference"
        index, actual, expected = locate() if located or error > allowed else _NOWHERE
        if error > allowed:
            shown = [f"{x:.9g}" if isinstance(x, float) else str(x) for x in (actual, expected)]
            why = f"error {error:.2g}; baseline's {baseline_error:.2g}; allowed {allowed:.2g}"
            if math.isinf(error):
                why = "unwritten or not finite: results must be finite"
            raise WrongResult(
                f"{problem}{when and ' ' + when}: {path}{list(index) or ''} is {shown[0]}, "
                f"expected {shown[1]} ({why})"
            )
        yield Error(arm, path, index, float(actual), float(expected), error, allowed)


def _numbers(value: Any) -> Any:
    """Return one output as an array of real numbers."""
    import numpy as np

    if isinstance(value, (int, float, complex, np.generic)):
        value = np.asarray(value)
    if not backend_of(value):
        raise UsageError(
            f"a result of type {type(value).__name__} cannot be compared: return numbers, or "
            "plain, dense arrays of them"
        )
    return backend_of(value).as_real_view(value)


def _check_reference(path: str, base: Any, want: Any) -> float:
    """Check that the reference has the baseline's shape, is fp64 or exact, and finite.

    Return its root mean square.
    """
    if base.shape != want.shape:
        raise UsageError(
            f"the reference gives {signature(want)} for {path}, the baseline {signature(base)}"
        )
    exact = is_exact(want) or is_exact(base) or dtype(want) == "float64"
    if not exact and (dtype(want) != dtype(base) or _worst(base, want, 0.0)[0]):
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


def _worst(got: Any, want: Any, rms: float) -> tuple[float, Callable[[], Element]]:
    """Return the largest error of any element, and a function that returns this element.

    The error is |got - want| / (|want| + rms). It is 1 where integers differ, and infinite where
    ``got`` is not finite.
    """
    import numpy as np

    backend, exact = backend_of(got), is_exact(got)
    kind = "int64" if exact and is_exact(want) else "float64"
    # compare a host output on the reference's device, because a GPU compares faster
    like = want if _on_host(got) and backend_of(want) is backend else got
    size = _chunk(like)
    pairs = list(zip(_parts(got, size), _parts(want, size), strict=True))

    def errors(part: Any, truth: Any) -> Any:
        g = backend.cast(part, kind, like)
        w = backend.cast(backend_of(truth).cast(truth, kind, truth), kind, like)
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, which becomes inf below
            error = backend.cast(g != w, "float64", like) if exact else abs(g - w)
        if rms and not exact:
            error /= abs(w) + rms
        error[~backend.module.isfinite(error)] = math.inf
        return error

    if not pairs:
        return 0.0, lambda: _NOWHERE
    maxima = backend.module.stack([errors(*pair).max() for pair in pairs])

    def locate() -> Element:
        i = int(maxima.argmax())
        part, truth = pairs[i]
        offset = int(errors(part, truth).argmax())
        index = np.unravel_index(i * size + offset, tuple(got.shape))
        return tuple(map(int, index)), part[offset].item(), truth[offset].item()

    return float(maxima.max()), locate  # one wait for the GPU for all parts


def _on_host(array: Any) -> bool:
    return str(getattr(array, "device", "cpu")) == "cpu"


def _chunk(array: Any) -> int:
    return HOST_CHUNK if _on_host(array) else CHUNK


def _parts(array: Any, size: int) -> Iterator[Any]:
    flat = array.reshape(-1)
    return (flat[start : start + size] for start in range(0, len(flat), size))
