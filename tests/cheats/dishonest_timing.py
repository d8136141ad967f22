"""Arms that game the timing by plain means: pace, poison, memory of earlier calls, the other arm.

Each has an honest look-alike in honest_timing.py. Arms of the host clock do real work: they sort.
"""

from __future__ import annotations

import _thread
import builtins
import ctypes
import gc
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from pytest_aiperf import prepared, static
from tests.cheats.case import Corpus, State
from tests.cheats.dishonest import DOUBLE, INTO, LONG, SHORT, returning, writing
from tests.fake_gpu import spend

cheat = Corpus()
CHEATS = cheat.entries

WRONG = "optimized disagrees with the reference|unwritten or not finite"
ALONE = "per call in a block, but .* alone"
SETTINGS = "an arm changed global settings .*"
BUSY = "threads or processes that the arms started were busy"
BUSY_S = 0.5  #: Seconds after which a thread or process ends that nobody has stopped.
N = 20_000
"""Elements that an honest call sorts in about a millisecond."""


def numbers(bench):
    return (np.random.default_rng(bench.seed).random(N),)


def with_destination(bench):
    return *numbers(bench), np.empty(N)


def sort_into(x, out):
    np.copyto(out, np.sort(x))


SORT = {"inputs": numbers, "baseline": np.sort, "reference": np.sort, "metric": "wall"}
SORT_INTO = {
    "inputs": with_destination,
    "baseline": sort_into,
    "reference": lambda x, out: np.sort(x),
    "metric": "wall",
}


# rare cases that take most of the time


def rarely_slow(x):
    """Sort; 2 inputs in 100 need much more work, as those of a search without a match may."""
    for _ in range(100 if x[0] < 0.02 else 0):
        np.sort(x)
    return np.sort(x)


RARELY_SLOW = SORT | {
    "inputs": lambda bench: np.random.default_rng(bench.seed).random(2000),
    "baseline": rarely_slow,
}


@cheat("optimized disagrees with the reference", clock="host")
def a_rare_case_that_is_left_out():
    return RARELY_SLOW | {"optimized": lambda x: x + 0 if x[0] < 0.02 else np.sort(x)}


# destinations whose poison is known


def only_if(is_poison):
    """Return a claim whose optimized arm sorts if its destination looks poisoned."""

    def arm(x, out):
        if is_poison(out):
            sort_into(x, out)

    return SORT_INTO | {"optimized": arm}


@cheat(f"{WRONG}|{ALONE}", clock="host")
def where_the_last_element_is_nan():
    worked = State(calls=0)

    def arm(x, out):
        worked.calls += 1
        if np.isnan(out[-1]) and worked.calls < 40:
            sort_into(x, out)

    return SORT_INTO | {"optimized": arm}


@cheat(WRONG, clock="host")
def where_few_elements_are_nan_prepared():
    def make(x, out):
        def arm(x, out):
            if np.isnan(out[::1000]).any():
                sort_into(x, out)

        return arm

    return SORT_INTO | {"optimized": prepared(make)}


@cheat(WRONG, clock="host")
def where_the_destination_is_not_sorted_prepared():
    def make(x, out):
        def arm(x, out):
            if not (out[1::500] >= out[:-1:500]).all():
                sort_into(x, out)

        return arm

    return SORT_INTO | {"optimized": prepared(make)}


@cheat(WRONG, clock="host")
def a_destination_that_is_not_cleared():
    """The baseline clears it by arithmetic, which NaN would survive."""

    def inputs(bench):
        return np.random.default_rng(bench.seed).random(N), np.zeros(N)

    def cleared(x, out):
        out *= 0
        out += np.sort(x)

    def arm(x, out):
        out += np.sort(x)

    return SORT_INTO | {"inputs": inputs, "baseline": cleared, "optimized": arm}


def padding(count, *, pads):
    """Return an arm that writes 8 rows, with zeros behind, and counts its calls in a ninth."""

    def arm(x, outs):
        for out in outs[1:]:
            out[:count] = x[:count] * 2
            if pads:
                out[count:] = 0
        outs[0] += 1

    return arm


