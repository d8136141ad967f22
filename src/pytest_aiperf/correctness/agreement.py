"""Checks that the arms' results agree with the reference.

A call's result: the tensors in its return value, followed by the argument tensors that it changed.

Large inputs leave no room for temporaries of their size. Arrays are therefore read in parts, and
casts and differences exist for one part at a time. Let S be the bytes of one set of inputs and of a
result, where memory that they share counts once. At most 2 S of arrays exist at a time:

* in :func:`infer_effects`, a set of inputs and a copy of the result;
* in :func:`agree` with ``kept_bytes`` below S, the reference's result, and the inputs and the
  result of one arm. Before that, the reference runs alone.

The memory that a claim's functions take comes on top: temporaries of the arms and the reference,
and decoy inputs of prepared arms. A reference in fp64 returns 2 to 8 times the bytes of the arms'
results; for large inputs it should return exactly their result, in their dtype.
"""

import contextlib
import itertools
import math
import random
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

from pytest_aiperf.device.device import gc_disabled
from pytest_aiperf.errors import UsageError, WrongResult
from pytest_aiperf.model import Error, PrecisionName
from pytest_aiperf.rules.validity import watched
from pytest_aiperf.text import si

from . import contents, objects, reach, tensors
from .contents import Contents
from .objects import Originals
from .reach import Hidden
from .tensors import (
    Args,
    Inputs,
    NamedTensor,
    backend_of,
    device_name,
    dtype,
    is_exact,
    parts,
    signature,
)

Prepare = Callable[[Inputs], Callable[..., object]]  #: Prepares an arm for one set of inputs.
Make = Callable[[], Inputs]  #: Builds the same inputs anew each time.
Outputs = Sequence[NamedTensor]
Element = tuple[tuple[int, ...], Any, Any]  #: Index, value in a result, value in the reference.
_NOWHERE: Element = ((), 0.0, 0.0)
_INDEX = re.compile(r"\[\d+\]")

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
MAX_SINGLE_CHECKS = 4
"""Most tensors of an argument that are poisoned one by one, if poisoning all of them makes some
outputs wrong, to find those that a call only writes. If there are more, they count as read: each
check is a call, and a training step changes each of hundreds of parameters."""
FINITE = 256.0
"""Value that poisons arrays which a call clears by arithmetic: NaN would stay NaN. Formats of 8
bits can hold this value as well."""
MAX_BASELINE_BUDGETS = 64  #: The baseline's error may be this many times its budget.
MAX_BASELINE_ERROR = 0.1
"""Limit of the baseline's error, unless its budget is larger; a result of zeros has error 0.5."""
MAX_CONSTANT_SHARE = 0.5
"""Largest fraction of an output's elements, in a random sample, that may not depend on the seed."""
MIN_CONSTANT = 8
"""Fewest sampled elements independent of the seed for which a claim is refused."""
MAX_CONSTANT_CHANGE = 2.0**-6
"""An element that changes by at most this relative amount counts as independent of the seed, unless
its tolerance is smaller. With the tolerance of fp8, a third of random elements would count by
chance."""
SAMPLE = 4096  #: Number of elements of a large array that :func:`_scale` reads.
NEGLIGIBLE = 1e-12
"""Smallest scale of an output, and its smallest fraction of the RMS. Smaller values, such as
exponentials of large arguments, are inexact and underflow."""
KEPT_TIMES = 2
"""The memory that results keep alive is reported if it is more than this many times that of their
elements and of the baseline's, plus KEPT_BYTES. Padding may double a result."""
KEPT_BYTES = 1 << 20
"""Constant part of that limit."""
NAMED_PATHS = 8  #: Most outputs that a message lists; a dict may have thousands.
SAME_INPUTS = "all arms must get the same inputs"  #: Why inputs of one seed may not differ.
SEEDING = (
    "np.random.rand and torch.randn are seeded; a generator of your own takes its seed from bench: "
    "np.random.default_rng(bench.seed)"
)
"""How inputs are drawn so that they depend on the seed, and on nothing else."""
UNSEEDED = (
    f"{SAME_INPUTS}. {SEEDING}. The baseline must write all of a destination from np.empty or "
    "torch.empty; for scratch memory that it does not write, use np.zeros or torch.zeros"
)
"""What to do if inputs of one seed have different values."""
FEW = 64
"""With fewer elements than this, SMALLER_HALF is raised: half of them may be small by chance."""
SMALLER_HALF = 8
"""The scale of a result is at most this many times the RMS of the smaller half of its values. The
RMS of all values is 2.6 times as large for normally distributed values, and 6 times for products of
two of them or after a GELU. One large element among many small ones makes it any number of times
as large."""


