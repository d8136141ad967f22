"""Refuses problems whose results an arm could give without doing the work."""

import contextlib
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_aiperf.errors import UsageError, WrongResult
from pytest_aiperf.model import PrecisionName

from . import accuracy, tensors
from .accuracy import Deviation, Expected, Outputs
from .tensors import backend_of, is_exact, parts

MAX_CONSTANT_SHARE = 0.5
"""Largest fraction of an output's elements, in a random sample, that may not depend on the seed."""
MIN_CONSTANT = 8
"""Fewest sampled elements independent of the seed for which a claim is refused."""
MAX_CONSTANT_CHANGE = 2.0**-6
"""An element that changes by at most this relative amount counts as independent of the seed, unless
its tolerance is smaller. With the tolerance of fp8, a third of random elements would count by
chance."""


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

    def is_stale(self, result: Outputs) -> bool:
        """Whether an arm's result is the baseline's on the other seed, apart from rounding.

        Integers, and results of zeros, could agree by chance.
        """
        if not self.stale or len(result) != len(self.stale):
            return False
        old = accuracy.expect([value for _, value in self.stale], exact=True)
        if not any(want.rms > 0 and not is_exact(want.array) for want in old):
            return False
        deviations = {
            arm: accuracy.compare(outputs, old, located=False)
            for arm, outputs in {"baseline": self.stale, "optimized": result}.items()
        }
        try:
            accuracy.judge(deviations, old, self.precision, located=False)
        except (UsageError, WrongResult):
            return False
        return True

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
        limit = min(accuracy.ERROR_BUDGETS[self.precision or "fp32"], MAX_CONSTANT_CHANGE)
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
            (output,) = accuracy.compare([(base.path, array)], [want], located=False)
            is_copied = name in inputs and not output.error
            with contextlib.suppress(WrongResult):
                arms = {"baseline": base, "optimized": output}
                list(accuracy.judge_output(arms, want, self.precision, "", located=False))
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
