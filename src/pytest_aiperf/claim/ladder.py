"""The rungs of a ladder, whose arms are timed together; a single claim is a ladder of one rung."""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import itemgetter
from types import MethodType

from pytest_aiperf.correctness import accuracy, agreement, stored
from pytest_aiperf.correctness.accuracy import Deviation, Expected
from pytest_aiperf.correctness.contents import Contents
from pytest_aiperf.correctness.shortcuts import Shortcuts
from pytest_aiperf.correctness.tensors import Inputs, NamedTensor
from pytest_aiperf.errors import AiperfError, WrongResult
from pytest_aiperf.model import Error, Prepared, Replicate, Round, Timing

from .bound_claim import BoundClaim, Share, worst
from .search import Search

VERIFIED_RESULTS = 4
"""At least this many results of each arm are verified, drawn from all that its timed blocks left.
That finds 94 of 100 arms that skip their work in every second block."""
VERIFYING_S = 0.2
"""CPU seconds of this thread within which further results are verified. In most claims that is
enough for all results, and other work on the machine does not shorten it."""
SLOW_S = 8.0
"""Time limit of the verification by the clock, as no other claim can be timed meanwhile. If a slow
reference takes longer for VERIFIED_RESULTS of each arm, only each arm's first result is certain to
be verified."""


@dataclass(frozen=True)  # a cached property needs a __dict__, and so no slots
class _Pending:
    """The result of a timed call that the reference has not verified yet."""

    arm: str  #: Name of the arm.
    outputs: Sequence[NamedTensor]  #: Copies, which later calls do not overwrite.
    seed: int  #: Seed of the inputs.
    values_seed: int | None  #: Seed of the values that overwrote the dynamic inputs, if any.
    when: str  #: Which call wrote these outputs, for the error message.
    left: Sequence[Contents] = ()  #: What the call left in arguments, beside arrays and numbers.

    @cached_property
    def nbytes(self) -> int:
        return sum(getattr(value, "nbytes", 0) for _, value in self.outputs)


@dataclass(eq=False)
class Rung:
    """One claim of a ladder."""

    bound: BoundClaim
    arms: dict[str, str] = field(default_factory=dict)
    """Names of the ladder's arms by their role in this claim: "baseline", "optimized", "library"
    and, unless it is the baseline, "first": the first arm of the ladder."""
    agreement: tuple[Error, ...] = ()  #: The arms' largest errors before they were timed.
    error: Exception | None = None  #: Why the claim has no valid result, if it has none.
    suspicion: Exception | None = None
    """Error to report unless a result is wrong: a wrong result explains more."""