@dataclass(frozen=True, slots=True)
class ArgumentEffects:
    """What the baseline does to its arguments."""

    mutated: tuple[str, ...] = ()  #: Paths of the arguments' leaves that the baseline changes.
    write_only: tuple[str, ...] = ()
    """Paths in ``mutated`` that the baseline never reads, or only to clear them."""
    names: tuple[str, ...] = ()  #: Names of the parameters, for messages.
    returned: int | None = field(default=None, compare=False)
    """How many values the baseline returns that are none of the changed arguments."""
    nbytes: int = field(default=0, compare=False)
    """Bytes of one set of inputs and of the baseline's result; shared memory counts once."""
    exact: tuple[int, ...] = ()
    """Positions of arguments in which the baseline changes bytes, texts, sets or queues."""
    objects: tuple[int, ...] = ()
    """Positions of arguments in which the baseline changes attributes of objects."""
    drawn: tuple[int, ...] = ()
    """Positions of arguments in which attributes of objects differ between seeds."""
    cleared: tuple[str, ...] = ()
    """Paths in ``write_only`` that the baseline clears by arithmetic, as in ``out *= 0``."""
    overwritten: tuple[str, ...] = ()
    """Paths of lists of floats, of buffers, and of arrays of texts, dates, objects or records that
    the baseline changes and whose values it never reads."""

    @property
    def changed(self) -> tuple[int, ...]:
        """Positions of arguments that the baseline changes, but for attributes of objects."""
        return tuple(sorted({*self.exact, *(_split(path)[0] for path in self.mutated)}))

    @property
    def left(self) -> tuple[int, ...]:
        """Positions of arguments whose contents after a call are compared by fingerprints."""
        return tuple(sorted({*self.exact, *self.objects}))

    @property
    def changed_inside(self) -> tuple[int, ...]:
        """Positions of changed arguments that may hold objects: no arrays and no number lists."""
        return tuple(i for i in self.changed if f"args[{i}]" not in self.mutated)

    @property
    def updates(self) -> bool:
        """Whether a call reads an argument that it changes: a second call has another result."""
        return bool(self.exact or set(self.mutated) - set(self.write_only))

    def tables(self, args: Args) -> dict[str, dict[str, Sequence[Any]]]:
        """Return the columns that calls change in many rows or long dicts of numbers, by path.

        Both keys and values of a dict count as changed as soon as one of them is.
        """
        by_path: dict[str, dict[str, Sequence[Any]]] = {}
        for path, columns in tensors.tables(args) if self.mutated else ():
            changed = {_column(p, path) for p in self.mutated if p.startswith(f"{path}[")}
            if changed and changed.isdisjoint(columns):  # it is a dict
                changed = {*columns}
            if kept := {suffix: x for suffix, x in columns.items() if suffix in changed}:
                by_path[path] = kept
        return by_path

    def poison(self, args: Args) -> None:
        """Fill the arrays that calls must not read with wrong values."""
        tensors.poison(args, set(self.write_only) - set(self.cleared))
        tensors.poison(args, self.cleared, FINITE)
        tensors.poison(args, self.overwritten)

    def label(self, path: str) -> str:
        """Return a tensor's path with the parameter's name in place of ``args[i]``."""
        position, rest = _split(path)
        return self.names[position] + rest if position < len(self.names) else path

    def not_compared(self, changed: Sequence[str], args: Args) -> list[str]:
        """Return the changed paths whose values neither :func:`outputs_of` nor contents compare.

        These are the paths of arrays and numbers, and paths in arguments that ``exact`` lacks. The
        columns and long dicts in :attr:`tables` are left out: :func:`outputs_of` compares them.
        """
        leaves = tensors.leaves(args) if changed else {}
        tables = self.tables(args) if changed else {}
        return [
            path
            for path in changed
            if not any(_is_in(path, table, columns) for table, columns in tables.items())
            if tensors.is_compared(leaves.get(path)) or _split(path)[0] not in self.exact
        ]


def _split(path: str) -> tuple[int, str]:
    """Return the position of an argument, and the path within it."""
    position, _, rest = path.removeprefix("args[").partition("]")
    return int(position), rest


def _column(path: str, table: str) -> str:
    """Return the suffix of the column in which a leaf of a table of rows is."""
    return tensors.ROWS + path.removeprefix(table).partition("]")[2]


