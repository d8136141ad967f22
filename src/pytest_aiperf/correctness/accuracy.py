"""Measures how far outputs are from the reference's, and refuses those that are too far.

Arrays are read in parts: casts and differences exist for one part at a time.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pytest_aiperf.errors import UsageError, WrongResult
from pytest_aiperf.model import Error, PrecisionName
from pytest_aiperf.rules.validity import watched

from . import tensors
from .tensors import NamedTensor, backend_of, device_name, dtype, is_exact, parts, signature

Outputs = Sequence[NamedTensor]
Element = tuple[tuple[int, ...], Any, Any]  #: Index, value in a result, value in the reference.
_NOWHERE: Element = ((), 0.0, 0.0)

MAX_ERROR_RATIO = 4
"""An arm's error may be up to this many times the baseline's, or as large as its budget. The worst
error of a sum in another order is seldom larger than either."""
ERROR_BUDGETS: Mapping[PrecisionName, float] = {
    "fp64": 512 * 2.0**-52,
    "fp32": 64 * 2.0**-23,
    "tf32": 4 * 2.0**-10,
    "fp16": 2 * 2.0**-10,
    "bf16": 2 * 2.0**-7,
    "fp8_e5m2": 3 * 2.0**-2,
    "fp8": 3 * 2.0**-3,
    "nvfp4": 2 * 2.0**-1,
}
"""Relative error of an element that is always allowed: a few units in the last place.

The budget of fp64 has more of them: the reference is no more precise, and both errors add up.

In formats of 8 and 4 bits, the baseline is often more precise and then sets no limit. Their budgets
are therefore at least 5.5 times the RMS budget: the largest of 10 million normally distributed
errors."""
MAX_RMS_RATIO = 2
"""An arm's RMS error may be up to this many times the baseline's. Even if the baseline's error is
as large as allowed, this is less than the error of a result scaled by 0.75 in fp8, or by 0.5 in
nvfp4."""
RMS_BUDGETS: Mapping[PrecisionName, float] = {
    "fp64": 512 * 2.0**-52,
    "fp32": 64 * 2.0**-23,
    "tf32": 2 * 2.0**-10,
    "fp16": 1.28 * 2.0**-10,
    "bf16": 0.01,
    "fp8_e5m2": 0.13,
    "fp8": 0.065,
    "nvfp4": 0.15,
}
"""Relative RMS error of an output that is always allowed.

Rounding normally distributed values costs 2.6 % in fp8, 5.3 % in fp8_e5m2 and 9.5 % in nvfp4; a
product of two rounded matrices costs sqrt(2) times as much: 3.7 %, 7.4 % and 13.4 %. Two products
in succession cost 5 to 6 % in fp8, as gradients do. In bf16 a product costs 0.24 %, which leaves
room for a dozen of them; fp16 has an eighth of bf16's error. Tensor cores truncate tf32 operands
that the kernel has not rounded, which shrinks all results by about 0.07 %. In fp32 and fp64 the
errors of long sums are alike in all elements: the limit is that of one element."""
COARSE_RATIO = 4
"""An arm is reported as not checked if its RMS error is more than this many times the baseline's,
and above COARSE_SHARE and COARSE_LEAST, although the claim declares no lower precision: the arm may
leave out a small part of the work. On an H200, summing in another order had at most 9 times the
baseline's error."""
COARSE_SHARE = 1 / 8
"""An error is reported only if it is more than this fraction of what is always allowed. On an H200,
summing in another order had at most a nineteenth of what is allowed."""
COARSE_LEAST = 2e-13
"""An error up to this is never reported: in fp64, the reference has such errors itself."""
MAX_BASELINE_BUDGETS = 64  #: The baseline's error may be this many times its budget.
MAX_BASELINE_ERROR = 0.1
"""Limit of the baseline's error, unless its budget is larger; a result of zeros has error 0.5."""
SAMPLE = 4096  #: Number of elements of a large array that :func:`_scale` reads.
NEGLIGIBLE = 1e-12
"""Smallest scale of an output, and its smallest fraction of the RMS. Smaller values, such as
exponentials of large arguments, are inexact and underflow."""
NAMED_PATHS = 8  #: Most outputs that a message lists; a dict may have thousands.
FEW = 64
"""With fewer elements than this, SMALLER_HALF is raised: half of them may be small by chance."""
SMALLER_HALF = 8
"""The scale of a result is at most this many times the RMS of the smaller half of its values. The
RMS of all values is 2.6 times as large for normally distributed values, and 6 times for products of
two of them or after a GELU. One large element among many small ones makes it any number of times
as large."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One output of the reference."""

    path: str  #: Where the output is in the reference's result.
    array: Any  #: Its values.
    rms: float  #: Root mean square of its values.
    scale: float  #: Their typical size: see :func:`_scale`.
    exact: bool  #: Whether the values count as correct whatever their dtype.


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one output of one arm is from the reference's."""

    path: str  #: Where the output is in the arm's result.
    dtype: str  #: Its dtype.
    shape: tuple[int, ...]  #: Its shape.
    device: str  #: Where it is.
    error: float = math.inf  #: Largest error of an element; infinite if the shapes differ.
    rms: float = math.inf  #: Relative RMS error; 0 for integers.
    locate: Callable[[], Element] = lambda: _NOWHERE  #: Finds the element with the largest error.

    @property
    def signature(self) -> str:
        """Its dtype, shape and device, as :func:`tensors.signature` writes them."""
        return f"{self.dtype}{list(self.shape)} on {self.device}"