class Ladder:
    """Rungs that are timed together on the same inputs.

    All rungs have the same ``inputs``, reference, metrics and cache state, and their arms have the
    same effects on the arguments. An arm that several rungs use is timed once.
    """

    def __init__(self, bounds: Sequence[BoundClaim]) -> None:
        self.rungs = [Rung(bound) for bound in bounds]
        self.bound = bounds[0]  #: Builds the inputs, which are the same for all rungs.
        self._arms: dict[str, tuple[BoundClaim, str]] = {}
        self._pending: list[_Pending] = []
        self._baselines: dict[str, list[Deviation]] = {}  # by baseline: its largest deviations
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

    def owner(self, name: str) -> tuple[BoundClaim, str]:
        """Return the first claim that an arm is part of, and its role there."""
        return self._arms[name]

    def describe(self, name: str) -> str:
        """Name an arm for users: by its role, in a ladder also by the first rung that it is in."""
        bound, role = self._arms[name]
        return f"the {role} arm of rung {bound.rung!r}" if len(self.rungs) > 1 else role

    def owners(self, name: str) -> Iterator[tuple[BoundClaim, str]]:
        """Yield all claims that an arm is part of, and its role there."""
        for rung in self.rungs:
            for role, arm in rung.arms.items():
                if arm == name and role != "first":
                    yield rung.bound, role

    def check_agreement(self, share: Share) -> bool:
        """Check all arms against the reference on several seeds, on each seed every arm once.

        Set each rung's ``agreement``, or its ``error`` if its results are wrong. Return False if an
        arm raises an exception: then check each rung by itself to find out which one fails.
        """
        shortcuts = [Shortcuts(rung.bound.claim.precision) for rung in self.rungs]
        errors: list[list[Error]] = [[] for _ in self.rungs]
        for seed in self.bound.agreement_seeds:
            try:
                results = share(partial(self._collect, seed))
            except Exception:  # noqa: BLE001  raised again when each rung is checked by itself
                return False
            share(partial(self._judge, results, seed, shortcuts, errors))
            del results
        self.bound.end_agreement()
        for rung, rung_errors in zip(self.rungs, errors, strict=True):
            rung.agreement = worst(rung_errors)
        return True

    def _collect(self, seed: int) -> agreement.Results:
        with self.bound.step():
            arms = {name: partial(self._prepare_observed, name) for name in self.arms}
            return self.bound.collect(seed, arms)

    def _judge(
        self,
        results: agreement.Results,
        seed: int,
        shortcuts: Sequence[Shortcuts],
        errors: Sequence[list[Error]],
    ) -> None:
        """Judge each rung that has no error yet; put its errors into its list in ``errors``."""
        for rung, shortcut, rung_errors in zip(self.rungs, shortcuts, errors, strict=True):
            if rung.error is None:
                roles = {role: name for role, name in rung.arms.items() if role != "first"}
                try:
                    with rung.bound.step(), rung.bound.explained():
                        rung_errors.extend(rung.bound.judge(results, roles, seed, shortcut))
                except Exception as why:  # noqa: BLE001  the claim's test raises it
                    rung.error = why

    def _prepare_observed(self, name: str, inputs: Inputs) -> Callable[..., object]:
        (bound, role), *others = self.owners(name)
        return bound.prepare_observed(role, inputs, others)

    def prepare(self, name: str, inputs: Inputs) -> Callable[..., object]:
        """Return an arm's callable to time."""
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
        notes = tuple(filter(None, (self._note_of(rung, note) for note in timing.notes)))
        return replace(timing, replicates=replicates, calls=calls, notes=notes)

    def _note_of(self, rung: Rung, note: str) -> str:
        """Return a note, which may begin with an arm; "" if that is an arm of other rungs."""
        name, _, rest = note.partition(" ")
        if name not in self._arms:
            return note
        role = next((role for role, arm in rung.arms.items() if arm == name), "")
        return f"{role} {rest}" if role else ""

    def is_prepared(self, name: str) -> bool:
        """Whether an arm prepares each set of its inputs before it is timed."""
        bound, role = self._arms[name]
        return isinstance(bound.claim.arms[role], Prepared)

    def verify_later(
        self,
        arm: str,
        outputs: Sequence[NamedTensor],
        seed: int,
        when: str,
        values_seed: int | None = None,
        *,
        left: Sequence[Contents] = (),
    ) -> None:
        """Queue copies of an arm's outputs for verification after the exclusive lock is released.

        The inputs were made with ``seed``; if ``values_seed`` is given, their dynamic arguments
        were then overwritten with values drawn with that seed. If the queued copies exceed the
        bytes that may be kept, random copies of the arm with the most copies are dropped.
        """
        pending = self._pending
        pending.append(_Pending(arm, outputs, seed, values_seed, when, left))
        while len(pending) > len(self._arms) and (
            sum(p.nbytes for p in pending) > self.bound.kept_bytes
        ):
            counts = Counter(p.arm for p in pending)
            most, _ = counts.most_common(1)[0]
            victims = [i for i, p in enumerate(pending) if p.arm == most]
            del pending[self.bound.random.choice(victims)]

    def verify(self) -> None:
        """Check queued outputs; a wrong result becomes the error of the rungs that it affects.

        Which results are checked is drawn only here, so that no arm can know. Results of baselines
        come first, because their largest deviations limit those of the other arms.
        """
        pending, self._pending = self._pending, []
        self.bound.random.shuffle(pending)
        baselines = {rung.arms["baseline"] for rung in self.rungs}
        # one result of each arm, then a second one of each, and so on
        numbers: Counter[str] = Counter()
        ranked = []
        for p in pending:
            ranked.append(((p.arm not in baselines), numbers[p.arm], p))
            numbers[p.arm] += 1
        started, started_cpu = time.monotonic(), time.thread_time()
        for is_other in (False, True):
            share = (1 + is_other) / 2
            for rank, p in sorted(
                ((n, p) for other, n, p in ranked if other is is_other), key=itemgetter(0)
            ):
                elapsed = (time.monotonic() - started) / SLOW_S
                if rank >= VERIFIED_RESULTS:
                    elapsed = max(elapsed, (time.thread_time() - started_cpu) / VERIFYING_S)
                if self.bound.device.ranks.max(elapsed) > share and rank:
                    break
                self._verify(p)
                if p.left:
                    self._verify_left(p)
        for rung in self.rungs:
            rung.error = rung.error or rung.suspicion

    def _verify(self, pending: _Pending) -> None:
        bound, name = self.bound, pending.arm
        expected = accuracy.expect(bound.claim.reference(*self._inputs_of(pending).args))
        deviations = accuracy.compare(pending.outputs, expected, located=False)
        for rung in self.rungs:
            base = rung.arms["baseline"]
            roles = {r: deviations for r, n in rung.arms.items() if n == name and r != "first"}
            if not roles:
                continue
            known = self._largest(base, pending, deviations, expected)
            if name != base:
                shapes = [tuple(want.array.shape) for want in expected]
                roles["baseline"] = list(map(_with_shape, known, shapes))
            judge = partial(
                accuracy.judge,
                expected=expected,
                precision=rung.bound.claim.precision,
                when=pending.when,
                located=False,
            )
            try:
                try:
                    judge(roles)
                except AiperfError:
                    if bound.device.ranks.count > 1:
                        raise
                    self._judge_again(judge, roles, pending, expected, base)
            except AiperfError as why:
                # over many seeds, a baseline may deviate several times more than in the agreement
                if name != base or not _passes(judge, base=list(map(_lenient, deviations))):
                    rung.error = rung.error or why
            else:
                if name == base:
                    self._baselines[base] = list(map(accuracy.larger, known, deviations))

    def _largest(
        self,
        base: str,
        pending: _Pending,
        deviations: list[Deviation],
        expected: Sequence[Expected],
    ) -> list[Deviation]:
        """Return a baseline's largest deviations so far, of a result with the same parts.

        If the parts differ, as the keys of a dict may between seeds, those on the pending result's
        inputs are returned.
        """
        known = self._baselines.get(base, deviations)
        if _paths(known) == _paths(deviations):
            return known
        if pending.arm == base:
            return deviations
        return self._baseline_on(self._inputs_of(pending), base, expected)

    def _judge_again(
        self,
        judge: Callable[..., object],
        roles: dict[str, list[Deviation]],
        pending: _Pending,
        expected: Sequence[Expected],
        base: str,
    ) -> None:
        """Judge a result without rounding errors, and with the baseline's result on its inputs.

        Where sums nearly cancel, the baseline may be as far off.
        """
        rounding = self.bound.rounding_errors(self._inputs_of(pending), expected)
        if pending.arm != base:
            here = self._baseline_on(self._inputs_of(pending), base, expected)
            roles = roles | {"baseline": list(map(accuracy.larger, roles["baseline"], here))}
        judge({role: accuracy.beyond(rows, rounding) for role, rows in roles.items()})

    def _verify_left(self, pending: _Pending) -> None:
        """Compare what a call left in arguments with what the baselines leave on its inputs."""
        for rung in self.rungs:
            if pending.arm not in rung.arms.values():
                continue
            expected = rung.bound.contents_of("baseline", self._inputs_of(pending))
            effects = rung.bound.effects
            try:
                rung.bound.unchecked.update(
                    agreement.compare_contents(
                        self.describe(pending.arm), pending.left, expected, effects, pending.when
                    )
                )
            except WrongResult as why:
                rung.error = rung.error or why

    def not_compared(self) -> Iterator[str]:
        """Describe what could not be compared and affects all rungs.

        What only affects a rung's own results is in ``rung.bound.unchecked``.
        """
        yield from dict.fromkeys(text for rung in self.rungs for text in rung.bound.not_compared())

    def _inputs_of(self, pending: _Pending) -> Inputs:
        inputs = self.bound.make_inputs(pending.seed)
        if pending.values_seed is not None:
            inputs.overwrite(self.bound.make_inputs(pending.values_seed))
            inputs.values_seed = pending.values_seed
        return inputs

    def _baseline_on(
        self, inputs: Inputs, base: str, expected: Sequence[Expected]
    ) -> list[Deviation]:
        """Compare the baseline's result on these inputs with the reference's."""
        bound, role = self._arms[base]
        return accuracy.compare(bound.result_of(role, inputs), expected, located=False)

    def check_anew(self, seed: int) -> None:
        """Check each rung on one more seed; for outputs that are too large to keep."""
        for rung in self.rungs:
            try:
                rung.bound.check_seed(seed)
            except AiperfError as why:
                rung.error = rung.error or why

    def search(self, typical_s: Mapping[str, float], *, is_short: bool) -> None:
        """Time each rung's arms on more inputs, on many if ``is_short``.

        Check the results for those on which its baseline is slow, and whether the ratio of the
        times in ``typical_s`` holds; it is empty if no round was quiet enough.
        """
        for rung in self.rungs:
            search = Search(rung.bound)
            try:
                for seed in search.slow_seeds() if is_short else ():
                    rung.bound.check_seed(seed)
                if typical_s:
                    judged = typical_s[rung.arms["baseline"]] / typical_s[rung.arms["optimized"]]
                    rung.bound.unchecked.update(search.unchecked(judged))
            except AiperfError as why:
                rung.suspicion = rung.suspicion or why  # wrong results of timed calls come first

    def raise_error(self) -> None:
        """Raise the error of the first rung that has one."""
        for rung in self.rungs:
            if rung.error is not None:
                raise rung.error


