"""A claim on a device: builds its inputs, prepares its arms and checks their results."""

import gc
import inspect
import math
import random
import reprlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final, get_args

from pytest_aiperf.build.launcher import Launcher
from pytest_aiperf.correctness import (
    accuracy,
    agreement,
    argument_effects,
    contents,
    own_memory,
    stored,
    tensors,
)
from pytest_aiperf.correctness.argument_effects import ArgumentEffects
from pytest_aiperf.correctness.contents import Contents
from pytest_aiperf.correctness.shortcuts import Shortcuts
from pytest_aiperf.correctness.tensors import Args, Inputs, NamedTensor
from pytest_aiperf.device.device import Device, gc_disabled, grown_bytes, nothing
from pytest_aiperf.errors import InvalidMeasurement, UsageError, WrongResult
from pytest_aiperf.model import (
    TIMED_UNIT,
    Bench,
    Error,
    Metric,
    Mode,
    PrecisionName,
    Prepared,
    Score,
    Static,
    Work,
)
from pytest_aiperf.rules import validity
from pytest_aiperf.rules.stats import as_float

from . import arm_errors
from .claim import Arm, Claim, Progress, no_progress
from .side_effects import SideEffects

WORK_DTYPES: Final = (*get_args(PrecisionName), "int8")  #: Names for the dtype of a Work.
BEFORE_OTHERS = "before another arm had run"
"""Name of the baseline's times before another arm had run. If its timed calls are slower than
these, another arm may be the reason."""
WITH_COLLECTION = "with garbage collection on, which is off in timed calls"
"""Name of its times with garbage collection."""
IN_THREAD = "when a thread called it"  #: Name of its times where no call stack shows the harness.
AGREEMENT_SEEDS = 3  #: Seeds on which the arms must agree with the reference before timing.
DECOY_OFFSET = 500_009
"""Added to a set's seed to draw the decoy values for the setup of a prepared arm. No input set has
such a seed, so whatever the arm computes from decoys is wrong for the timed values."""
PENDING_SHARE = 1 / 64
"""Fraction of the GPU's memory that outputs may fill while they wait to be compared. They wait
until the exclusive lock is released, because the reference takes longer than the timed calls."""
ASSUMED_MEMORY_BYTES = 64 << 30  #: Assumed memory of a GPU that does not report its size.

MAX_ROUNDING = 1e-11
"""Largest relative fp64 error that counts as rounding if sums nearly cancel: some 50,000 rounding
errors."""
SAMPLED_ARRAYS = 32
"""Most arrays per set of inputs whose values are compared with those of another set."""
MIN_DISTINCT = 8
"""If sampled arrays hold at least this many different values, they do not repeat by chance."""
MIN_VARIANTS = 4
"""Fewest seeds after which values that have never changed are reported."""
MIN_CONTENTS = 64
"""Smallest size of contents other than arrays that are reported if they never change. Smaller
contents may be names of modes, or sizes, which need not change."""
MAX_REPEATED = 0.1
"""Largest fraction of seeds that may repeat another seed's values: some problems have only 65,536
different seeds."""
SAME_VALUE = 1e-2
"""Largest relative difference between inputs that count as equal: a GPU may compute them in another
order each time."""

Step = Callable[[], Any]
Share = Callable[[Step], Any]  #: Runs one step under the shared lock.