def larger(known: Deviation, new: Deviation) -> Deviation:
    """Return the first deviation with the larger errors of both."""
    return replace(known, error=max(known.error, new.error), rms=max(known.rms, new.rms))


def beyond(deviations: Sequence[Deviation], rounding: Sequence[Deviation]) -> list[Deviation]:
    """Return the deviations, with 0 in place of errors that ``rounding`` explains."""
    if len(deviations) != len(rounding):
        return list(deviations)
    return [
        replace(d, error=0.0, rms=0.0)
        if d.error <= MAX_ERROR_RATIO * other.error and d.rms <= MAX_RMS_RATIO * other.rms
        else d
        for d, other in zip(deviations, rounding, strict=True)
    ]


def copies(result: Outputs) -> list[NamedTensor]:
    """Copy a result: a later arm may write its own result into the same buffer."""
    return [(path, backend_of(x).copy(x)) for path, value in result for x in [_numbers(value)]]


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
    expected = expect(reference)
    deviations = {
        arm: compare(result, expected, located=located) for arm, result in results.items()
    }
    return judge(deviations, expected, precision, when, located=located)


def expect(reference: object, *, exact: bool = False) -> list[Expected]:
    """Return the outputs in a reference's result.

    ``exact`` states that they are correct whatever their dtype. Without it, :func:`judge` requires
    fp64, or exactly the baseline's result.
    """
    of = "the reference's result"
    outputs = [(path, _numbers(value, of)) for path, value in _results(reference)]
    scales = ((rms, _scale(array, rms)) for _, array in outputs for rms in [_rms(array)])
    return [Expected(*o, *s, exact) for o, s in zip(outputs, scales, strict=True)]


def _results(reference: object) -> list[NamedTensor]:
    return tensors.walk(reference, "reference", is_result=True)


@watched
def compare(
    outputs: Outputs, expected: Sequence[Expected], *, located: bool = True
) -> list[Deviation]:
    """Compare one arm's outputs with the reference's, for :func:`judge`.

    The deviations refer to no array, so that the outputs can be freed. With ``located=False``, they
    refer to the outputs, because the worst element is looked up only when it is needed.
    """
    deviations = []
    for i, (path, value) in enumerate(outputs):
        got = _numbers(value)
        deviation = Deviation(path, dtype(got), tuple(got.shape), device_name(got))
        if i < len(expected) and tuple(expected[i].array.shape) == deviation.shape:
            error, rms, locate = _worst(got, expected[i])
            if located:
                locate = partial(tuple, locate())
            deviation = replace(deviation, error=error, rms=rms, locate=locate)
        deviations.append(deviation)
    return deviations


@watched
def judge(
    deviations: Mapping[str, Sequence[Deviation]],
    expected: Sequence[Expected],
    precision: PrecisionName | None = None,
    when: str = "",
    *,
    located: bool = True,
) -> list[Error]:
    """Check that the arms' outputs are as close to the reference's as the baseline and dtype allow.

    The largest error of an element and the relative RMS error have limits of their own: in fp8 and
    nvfp4, single elements may be so far off that results of zeros would pass the first one.
    Arguments, return value and errors are those of :func:`verify`.
    """
    base = deviations["baseline"]
    if len(base) != len(expected):
        numbers = len(base) > 1 and not any(output.shape for output in base)
        same = f"a list of {len(base)} numbers" if numbers else "as many, in the same order"
        raise UsageError(
            f"the reference returns {_paths(expected)}, but the baseline's result is "
            f"{_paths(base)}: the values that a call returns, followed by the arguments that it "
            f"changes; let the reference return {same}"
        )
    arms = sorted(deviations, key=lambda arm: arm != "baseline")
    for arm in arms:
        if len(deviations[arm]) != len(base):
            if not deviations[arm]:
                raise WrongResult(
                    f"{arm} returns nothing and changes no argument: is a return missing?"
                )
            given = f"{_paths(deviations[arm])}, the baseline's {_paths(base)}"
            raise WrongResult(f"{arm}'s result is {given}")
    return [
        error
        for i, want in enumerate(expected)
        for error in judge_output(
            {arm: deviations[arm][i] for arm in arms}, want, precision, when, located=located
        )
    ]


