"""Finds out what calls do to their arguments, and collects what they return and leave there.

A call's result: the tensors in its return value, followed by the argument tensors that it changed.
"""

import itertools
import math
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pytest_aiperf.device.device import gc_disabled
from pytest_aiperf.errors import UsageError, WrongResult
from pytest_aiperf.model import Score

from . import accuracy, contents, tensors
from .accuracy import Deviation, Expected
from .contents import Contents
from .objects import Originals
from .tensors import Args, Inputs, NamedTensor, backend_of, is_exact, parts

Prepare = Callable[[Inputs], Callable[..., object]]  #: Prepares an arm for one set of inputs.
Make = Callable[[], Inputs]  #: Builds the same inputs anew each time.
_INDEX = re.compile(r"\[\d+\]")

MAX_SINGLE_CHECKS = 4
"""Most tensors of an argument that are poisoned one by one, if poisoning all of them makes some
outputs wrong, to find those that a call only writes. If there are more, they count as read: each
check is a call, and a training step changes each of hundreds of parameters."""
FINITE = 256.0
"""Value that poisons arrays which a call clears by arithmetic: NaN would stay NaN. Formats of 8
bits can hold this value as well."""
SAME_INPUTS = "all arms must get the same inputs"  #: Why inputs of one seed may not differ.
SEEDING = (
    "np.random.rand and torch.randn are seeded; a generator of your own takes its seed from bench: "
    "np.random.default_rng(bench.seed)"
)
"""How inputs are drawn so that they depend on the seed, and on nothing else."""
UNSEEDED = (
    f"{SAME_INPUTS}. {SEEDING}. If it is an array from np.empty or torch.empty, the baseline must "
    "write all of it; for scratch memory, use np.zeros or torch.zeros"
)
"""What to do if inputs of one seed have different values."""


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
    repeated: tuple[str, ...] = field(default=(), compare=False)
    """Descriptions of arrays that are passed several times: an arm could do their work once."""
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


def parameter_names(call: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of the positional parameters; () for builtins and launchers."""
    code = getattr(call, "__code__", None)
    bound = int(hasattr(call, "__self__"))
    return code.co_varnames[bound : code.co_argcount] if code else ()


def _no_result(returned: object) -> UsageError:
    """Return the error for a baseline without any result that can be compared."""
    figures = returned if type(returned) is tuple else (returned,)
    if any(type(figure) is Score for figure in figures):
        return UsageError(
            "the baseline returns only its Score, so no result can be checked: also return the "
            "values from which it is computed"
        )
    return UsageError(
        "the baseline returns nothing and changes none of its arguments' arrays and numbers "
        "(no reference tells what queues, sets and structured arrays must hold): return what "
        "it leaves there as well, as numbers or arrays"
    )


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
    returned, mutated, originals = run(prepare, inputs, ArgumentEffects(), lambda _: None)
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
    expected = accuracy.expect([x for _, x in accuracy.copies(result)], exact=True)
    left = contents_of(inputs.args, effects)
    if not expected:
        raise _no_result(returned)
    del returned, inputs, result, originals

    def wrong_with(paths: Sequence[str], value: float) -> set[str]:
        """Return the paths of outputs that are wrong if these arrays are filled with a value."""
        try:
            inputs = _make_filled(make)
            poison = partial(tensors.poison, paths=paths, value=value)
            returned, _, _ = run(prepare, inputs, effects, poison)
            now = contents_of(inputs.args, effects) if candidates.isdisjoint(paths) else left
            if any(map(_differ, now, left)):
                return set(paths)
            result = outputs_of(returned, inputs.args, effects)
            return {*_wrong(accuracy.compare(result, expected), expected)}
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


def run(
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


def contents_of(args: Args, effects: ArgumentEffects) -> list[Contents]:
    """Read what a call has left in the arguments in which the baseline leaves something."""
    return [contents.read(args[i]) for i in effects.left]


def _differ(old: Contents, new: Contents) -> bool:
    return (old.exact, old.positions) != (new.exact, new.positions)


def _wrong(result: Sequence[Deviation], expected: Sequence[Expected]) -> Iterator[str]:
    """Name the baseline's outputs that are wrong."""
    for output, want in zip(result, expected, strict=True):
        try:
            list(accuracy.judge_output({"baseline": output}, want, None, "", located=False))
        except WrongResult:
            yield output.path
