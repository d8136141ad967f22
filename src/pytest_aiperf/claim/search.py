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

SEARCHED_SEEDS, SEARCHING_S, FEWEST_SEEDS = 200, 0.5, 8
"""Inputs on which an arm is slow are searched for among so many seeds, for so many seconds at
most. A case that 2 of 100 inputs have is found by 98 of 100 searches. Fewer seeds than the last
figure do not tell which time is usual."""
SLOW_TIMES, SLOW_S, VERIFIED_SEEDS = 3.0, 50e-6, 3
"""An arm counts as slow on inputs if it takes so many times as long as on most, and so many seconds
more. Where it is the baseline, the results for so many of these inputs are verified; it does no
harm if other work on the machine took the time."""
WORSE_IN_ALL = 1.5
"""The ratio of sums over all searched inputs may be worse than that of typical calls by this
factor: rare cases that change it by less are common, and no reader of a ratio expects less."""
WORSE_COLLECTED = 1.4
"""The ratio may be worse by this factor while garbage is collected, as a baseline's time may be."""
JUDGED = ("baseline", "optimized")
validity.watched(now, __name__, "now")  # this module has a reference of its own to the function


class Search:
    """Calls of a claim's two arms on inputs that none has met, while garbage is collected.

    The seconds of each call are without those of collections, which fall on calls at random: they
    are counted apart.
    """

    def __init__(self, bound: BoundClaim) -> None:
        self.bound = bound
        self.names = [n for n in JUDGED if not isinstance(bound.claim.arms[n], Prepared)]
        """Arms to search with: to prepare one for so many sets takes too long."""
        self.seconds: dict[str, dict[int, float]] = {name: {} for name in JUDGED}  # by seed
        self._collecting_s: dict[str, list[float]] = {name: [] for name in JUDGED}
        gc.collect()
        gc.freeze()  # a collection in a call of an arm must not look at what the harness keeps

    def slow_seeds(self) -> list[int]:
        """Return the seeds of the few inputs on which the baseline is the slowest.

        An arm could be wrong for them alone, and so save most of the baseline's time. Without a
        seed for which it takes much longer than for most, or enough seeds to tell, return [].
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
        """Describe in which way the ratio that is judged does not hold."""
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
            self._call("optimized", seed)  # the least of both counts: other work may have taken it
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

    Those that an arm starts itself are part of its timed calls as well.
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