def coarse(errors: Sequence[Error], precision: PrecisionName | None) -> Iterator[str]:
    """Yield the outputs that are much less precise than the baseline's, undeclared."""
    if precision is not None:
        return
    base = [error.rms for error in errors if error.arm == "baseline"]
    for arm in {error.arm for error in errors} - {"baseline"}:
        rows = [error for error in errors if error.arm == arm]
        for error, other in zip(rows, base, strict=True):
            least = max(COARSE_SHARE * error.rms_allowed, COARSE_LEAST)
            if error.rms > max(COARSE_RATIO * other, least) and math.isfinite(error.rms):
                yield (
                    f"small parts of {error.output}: {arm}'s error is {error.rms:.2g}, the "
                    f"baseline's {other:.2g}; declare the precision in which it computes"
                )


def _paths(outputs: Sequence[Expected | Deviation]) -> str:
    return f"({some_names(output.path for output in outputs)})" if outputs else "nothing"


def some_names(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    known = list(names)
    more = f", and {len(known) - NAMED_PATHS} more" if len(known) > NAMED_PATHS else ""
    return ", ".join(known[:NAMED_PATHS]) + more


def judge_output(
    deviations: Mapping[str, Deviation],
    want: Expected,
    precision: PrecisionName | None,
    when: str,
    *,
    located: bool,
) -> Iterator[Error]:
    """Judge one output of every arm; the baseline comes first, as its error limits the others."""
    base = deviations["baseline"]
    _check_reference(base, want)
    name = base.dtype.replace("bfloat", "bf").replace("float", "fp")
    names = [key for key in ERROR_BUDGETS if name.startswith(key) or key == precision]
    budgets = 0.0, 0.0
    if not is_exact(base):
        budgets = max(ERROR_BUDGETS[n] for n in names), max(RMS_BUDGETS[n] for n in names)
    for arm, output in deviations.items():
        if output.signature != base.signature:
            device = "" if output.device == base.device else ", on the same device"
            raise WrongResult(
                f"{arm} gives {output.signature} for {output.path}, the baseline {base.signature}: "
                f"all arms must return the same shapes and dtypes{device}; convert it in the arm"
            )
        if arm == "baseline":
            limits = [
                min(MAX_BASELINE_BUDGETS * budget, max(MAX_BASELINE_ERROR, budget))
                for budget in budgets
            ]
            problem = "baseline and reference disagree, one of them is wrong"
        else:
            limits = [
                max(MAX_ERROR_RATIO * base.error, budgets[0]),
                max(MAX_RMS_RATIO * base.rms, budgets[1]),
            ]
            problem = f"{arm} disagrees with the reference"
        allowed, rms_allowed = limits
        of_baseline = "" if arm == "baseline" else ", baseline's {:.2g}"
        problem += f"{when and ' ' + when}: {output.path}"
        found = located or output.error > allowed
        index, actual, expected = output.locate() if found else _NOWHERE
        if output.error > allowed:
            shown = [f"{x:.9g}" if isinstance(x, float) else str(x) for x in (actual, expected)]
            kind, to = "error", ""
            if want.rms and not is_exact(base):
                kind, to = "relative error", f"; relative to |expected| + {want.scale:.2g}"
            compared = of_baseline.format(base.error)
            why = f"{kind} {output.error:.2g}, allowed {allowed:.2g}{compared}{to}"
            if math.isinf(output.error):
                why = "unwritten or not finite: results must be finite"
            raise WrongResult(
                f"{problem}{list(index) or ''} is {shown[0]}, expected {shown[1]} ({why})"
            )
        if output.rms > rms_allowed:
            raise WrongResult(
                f"{problem} has a relative RMS error of {output.rms:.2g} "
                f"(allowed {rms_allowed:.2g}{of_baseline.format(base.rms)})"
            )
        yield Error(
            *(arm, output.path, index, float(actual), float(expected)),
            *(output.error, allowed, output.rms, rms_allowed),
        )


def _numbers(value: Any, of: str = "a result") -> Any:
    """Return one output as an array of real numbers."""
    if not (array := tensors.as_array(value)):
        kind = type(value).__name__
        if (type(value).__module__, kind) == ("numpy", "ndarray"):  # runs no code of other classes
            kind += f" of {value.dtype}"
        raise UsageError(
            f"{of} of type {kind} cannot be compared: return numbers, or plain, dense arrays "
            "of them (of a structured array, its fields)"
        )
    return backend_of(array[0]).as_real_view(array[0])


def _check_reference(base: Deviation, want: Expected) -> None:
    """Check that the reference has the baseline's shape, is fp64 or exact, and finite."""
    kind = dtype(want.array)
    if base.shape != tuple(want.array.shape):
        raise UsageError(
            f"the reference gives {signature(want.array)} for {base.path}, the baseline "
            f"{base.signature}"
        )
    exact = want.exact or is_exact(want.array) or is_exact(base)
    is_fp64 = kind.startswith("float64")  # in any order of bytes
    if not exact and not is_fp64 and (kind != base.dtype or base.error):
        raise UsageError(
            f"compute the reference in fp64: for {base.path} it gives {kind}, and not exactly "
            "the baseline's result"
        )
    if not math.isfinite(want.rms):
        index, value, _ = _worst(want.array, replace(want, rms=0.0, scale=0.0))[2]()
        where = f"{value} at {base.path}{list(index)}"
        raise UsageError(
            f"the reference is {where}: choose inputs whose results, and their squares, are finite"
        )


def _rms(array: Any) -> float:
    """Return the root mean square of an array."""
    import numpy as np

    doubles = (backend_of(part).cast(part, "float64", part) for _, part in parts(array))
    with np.errstate(over="ignore"):  # refused as not finite, which says what to do
        squares = sum((part**2).sum() for part in doubles)
    return math.sqrt(float(squares) / max(math.prod(array.shape), 1))


def _scale(array: Any, rms: float) -> float:
    """Return the RMS of an array or, if less, SMALLER_HALF times the RMS of its smaller half.

    A few large elements can raise the RMS so far that the errors of all others would not count.
    Zeros are left out. Of a large array, a random sample is used.
    """
    import numpy as np

    count = math.prod(array.shape)
    if not 0 < rms < math.inf:
        return rms
    backend = backend_of(array)
    index: Any = ...
    if count > SAMPLE:
        at = np.random.default_rng().integers(0, count, SAMPLE)
        index = tuple(backend.cast(i, "int64", array) for i in np.unravel_index(at, array.shape))
    sample = backend.cast(array[index], "float64", array).reshape(-1).tolist()
    sizes = np.sort(np.abs([x for x in sample if x]))
    half = sizes[: (len(sizes) + 1) // 2]
    # of few values, the smaller half may be small by chance
    factor = SMALLER_HALF * max(1.0, FEW / count)
    scale = factor * float(np.sqrt((half**2).mean())) if len(half) else rms
    return min(rms, max(scale, NEGLIGIBLE * min(rms, 1.0)))


def _worst(got: Any, expected: Expected) -> tuple[float, float, Callable[[], Element]]:
    """Return the largest error of any element, the RMS error, and a function to find the element.

    The error is |got - want| / (|want| + scale). It is 1 where integers differ, and infinite where
    ``got`` is not finite. The RMS error is relative to the RMS of the expected values, if that is
    not 0, or else to each value and the scale: the larger of the two.
    """
    import numpy as np

    want, rms, scale = expected.array, expected.rms, expected.scale
    backend, exact = backend_of(got), is_exact(got)
    kind = "int64" if exact and is_exact(want) else "float64"
    # compare a host output on the reference's device, because a GPU compares faster
    like = want if tensors.on_host(got) and backend_of(want) is backend else got
    size = tensors.chunk(like)

    def pairs() -> Iterator[tuple[int, Any, Any]]:
        rows = zip(parts(got, size), parts(want, size), strict=True)
        return ((start, part, truth) for (start, part), (_, truth) in rows)

    def errors(part: Any, truth: Any) -> tuple[Any, Any]:
        """Return the errors of a part's elements, and the sum of their squares."""
        g = backend.cast(part, kind, like)
        w = backend.cast(backend_of(truth).cast(truth, kind, truth), kind, like)
        with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN, replaced below
            error = backend.cast(g != w, "float64", like) if exact else abs(g - w)
            squares = ((error / (rms or 1)) ** 2).sum()
            if rms and not exact:
                error /= abs(w) + scale
                if scale < rms:
                    squares = backend.module.maximum(squares, (error**2).sum())
        error[~backend.module.isfinite(error)] = math.inf
        return error, squares

    results = (errors(part, truth) for _, part, truth in pairs())
    figures = [(error.max(), squares) for error, squares in results]
    if not figures:
        return 0.0, 0.0, lambda: _NOWHERE
    maxima, sums = (backend.module.stack(column) for column in zip(*figures, strict=True))

    def locate() -> Element:
        i = int(maxima.argmax())
        start, part, truth = next(itertools.islice(pairs(), i, None))
        offset = int(errors(part, truth)[0].argmax()) if worst else 0
        index = np.unravel_index(start + offset, tuple(got.shape))
        return tuple(map(int, index)), part[offset].item(), truth[offset].item()

    worst = float(maxima.max())  # one wait for the GPU for all parts
    mean_square = float(sums.sum()) / math.prod(got.shape)
    return worst, 0.0 if exact else math.sqrt(mean_square), locate