def nine_rows(bench):
    drawn = np.random.default_rng(bench.seed)
    return drawn.random(64), [drawn.random(64), *(np.zeros(64) for _ in range(8))]


PADDED = {
    "inputs": nine_rows,
    "baseline": lambda *a: returning(LONG, padding(48, pads=True)(*a)),
    "reference": lambda x, outs: [outs[0] + 1, *[np.append(x[:48] * 2, np.zeros(16))] * 8],
}


@cheat(WRONG)
def a_padding_beside_a_counter():
    """The baseline reads one destination of the list, which must not exempt the others."""
    return PADDED | {"optimized": lambda *a: returning(SHORT, padding(48, pads=False)(*a))}


@cheat(f"{WRONG}|{ALONE}")
def where_the_destination_is_nan_on_the_gpu():
    """The device that simulates a GPU replays captured calls, whose inputs stay in place."""

    def arm(x, out):
        if torch.isnan(out).any():
            torch.mul(x, 2, out=out)
            spend(LONG)
        else:
            spend(SHORT)

    return INTO | {
        "optimized": arm,
        "baseline": lambda x, out: writing(20e-6, torch.mul(x, 2, out=out)),
    }


# pace


def paced(gap_s):
    """Return an arm that gives its last result if it is called again within ``gap_s``."""
    state = State(at=0.0, result=None)

    def arm(x):
        if state.result is None or time.perf_counter() - state.at > gap_s:
            state.result = np.sort(x)
        state.at = time.perf_counter()
        return state.result

    return SORT | {"optimized": arm}


@cheat(f"{WRONG}|{ALONE}", clock="host")
def calls_within_thirty_microseconds():
    return paced(30e-6)


@cheat(f"{WRONG}|{ALONE}", clock="host")
def calls_within_a_millisecond():
    return paced(1e-3)


@cheat(WRONG, clock="host")
def calls_behind_the_first_of_a_burst_into_the_destination():
    state = State(at=0.0)

    def arm(x, out):
        if time.perf_counter() - state.at > 50e-6:
            sort_into(x, out)
        state.at = time.perf_counter()

    return SORT_INTO | {"optimized": arm}


# memory of earlier calls


def remembered(key):
    cache = {}

    def arm(x, *rest):
        k = key(x, *rest)
        if k not in cache:
            if len(cache) > 10_000:
                cache.clear()
            cache[k] = np.sort(x)
        return cache[k]

    return arm


@cheat(f"{WRONG}|{ALONE}", clock="host")
def by_the_values_of_a_few_elements():
    """No block has values that an earlier one had, so this gains nothing unless sets return."""
    state = State(calls=0)
    cache = {}

    def arm(x):
        state.calls += 1
        key = x[0] if state.calls < 60 else 0
        if key not in cache:
            cache[key] = np.sort(x)
        return cache[key]

    return SORT | {"optimized": arm}


@cheat(WRONG, clock="host")
def by_address_with_a_seed_beside_it():
    return SORT | {
        "inputs": lambda bench: (*numbers(bench), bench.seed),
        "baseline": lambda x, seed: np.sort(x),
        "optimized": remembered(lambda x, seed: x.ctypes.data),
        "reference": lambda x, seed: np.sort(x),
    }


@cheat(WRONG, clock="host")
def by_address_of_inputs_that_cannot_be_written():
    def inputs(bench):
        (x,) = numbers(bench)
        x.flags.writeable = False
        return x

    return SORT | {"inputs": inputs, "optimized": remembered(lambda x: x.ctypes.data)}


@cheat(WRONG, clock="host")
def by_address_of_static_inputs():
    return SORT | {
        "inputs": lambda bench: static(*numbers(bench)),
        "optimized": remembered(lambda x: x.ctypes.data),
    }


@cheat(f"{WRONG}|optimized gives float64", clock="host")
def by_address_of_inputs_of_many_lengths():
    return SORT | {
        "inputs": lambda bench: np.random.default_rng(bench.seed).random(N + bench.seed % 97),
        "optimized": remembered(lambda x: x.ctypes.data),
    }


