"""Times the arms on many more inputs: an arm may be wrong or slow for few of them."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pytest_aiperf.device.device import nothing, now
from pytest_aiperf.model import Mode, Prepared
from pytest_aiperf.rules import validity
from pytest_aiperf.text import si

from . import arm_errors
from .bound_claim import BoundClaim, bind

SEARCHED_SEEDS = 200
"""Most inputs among which to search for those on which an arm is slow. A case that 2 of 100 inputs
have is found by 98 of 100 searches."""
SEARCHING_S = 0.5
"""Time limit of a search."""
FEWEST_SEEDS = 8
"""Fewest inputs of a search: fewer do not show which time is usual."""
SLOW_TIMES = 3.0
"""An arm is slow on inputs if its call takes more than this many times its median, plus SLOW_S."""
SLOW_S = 50e-6
"""Constant part of that limit."""
VERIFIED_SEEDS = 3
"""Number of inputs on which a slow baseline's results are verified, the slowest first. If other
work on the machine caused the delay, the verification does no harm."""
WORSE_IN_ALL = 1.5
"""The speedup over the sum of all searched inputs may be worse by this factor than that of typical
calls. Rare cases often change it by less, and no reader of a ratio expects it to be more exact."""
WORSE_COLLECTED = 1.4
"""The speedup with garbage collection on may be worse by this factor. The same factor applies to a
baseline's time (SLOWED_BASELINE in plausibility.py)."""
JUDGED = ("baseline", "optimized")
"""Arms whose speedup is judged."""
validity.watched(now, __name__, "now")  # this module has a reference of its own to the function


class Search:
    """Times calls of a claim's two arms on inputs that no call has met, with garbage collection on.

    Collections fall on calls at random. Their seconds are therefore subtracted from those of the
    call and counted separately.
    """

    def __init__(self, bound: BoundClaim) -> None:
        self.bound = bound
        self.names = [n for n in JUDGED if not isinstance(bound.claim.arms[n], Prepared)]
        """Arms to search with. Preparing an arm for so many sets would take too long."""
        self.seconds: dict[str, dict[int, float]] = {name: {} for name in JUDGED}  # by seed
        self._collecting_s: dict[str, list[float]] = {name: [] for name in JUDGED}
        gc.collect()
        gc.freeze()  # a collection in an arm's call must not scan the harness's objects

    def slow_seeds(self) -> list[int]:
        """Return the seeds of the few inputs on which the baseline is the slowest.

        An arm could give wrong results on these inputs alone and so save most of the baseline's
        time. Return [] if the baseline is much slower than usual on none of them, or if too few
        seeds were tried to tell.
        """
        if "baseline" not in self.names:
            return []
        started = time.monotonic()
        seeds: list[int] = []
        while len(seeds) < SEARCHED_SEEDS and time.monotonic() - started < SEARCHING_S:
            seeds.append(self.bound.random.getrandbits(31))
            self.bound.random.shuffle(self.names)
            for name in self.names:
                self._call(name, seeds[-1])
        slow = self._slow("baseline") if len(seeds) >= FEWEST_SEEDS else []
        return slow[:VERIFIED_SEEDS]

    def _slow(self, name: str) -> list[int]:
        """Return the seeds for which an arm is slow, the slowest first."""
        taken = self.seconds[name]
        if not taken:
            return []
        least = SLOW_TIMES * statistics.median(taken.values()) + SLOW_S
        slow = [seed for seed, seconds in taken.items() if seconds > least]
        return sorted(slow, key=taken.__getitem__, reverse=True)

    def _call(self, name: str, seed: int) -> None:
        bound, arm = self.bound, self.bound.claim.arms[name]
        # not make_inputs(): among so many seeds, few different values repeat by chance
        inputs = bound.draw_inputs(seed)
        with arm_errors.explained(name, on_cpu=bound.device.torch_device == "cpu"):
            function = bound.prepare(name, inputs) if isinstance(arm, Prepared) else arm
            bound.effects.poison(inputs.args)
            block = bound.device.block([bind(function, inputs.args)], Mode.WALL)
            with _collections() as spent:
                seconds = block.run(gc.enable if gc.isenabled() else nothing)
        collecting_s = min(seconds, sum(spent))
        self._collecting_s[name].append(collecting_s)
        taken = self.seconds[name]
        taken[seed] = min(taken.get(seed, seconds), seconds - collecting_s)

    def unchecked(self, judged: float) -> Iterator[str]:
        """Describe the conditions under which the judged speedup does not hold."""
        yield from self._slow_in_all(judged)
        yield from self._slow_while_collecting()

    def _slow_in_all(self, judged: float) -> Iterator[str]:
        if len(self.seconds["optimized"]) < FEWEST_SEEDS or len(self.names) < len(JUDGED):
            return
        # calls alone may have another ratio than in blocks, and blocks may have met rare cases
        least = min(judged, self._ratio(statistics.median)) / WORSE_IN_ALL
        if self._ratio(sum) >= least:
            return
        for seed in self._slow("optimized"):
            self._call("optimized", seed)  # keeps the shorter time: other work may have disturbed
        in_all, slow = self._ratio(sum), self._slow("optimized")
        if slow and in_all < least:
            sets = len(self.seconds["optimized"])
            yield (
                f"whether the speedup holds for all inputs: it is {judged:.2f}x, but "
                f"{in_all:.2f}x for the sum of the times on {sets} sets, because optimized takes "
                f"{SLOW_TIMES:g} times as long as usual on {len(slow)}; make each call meet such "
                "cases, or measure them in another claim"
            )

    def _ratio(self, mean: Callable[..., float]) -> float:
        baseline, optimized = (mean(self.seconds[name].values()) for name in JUDGED)
        return baseline / max(optimized, 1e-9)

    def _slow_while_collecting(self) -> Iterator[str]:
        for name in JUDGED:
            if not self.seconds[name]:
                self._call(name, self.bound.random.getrandbits(31))
        typical = {name: statistics.median(self.seconds[name].values()) for name in JUDGED}
        extra = {name: statistics.fmean(self._collecting_s[name]) for name in JUDGED}
        slower = {name: 1 + extra[name] / max(typical[name], 1e-9) for name in JUDGED}
        if slower["optimized"] > WORSE_COLLECTED * slower["baseline"]:
            was, more = (si(of["optimized"], "s") for of in (typical, extra))
            yield (
                "whether the speedup holds with garbage collection on, which is off in timed "
                f"calls: optimized took {was}, and collections {more} more in each call; make "
                "fewer objects that refer to others"
            )


@contextmanager
def _collections() -> Iterator[list[float]]:
    """Yield a list to which the seconds of each automatic garbage collection are added.

    Collections that an arm starts itself are left out: its timed calls include them as well.
    """
    begun: list[int] = []
    spent: list[float] = []

    def note(phase: str, _info: object) -> None:
        if phase == "start" and gc.get_count()[0] > gc.get_threshold()[0]:
            begun[:] = [now()]
        elif phase == "stop" and begun:
            spent.append((now() - begun.pop()) * 1e-9)

    gc.callbacks.append(note)
    try:
        yield spent
    finally:
        gc.callbacks.remove(note)