def _paths(deviations: Sequence[Deviation]) -> list[str]:
    return [deviation.path for deviation in deviations]


def _passes(judge: Callable[..., object], base: Sequence[Deviation]) -> bool:
    try:
        judge({"baseline": base})
    except AiperfError:
        return False
    return True


def _lenient(baseline: Deviation) -> Deviation:
    error = baseline.error / accuracy.MAX_ERROR_RATIO
    return replace(baseline, error=error, rms=baseline.rms / accuracy.MAX_RMS_RATIO)


def _with_shape(baseline: Deviation, shape: tuple[int, ...]) -> Deviation:
    """Return a baseline's deviation with the shape of a result on another seed's inputs."""
    return replace(baseline, shape=shape) if len(shape) == len(baseline.shape) else baseline


def identity(value: object, seen: tuple[int, ...] = ()) -> Hashable:
    """Return a key that is equal for callables that do the same.

    Lambdas that a test body makes anew for each rung share one if they have the same code and
    refer to the same objects.
    """
    if id(value) in seen:  # a function that refers to itself
        return seen.index(id(value))
    of = partial(identity, seen=(*seen, id(value)))
    if isinstance(value, MethodType):  # its code is that of its function, without the object
        value = partial(value.__func__, value.__self__)
    if isinstance(value, Prepared):
        return "prepared", of(value.make)
    if isinstance(value, partial):
        keywords = tuple(sorted((name, of(v)) for name, v in value.keywords.items()))
        return "partial", of(value.func), tuple(map(of, value.args)), keywords
    if hasattr(value, "__code__") and hasattr(value, "__globals__"):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]  # type: ignore[attr-defined]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())  # type: ignore[attr-defined]
        return value.__code__, id(value.__globals__), *map(of, (*cells, *defaults))
    return _identity_of_data(value, of)


def _identity_of_data(value: object, of: Callable[[object], Hashable]) -> Hashable:
    """Return a key that two values share if they cannot be told apart.

    Equality is not enough: 0.0 equals -0.0, and objects of a class that is written in Python may be
    equal and still act differently. Of such objects, the attributes are compared as well.
    """
    if isinstance(value, tuple):
        return type(value), *map(of, value)
    try:
        key = type(value), hash(value), repr(value) if isinstance(value, float) else value
    except TypeError:
        return id(value)
    if type(value).__eq__ is object.__eq__ or not type(value).__flags__ & stored.HEAP_TYPE:
        return key
    attributes = stored.attributes(value) | stored.slots(value)
    return *key, *((name, of(v)) for name, v in sorted(attributes.items()))


def _is_set(cell: object) -> bool:
    try:
        cell.cell_contents  # type: ignore[attr-defined]  # noqa: B018
    except ValueError:
        return False
    return True