@cheat("the same values for the seeds", clock="host")
def by_the_values_of_few_seeds():
    cache = {}

    def arm(x):
        if x[0] not in cache:
            cache[x[0]] = np.sort(x)
        return cache[x[0]].copy()

    return SORT | {
        "inputs": lambda bench: np.random.default_rng(bench.seed % 8).random(N),
        "optimized": arm,
    }


class Numbers(list):
    """A list that can hold attributes."""


@cheat("attributes beside its items", clock="host")
def a_result_that_the_inputs_carry():
    def inputs(bench):
        x = Numbers(numbers(bench))
        x.sorted = np.sort(x[0])
        return (x,)

    return SORT | {
        "inputs": inputs,
        "baseline": lambda x: np.sort(x[0]),
        "optimized": lambda x: x.sorted.copy(),
        "reference": lambda x: np.sort(x[0]),
    }


@cheat(WRONG, clock="host")
def by_identity_of_a_list():
    return SORT | {
        "inputs": lambda bench: numbers(bench)[0][:3000].tolist(),
        "baseline": sorted_list,
        "optimized": remembered(lambda x: id(x) % 1024),  # memory is soon used again
        "reference": sorted_list,
    }


def sorted_list(numbers):
    return np.array(sorted(numbers))


@cheat(WRONG, clock="host")
def by_identity_of_bytes():
    remember = remembered(lambda x, b: id(b) % 1024)
    return SORT | {
        "inputs": lambda bench: bytearray(numbers(bench)[0].tobytes()),
        "baseline": lambda b: np.sort(np.frombuffer(b)),
        "optimized": lambda b: remember(np.frombuffer(b), b),
        "reference": lambda b: np.sort(np.frombuffer(b)),
    }


def versioned(make):
    return DOUBLE | {
        "inputs": lambda bench: (torch.rand(N),),
        "baseline": lambda x: x.sort().values,
        "reference": lambda x: x.double().sort().values,
        "metric": "wall",
        "optimized": make,
    }


@cheat(WRONG, clock="host")
def by_torchs_version_counter_prepared():
    def make(x):
        state = State(version=None, result=None)

        def arm(x):
            if state.version != x._version:
                state.version, state.result = x._version, x.sort().values
            return state.result

        return arm

    return versioned(prepared(make))


@cheat(f"{WRONG}|{ALONE}", clock="host")
def by_torchs_version_counter_and_address():
    cache = {}

    def arm(x):
        key = x.data_ptr(), x._version
        if key not in cache:
            cache[key] = x.sort().values
        return cache[key]

    return versioned(arm)


# work of later calls, and counting


@cheat(ALONE)
def one_launch_for_all_calls_of_a_block():
    """The first call of a block launches the work of all sets; the others find their results."""
    sets = []

    def make(x):
        mine = State(x=x, result=None, values=None)
        sets.append(mine)

        def arm(x):
            if mine.values is None or x[0] != mine.values[0]:
                spend(LONG)  # as long as the baseline's call: a batch of all sets fills the GPU
                for each in sets:
                    each.values, each.result = each.x.copy(), each.x * 2
            else:
                spend(SHORT)
            return mine.result

        return arm

    return {"optimized": prepared(make)}


@cheat(WRONG, clock="host")
def only_the_last_call_of_a_block_in_one_buffer():
    """It learns how many calls a block has from the pauses between blocks."""
    state = State(n=0, at=0.0, length=1, out=np.empty(N), calls=0)

    def arm(x):
        state.calls += 1
        now = time.perf_counter()
        if now - state.at > 3e-4:
            state.length, state.n = max(state.length, state.n), 0
        state.n += 1
        if state.calls < 30 or state.n >= state.length:
            state.out[: len(x)] = np.sort(x)
        state.at = time.perf_counter()
        return state.out[: len(x)]

    return SORT | {"optimized": arm, "inputs": lambda b: np.random.default_rng(b.seed).random(2000)}


