"""Honest arms that look like those of dishonest_timing.py: no guard may refuse them."""

from __future__ import annotations

import _thread
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from pytest_aiperf import prepared, static
from tests.cheats.case import Corpus, State
from tests.cheats.dishonest import returning
from tests.cheats.dishonest_timing import (
    PADDED,
    RARELY_SLOW,
    SORT,
    SORT_INTO,
    N,
    numbers,
    padding,
    sort_into,
)
from tests.cheats.honest import FAST, arms
from tests.fake_gpu import Allocation, spend

honest = Corpus()
HONEST = honest.entries


def sorting(arm, **words):
    return SORT | {"optimized": arm, **words}


# rare cases


@honest(clock="host")
def a_rare_case_that_is_quick():
    return RARELY_SLOW | {"optimized": np.sort}


# destinations


@honest(clock="host")
def a_destination_that_is_read_first():
    """It looks at its destination, as a kernel with beta=0 may, and works whatever is there."""

    def arm(x, out):
        out[:1] = np.nan_to_num(out[:1])
        sort_into(x, out)

    return SORT_INTO | {"optimized": arm}


@honest(clock="host")
def a_destination_that_is_zeroed_first():
    def arm(x, out):
        out[:] = 0
        sort_into(x, out)

    return SORT_INTO | {"optimized": prepared(lambda x, out: arm)}


@honest(clock="host")
def a_destination_that_is_cleared_in_another_way():
    def cleared(x, out):
        out *= 0
        out += np.sort(x)

    return SORT_INTO | {"baseline": cleared, "optimized": sort_into}


@honest()
def a_padding_beside_a_counter_that_is_written():
    return PADDED | {"optimized": lambda *a: returning(FAST, padding(48, pads=True)(*a))}


@honest(clock="host")
def a_destination_and_a_result():
    def both(x, out):
        sort_into(x, out)
        return x.max()

    return SORT_INTO | {
        "baseline": both,
        "optimized": both,
        "reference": lambda x, out: (x.max(), np.sort(x)),
    }


# pace, and memory of earlier calls


@honest(clock="host")
def an_arm_that_logs_its_pace():
    gaps, state = [], State(at=0.0)

    def arm(x):
        gaps.append(time.perf_counter() - state.at)
        state.at = time.perf_counter()
        return np.sort(x)

    return sorting(arm)


@honest(clock="host")
def a_cache_that_never_hits():
    cache = {}

    def arm(x):
        key = float(x[0]), float(x[-1])
        if key not in cache:
            cache.clear()
            cache[key] = np.sort(x)
        return cache[key]

    return sorting(arm)


@honest(clock="host")
def a_buffer_for_each_address():
    buffers = {}

    def arm(x):
        out = buffers.setdefault(x.ctypes.data % 8, np.empty(N))[: len(x)]
        np.copyto(out, x)
        out.sort()
        return out

    return sorting(arm)


@honest(clock="host")
def three_buffers_in_turn():
    state = State(i=0, buffers=[np.empty(N) for _ in range(3)])

    def arm(x):
        state.i = (state.i + 1) % 3
        out = state.buffers[state.i][: len(x)]
        np.copyto(out, x)
        out.sort()
        return out

    return sorting(arm)


@honest(clock="host")
def one_buffer_for_all_results_of_the_host():
    buffer = np.empty(N)

    def arm(x):
        np.copyto(buffer[: len(x)], x)
        buffer[: len(x)].sort()
        return buffer[: len(x)]

    return sorting(arm)


@honest(clock="host")
def a_seed_beside_the_values():
    return SORT | {
        "inputs": lambda bench: (*numbers(bench), bench.seed),
        "baseline": lambda x, seed: np.sort(x),
        "optimized": lambda x, seed: np.sort(x, kind="stable"),
        "reference": lambda x, seed: np.sort(x),
    }


@honest(clock="host")
def inputs_of_the_host_that_cannot_be_written():
    def inputs(bench):
        (x,) = numbers(bench)
        x.flags.writeable = False
        return x

    return sorting(np.sort, inputs=inputs)


