"""Compares what outputs are, other than their values: views, autograd graphs, memory, containers.

An output may leave work to whatever reads or changes it, unless the baseline's does so as well.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pytest_aiperf.errors import WrongResult
from pytest_aiperf.text import si

from . import objects, reach, tensors
from .accuracy import Deviation, Outputs, some_names
from .argument_effects import ArgumentEffects
from .reach import Hidden
from .tensors import Args, backend_of

KEPT_TIMES = 2
"""The memory that results keep alive is reported if it is more than this many times that of their
elements and of the baseline's, plus KEPT_BYTES. Padding may double a result."""
KEPT_BYTES = 1 << 20
"""Constant part of that limit."""


@dataclass(frozen=True, slots=True)
class Form:
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


def form_of(
    returned: object,
    outputs: Outputs,
    args: Args,
    effects: ArgumentEffects,
    *,
    hidden: Hidden,
    arguments: objects.State,
) -> Form:
    own = [(path, x) for path, x in outputs if path.startswith("result") and backend_of(x)]
    written = {*effects.mutated, *(f"args[{i}]" for i in effects.exact)}
    memory = tensors.memory_of(args, written)
    paths = {path for path, _ in own}
    changed = {*effects.changed, *effects.objects}
    others = tuple(arg for i, arg in enumerate(args) if i not in changed)
    return Form(
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


def refuse_lazy_copies(arm: str, returned: object) -> None:
    """Refuse lazy copies: torch makes them when they are written, or when their address is read."""
    for path, value in tensors.walk(returned, "result", is_result=True):
        if tensors.is_lazy_copy(value):
            raise WrongResult(
                f"{arm} returns {path} as a lazy copy: whatever writes to it does the work, so "
                "copy with clone()"
            )


def compare_forms(
    deviations: Mapping[str, Sequence[Deviation]],
    forms: Mapping[str, Form],
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
    arm: str, outputs: Sequence[Deviation], form: Form, base: Form
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


def _compare_containers(arm: str, form: Form, base: Form) -> Iterator[str]:
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
        return some_names(effects.label(path) for path in sorted(paths))

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