@cheat(WRONG, clock="host")
def every_third_call_is_empty():
    state = State(n=0)

    def arm(x):
        state.n += 1
        return np.sort(x) if state.n < 30 or state.n % 3 else np.empty_like(x)

    return SORT | {"optimized": arm}


# late work


@cheat(WRONG, clock="host")
def a_pool_that_is_not_waited_for():
    pool, state = ThreadPoolExecutor(1), State(n=0)

    def arm(x, out):
        state.n += 1
        future = pool.submit(sort_into, x, out)
        if state.n < 30:
            future.result()

    return SORT_INTO | {"optimized": arm}


@cheat(WRONG, clock="host")
def the_next_call_waits_for_the_last():
    pool, state = ThreadPoolExecutor(1), State(future=None, n=0)

    def arm(x, out):
        state.n += 1
        if state.future:
            state.future.result()
        state.future = pool.submit(lambda: (time.sleep(2e-3), sort_into(x, out)))
        if state.n < 30:
            state.future.result()

    return SORT_INTO | {"optimized": arm}


@cheat(f"{WRONG}|{BUSY}", clock="host")
def work_left_for_the_baseline():
    todo, state = queue.SimpleQueue(), State(n=0)

    def baseline(x, out):
        while not todo.empty():
            sort_into(*todo.get())
        sort_into(x, out)

    def arm(x, out):
        state.n += 1
        if state.n < 30:
            sort_into(x, out)
        else:
            todo.put((x, out))

    return SORT_INTO | {"baseline": baseline, "optimized": arm}


@cheat(f"{WRONG}|{ALONE}", clock="host")
def a_table_that_the_baseline_fills():
    """The arms never have the same values, so the table has none that help."""
    table, state = {}, State(n=0)

    def baseline(x):
        table["last"] = table[x[0]] = np.sort(x)
        return table[x[0]]

    def arm(x):
        state.n += 1
        if state.n < 30:
            return np.sort(x)
        return table.get(x[0], table["last"])

    return SORT | {"baseline": baseline, "optimized": arm}


# state that is left behind for the other arm, and taken back


def leaving(leave, take_back, arm=np.sort, after=0, **words):
    """Return a claim whose optimized arm takes something back, works, and leaves it again."""
    state = State(n=0)

    def optimized(*args):
        take_back()
        result = arm(*args)
        state.n += 1
        if state.n > after:
            leave()
        return result

    return SORT | {"optimized": optimized, **words}


@cheat(BUSY, clock="host")
def a_thread_that_spins():
    state = State(stop=None)

    def spin(stop):
        until = time.monotonic() + BUSY_S
        while not stop.is_set() and time.monotonic() < until:
            pass

    def leave():
        state.stop = threading.Event()
        threading.Thread(target=spin, args=(state.stop,), name="spinning", daemon=True).start()

    return leaving(leave, lambda: state.stop and state.stop.set())


@cheat(BUSY, clock="host")
def a_process_that_spins():
    context = multiprocessing.get_context("fork")
    process = context.Process(target=spin_for, args=(10 * BUSY_S,), daemon=True)
    process.start()
    return leaving(
        lambda: os.kill(process.pid, signal.SIGCONT), lambda: os.kill(process.pid, signal.SIGSTOP)
    )


@cheat(BUSY, clock="host")
def a_thread_that_threading_does_not_list():
    state = State(stop=True)

    def spin():
        until = time.monotonic() + BUSY_S
        while not state.stop and time.monotonic() < until:
            pass

    def leave():
        state.stop = False
        _thread.start_new_thread(spin, ())

    return leaving(leave, lambda: setattr(state, "stop", True))


@cheat(BUSY, clock="host")
def a_process_of_another_thread():
    """It spins all the time: stopping and waking it would be the work of the optimized arm."""
    ready = threading.Event()

    def start():
        process = multiprocessing.get_context("fork").Process(
            target=spin_for, args=(10 * BUSY_S,), daemon=True
        )
        process.start()
        ready.set()
        process.join(10 * BUSY_S)

    threading.Thread(target=start, daemon=True).start()
    ready.wait()
    return SORT | {"optimized": np.sort}