@honest(clock="host")
def static_inputs_of_arms_that_prepare_nothing():
    return sorting(np.sort, inputs=lambda bench: static(*numbers(bench)))


@honest(clock="host")
def inputs_of_many_lengths():
    return sorting(
        np.sort, inputs=lambda bench: np.random.default_rng(bench.seed).random(N + bench.seed % 97)
    )


@honest(clock="host")
def a_list_of_numbers():
    return SORT | {
        "inputs": lambda bench: numbers(bench)[0][:3000].tolist(),
        "baseline": lambda x: np.array(sorted(x)),
        "optimized": lambda x: np.sort(np.array(x)),
        "reference": np.sort,
    }


@honest(clock="host")
def bytes_of_numbers():
    return SORT | {
        "inputs": lambda bench: bytearray(numbers(bench)[0].tobytes()),
        "baseline": lambda b: np.sort(np.frombuffer(b)),
        "optimized": lambda b: np.sort(np.frombuffer(b)),
        "reference": lambda b: np.sort(np.frombuffer(b)),
    }


@honest(clock="host")
def updates_in_place():
    def update(x):
        x.sort()

    return sorting(update, baseline=update)


@honest(clock="host")
def updates_in_place_of_prepared_arms():
    def make(x):
        def update(x):
            x.sort()

        return update

    return sorting(prepared(make), baseline=prepared(make))


@honest()
def updates_in_place_in_a_graph():
    def add(seconds):
        def arm(x):
            spend(seconds)
            np.add(x, 1, out=x)

        return arm

    return {"baseline": add(20e-6), "optimized": add(10e-6), "reference": lambda x: x + 1}


@honest()
def numbers_that_a_graph_would_freeze():
    """A captured graph could not take a new number: the calls are timed without one."""

    def scale(seconds):
        def arm(x, n):
            spend(seconds)
            return x * n

        return arm

    return {
        "inputs": lambda bench: (np.random.default_rng(bench.seed).random(64), bench.seed % 1000),
        "baseline": scale(20e-6),
        "optimized": scale(10e-6),
        "reference": lambda x, n: x * n,
    }


@honest()
def a_first_call_that_takes_longer():
    """The first call behind a pause loads code and wakes threads, for both arms alike."""
    seen = State(last=None)

    def arm(seconds):
        def double(x):
            spend(seconds + (20e-6 if seen.last != seconds else 0))
            seen.last = seconds
            return x * 2

        return double

    return {"baseline": arm(200e-6), "optimized": arm(100e-6)}


# work in threads and processes that ends with its call


@honest(clock="host")
def a_pool_that_idles_between_calls():
    pool = ThreadPoolExecutor(2)

    def arm(x, out):
        half = len(x) // 2
        parts = list(pool.map(np.sort, (x[:half], x[half:])))
        np.copyto(out, np.sort(np.concatenate(parts), kind="stable"))

    return SORT_INTO | {"optimized": arm}


@honest(clock="host")
def a_queue_that_is_emptied():
    todo = queue.SimpleQueue()

    def arm(x, out):
        todo.put((x, out))
        while not todo.empty():
            sort_into(*todo.get())

    return SORT_INTO | {"optimized": arm}


@honest(clock="host")
def a_process_that_waits_for_work():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def serve():
        while theirs.recv_bytes() != b"end":
            theirs.send_bytes(b"done")

    context.Process(target=serve, daemon=True).start()

    def arm(x, out):
        ours.send_bytes(b"go")
        sort_into(x, out)
        ours.recv_bytes()

    return SORT_INTO | {"optimized": arm}


@honest(clock="host")
def a_process_that_works_in_each_call():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def serve():
        while theirs.recv_bytes() != b"end":
            np.sort(np.random.default_rng(1).random(10 * N))
            theirs.send_bytes(b"done")

    context.Process(target=serve, daemon=True).start()

    def arm(x, out):
        ours.send_bytes(b"go")
        sort_into(x, out)
        ours.recv_bytes()

    return SORT_INTO | {"optimized": arm}


