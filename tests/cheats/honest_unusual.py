"""Honest arms with slow cases and many objects as the baseline has, and that read counters."""

from __future__ import annotations

import gc
import time
import tracemalloc

import numpy as np

from tests.cheats.case import Corpus
from tests.cheats.dishonest_unusual import (
    SHORT_SORT,
    SORT,
    hiding,
    many,
    many_objects,
    numbers,
    rarely,
    sorted_twice,
)

honest = Corpus()
HONEST = honest.entries


@honest(clock="host")
def cases_that_are_slow_for_both_arms():
    return SHORT_SORT | {"baseline": rarely(sorted_twice, 100), "optimized": rarely(np.sort, 100)}


@honest(clock="host")
def cases_that_are_a_little_slower():
    return SHORT_SORT | {"optimized": rarely(np.sort, 5)}


@honest(clock="host")
def as_many_objects_as_the_baseline_makes():
    def baseline(x):
        many_objects(x)
        return many_objects(x)

    return SORT | {"baseline": baseline, "optimized": many_objects}


@honest(clock="host")
def garbage_that_it_collects_itself():
    """Its timed calls include that as well."""

    def optimized(x):
        gc.collect(0)
        return np.sort(x)

    def baseline(x):
        time.sleep(1e-3)
        return np.sort(x)

    return SHORT_SORT | {"baseline": baseline, "optimized": optimized}


@honest(clock="host")
def values_that_take_long_to_draw():
    def inputs(bench):
        time.sleep(25e-3)
        return numbers(bench)

    def baseline(x):
        np.sort(x)
        return np.sort(x)

    return SORT | {"inputs": inputs, "baseline": baseline, "optimized": np.sort}


@honest(clock="host")
def counters_that_are_read():
    def arm(x):
        tracemalloc.get_traced_memory()
        return x * 2

    return hiding(gc.get_count, many) | {"optimized": arm}