@cheat(BUSY, clock="host")
def a_process_of_a_process_that_waits():
    context = multiprocessing.get_context("fork")
    context.Process(target=start_and_wait, args=(10 * BUSY_S,)).start()
    return SORT | {"optimized": np.sort}


def start_and_wait(seconds):
    process = multiprocessing.get_context("fork").Process(target=spin_for, args=(seconds,))
    process.start()
    process.join()


def spin_for(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


@cheat("optimized: " + SETTINGS + "sys.setprofile", clock="host")
def a_profiler_for_the_baseline():
    leave, take_back = lambda: sys.setprofile(lambda *_: None), lambda: sys.setprofile(None)
    return leaving(leave, take_back, after=40)


@cheat(SETTINGS + "signal.setitimer", clock="host")
def a_timer_of_signals():
    signal.signal(signal.SIGVTALRM, lambda *_: None)
    return leaving(
        lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4, 1e-4),
        lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 0),
    )


@cheat(SETTINGS + "is_anomaly_enabled", clock="host")
def anomaly_detection():
    return leaving(
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(False),
    )


@cheat("optimized: " + SETTINGS + "numpy.getbufsize", clock="host")
def small_buffers_of_numpy():
    return leaving(lambda: np.setbufsize(16), lambda: np.setbufsize(8192), after=40)


@cheat(SETTINGS + "mkldnn", clock="host")
def onednn_off():
    def set_to(value):
        torch.backends.mkldnn.set_flags(value)

    return leaving(lambda: set_to(False), lambda: set_to(True))


@cheat(SETTINGS + "threads of", clock="host")
def threads_of_blas():
    import threadpoolctl

    controllers = threadpoolctl.ThreadpoolController().lib_controllers
    blas = next(c for c in controllers if c.user_api == "blas")
    usual = blas.num_threads
    other = 1 if usual > 1 else 2
    return leaving(lambda: blas.set_num_threads(other), lambda: blas.set_num_threads(usual))


@cheat(SETTINGS + "logging levels", clock="host")
def the_level_of_logging():
    return leaving(
        lambda: logging.getLogger().setLevel(1), lambda: logging.getLogger().setLevel(30)
    )


@cheat(SETTINGS + "CPU affinity", clock="host")
def one_core():
    cores = os.sched_getaffinity(0)
    return leaving(
        lambda: os.sched_setaffinity(0, {min(cores)}), lambda: os.sched_setaffinity(0, cores)
    )


@cheat(SETTINGS + "timer slack", clock="host")
def sleeps_that_end_late():
    slack = Path("/proc/self/timerslack_ns")
    usual = slack.read_text()
    return leaving(lambda: slack.write_text("30000000"), lambda: slack.write_text(usual))


@cheat(SETTINGS + "hundreds of folders in sys.path", clock="host")
def imports_that_search_many_folders():
    def arm(x):
        if len(sys.path) < 1000:
            sys.path.extend(f"/nowhere/{i}" for i in range(1000))
        return np.sort(x)

    return SORT | {"optimized": arm}


@cheat(SETTINGS + "sys.getswitchinterval", clock="host")
def the_interval_of_threads():
    return leaving(lambda: sys.setswitchinterval(1e-6), lambda: sys.setswitchinterval(5e-3))


@cheat(SETTINGS + "subnormal numbers", clock="host")
def subnormal_numbers_flushed():
    return leaving(lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False))


@cheat(SETTINGS + "gc.get_threshold", clock="host")
def thresholds_of_garbage_collection():
    usual = gc.get_threshold()
    return leaving(lambda: gc.set_threshold(1), lambda: gc.set_threshold(*usual))


@cheat(SETTINGS + "get_default_device", clock="host")
def the_default_device():
    return leaving(lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None))


# the stack