@honest(clock="host")
def processes_of_another_thread_that_wait():
    """Its process waits for one of its own."""

    def wait(depth):
        if depth:
            start(depth - 1)
        time.sleep(5)

    def start(depth):
        multiprocessing.get_context("fork").Process(target=wait, args=(depth,)).start()

    starter = threading.Thread(target=start, args=(1,))
    starter.start()
    starter.join()
    return sorting(np.sort)


@honest(clock="host")
def a_thread_that_threading_does_not_list_and_that_sleeps():
    _thread.start_new_thread(time.sleep, (5,))
    return sorting(np.sort)


@honest(clock="host")
def a_thread_that_sleeps():
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
    return sorting(np.sort)


# settings for one call


def for_one_call(change, undo):
    def arm(x):
        change()
        try:
            return np.sort(x)
        finally:
            undo()

    return sorting(arm)


@honest(clock="host")
def buffers_of_numpy_for_one_call():
    return for_one_call(lambda: np.setbufsize(16384), lambda: np.setbufsize(8192))


@honest(clock="host")
def errors_of_numpy_for_one_call():
    def arm(x):
        with np.errstate(all="ignore"):
            return np.sort(x)

    return sorting(arm)


@honest(clock="host")
def blas_threads_for_one_call():
    import threadpoolctl

    def arm(x):
        with threadpoolctl.threadpool_limits(1):
            return np.sort(x)

    return sorting(arm)


@honest(clock="host")
def onednn_for_one_call():
    def arm(x):
        with torch.backends.mkldnn.flags(enabled=False):
            return np.sort(x)

    return sorting(arm)


@honest(clock="host")
def a_core_for_one_call():
    cores = os.sched_getaffinity(0)
    return for_one_call(
        lambda: os.sched_setaffinity(0, {min(cores)}), lambda: os.sched_setaffinity(0, cores)
    )


@honest(clock="host")
def a_logger_of_its_own():
    logger = logging.getLogger("kernels")

    def arm(x):
        logger.setLevel(logging.ERROR)
        logger.debug("sorting")
        return np.sort(x)

    return sorting(arm)


@honest(clock="host")
def an_arm_that_looks_at_its_caller():
    return sorting(lambda x: [sys._getframe(1).f_lineno, np.sort(x)][1])


@honest()
def memory_of_buffers_that_are_kept():
    buffers = {}

    def arm(x):
        scratch = Allocation(100)
        buffers.setdefault(len(x), scratch)
        return x * 2

    def baseline(x):
        scratch = Allocation(3000)
        return x * 2 if scratch else x

    return {"metric": "memory", "baseline": baseline, "optimized": arm}


@honest()
def prepared_calls_that_share_a_plan():
    plans = {}

    def make(x):
        plan = plans.setdefault(x.shape, 2)

        def arm(x):
            spend(FAST)
            return x * plan

        return arm

    return arms(lambda x: x * 2) | {"optimized": prepared(make)}


@honest(clock="host")
def a_result_of_untouched_memory():
    """Most of it is zero and is read for the first time when the result is copied."""

    def arm(x):
        out = np.zeros(1_000_000)
        out[: len(x)] = np.sort(x)
        return out

    def baseline(x):
        return np.concatenate([np.sort(x), np.zeros(1_000_000 - len(x))])

    return {"inputs": numbers, "metric": "wall", "baseline": baseline, "reference": baseline} | {
        "optimized": arm
    }


@honest(clock="host")
def a_time_limit_for_one_call():
    def arm(x):
        usual = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 10)
        try:
            return np.sort(x)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, usual)

    return sorting(arm)


@honest(clock="host")
def large_results():
    rows = lambda x: np.multiply.outer(x[:100], x)
    return {"inputs": numbers, "metric": "wall", "baseline": rows, "reference": rows} | {
        "optimized": lambda x: x[:100, None] * x
    }
