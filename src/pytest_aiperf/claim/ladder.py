"""The rungs of a ladder, whose arms are timed together; a single claim is a ladder of one rung."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pytest_aiperf.correctness import agreement
from pytest_aiperf.correctness.agreement import Expected
from pytest_aiperf.correctness.tensors import Inputs, NamedTensor
from pytest_aiperf.errors import AiperfError
from pytest_aiperf.model import Prepared, Replicate, Round, Timing

from .bound_claim import BoundClaim

Results = Mapping[str, list[NamedTensor]]  #: Each arm's result for the same inputs.


@dataclass(frozen=True, slots=True)
class _Pending:
    """Outputs of timed calls that the reference has not verified yet."""

    results: Sequence[Results]  #: Copies, which later calls do not overwrite.
    seed: int  #: Seed of the inputs.
    values_seed: int | None  #: Seed of the values that overwrote the dynamic inputs, if any.
    when: str  #: Which calls wrote these outputs, for the error message.


@dataclass(eq=False)
class Rung:
    """One claim of a ladder."""

    bound: BoundClaim
    arms: dict[str, str] = field(default_factory=dict)
    """Names of the ladder's arms by their role in this claim: "baseline", "optimized", "library"
    and, unless it is the baseline, "first": the first arm of the ladder."""
    error: Exception | None = None  #: Why the claim has no valid result, if it has none.


class Ladder:
    """Rungs that are timed together on the same inputs.

    All of them need the same ``inputs``, reference, metrics and cache state, and effects of their
    arms on the arguments. An arm that several rungs use is timed once.
    """

    def __init__(self, bounds: Sequence[BoundClaim]) -> None:
        self.rungs = [Rung(bound) for bound in bounds]
        self.bound = bounds[0]  #: Builds the inputs, which are the same for all rungs.
        self._arms: dict[str, tuple[BoundClaim, str]] = {}
        self._pending: list[_Pending] = []
        names: dict[Hashable, str] = {}
        for number, rung in enumerate(self.rungs):
            keys = [identity(arm) for arm in rung.bound.claim.arms.values()]
            for i, role in enumerate(rung.bound.claim.arms):
                # arms of one claim are timed apart even if they are the same
                key = keys[i], keys[:i].count(keys[i])
                name = names.setdefault(key, f"{role}-{number}" if number else role)
                self._arms.setdefault(name, (rung.bound, role))
                rung.arms[role] = name
            first = self.rungs[0].arms["baseline"]
            if first != rung.arms["baseline"]:
                rung.arms["first"] = first

    @property
    def arms(self) -> list[str]:
        """Names of all different arms."""
        return list(self._arms)

    def prepare(self, name: str, inputs: Inputs) -> Callable[..., object]:
        """Return the callable to time of an arm."""
        bound, role = self._arms[name]
        return bound.prepare(role, inputs)

    def letter(self, name: str) -> str:
        """Return the letter of an arm in the order of a round."""
        return chr(ord("A") + self.arms.index(name))

    def timing_of(self, rung: Rung, timing: Timing) -> Timing:
        """Return the part of the ladder's timing that is about one rung's arms."""
        initials = {self.letter(name): role[0].upper() for role, name in rung.arms.items()}

        def part(blocks: Round) -> Round:
            order = "".join(initials.get(letter, "") for letter in blocks.order)
            seconds = {role: blocks.seconds[name] for role, name in rung.arms.items()}
            return replace(blocks, order=order, seconds=seconds)

        replicates = tuple(
            Replicate(r.seed, tuple(map(part, r.rounds)), r.redone) for r in timing.replicates
        )
        calls = {role: timing.calls[name] for role, name in rung.arms.items()}
        return replace(timing, replicates=replicates, calls=calls)

    def verify_later(
        self, results: Sequence[Results], seed: int, when: str, values_seed: int | None = None
    ) -> None:
        """Queue copies of the arms' outputs for verification after the exclusive lock is released.

        The inputs were made with ``seed``; if ``values_seed`` is given, their dynamic arguments
        were then overwritten with values drawn with that seed. If the queued copies
        exceed the bytes that may be kept, all of them are verified immediately.
        """
        self._pending.append(_Pending(results, seed, values_seed, when))
        arms = (arm for p in self._pending for each in p.results for arm in each.values())
        pending_bytes = sum(getattr(value, "nbytes", 0) for arm in arms for _, value in arm)
        if pending_bytes > self.bound.kept_bytes:
            self.verify()

    def verify(self) -> None:
        """Check the queued outputs; a wrong result becomes the error of the rungs that it affects.

        Successive outputs with equal inputs need one reference result.
        """
        bound = self.bound
        key: tuple[int, int | None] | None = None
        expected: list[Expected] = []
        while self._pending:
            batch = self._pending[0]
            if key != (batch.seed, batch.values_seed):
                expected = []  # free it first
                if batch.values_seed is None:
                    inputs = bound.make_inputs(batch.seed)
                else:
                    inputs = bound.make_inputs_with(batch.seed, batch.values_seed)
                expected = agreement.expect(bound.claim.reference(*inputs.args))
                key = batch.seed, batch.values_seed
                del inputs
            for results in batch.results:
                deviations = {
                    name: agreement.compare(outputs, expected, located=False)
                    for name, outputs in results.items()
                }
                for rung in self.rungs:
                    roles = {r: deviations[n] for r, n in rung.arms.items() if r != "first"}
                    precision = rung.bound.claim.precision
                    try:
                        agreement.judge(roles, expected, precision, batch.when, located=False)
                    except AiperfError as why:
                        rung.error = rung.error or why
            del self._pending[0]

    def check_anew(self, seed: int) -> None:
        """Check each rung on one more seed; for outputs that are too large to keep."""
        for rung in self.rungs:
            try:
                rung.bound.check_seed(seed)
            except AiperfError as why:
                rung.error = rung.error or why

    def raise_error(self) -> None:
        """Raise the error of the first rung that has one."""
        for rung in self.rungs:
            if rung.error is not None:
                raise rung.error


def identity(value: object, seen: tuple[int, ...] = ()) -> Hashable:
    """Return a key that two callables share if a call of either does the same.

    Lambdas that a test body makes anew for each rung share one if they have the same code and
    refer to the same objects.
    """
    if id(value) in seen:  # a function that refers to itself
        return seen.index(id(value))
    of = partial(identity, seen=(*seen, id(value)))
    if isinstance(value, Prepared):
        return "prepared", of(value.make)
    if isinstance(value, partial):
        keywords = tuple(sorted((name, of(v)) for name, v in value.keywords.items()))
        return "partial", of(value.func), tuple(map(of, value.args)), keywords
    if hasattr(value, "__code__") and hasattr(value, "__globals__"):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]  # type: ignore[attr-defined]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())  # type: ignore[attr-defined]
        return value.__code__, id(value.__globals__), *map(of, (*cells, *defaults))
    try:
        return type(value), hash(value), value
    except TypeError:
        return id(value)


def _is_set(cell: object) -> bool:
    try:
        cell.cell_contents  # type: ignore[attr-defined]  # noqa: B018
    except ValueError:
        return False
    return True