class BoundClaim:
    """A claim on one device, with one seed, at full input sizes or at the small check sizes."""

    def __init__(
        self,
        claim: Claim,
        device: Device,
        seed: int,
        *,
        full: bool,
        progress: Progress = no_progress,
        draw: random.Random | None = None,
        rung: str = "",
    ) -> None:
        self.claim = claim
        self.device = device
        self.seed = seed
        self.full = full
        self.progress = progress
        self.rung = rung  #: Name of the claim's rung, for messages about a ladder.
        self.effects = ArgumentEffects()
        self.baseline_alone_s: dict[str, float] = {}
        """Shortest time of a baseline call before another arm had run, by the way it was called;
        measured with the host's clock."""
        self.random = draw or random.Random(seed)  # noqa: S311  the caller decides
        """Draws the orders of arms and the seeds of timed inputs. An arm that could predict them
        could compute the results of all blocks beforehand."""
        self._other_seeds = self.random.getrandbits(64)
        """Mixed into the seeds that generators get after ``inputs``."""
        self.unchecked: set[str] = set()  #: What could not be compared of its arms' results.
        self.side_effects = SideEffects(claim.arms, claim.inputs, claim.reference)
        self._settings = validity.flags()
        self._entropy = random.SystemRandom().getrandbits(64)
        self._seen: dict[tuple[int, bool], tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        self._variants: dict[
            tuple[tuple[Any, ...], Hashable], int
        ] = {}  # by values: the first seed that gave them
        self._has_learned = False
        self._score_units: set[str] = set()
        self.grown_bytes: dict[str, list[int]] = {}
        """Growth of the resident memory in the checked calls of each arm, on the host."""
        self._held: Counter[str] = Counter()  # bytes that arms hold after their calls
        self._repeated: set[int] = set()  # seeds that gave another seed's values
        self._varying: set[str] = set()  # paths of arrays and lists that differ between seeds
        self._constant: set[str] = set()  # paths of arrays and lists that are not static
        # fingerprints of contents by argument and seed, until two seeds differ
        self._contents: dict[int, dict[int, Hashable]] | None = None

    @property
    def kept_bytes(self) -> float:
        """Bytes of outputs that may be kept until they are compared."""
        gpu = self.device.gpu
        memory_bytes = gpu.memory_bytes if gpu and gpu.memory_bytes else ASSUMED_MEMORY_BYTES
        return PENDING_SHARE * memory_bytes

    def make_inputs(self, seed: int) -> Inputs:
        """Build one set of inputs; the same seed gives the same values."""
        inputs = self.draw_inputs(seed)
        self._refuse_unlike(inputs)
        return inputs

    def draw_inputs(self, seed: int) -> Inputs:
        """Build one set of inputs that is not compared with others."""
        self.device.seed(seed)
        where = self.device.torch_device
        try:
            value = self.claim.inputs(Bench(where, seed, self.full))
        except Exception as error:
            if where == "cpu" and arm_errors.needs_gpu(error):
                raise UsageError(
                    f"inputs() needs a GPU ({error}): allocate on bench.device, which is cpu here"
                ) from error
            raise
        if value is None:
            raise UsageError("inputs() returns None: return the arguments of one call of an arm")
        args = value if isinstance(value, tuple) else (value,)
        moved = own_memory.give(tuple(a.value if isinstance(a, Static) else a for a in args))
        if Metric.MEMORY in self.claim.metrics:
            tensors.touch(moved)  # else pages that an arm writes first count as its memory
        # else an arm could rewind the generators and draw what inputs() drew, such as a solution
        # that is no argument; all arms get the same state
        self.device.seed(random.Random(seed ^ self._other_seeds).getrandbits(31))  # noqa: S311  keeps no secrets
        return Inputs(
            args=moved,
            dynamic=[i for i, a in enumerate(args) if not isinstance(a, Static)],
            seed=seed,
        )

    def _refuse_unlike(self, inputs: Inputs) -> None:
        """Refuse a set of inputs that differs from an earlier one of the same seed.

        Each arm gets its own sets, and ``inputs`` must not give one arm easier ones.
        """
        leaves = tensors.leaves(inputs.args)
        arrays = {path: leaf for path, leaf in leaves.items() if tensors.backend_of(leaf)}
        layouts = {path: tensors.layout(array) for path, array in arrays.items()}
        values = {}
        if self.effects.returned is not None:  # else it is not known yet what inputs() leaves unset
            paths = sorted(arrays.keys() - set(self.effects.write_only))
            chosen = random.Random(self._entropy).sample(paths, min(len(paths), SAMPLED_ARRAYS))  # noqa: S311  keeps no secrets
            values = {path: tensors.sample(arrays[path], self._entropy) for path in chosen}
        earlier = self._seen.setdefault((inputs.seed, bool(values)), (layouts, values))
        for path, array_layout in layouts.items() if earlier[0] is not layouts else ():
            pairs = zip(values.get(path, ()), earlier[1].get(path, ()), strict=False)
            limit = SAME_VALUE * max(map(abs, values.get(path, ())), default=0.0)
            differs = "values" if any(abs(a - b) > limit for a, b in pairs) else ""
            todo = argument_effects.UNSEEDED
            if array_layout != earlier[0].get(path):
                differs, todo = "strides, alignment or memory", argument_effects.SAME_INPUTS
            if differs:
                raise UsageError(
                    f"inputs() gives different {differs} for the same seed: "
                    f"{self.effects.label(path)} ({todo})"
                )
        is_whole = len(values) == len(arrays.keys() - set(self.effects.write_only))
        # small inputs of a check may repeat
        if self.full and self.effects.returned is not None and is_whole:
            lists = {p: x for p, x in leaves.items() if tensors.is_number_list(x)}
            listed = {p: tensors.sample_of_list(x, self._entropy) for p, x in lists.items()}
            values = values | listed
            others = [leaf for p, leaf in leaves.items() if p not in arrays]
            dynamic = tuple(f"args[{i}]" for i in inputs.dynamic)
            self._constant = {path for path in values if path.startswith(dynamic)}
            texts = tuple(map(_text, others))
            # store a hash, as there may be a million texts; objects without a text never repeat
            key = object() if object in map(type, texts) else hash(texts)
            self._refuse_repeated(inputs.seed, values, key)
        if self.full and self.effects.returned is not None:
            self._read_contents(inputs)

    def _read_contents(self, inputs: Inputs) -> None:
        """Note the arguments whose contents, apart from arrays and number lists, never change."""
        if self._contents is None:
            kept = set(inputs.dynamic) - {*self.effects.changed, *self.effects.objects}
            first = {i: contents.read(inputs.args[i]) for i in kept}
            large = {i: c.all for i, c in first.items() if c.size >= MIN_CONTENTS}
            self._contents = {i: {inputs.seed: all_} for i, all_ in large.items()}
        for i, by_seed in list(self._contents.items()):
            if len(by_seed) < MIN_VARIANTS and inputs.seed not in by_seed:
                by_seed[inputs.seed] = contents.read(inputs.args[i]).all
                if len({*by_seed.values()}) > 1:
                    del self._contents[i]

    def _refuse_repeated(
        self, seed: int, values: Mapping[str, Sequence[float]], others: Hashable
    ) -> None:
        """Refuse values that another seed gave: an arm could keep the results of a few variants.

        ``values`` are samples of all arrays and lists of numbers, ``others`` is a key for all other
        leaves. If there are only few different values, they may repeat by chance: such seeds are
        noted and not refused.
        """
        samples = tuple((path, tuple(numbers)) for path, numbers in sorted(values.items()))
        if self._variants:
            first, _ = next(iter(self._variants))
            self._varying |= {path for path, numbers in samples if (path, numbers) not in first}
        earlier = self._variants.setdefault((samples, others), seed)
        if earlier == seed:
            return
        self._repeated.add(seed)
        distinct = {number for path in self._varying for number in values.get(path, ())}
        if self._repeats_often() and len(distinct) >= MIN_DISTINCT:
            raise UsageError(
                f"inputs() gives the same values for the seeds {earlier} and {seed}, and an arm "
                "that remembers the results of a few seeds would pass: draw all values from "
                "bench.seed"
            )

    def _repeats_often(self) -> bool:
        return len(self._repeated) > max(3, MAX_REPEATED * len(self._variants))

    def _easy_inputs(self) -> Iterator[str]:
        """Describe inputs from which arms can keep what they have computed."""
        if self._repeats_often():
            yield (
                f"results cached by value: inputs() gave {len(self._variants)} different sets of "
                f"values for {len(self._variants) + len(self._repeated)} seeds; draw from more"
            )
        paths: list[str] = []
        if len(self._variants) + len(self._repeated) >= MIN_VARIANTS:
            (samples, _), *_ = self._variants
            same = self._constant - self._varying
            paths += [p for p, x in samples if p in same and len({*x}) >= MIN_DISTINCT]
        rest = sorted((self._contents or {}).items())
        paths += [f"args[{i}]" for i, by_seed in rest if len(by_seed) >= MIN_VARIANTS]
        if paths:
            names = ", ".join(map(self.effects.label, paths[: accuracy.NAMED_PATHS]))
            yield (
                f"what arms keep of {names}: the values are the same for all seeds; draw them from "
                "bench.seed, or mark them with static()"
            )

    @contextmanager
    def counting(self, name: str) -> Iterator[list[int]]:
        """Count the bytes that an arm holds after the body; subtract those put into the list."""
        if Metric.MEMORY not in self.claim.metrics or not self.full:
            yield []
            return
        before = self.device.held_bytes()
        results: list[int] = []
        yield results
        growth = self.device.held_bytes() - before
        self._held[name] += growth - min(sum(results), max(0, growth))  # results may be old memory

    def held_bytes(self, name: str) -> int:
        """Return the bytes that an arm held before its first call, plus those kept by its calls.

        They are counted only for the metric memory.
        """
        held = self._held[name]
        held = held if held > self.device.held_noise_bytes else 0
        before = self.side_effects.references[name].nbytes
        return held + before[self.device.torch_device == "cpu"]

    def prepare_observed(
        self, name: str, inputs: Inputs, others: Sequence[tuple["BoundClaim", str]] = ()
    ) -> Callable[..., object]:
        """Prepare an arm so that each call records what it keeps in memory, changes and writes.

        ``others`` are further claims that use the arm, each with the arm's name there.
        """
        explained = partial(arm_errors.explained, name, on_cpu=self.device.torch_device == "cpu")
        owners = (self, name), *others
        with explained(), ExitStack() as stack:
            for bound, role in owners:
                stack.enter_context(bound.counting(role))
            call = self.prepare(name, inputs)

        def observed(*args: object) -> object:
            with explained(), ExitStack() as stack:
                counts = [
                    stack.enter_context(bound.observing(role, args)) for bound, role in owners
                ]
                if Metric.MEMORY in self.claim.metrics and self.device.gpu is None:
                    grown, returned = grown_bytes(bind(call, args))
                    for bound, role in owners:
                        bound.grown_bytes.setdefault(role, []).append(grown)
                else:
                    returned = call(*args)
                for bound, role in owners:
                    bound.side_effects.returns(role, returned)
                values = returned if isinstance(returned, tuple) else (returned,)
                # isinstance() would ask the value for its class
                self._score_units.update(v.unit for v in values if type(v) is Score)
                if Metric.MEMORY in self.claim.metrics:
                    size = tensors.nbytes((*args, returned)) - tensors.nbytes(args)
                    for results in counts:
                        results.append(size)
            return returned

        return observed

    @contextmanager
    def observing(self, name: str, args: Args) -> Iterator[list[int]]:
        """Observe a call of an arm; put the bytes of its results into the list."""
        with self.side_effects.of(name, args), self.counting(name) as results:
            yield results

    def prepare(self, name: str, inputs: Inputs) -> Callable[..., object]:
        """Return the callable to time; an arm from prepared(make) runs ``make`` on decoy values."""
        arm = self.claim.arms[name]
        self.check_arguments(name, inputs.args)
        if not isinstance(arm, Prepared):
            return arm
        self._refuse_all_static(name, inputs)
        decoys = self.make_inputs(inputs.seed + DECOY_OFFSET)
        if stuck := inputs.overwrite_in_place(decoys):
            names = ", ".join(map(self.effects.label, stuck))
            raise UsageError(
                f"{name} is prepared, so its inputs are overwritten, but inputs() makes {names} "
                "read-only, or of another shape or dtype for another seed: mark it as static, or "
                "make it writable and of a fixed shape"
            )
        with gc_disabled():  # if make() captures a CUDA graph, collecting an old one would break it
            self.side_effects.begin()
            call = arm.make(*inputs.args)
            self.side_effects.end(name)
        if not callable(call):
            raise UsageError(f"{name}: make(*inputs) of prepared(make) must return the callable")
        values = inputs.seed if inputs.values_seed is None else inputs.values_seed
        inputs.overwrite_in_place(self.make_inputs(values))
        self.effects.poison(inputs.args)
        return call

    def overwrite(
        self, inputs: Inputs, fresh: Callable[[], Inputs], positions: Sequence[int]
    ) -> tuple[str, ...]:
        """Give inputs the values of fresh ones; change nothing if not all can change in place.

        Return the paths that cannot change in place, such as attributes of a module or a tensor.
        """
        drawn = tuple(f"args[{i}]" for i in positions if i in self.effects.drawn)
        return drawn or inputs.overwrite(fresh(), positions)

    def check_arguments(self, name: str, args: Args) -> None:
        """Raise UsageError if an arm or the reference does not take these inputs; call neither."""
        arm = self.claim.arms[name]
        _check_signature(name, arm, args)
        if isinstance(arm, Launcher):
            arm.check(*args)
        _check_signature("reference", self.claim.reference, args)

    def _refuse_all_static(self, name: str, inputs: Inputs) -> None:
        leaves = {p for i in inputs.dynamic for p, _ in tensors.walk(inputs.args[i], f"args[{i}]")}
        has_static = len(inputs.dynamic) < len(inputs.args)
        if has_static and not leaves - set(self.effects.write_only):
            raise UsageError(
                f"{name}: all inputs are static, so a prepared arm could do all its work while it "
                "prepares: mark as static only what a caller would hold (weights, tables)"
            )

    def compute_work(self) -> Work | None:
        """Return the work of one call; None if the claim does not declare it."""
        return self._first_inputs[0]

    @property
    def set_bytes(self) -> int:
        """Size of one set of inputs."""
        return self._first_inputs[1]

    @cached_property
    def _first_inputs(self) -> tuple[Work | None, int]:
        work = None
        with self.step():
            args = self.make_inputs(self.seed).args
            if self.claim.work is not None:
                _check_signature("work", self.claim.work, args)
                work = self.claim.work(*args)
                if not isinstance(work, Work):
                    raise UsageError(f"work() must return a Work, not {work!r}")
                names = ", ".join(WORK_DTYPES)
                if work.dtype not in (None, *WORK_DTYPES):
                    raise UsageError(f"Work(dtype={work.dtype!r}): use one of {names}")
                if work.flops and work.dtype is None:
                    raise UsageError(
                        "Work(flops=...) needs the precision of the operations, for their limit: "
                        f'write Work(flops=..., dtype="fp32"), or another of {names}'
                    )
                work = _in_floats(work)
            return work, tensors.nbytes(args)

    @property
    def second_call_differs(self) -> bool:
        """Whether a second call on the same values does other work or returns another result."""
        return self.effects.updates or bool(self.effects.objects)

    def note_settings(self) -> None:
        """Note the global settings; the number of threads among them depends on the lock held."""
        self._settings = validity.flags()

    def refuse_changed_settings(self, *arms: str) -> None:
        """Raise InvalidMeasurement if a global setting changed since ``note_settings``.

        The error names the arms that have run since, if they are given.
        """
        changed = validity.changed_flags(self._settings, validity.flags())
        if changed:
            names = f"{' or '.join(arms)}: " if arms else ""
            raise InvalidMeasurement(
                f"{names}an arm changed global settings ({', '.join(changed)}): the other arm "
                "would run under them as well; restore them before the call returns, or set them "
                "before pytest starts"
            )

    @contextmanager
    def step(self) -> Iterator[None]:
        """After the body: check that global settings are unchanged, and wait for the device."""
        self.note_settings()
        try:
            yield
        finally:
            self.refuse_changed_settings()  # also after an error: the setting may have caused it
        self.device.synchronize()  # work left on the GPU would disturb the timing of another claim

    def learn_effects(
        self,
        share: Share = lambda step: step(),
        effects: ArgumentEffects | None = None,
    ) -> None:
        """Infer once what baseline calls return and change, unless ``effects`` are given."""
        if self._has_learned:
            return
        self._has_learned = True
        if effects is None:
            share(self._infer_effects)
        else:
            self.effects = effects

    def check_agreement(self, share: Share = lambda step: step()) -> tuple[Error, ...]:
        """Check all arms against the reference on several seeds; return the worst errors.

        Each seed takes the shared lock anew, so that other claims can be timed between seeds.
        """
        self.learn_effects(share)
        shortcuts = Shortcuts(self.claim.precision)
        errors: list[Error] = []
        for seed in self.agreement_seeds:
            errors += share(partial(self.check_seed, seed, shortcuts))
        self.end_agreement()
        return worst(errors)

    def depends_on_load(self, metric: Metric) -> bool:
        """Whether claims that run at the same time change a metric; bytes and counts stay equal."""
        if metric is Metric.SCORE:
            return not self._score_units or any(map(TIMED_UNIT.search, map(str, self._score_units)))
        return metric is not Metric.MEMORY

    @property
    def agreement_seeds(self) -> range:
        """The seeds on which the arms must agree with the reference before they are timed."""
        return range(self.seed + 1, self.seed + 1 + AGREEMENT_SEEDS)

    def end_agreement(self) -> None:
        if self.full:
            gc.freeze()  # later collections skip the objects that exist now

    def _infer_effects(self) -> None:
        with self.step():
            self.effects = argument_effects.infer_effects(
                partial(self.prepare_observed, "baseline"),
                partial(self.make_inputs, self.seed),
                argument_effects.parameter_names(self.claim.reference),
            )
            self._refuse_constant_inputs()
            if self.full and Metric.WALL in self.claim.metrics:
                self.baseline_alone_s = self._time_baseline()

    def _baseline_call(self) -> Callable[[], object]:
        """Return a call of the baseline on inputs of its own, as it may change them."""
        inputs = self.make_inputs(self.seed)
        return bind(self.prepare("baseline", inputs), inputs.args)

    def _time_baseline(self) -> dict[str, float]:
        return {how: self.time_baseline(how) for how in (BEFORE_OTHERS, WITH_COLLECTION, IN_THREAD)}

    def time_baseline(self, how: str) -> float:
        """Return the shorter time of two calls of the baseline in a block, or as ``how`` says.

        A baseline could see that garbage collection is off, or the harness in the call stack, and
        be slow only then.
        """
        if how == IN_THREAD:
            return min(self._time_in_thread() for _ in range(2))
        collects = how == WITH_COLLECTION and gc.isenabled()
        before = gc.enable if collects else nothing
        block = self.device.block
        return min(block([self._baseline_call()], Mode.WALL).run(before) for _ in range(2))

    def _time_in_thread(self) -> float:
        def prepared() -> tuple[Callable[..., object], Args]:
            inputs = self.make_inputs(self.seed)
            return self.prepare("baseline", inputs), inputs.args

        return self.device.time_in_thread(prepared)

    def _repeated_arrays(self, inputs: Inputs) -> Iterator[str]:
        """Describe arrays that are passed several times: an arm could do their work once."""
        paths: dict[tuple[Any, ...], list[str]] = {}
        for i in inputs.dynamic:
            for path, leaf in tensors.walk(inputs.args[i], f"args[{i}]"):
                # parameters of a module may be tied
                if tensors.backend_of(leaf) and math.prod(leaf.shape) and "." not in path:
                    paths.setdefault(tensors.view(leaf), []).append(self.effects.label(path))
        for names in paths.values():
            if len(names) > 1:
                some = ", ".join(names[: accuracy.NAMED_PATHS])
                yield f"calls on different arrays: inputs() passes one array as {some}; pass copies"

    def check_seed(self, seed: int, shortcuts: Shortcuts | None = None) -> Sequence[Error]:
        """Check all arms against the reference on one seed; return each arm's errors."""
        with self.step(), self.explained():
            results = self.collect(
                seed, {name: partial(self.prepare_observed, name) for name in self.claim.arms}
            )
            return self.judge(results, {name: name for name in self.claim.arms}, seed, shortcuts)

    def collect(self, seed: int, arms: Mapping[str, argument_effects.Prepare]) -> agreement.Results:
        """Call arms and the reference on one seed, and compare their results."""
        self.progress("checking results", seed=seed)
        results = agreement.collect(
            arms,
            partial(self.make_inputs, seed),
            self.claim.reference,
            self.effects,
            kept_bytes=self.kept_bytes / max(1, len(arms) / 3),
        )
        if seed == self.agreement_seeds[-1]:
            self.device.release()  # only once: this delays other processes' driver calls
        return results

    def judge(
        self,
        results: agreement.Results,
        roles: Mapping[str, str],
        seed: int,
        shortcuts: Shortcuts | None = None,
    ) -> Sequence[Error]:
        """Judge the arms' results; ``roles`` maps each role to the arm's name in ``results``.

        ``shortcuts`` compares the results on the first two seeds.
        """
        judge = partial(
            agreement.Results.judge,
            roles=roles,
            make=partial(self.make_inputs, seed),
            precision=self.claim.precision,
            shortcuts=shortcuts if seed in self.agreement_seeds[:2] else None,
            unchecked=self.unchecked,
        )
        try:
            return judge(results)
        except WrongResult:
            if self.device.ranks.count > 1:  # the other ranks do not call the reference again
                raise
            rounding = self.rounding_errors(self.make_inputs(seed), results.expected)
            explained = {
                arm: accuracy.beyond(rows, rounding) for arm, rows in results.deviations.items()
            }
            return judge(replace(results, deviations=explained))

    def rounding_errors(
        self, inputs: Inputs, expected: Sequence[accuracy.Expected]
    ) -> list[accuracy.Deviation]:
        """Return how far the reference's fp64 results change if the inputs change by rounding.

        Where sums nearly cancel, summing in another order changes a result as much. The returned
        errors are at most ``MAX_ROUNDING``. Changes ``inputs``. Return [] if the reference fails.
        """
        tensors.nudge(inputs.args)
        self.effects.poison(inputs.args)
        try:
            returned = self.claim.reference(*inputs.args)
        except Exception:  # noqa: BLE001  the changed inputs may be out of its domain
            return []
        outputs = tensors.walk(returned, "reference", is_result=True)
        return [
            replace(d, error=min(d.error, MAX_ROUNDING), rms=min(d.rms, MAX_ROUNDING))
            if d.dtype.startswith("float64")
            else replace(d, error=0.0, rms=0.0)
            for d in accuracy.compare(outputs, expected, located=False)
        ]

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add to a prepared arm's WrongResult that its inputs are overwritten after the setup."""
        try:
            yield
        except WrongResult as wrong:
            name = str(wrong).partition(" ")[0]
            if not isinstance(self.claim.arms.get(name), Prepared):
                raise
            raise WrongResult(
                f"{wrong}; inputs are overwritten after the setup of a prepared arm, so mark those "
                "that the setup may use with static()"
            ) from None

    def result_of(self, name: str, inputs: Inputs) -> list[NamedTensor]:
        """Call an arm, and copy the tensors that it returned or changed."""
        self.effects.poison(inputs.args)
        returned = self.prepare(name, inputs)(*inputs.args)
        self.device.synchronize()
        return self.output_copies(returned, inputs)

    def contents_of(self, name: str, inputs: Inputs) -> list[Contents]:
        """Call an arm, and read what it has left in arguments beside arrays and numbers."""
        self.prepare(name, inputs)(*inputs.args)
        self.device.synchronize()
        return argument_effects.contents_of(inputs.args, self.effects)

    def not_compared(self) -> Iterator[str]:
        """Describe what could not be compared and affects all arms that are timed together."""
        yield from self.effects.repeated
        yield from self._easy_inputs()
        yield from self.side_effects.unchecked(self.effects.label, self.claim.metrics)

    def _refuse_constant_inputs(self) -> None:
        """Refuse inputs that ignore the seed: an arm could return a constant and be correct."""
        inputs, second = self.make_inputs(self.seed), self.make_inputs(self.seed + 1).args
        first = inputs.args
        pairs = zip(map(contents.read, first), map(contents.read, second), strict=True)
        drawn = tuple(i for i, (old, new) in enumerate(pairs) if old.objects != new.objects)
        repeated = tuple(self._repeated_arrays(inputs))
        self.effects = replace(self.effects, drawn=drawn, repeated=repeated)
        if path := tensors.hidden_values(first, "args"):
            raise UsageError(
                f"inputs() gives {self.effects.label(path)} attributes beside its items or fields: "
                "they could hold results, and no check would see them"
            )
        arrays = tensors.arrays(first)
        counters = [p for p in self.effects.mutated if p in arrays and tensors.is_exact(arrays[p])]
        skip = {*self.effects.write_only, *counters}
        if not arrays.keys() - skip or not tensors.alike(first, second):
            return
        if not tensors.changed(tensors.fingerprint(first, skip), second, skip):
            raise UsageError(
                "inputs() gives the same values for every seed, and an arm that caches its result "
                f"would pass: draw random values ({argument_effects.SEEDING})"
            )

    def output_copies(self, returned: object, inputs: Inputs) -> list[NamedTensor]:
        """Copy the tensors that a call returned or changed."""
        return accuracy.copies(argument_effects.outputs_of(returned, inputs.args, self.effects))


def worst(errors: Iterable[Error]) -> tuple[Error, ...]:
    """Return each arm's error that is closest to what is allowed, or furthest above it."""
    by_arm: dict[str, Error] = {}
    for error in errors:
        other = by_arm.setdefault(error.arm, error)
        if error.error * other.allowed > other.error * error.allowed:
            by_arm[error.arm] = error
    return tuple(by_arm.values())


def bind(call: Callable[..., object], args: Args) -> Callable[[], object]:
    return lambda: call(*args)


def _in_floats(work: Work) -> Work:
    """Return the work with figures that a record can hold, which numbers of numpy are not."""
    read, written, flops = (_figure(n, getattr(work, n)) for n in ("read", "written", "flops"))
    return replace(work, read=read, written=written, flops=flops)


def _figure(name: str, value: object) -> float:
    figure = as_float(value)
    if figure is not None and 0 <= figure < math.inf:
        return figure
    given = " ".join(reprlib.repr(value).split())  # an array's text has several lines
    raise UsageError(f"Work({name}={given}): give a finite number that is at least 0")


def _check_signature(name: str, arm: Arm | Callable[..., object], args: Args) -> None:
    call = arm.make if isinstance(arm, Prepared) else arm
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # some builtins and launchers have no readable signature
        return
    try:
        signature.bind(*args)
    except TypeError as why:
        values, problem = f"{len(args)} value{'s' * (len(args) != 1)}", f": {why}"
        if len(args) == 1 and isinstance(args[0], list):
            problem = ", a list: return a tuple for several arguments"
        raise UsageError(
            f"{name}={getattr(call, '__name__', 'arm')}{signature} does not take the {values} "
            f"that inputs() returns{problem}"
        ) from None


def _text(leaf: object) -> Hashable:
    """Return the key by which a leaf that is no array is compared; objects get a new key each."""
    if tensors.is_number_list(leaf):
        return hash(tuple(leaf))  # type: ignore[arg-type]
    is_plain = isinstance(leaf, (str, bytes, bytearray)) or tensors.is_other_scalar(leaf)
    if is_plain or tensors.is_compared(leaf):
        return stored.text(leaf)
    return object()  # the contents of a file or a queue are unknown