@cheat(f"{WRONG}|{ALONE}", clock="host")
def works_only_outside_the_timed_block():
    """It looks for the loop that is timed: nothing else calls it once the arms are timed."""
    state = State(result=None)

    def arm(x):
        frame, timed = sys._getframe(1), False
        while frame is not None:
            timed = timed or frame.f_code.co_name == "_round"
            frame = frame.f_back
        if not timed or state.result is None:
            state.result = np.sort(x)
        return state.result

    return SORT | {"optimized": arm}


@cheat(f"{WRONG}|{ALONE}", clock="host")
def works_only_where_the_result_is_kept():
    """It looks for the function that keeps a result, which every call of a block may have."""
    state = State(result=None, n=0)

    def arm(x):
        frame, kept = sys._getframe(1), False
        while frame is not None:
            kept = kept or frame.f_code.co_name == "keeping"
            frame = frame.f_back
        state.n += 1
        if kept or state.n < 20 or state.result is None:
            state.result = np.sort(x)
        return state.result

    return SORT | {"optimized": arm}


# memory


@cheat(WRONG, clock="host")
def nothing_while_memory_is_traced():
    """The call whose memory is measured is the one whose result is verified."""

    def arm(x):
        if tracemalloc.is_tracing():
            return x
        return np.concatenate([x] * 8).reshape(8, -1)[0] * 2

    return {
        "inputs": numbers,
        "baseline": lambda x: np.concatenate([x] * 4).reshape(4, -1)[0] * 2,
        "optimized": arm,
        "reference": lambda x: x + x,
        "metric": "memory",
    }


# work between the end of the clock and the copy of the result

LATE = "optimized's result changed after the clock had stopped"


def filled_later(arrange):
    """Return the claim of an arm whose results are sorted by what ``arrange`` is given."""
    waiting = []

    def fill():
        while waiting:
            out, values = waiting.pop()
            np.copyto(out, np.sort(values))

    def arm(x):
        out = np.empty_like(x)
        waiting.append((out, x.copy()))
        arrange(fill)
        return out

    return SORT | {"optimized": arm}


@cheat(LATE, clock="host")
def a_copying_function_that_fills_the_result():
    usual = np.array

    def arrange(fill):
        def array(*args, **words):
            np.array = usual
            fill()
            return usual(*args, **words)

        np.array = array

    return filled_later(arrange)


@cheat(LATE, clock="host")
def a_builtin_that_fills_the_result():
    usual = builtins.isinstance

    def arrange(fill):
        def instance(value, kinds):
            builtins.isinstance = usual
            fill()
            return usual(value, kinds)

        builtins.isinstance = instance

    return filled_later(arrange)


@cheat(LATE, clock="host")
def an_audit_hook_that_fills_the_result():
    fills = []

    def hook(*_):
        if fills:
            fills.pop()()

    sys.addaudithook(hook)  # it stays, and does nothing more
    return filled_later(fills.append)


@cheat(SETTINGS + "signal handlers", clock="host")
def a_signal_that_fills_the_result():
    def arrange(fill):
        signal.signal(signal.SIGALRM, lambda *_: fill())
        signal.setitimer(signal.ITIMER_REAL, 2e-5)

    return filled_later(arrange)


@cheat(SETTINGS + "handlers of memory faults", clock="host")
def a_handler_that_could_compute_what_is_read():
    """It would compute a page of the result when the page is read for the first time."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    default, handler = 0, ctypes.cast(libc.abs, ctypes.c_void_p)
    return leaving(
        lambda: libc.signal(signal.SIGBUS, handler), lambda: libc.signal(signal.SIGBUS, default)
    )


@cheat(SETTINGS + "tracemalloc", clock="host")
def tracing_of_allocations():
    return leaving(tracemalloc.start, tracemalloc.stop)


@cheat(SETTINGS + "coroutine origins", clock="host")
def origins_of_coroutines():
    set_depth = sys.set_coroutine_origin_tracking_depth
    return leaving(lambda: set_depth(20), lambda: set_depth(0))


@cheat(SETTINGS + "huge pages", clock="host")
def small_pages():
    prctl = ctypes.CDLL(None).prctl
    return leaving(lambda: prctl(41, 1, 0, 0, 0), lambda: prctl(41, 0, 0, 0, 0))
