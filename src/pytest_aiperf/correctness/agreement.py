"""Checks that the arms' results agree with the reference."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_aiperf.errors import UsageError, WrongResult
from pytest_aiperf.model import Error, PrecisionName

from . import accuracy, argument_effects, contents, output_properties, tensors
from .accuracy import Deviation, Expected, Outputs, some_names
from .argument_effects import ArgumentEffects, Make, Prepare
from .contents import Contents
from .output_properties import Form
from .reach import Hidden
from .shortcuts import Shortcuts
from .tensors import backend_of

# Large inputs leave no room for temporaries of their size. Arrays are therefore read in parts, and
# casts and differences exist for one part at a time. Let S be the bytes of one set of inputs and of
# a result, where memory that they share counts once. At most 2 S of arrays exist at a time:
#
# * in infer_effects(), a set of inputs and a copy of the result;
# * in agree() with kept_bytes below S, the reference's result, and the inputs and the result of one
#   arm. Before that, the reference runs alone.
#
# The memory that a claim's functions take comes on top: temporaries of the arms and the reference,
# and decoy inputs of prepared arms. A reference in fp64 returns 2 to 8 times the bytes of the arms'
# results; for large inputs it should return exactly their result, in their dtype.


def agree(
    arms: Mapping[str, Prepare],
    make: Make,
    reference: Callable[..., object],
    effects: ArgumentEffects,
    precision: PrecisionName | None = None,
    *,
    kept_bytes: float = math.inf,
    shortcuts: Shortcuts | None = None,
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
        return accuracy.expect(reference(*inputs.args))

    expected = expected_outputs() if effects.nbytes > kept_bytes else None
    outputs_: dict[str, Outputs] = {}
    forms: dict[str, Form] = {}
    deviations: dict[str, list[Deviation]] = {}
    left: dict[str, Sequence[Contents]] = {}
    beside: dict[str, str] = {}
    in_use: list[object] = []
    changes: dict[str, tuple[Sequence[str], Sequence[str]]] = {}
    for arm in sorted(arms, key=_reverse_order, reverse=True):
        inputs = make()
        returned, changed, originals = argument_effects.run(
            arms[arm], inputs, effects, effects.poison
        )
        changes[arm] = changed, effects.not_compared(changed, inputs.args)
        output_properties.refuse_lazy_copies(arm, returned)
        outputs = argument_effects.outputs_of(returned, inputs.args, effects)
        left[arm] = argument_effects.contents_of(inputs.args, effects)
        if arm.startswith(
            ("baseline", "optimized")
        ):  # an optimized arm is the next rung's baseline
            beside[arm] = contents.read(returned).objects
        forms[arm] = output_properties.form_of(
            *(returned, outputs, inputs.args, effects),
            hidden=Hidden(inputs.args, lambda: make().args),
            arguments=originals.state_after(inputs.args, [x for _, x in outputs if backend_of(x)]),
        )
        if expected is None:
            outputs_[arm] = accuracy.copies(outputs)
            in_use.append(returned)
        else:
            deviations[arm] = accuracy.compare(outputs, expected)
        del inputs, returned, outputs, originals
    _refuse_changes(changes, effects)
    in_use.clear()
    if expected is None:
        expected = expected_outputs()
        for arm, result in outputs_.items():
            deviations[arm] = accuracy.compare(result, expected)
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
        names = some_names(repr(effects.label(p)) for p in others or not_compared)
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
    forms: Mapping[str, Form]
    left: Mapping[str, Sequence[Contents]]
    beside: Mapping[str, str]  #: Fingerprints of result contents other than arrays and numbers.
    outputs: Mapping[str, Outputs]  #: Copies; empty if they are too large to keep.

    def judge(
        self,
        roles: Mapping[str, str],
        make: Make,
        precision: PrecisionName | None,
        shortcuts: Shortcuts | None,
        unchecked: set[str],
    ) -> list[Error]:
        """Judge one claim, whose arms are named by ``roles``; return the errors of its arms.

        What cannot be compared is added to ``unchecked``.
        """
        base, effects = roles["baseline"], self.effects
        deviations = {role: self.deviations[arm] for role, arm in roles.items()}
        if shortcuts:
            unchecked.update(shortcuts.changes_beside(self.beside[base]))
        try:
            errors = accuracy.judge(deviations, self.expected, precision)
        except WrongResult as wrong:
            role = str(wrong).partition(" ")[0]
            result = self.outputs.get(roles.get(role, ""), ())
            if role == "baseline" or not shortcuts or not shortcuts.is_stale(result):
                raise
            raise WrongResult(
                f"{wrong}; it is the result for earlier inputs: the arm keeps it"
            ) from None
        forms = {role: self.forms[arm] for role, arm in roles.items()}
        unchecked.update(output_properties.compare_forms(deviations, forms, effects))
        unchecked.update(accuracy.coarse(errors, precision))
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