def _is_in(path: str, table: str, columns: Collection[str]) -> bool:
    """Whether a leaf is in one of these columns of a table, or in a dict."""
    is_dict = not next(iter(columns)).startswith(tensors.ROWS)
    return path.startswith(f"{table}[") and (is_dict or _column(path, table) in columns)


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
    arrays = tensors.arrays(inputs.args)
    leaves = tensors.leaves(inputs.args)
    values = {p for p, x in leaves.items() if p in arrays or tensors.is_number_list(x)}
    unseeded = [p for p in tensors.changed(before, inputs.args) if p in values]
    candidates = {p for p, a in arrays.items() if p in unseeded or _may_poison(a)}
    others = [p for p, x in leaves.items() if tensors.can_be_filled(x)]
    del before, arrays, leaves
    held = [contents.read(arg) for arg in inputs.args]
    returned, mutated, originals = _run(prepare, inputs, ArgumentEffects(), lambda _: None)
    pairs = list(zip(held, map(contents.read, inputs.args), strict=True))
    effects = ArgumentEffects(
        _with_kin(mutated, inputs.args),
        exact=tuple(i for i, (old, new) in enumerate(pairs) if _differ(old, new)),
        objects=tuple(i for i, (old, new) in enumerate(pairs) if old.objects != new.objects),
    )
    result = outputs_of(returned, inputs.args, effects)
    effects = replace(
        effects,
        returned=sum(path.startswith("result") for path, _ in result),
        nbytes=tensors.nbytes((inputs.args, [x for _, x in result])),
    )
    expected = expect([x for _, x in copies(result)], exact=True)
    left = contents_of(inputs.args, effects)
    del returned, inputs, result, originals
    if not expected:
        raise UsageError(
            "the baseline returns nothing and changes none of its arguments' arrays and numbers "
            "(no reference tells what queues, sets and structured arrays must hold): return what "
            "it leaves there as well, as numbers or arrays"
        )

    def wrong_with(paths: Sequence[str], value: float) -> set[str]:
        """Return the paths of outputs that are wrong if these arrays are filled with a value."""
        try:
            inputs = _make_filled(make)
            poison = partial(tensors.poison, paths=paths, value=value)
            returned, _, _ = _run(prepare, inputs, effects, poison)
            now = contents_of(inputs.args, effects) if candidates.isdisjoint(paths) else left
            if any(map(_differ, now, left)):
                return set(paths)
            result = outputs_of(returned, inputs.args, effects)
            return {*_wrong(compare(result, expected), expected)}
        except Exception:  # noqa: BLE001  an arm may raise anything for a poisoned input
            return set(paths)

    write_only: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    for paths in _by_argument(p for p in mutated if p in candidates):
        not_read = _not_read(paths, (math.nan,), wrong_with)
        rest = tuple(p for p in paths if p not in not_read)
        write_only += not_read
        cleared += _not_read(rest, (FINITE, -FINITE), wrong_with)
    write_only += cleared
    overwritten: tuple[str, ...] = ()
    changed = {p for p in others if p in mutated or _split(p)[0] in effects.exact}
    for paths in _by_argument(p for p in others if p in changed):
        overwritten += _not_read(paths, (math.nan,), wrong_with)
    effects = replace(
        effects,
        write_only=write_only,
        cleared=cleared,
        overwritten=overwritten,
        names=tuple(names),
    )
    unseeded_names = [effects.label(p) for p in unseeded if p not in write_only]
    if unseeded_names:
        raise UsageError(
            f"inputs() gives different values for the same seed: {', '.join(unseeded_names)} "
            f"({UNSEEDED})"
        )
    return effects


def _with_kin(mutated: Sequence[str], args: Args) -> tuple[str, ...]:
    """Add the other numbers of lists in which a call changes more than half of the numbers.

    When rows are sorted, most of them move for any seed, but a row may happen to be in its place.
    """
    leaves = tensors.leaves(args) if mutated else {}
    kin: dict[tuple[int, str], list[str]] = defaultdict(list)
    for path, leaf in leaves.items():
        if tensors.is_compared(leaf) and not (backend_of(leaf) or tensors.is_number_list(leaf)):
            position, rest = _split(path)
            kin[position, _INDEX.sub("[]", rest)].append(path)
    changed = {*mutated}
    missing = [path for path in mutated if path not in leaves]
    for paths in kin.values():
        if 2 * len(changed.intersection(paths)) > len(paths):
            changed.update(paths)
    return (*(path for path in leaves if path in changed), *missing)


