"""Arms that are slow for few inputs or while garbage is collected, or hide their peak of memory."""

from __future__ import annotations

import ctypes
import gc
import time
import tracemalloc
from pathlib import Path

import numpy as np

from tests.cheats.case import Corpus
from tests.cheats.dishonest_effects import measured
from tests.cheats.dishonest_timing import RARELY_SLOW, SORT, numbers

cheat = Corpus()
CHEATS = cheat.entries
marked = Corpus()
MARKED = marked.entries

# few inputs, in arms of honest claims: a test of the sampler has the others


def sorted_twice(x):
    np.sort(x)
    return np.sort(x)


def rarely(work, times):
    """Return an arm that does work often for 3 inputs in 100."""

    def arm(x):
        for _ in range(times if x[0] < 0.03 else 0):
            work(x)
        return work(x)

    return arm


SHORT_SORT = SORT | {"inputs": RARELY_SLOW["inputs"], "baseline": sorted_twice}


# garbage collection


def many_objects(x):
    result = np.sort(x)
    [(i, []) for i in range(len(x))]
    return result


def no_objects(x):
    time.sleep(25e-3)
    return np.sort(x)


@marked("whether the speedup holds with garbage collection on", clock="host")
def an_arm_that_makes_many_objects():
    return SORT | {"baseline": no_objects, "optimized": many_objects}


# values that return in later blocks


@marked("results cached by value: optimized took .* on new values", clock="host")
def a_part_of_the_work_kept_by_value():
    """Where drawing values takes long: less than half of the baseline's time is saved."""
    kept = set()

    def inputs(bench):
        time.sleep(25e-3)
        return numbers(bench)

    def baseline(x):
        time.sleep(4e-3)
        return np.sort(x)

    def optimized(x):
        if (key := float(x[0])) not in kept:
            kept.add(key)
            time.sleep(1e-3)
        time.sleep(2e-3)
        return np.sort(x)

    return SORT | {"inputs": inputs, "baseline": baseline, "optimized": optimized}


# memory

COUNTERS = "a call has reset or stopped a counter of memory"
NUMBERS = 2**21


def many(bench):
    return (np.random.default_rng(bench.seed).random(NUMBERS),)


def copies(x):
    return np.concatenate([x] * 4)[: len(x)] * 2


def larger(x):
    return np.concatenate([x] * 5)[: len(x)] * 2


def hiding(hide, inputs=numbers):
    """Return an arm that needs more memory than the baseline, and hides it then."""

    def arm(x):
        result = larger(x)
        hide()
        return result

    return measured(arm) | {"inputs": inputs, "baseline": copies, "reference": lambda x: x + x}


@cheat(COUNTERS, clock="host")
def a_tracer_that_is_stopped():
    return hiding(tracemalloc.stop)


@cheat(COUNTERS, clock="host")
def a_tracer_that_starts_anew():
    def anew():
        if tracemalloc.is_tracing():
            tracemalloc.stop()
            tracemalloc.start()

    return hiding(anew)


@cheat(COUNTERS, clock="host")
def a_peak_that_is_reset():
    return hiding(tracemalloc.reset_peak)


@cheat(COUNTERS, clock="host")
def traces_that_are_cleared():
    return hiding(tracemalloc.clear_traces)


def memory_of_c(size):
    """Allocate memory that Python does not trace, write to it, and free it."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    where = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(where, 1, size)
    libc.free(ctypes.c_void_p(where))


@cheat(COUNTERS, clock="host")
def a_peak_of_the_process_that_is_reset():
    """Its memory is that of C."""

    def hide():
        memory_of_c(64 * NUMBERS)
        Path("/proc/self/clear_refs").write_text("5")

    return hiding(hide, many) | {"optimized": lambda x: (hide(), x * 2)[1]}


@cheat("optimized needs .* in calls that are checked, but .* where|whose memory", clock="host")
def less_memory_while_it_is_traced():
    def arm(x):
        return x * 2 if tracemalloc.is_tracing() else larger(x)

    return hiding(gc.get_count, many) | {"optimized": arm}