def _by_argument(paths: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Group the paths of leaves by the argument in which they are."""
    for _, group in itertools.groupby(paths, key=lambda path: _split(path)[0]):
        yield tuple(group)


def _not_read(
    paths: tuple[str, ...],
    values: Sequence[float],
    wrong_with: Callable[[Sequence[str], float], set[str]],
) -> tuple[str, ...]:
    """Return the arrays of an argument that a call does not read.

    The call's outputs stay right if these arrays are filled with any of ``values``. ``wrong_with``
    returns the outputs that are wrong if some arrays are filled with one value.
    """

    def affected(some: Sequence[str]) -> set[str]:
        wrong: set[str] = set()
        for value in values:
            if not wrong.issuperset(some):
                wrong |= wrong_with(some, value)
        return wrong

    wrong = affected(paths)
    if not wrong:
        return paths
    # an output that is right although all arrays are filled depends on none of them
    right = tuple(p for p in paths if p not in wrong)
    if 0 < len(right) < len(paths) and not affected(right):
        return right
    few = paths if 1 < len(paths) <= MAX_SINGLE_CHECKS else ()
    return tuple(p for p in few if not affected([p]))


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
    unset = _make_filled(lambda: module.empty(1, dtype=array.dtype, device=array.device))
    return all(bool((part == unset).all()) for _, part in parts(array))


def _run(
    prepare: Prepare, inputs: Inputs, effects: ArgumentEffects, poison: Callable[[Args], object]
) -> tuple[object, tuple[str, ...], Originals]:
    """Call an arm on inputs after ``poison`` has changed its arguments.

    Return what it returned, the paths of arguments that it changed but ``effects.mutated`` lacks,
    and the objects that were among the arguments. Garbage collection is off: destroying a CUDA
    graph would break a capture in progress.
    """
    with gc_disabled():
        call = prepare(inputs)
        poison(inputs.args)
        before = tensors.fingerprint(inputs.args, effects.mutated)
        originals = Originals(inputs.args, effects.changed_inside)
        returned = call(*inputs.args)
    return returned, tensors.changed(before, inputs.args, effects.mutated), originals


def outputs_of(returned: object, args: Args, effects: ArgumentEffects) -> list[NamedTensor]:
    """Return a call's result; an argument that is both changed and returned counts once.

    It counts twice if the arm would otherwise return fewer values than the baseline: the baseline
    then returns the same values in a separate array.
    """
    leaves = tensors.leaves(args) if effects.mutated else {}
    tables = effects.tables(args)  # a leaf per column, as in a result
    in_tables = tuple(f"{path}[" for path in tables)
    mutated = [
        (p, leaves[p]) for p in effects.mutated if p in leaves and not p.startswith(in_tables)
    ]
    mutated += [(p + suffix, column) for p, t in tables.items() for suffix, column in t.items()]
    views = {tensors.view(x) for _, x in mutated if backend_of(x)}
    outputs = tensors.walk(returned, "result", is_result=True)
    distinct = [
        (p, x) for p, x in outputs if not (views and backend_of(x) and tensors.view(x) in views)
    ]
    if len(distinct) != effects.returned == len(outputs):
        distinct = outputs
    named = [(effects.label(p), x) for p, x in mutated if tensors.as_array(x)]
    return distinct + named


def copies(result: Outputs) -> list[NamedTensor]:
    """Copy a result: a later arm may write its own result into the same buffer."""
    return [(path, backend_of(x).copy(x)) for path, value in result for x in [_numbers(value)]]


def agree(
    arms: Mapping[str, Prepare],
    make: Make,
    reference: Callable[..., object],
    effects: ArgumentEffects,
    precision: PrecisionName | None = None,
    *,
    kept_bytes: float = math.inf,
    shortcuts: "Shortcuts | None" = None,
    unchecked: set[str] | None = None,
) -> list[Error]:
    """Check all arms of a claim against the reference on one seed, see :func:`collect`.

    What cannot be compared is added to ``unchecked``.
    """
    results = collect(arms, make, reference, effects, kept_bytes=kept_bytes)
    roles = {arm: arm for arm in arms}
    return results.judge(
        roles, make, precision, shortcuts, set() if unchecked is None else unchecked
    )


def collect(
    arms: Mapping[str, Prepare],
    make: Make,
    reference: Callable[..., object],
    effects: ArgumentEffects,
    *,
    kept_bytes: float = math.inf,
) -> "Results":
    """Call arms and the reference on one seed, and compare their results.

    Each function runs on new inputs: optimized arms first, later rungs before earlier ones, and the
    reference last. All results are kept until then, so that an arm cannot find a correct result in
    freed memory. A prepared arm prepares before its arguments are poisoned. If ``effects.nbytes``
    exceeds ``kept_bytes``, nothing is kept: the reference runs first, and each result is compared
    and freed before the next arm runs.
    """

    def expected_outputs() -> list[Expected]:
        inputs = make()
        effects.poison(inputs.args)
        return expect(reference(*inputs.args))

    expected = expected_outputs() if effects.nbytes > kept_bytes else None
    outputs_: dict[str, Outputs] = {}
    forms: dict[str, _Form] = {}
    deviations: dict[str, list[Deviation]] = {}
    left: dict[str, Sequence[Contents]] = {}
    beside: dict[str, str] = {}
    in_use: list[object] = []
    changes: dict[str, tuple[Sequence[str], Sequence[str]]] = {}
    for arm in sorted(arms, key=_reverse_order, reverse=True):
        inputs = make()
        returned, changed, originals = _run(arms[arm], inputs, effects, effects.poison)
        changes[arm] = changed, effects.not_compared(changed, inputs.args)
        _refuse_lazy_copies(arm, returned)
        outputs = outputs_of(returned, inputs.args, effects)
        left[arm] = contents_of(inputs.args, effects)
        if arm.startswith(
            ("baseline", "optimized")
        ):  # an optimized arm is the next rung's baseline
            beside[arm] = contents.read(returned).objects
        forms[arm] = _form(
            *(returned, outputs, inputs.args, effects),
            hidden=Hidden(inputs.args, lambda: make().args),
            arguments=originals.state_after(inputs.args, [x for _, x in outputs if backend_of(x)]),
        )
        if expected is None:
            outputs_[arm] = copies(outputs)
            in_use.append(returned)
        else:
            deviations[arm] = compare(outputs, expected)
        del inputs, returned, outputs, originals
    _refuse_changes(changes, effects)
    in_use.clear()
    if expected is None:
        expected = expected_outputs()
        for arm, result in outputs_.items():
            deviations[arm] = compare(result, expected)
    return Results(effects, expected, deviations, forms, left, beside, outputs_)


def _refuse_changes(
    changes: Mapping[str, tuple[Sequence[str], Sequence[str]]], effects: ArgumentEffects
) -> None:
    """Refuse changes of arguments, beyond those in ``effects``, that no check compares.

    ``changes`` has the paths that each arm changed, and those among them that are not compared.
    Texts may be added under different keys for each seed, but only where the baseline adds them as
    well.
    """
    baseline = frozenset(changes["baseline"][0] if "baseline" in changes else ())
    for arm, (changed, not_compared) in changes.items():
        others = [path for path in changed if path not in baseline]
        names = _some(repr(effects.label(p)) for p in others or not_compared)
        if others:
            raise UsageError(
                f"{arm} changed argument {names}, which the baseline left unchanged: an arm must "
                "not change its inputs"
            )
        if not_compared:
            raise UsageError(
                f"{arm} changed argument {names}, which the baseline changes for some seeds only, "
                "so nothing compares it: return it as a result"
            )


def _reverse_order(arm: str) -> tuple[bool, bool, int]:
    """Return the key that sorts arms: baselines, libraries, optimized arms, each by their rung."""
    role, _, number = arm.partition("-")
    return role == "optimized", role == "library", int(number or 0)


@dataclass(frozen=True, slots=True)
class Results:
    """The results of arms on one seed, by the arms' names."""

    effects: ArgumentEffects
    expected: Sequence[Expected]  #: The reference's result.
    deviations: Mapping[str, list[Deviation]]
    forms: "Mapping[str, _Form]"
    left: Mapping[str, Sequence[Contents]]
    beside: Mapping[str, str]  #: Fingerprints of result contents other than arrays and numbers.
    outputs: Mapping[str, Outputs]  #: Copies; empty if they are too large to keep.

    def judge(
        self,
        roles: Mapping[str, str],
        make: Make,
        precision: PrecisionName | None,
        shortcuts: "Shortcuts | None",
        unchecked: set[str],
    ) -> list[Error]:
        """Judge one claim, whose arms are named by ``roles``; return the errors of its arms.

        What cannot be compared is added to ``unchecked``.
        """
        base, effects = roles["baseline"], self.effects
        deviations = {role: self.deviations[arm] for role, arm in roles.items()}
        if shortcuts:
            unchecked.update(shortcuts.changes_beside(self.beside[base]))
        errors = judge(deviations, self.expected, precision)
        forms = {role: self.forms[arm] for role, arm in roles.items()}
        unchecked.update(_compare_forms(deviations, forms, effects))
        unchecked.update(_coarse(errors, precision))
        for role, arm in roles.items():
            found = compare_contents(role, self.left[arm], self.left[base], effects)
            unchecked.update(found)
        if shortcuts and self.outputs:
            arrays = tensors.arrays(make().args) if shortcuts.stale else {}
            named = {effects.label(p): a for p, a in arrays.items() if p not in effects.write_only}
            # if a call reads no input, filling its destinations is its work
            if named or effects.returned or not shortcuts.stale:
                updates = {effects.label(p) for p in effects.mutated if p not in effects.write_only}
                rows = deviations["baseline"]
                shortcuts.refuse(self.outputs[base], named, self.expected, rows, updates)
        return errors


def contents_of(args: Args, effects: ArgumentEffects) -> list[Contents]:
    """Read what a call has left in the arguments in which the baseline leaves something."""
    return [contents.read(args[i]) for i in effects.left]


def _differ(old: Contents, new: Contents) -> bool:
    return (old.exact, old.positions) != (new.exact, new.positions)


def compare_contents(
    arm: str,
    left: Sequence[Contents],
    baseline: Sequence[Contents],
    effects: ArgumentEffects,
    when: str = "",
) -> Iterator[str]:
    """Refuse contents that differ from the baseline's; yield those that rounding could explain."""
    for i, mine, other in zip(effects.left, left, baseline, strict=True):
        name = effects.label(f"args[{i}]")
        if i in effects.objects and mine.is_part:
            yield f"what calls change in {name}: it refers to objects that are not compared"
        elif i in effects.objects and mine.objects != other.objects:
            yield (
                f"what calls change in {name}: {arm} leaves other objects than the baseline "
                "(their floats are compared bit by bit)"
                if arm != "baseline"
                else f"what calls change in {name}: two calls of the baseline leave other objects"
            )
        if mine.exact != other.exact:
            if not (mine.has_floats or other.has_floats):
                raise WrongResult(
                    f"{arm} leaves other contents in {name} than the baseline{when and ' ' + when}"
                )
            yield f"what calls leave in {name}: {arm} leaves other contents than the baseline"
        is_alike = len(mine.positions) == len(other.positions)  # else an object differs
        if is_alike and mine.positions != other.positions:
            raise WrongResult(
                f"{arm} reads {name} to another place than the baseline{when and ' ' + when}, so "
                "what is read or written next differs: seek() to the same place, take as many "
                "items, or flush() what was written"
            )


@dataclass(frozen=True, slots=True)
class _Form:
    """Properties of an arm's outputs other than their values."""

    deferred: Sequence[bool]  #: Whether some of an output's elements are not in memory of its own.
    graphs: Sequence[bool]  #: Whether autograd has recorded how an output was computed.
    traits: Sequence[str]  #: What limits the use of an output in autograd.
    read_only: Sequence[bool]  #: Whether an output's memory cannot be written.
    own_bytes: int  #: Bytes of returned arrays' elements.
    kept_bytes: int  #: Bytes that returned arrays keep alive, without those of the arguments.
    shared_bytes: int  #: Bytes that returned arrays have in common.
    repeats: int  #: How often returned lists, dicts and dataclasses appear again.
    handed_back: int  #: Number of those taken from arguments that the baseline does not change.
    boxed: int  #: How many numbers are objects of numpy and not of Python.
    hooks: int  #: How many hooks the returned modules have.
    odd_truths: int  #: How many outputs have truth values whose bytes are not 0 and 1.
    unaligned: int  #: How many arrays begin within an element, or have such strides.
    is_cut: bool  #: Whether the arguments reach more objects than are looked at.
    arguments: objects.State


def _form(
    returned: object,
    outputs: Outputs,
    args: Args,
    effects: ArgumentEffects,
    *,
    hidden: Hidden,
    arguments: objects.State,
) -> _Form:
    own = [(path, x) for path, x in outputs if path.startswith("result") and backend_of(x)]
    written = {*effects.mutated, *(f"args[{i}]" for i in effects.exact)}
    memory = tensors.memory_of(args, written)
    paths = {path for path, _ in own}
    changed = {*effects.changed, *effects.objects}
    others = tuple(arg for i, arg in enumerate(args) if i not in changed)
    return _Form(
        [
            bool(backend_of(x))
            and (tensors.is_deferred(x, memory) or (p in paths and hidden.is_viewed_by(x)))
            for p, x in outputs
        ],
        [tensors.has_graph(x) for _, x in outputs],
        [tensors.autograd_trait(x) for _, x in outputs],
        [tensors.is_read_only(x) for _, x in outputs],
        tensors.nbytes(tuple(x for _, x in own)),
        _kept_bytes([x for _, x in own], tensors.memory_of(args), hidden),
        tensors.shared_bytes([x for _, x in own]),
        tensors.repeated_containers(returned),
        tensors.shared_containers(returned, others),
        sum(tensors.boxed_numbers(x) for _, x in outputs),
        tensors.hooks(returned),
        sum(tensors.has_odd_truths(x) for _, x in outputs),
        sum(tensors.is_unaligned(x) for _, x in outputs),
        hidden.is_cut,
        arguments,
    )


def _kept_bytes(arrays: Sequence[Any], memory: tensors.Memory, hidden: Hidden) -> int:
    """Return the bytes that arrays keep alive, without memory that the arguments keep alive."""
    others = (
        x for x in arrays if not (tensors.overlaps(x, memory.spans) or hidden.has_memory_of(x))
    )
    return sum(end - start for start, end in tensors.joined(map(tensors.storage, others)))


def _refuse_lazy_copies(arm: str, returned: object) -> None:
    """Refuse lazy copies: torch makes them when they are written, or when their address is read."""
    for path, value in tensors.walk(returned, "result", is_result=True):
        if tensors.is_lazy_copy(value):
            raise WrongResult(
                f"{arm} returns {path} as a lazy copy: whatever writes to it does the work, so "
                "copy with clone()"
            )


def _compare_forms(
    deviations: Mapping[str, Sequence[Deviation]],
    forms: Mapping[str, _Form],
    effects: ArgumentEffects,
) -> Iterator[str]:
    """Refuse outputs that leave work to their reader, unless the baseline's do so as well.

    Yield what could not be compared.
    """
    base = forms["baseline"]
    for arm, form in forms.items():
        flags = zip(form.deferred, base.deferred, form.graphs, base.graphs, strict=True)
        for output, (is_view, view_allowed, has_graph, needs_graph) in zip(
            deviations[arm], flags, strict=True
        ):
            if is_view and not view_allowed:
                raise WrongResult(
                    f"{arm} gives {output.path} as a view of its inputs, of a file or of few "
                    "elements, or as a lazy conjugate, but the baseline computes it: whatever "
                    "reads the view does the work, so time that step in both arms"
                )
            if needs_graph and not has_graph:
                raise WrongResult(
                    f"{arm} returns {output.path} without autograd's graph, which the baseline "
                    "records: call both under torch.no_grad(), or return the gradients as well"
                )
            if needs_graph:
                yield f"gradients of {output.path}: return them as well, or detach() the result"
        if form.shared_bytes > base.shared_bytes:
            raise WrongResult(
                f"{arm} returns arrays that share {form.shared_bytes:,} bytes, the baseline's "
                f"share {base.shared_bytes:,}: whatever changes one of them must copy it first"
            )
        yield from _compare_memory(arm, deviations[arm], form, base)
        yield from _compare_containers(arm, form, base)
        yield from _compare_arguments(arm, form.arguments, base.arguments, effects)


def _compare_memory(
    arm: str, outputs: Sequence[Deviation], form: _Form, base: _Form
) -> Iterator[str]:
    """Refuse arrays that callers cannot use like the baseline's; yield excess memory kept alive."""
    if form.kept_bytes > KEPT_BYTES + KEPT_TIMES * max(form.own_bytes, base.kept_bytes):
        # not refused: it may be part of a slab that the arm keeps alive anyway
        yield (
            f"memory that results keep alive: {arm}'s keep {si(form.kept_bytes, 'B')}, the "
            f"baseline's {si(base.kept_bytes, 'B')}; return a copy of a small part of an array"
        )
    traits = zip(outputs, form.traits, base.traits, strict=True)
    for output, trait, usual in traits:
        # whatever takes an inference tensor takes an ordinary one as well
        if trait != usual and (trait or usual != tensors.INFERENCE):
            raise WrongResult(
                f"{arm} returns {output.path} as {trait or tensors.ORDINARY}, the baseline as "
                f"{usual or tensors.ORDINARY}: callers cannot write to both, convert both to "
                "numpy or differentiate both, so compute it in the same mode of autograd"
            )
    for output, locked, allowed in zip(outputs, form.read_only, base.read_only, strict=True):
        if locked and not allowed:
            raise WrongResult(
                f"{arm} returns {output.path} in memory that cannot be written, but the "
                "baseline's can: whatever changes it must copy it first"
            )


def _compare_containers(arm: str, form: _Form, base: _Form) -> Iterator[str]:
    """Refuse containers and numbers unlike the baseline's; yield differences that may be honest."""
    if form.repeats > base.repeats:
        raise WrongResult(
            f"{arm} returns lists, dicts or objects that appear {form.repeats:,} times "
            f"more, the baseline's {base.repeats:,} times: whatever changes one must copy it "
            "first"
        )
    if form.handed_back > base.handed_back:
        # not refused: the baseline may copy only because it goes through another library
        yield (
            f"copies of the result: {arm} returns lists, dicts or objects of its inputs, "
            "so a caller that changes them changes the inputs as well; the baseline's are new"
        )
    if form.boxed > base.boxed + tensors.MANY:
        raise WrongResult(
            f"{arm} gives {form.boxed:,} numbers as objects of numpy, the baseline "
            f"{base.boxed:,}: convert them as the baseline does, for example with tolist()"
        )
    if form.odd_truths > base.odd_truths:
        raise WrongResult(
            f"{arm} gives truth values in bytes other than 0 and 1: whatever adds them up, or "
            "reads the bytes, finds other numbers than the baseline's, so compare with != 0"
        )
    if form.unaligned > base.unaligned:
        raise WrongResult(
            f"{arm} returns arrays whose addresses are no multiples of their elements' size: "
            "whatever reads them copies them first or takes longer, so copy them"
        )
    if form.hooks != base.hooks:
        yield (
            f"attributes of results: {arm}'s modules have {form.hooks} hooks, the baseline's "
            f"{base.hooks}"
        )
    if form.is_cut:
        yield (
            f"whether {arm} returns views of memory inside its arguments: they reach more than "
            f"{reach.MAX_OBJECTS:,} objects, so keep the numbers in arrays"
        )


_TRAITS = [
    (
        attrgetter("read_only"),
        "an array that cannot be written",
        "an array that can be written",
        "leave flags.writeable",
    ),
    (
        attrgetter("differentiable"),
        "a tensor that requires grad",
        "a tensor that does not require grad",
        "call requires_grad_()",
    ),
    (
        attrgetter("hooked"),
        "a tensor with hooks",
        "a tensor without hooks",
        "register and remove hooks",
    ),
]
"""Properties that an arm leaves in arrays as the baseline does: the paths of arrays with this
property, what such an array is, what another one is, and what to do."""


def _compare_arguments(
    arm: str, state: objects.State, base: objects.State, effects: ArgumentEffects
) -> Iterator[str]:
    """Refuse differences in arguments that other holders notice; yield those that may be honest."""

    def named(paths: Iterable[str]) -> str:
        return _some(effects.label(path) for path in sorted(paths))

    if state.repeats > base.repeats:
        raise WrongResult(
            f"{arm} leaves lists, dicts or objects that appear {state.repeats:,} times more in "
            f"an argument, the baseline {base.repeats:,} times: put a copy in each place"
        )
    if state.borrowed > base.borrowed:
        # a returned list may be that of an input, but here new inputs would overwrite both at once
        raise WrongResult(
            f"{arm} puts lists, dicts, arrays or objects of its inputs into an argument, so "
            "whatever changes one changes the inputs as well, and the baseline's are new: put "
            "copies there"
        )
    if unwritten := state.stale - base.stale:
        raise WrongResult(
            f"{arm} puts a new object into {named(unwritten)}, and the baseline changes the one "
            "that is there, which others may hold: change it in place"
        )
    if written := base.stale - state.stale:
        yield (
            f"the objects that were in {named(written)}: {arm} changes them in place, and the "
            "baseline puts new ones there and leaves the old as they were"
        )
    for of, has_it, lacks_it, advice in _TRAITS:
        if differ := of(state) ^ of(base):
            what = has_it if differ & of(state) else lacks_it
            raise WrongResult(
                f"{arm} leaves {what} in {named(differ)}, unlike the baseline: {advice} as the "
                "baseline does"
            )
    if moved := state.moved - base.moved:
        raise WrongResult(
            f"{arm} gives {named(moved)} other memory or strides, and the baseline does not: views "
            "of it keep the old values, so write into it, for example with copy_()"
        )
    if locked := state.locked - base.locked:
        raise WrongResult(
            f"{arm} leaves {named(locked)} locked by a view of its memory, so that it cannot be "
            "resized: release() the memoryview, or delete the array, before the call returns"
        )


def _coarse(errors: Sequence[Error], precision: PrecisionName | None) -> Iterator[str]:
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


@dataclass(slots=True)
class Shortcuts:
    """Refuses a claim that an arm could pass without doing the work.

    Zeros and half the result need no check: their relative RMS errors, 1 and 0.5, are never
    allowed. An input that equals the result needs no check either: the claim is about copying it.
    """

    precision: PrecisionName | None = None
    stale: Outputs = ()  #: The baseline's result on another seed.
    beside: str = ""  #: Fingerprint of that result's contents other than arrays and numbers.

    def refuse(
        self,
        result: Outputs,
        inputs: Mapping[str, Any],
        expected: Sequence[Expected],
        base: Sequence[Deviation],
        updates: Collection[str] = (),
    ) -> None:
        """Raise UsageError if an output of the baseline could have been found without work.

        A short integer output may be the same for all inputs if another output is not, and so may
        parts of ``updates``, the arguments that a call reads and changes.
        """
        rows = zip(self.stale, expected, base, strict=False)
        substitutes = [self._find(old, inputs, want, output) for (_, old), want, output in rows]
        self.stale, stale = result, dict(self.stale)
        for name, output in zip(substitutes, base, strict=False):
            if name and (all(substitutes) or not is_exact(output)):
                raise UsageError(
                    f"{name} would pass for {output.path}, so an arm could skip the work: choose "
                    "inputs for which the results differ by more than the tolerance"
                )
        for path, array in result:
            # a histogram has the same keys for all seeds, and other values
            values = path.removesuffix(", keys") + ", values"
            has_work = path.endswith(", keys") and not _is_same(stale, dict(result), values)
            table, mark, _ = path.partition(tensors.ROWS)
            if mark:  # the same for rows of an index and a value
                columns = [p for p, _ in result if p.startswith(table + mark)]
                has_work = not all(_is_same(stale, dict(result), p) for p in columns)
            if path in stale and path not in updates and not has_work:
                self._refuse_constant_part(path, stale[path], array)

    def changes_beside(self, fingerprint: str) -> Iterator[str]:
        """Yield a note if attributes of a result differ between seeds: no check compares them."""
        if self.beside not in ("", fingerprint):
            yield "attributes of results, beside their arrays and numbers"
        self.beside = fingerprint

    def _refuse_constant_part(self, path: str, old: Any, new: Any) -> None:
        """Refuse an output if an arm could keep most of its elements for later calls.

        Values that several elements have, such as the zeros of a mask, need no work and do not
        count.
        """
        if tuple(old.shape) != tuple(new.shape):
            return
        entropy = random.SystemRandom().getrandbits(64)
        pairs = list(zip(tensors.sample(old, entropy), tensors.sample(new, entropy), strict=True))
        limit = min(ERROR_BUDGETS[self.precision or "fp32"], MAX_CONSTANT_CHANGE)
        share = MAX_CONSTANT_SHARE
        if is_exact(new):  # most elements of sorted small integers are the same for all seeds
            if not _is_same({path: old}, {path: new}, path):
                return
            limit = share = 0.0
        constant = [b for a, b in pairs if abs(a - b) <= limit * abs(b)]
        distinct = sum(constant.count(value) == 1 for value in constant)
        others = len(pairs) - len(constant)
        if distinct >= MIN_CONSTANT and distinct > share * (distinct + others):
            raise UsageError(
                f"{distinct} of {distinct + others} drawn elements of {path} are the same for "
                "other seeds, so an arm could keep them: draw all inputs from bench.seed"
            )

    def _find(
        self, old: Any, inputs: Mapping[str, Any], want: Expected, base: Deviation
    ) -> str | None:
        """Return the name of an array that would pass for an output."""
        arrays = {"the result for other inputs": old, "a constant": _constant(old), **inputs}
        for name, array in arrays.items():
            (output,) = compare([(base.path, array)], [want], located=False)
            is_copied = name in inputs and not output.error
            with contextlib.suppress(WrongResult):
                arms = {"baseline": base, "optimized": output}
                list(_judge_output(arms, want, self.precision, "", located=False))
                if not is_copied:
                    return name
        return None


def _is_same(stale: Mapping[str, Any], result: Mapping[str, Any], path: str) -> bool:
    """Whether two results have equal outputs at a path."""
    both = path in stale and path in result
    return both and tensors.same_identity(
        tensors.identify(stale[path]), tensors.identify(result[path])
    )


def _constant(array: Any) -> Any:
    """Return an array of one value: the mean, or for integers the first element."""
    backend, constant = backend_of(array), backend_of(array).copy(array)
    if is_exact(array):
        constant[...] = array.reshape(-1)[:1]
    elif math.prod(array.shape):
        total = sum(backend.cast(part, "float64", part).sum() for _, part in parts(array))
        constant[...] = total / math.prod(array.shape)
    return constant


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
    outputs = [(path, _numbers(value)) for path, value in _results(reference)]
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
                raise WrongResult(f"{arm} returns nothing and changes no argument")
            given = f"{_paths(deviations[arm])}, the baseline's {_paths(base)}"
            raise WrongResult(f"{arm}'s result is {given}")
    return [
        error
        for i, want in enumerate(expected)
        for error in _judge_output(
            {arm: deviations[arm][i] for arm in arms}, want, precision, when, located=located
        )
    ]


def _wrong(result: Sequence[Deviation], expected: Sequence[Expected]) -> Iterator[str]:
    """Name the baseline's outputs that are wrong."""
    for output, want in zip(result, expected, strict=True):
        try:
            list(_judge_output({"baseline": output}, want, None, "", located=False))
        except WrongResult:
            yield output.path


def _paths(outputs: Sequence[Expected | Deviation]) -> str:
    return f"({_some(output.path for output in outputs)})" if outputs else "nothing"


def _some(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    known = list(names)
    more = f", and {len(known) - NAMED_PATHS} more" if len(known) > NAMED_PATHS else ""
    return ", ".join(known[:NAMED_PATHS]) + more


def _judge_output(
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
            raise WrongResult(
                f"{arm} gives {output.signature} for {output.path}, the baseline {base.signature}"
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


def _numbers(value: Any) -> Any:
    """Return one output as an array of real numbers."""
    if not (array := tensors.as_array(value)):
        kind = type(value).__name__
        if (type(value).__module__, kind) == ("numpy", "ndarray"):  # runs no code of other classes
            kind += f" of {value.dtype}"
        raise UsageError(
            f"a result of type {kind} cannot be compared: return numbers, or plain, dense arrays "
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
    if not exact and kind != "float64" and (kind != base.dtype or base.error):
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
    doubles = (backend_of(part).cast(part, "float64", part) for _, part in parts(array))
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
