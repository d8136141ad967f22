"""Arms that are wrong or dishonest, and the error message that must catch each of them.

Each entry gives the arguments that differ from an ordinary claim. That claim doubles a vector of 64
numbers on the fake device: the baseline takes 200 us, the optimized arm 100 us.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

import pytest_aiperf.correctness.accuracy
import pytest_aiperf.device.device
from pytest_aiperf import Score, Work, prepared, static
from tests.cheats.case import Corpus, State
from tests.fake_gpu import Allocation, Fault, fork, is_last_call, spend
from tests.plugin.claims import doubling

cheat = Corpus()
CHEATS = cheat.entries

WRONG = "optimized disagrees with the reference"
STALE = "on new values in a timed block|per call in a block, but .* alone"
SETTINGS = "an arm changed global settings .*"
SHORT = 1e-6
"""Seconds of a call that skips work: far less than any honest arm takes."""
LONG = 200e-6
"""Seconds of a call that does the work: as long as the ordinary baseline takes."""


def returning(seconds, value):
    """Spend time on the fake device, then return the value."""
    spend(seconds)
    return value


def writing(seconds, _):
    """Spend time on the fake device and return None, like an arm with an output argument."""
    spend(seconds)


def tensors(bench):
    return (torch.randn(bench.size(64, check=8)),)


def destinations(bench):
    # zeros: uninitialized memory may contain the poison of another test
    return torch.randn(bench.size(64, check=8)), torch.zeros(bench.size(64, check=8))


def rows(bench):
    return (torch.randn(64, 256),)


def products(bench):
    return torch.randn(32, 512), torch.randn(512, 32)


DOUBLE = {"inputs": tensors, "baseline": doubling(200), "reference": lambda x: x.double() * 2}
INTO = {
    "inputs": destinations,
    "baseline": lambda x, out: writing(LONG, torch.mul(x, 2, out=out)),
    "reference": lambda x, out: x.double() * 2,
}
SUMS = {
    "inputs": rows,
    "baseline": lambda x: returning(LONG, x.sum(1)),
    "reference": lambda x: x.double().sum(1),
}
PRODUCTS = {
    "inputs": products,
    "baseline": lambda a, b: returning(LONG, a @ b),
    "reference": lambda a, b: a.double() @ b.double(),
}


def into(write):
    """Return a claim with an output argument; ``write(x, out)`` is the optimized arm."""
    return INTO | {"optimized": lambda x, out: writing(SHORT, write(x, out))}


def remembering(key, size=None, work_s=LONG):
    """Return an arm that computes one result per key and caches up to ``size`` of them."""
    cache = {}

    def arm(x):
        cache_key = key(x)
        if cache_key not in cache:
            if size is not None and len(cache) >= size:
                cache.clear()
            cache[cache_key] = returning(work_s, x * 2)
        return returning(SHORT, cache[cache_key])

    return arm


# cached results


@cheat(f"{STALE}|{WRONG}")
def by_address():
    return {"optimized": remembering(lambda x: x.ctypes.data)}


@cheat(STALE)
def by_address_of_a_tensor():
    """Calls so short are captured: their inputs stay in place, and only there it gains anything."""
    alive = []  # keeps every input, so that no address is used twice
    arm = remembering(lambda x: alive.append(x) or x.data_ptr(), work_s=20e-6)
    return DOUBLE | {"baseline": doubling(20), "optimized": arm}


@cheat(f"{STALE}|{WRONG}")
def by_identity():
    return {"optimized": remembering(id)}


@cheat(f"{WRONG}|{STALE}")
def by_seed():
    return {"optimized": remembering(lambda x: torch.initial_seed())}


@cheat(f"{WRONG}|{STALE}")
def by_the_state_of_a_generator():
    return {"optimized": remembering(lambda x: np.random.get_state()[1].tobytes())}  # noqa: NPY002  the arm reads the global state


@cheat(WRONG)
def by_shape():
    return {"optimized": remembering(lambda x: x.shape)}


@cheat(WRONG)
def the_first_result_for_good():
    return {"optimized": remembering(lambda x: 0)}


@cheat(WRONG)
def what_the_baseline_left():
    shared = State(result=np.zeros(64))

    def baseline(x):
        shared.result = returning(LONG, x * 2)
        return shared.result

    return {"baseline": baseline, "optimized": lambda x: returning(SHORT, shared.result.copy())}


def counted(works, seconds=SHORT):
    """Return an arm that repeats its last result unless ``works(call number)`` is true."""
    state = State(calls=0, result=None)

    def arm(x):
        state.calls += 1
        if works(state.calls) or state.result is None:
            state.result = returning(LONG, x * 2)
        return returning(seconds, state.result)

    return {"optimized": arm}


@cheat(WRONG)
def every_second_call():
    return counted(lambda n: n % 2)


@cheat(WRONG)
def calls_that_are_not_the_last_of_their_block():
    """A real arm would have to guess where its block ends."""
    state = State(result=None)

    def arm(x):
        if is_last_call() or state.result is None:
            state.result = x * 2
        return returning(SHORT, state.result.copy())

    return {"optimized": arm, "metric": "wall"}


@cheat(WRONG)
def work_left_to_a_guessed_last_call():
    """A real arm learns from the clock that a block has begun; it expects the last length again."""
    state = State(calls=0, guess=1, ended=True, waiting=[])

    def arm(x):
        if state.ended:
            state.guess, state.calls, state.waiting = state.calls, 0, []
        state.calls += 1
        state.ended = is_last_call()
        state.waiting.append((x, np.empty_like(x)))
        if state.calls == 1 or state.calls >= state.guess:
            for each, result in state.waiting:
                np.multiply(each, 2, out=result)
        return returning(SHORT, state.waiting[-1][1])

    return {"optimized": arm, "metric": "wall"}


@cheat(WRONG)
def every_fifth_call_once_it_is_timed():
    return counted(lambda n: n < 30 or n % 5 == 0)


@cheat(STALE)
def the_first_hundred_calls():
    return counted(lambda n: n < 100)  # up to the end of the first replicate


@cheat(WRONG)
def the_first_three_calls():
    return counted(lambda n: n < 3)


@cheat(WRONG)
def calls_that_come_slowly():
    state = State(time=0.0, result=None)

    def arm(x):
        # CPU time of this thread: time of other processes does not count
        previous, state.time = state.time, time.thread_time()
        if state.time - previous > 2e-3 or state.result is None:
            state.result = returning(LONG, x * 2)
        return returning(SHORT, state.result)

    return {"optimized": arm}


# missing results


@cheat(WRONG)
def constant():
    return {"optimized": lambda x: returning(SHORT, np.zeros(64))}


@cheat(WRONG)
def the_mean_everywhere():
    return SUMS | {
        "optimized": lambda x: returning(SHORT, torch.full((64,), float(x.mean()) * 256))
    }


@cheat("unwritten or not finite")
def not_a_number():
    return {"optimized": lambda x: returning(SHORT, np.full(64, np.nan))}


@cheat("unwritten or not finite")
def one_infinity():
    return DOUBLE | {
        "optimized": lambda x: returning(SHORT, (x * 2).index_fill(0, torch.tensor(9), torch.inf))
    }


@cheat("on new values in a timed block: out", tries=3)  # one try in twelve looks at other calls
def every_second_call_into_its_buffer():
    """A skipped call leaves the right result of an earlier call with the same inputs in ``out``."""
    calls = State(n=0)

    def write(x, out):
        calls.n += 1
        if calls.n < 30 or calls.n % 2:  # a check of one single call sees a call that writes
            torch.mul(x, 2, out=out)

    return into(write)


@cheat("out.* is nan")
def nothing_written():
    return into(lambda x, out: None)


@cheat(r"out\[63\] is nan")
def last_element_unwritten():
    return into(lambda x, out: torch.mul(x[:-1], 2, out=out[:-1]))


@cheat(r"out\[48\] is nan")
def last_tile_unwritten():
    return into(lambda x, out: torch.mul(x[:48], 2, out=out[:48]))


@cheat(r"out\[7, 0\] is nan")
def last_row_unwritten():
    def inputs(bench):
        return torch.randn(8, 8), torch.zeros(8, 8)

    return into(lambda x, out: torch.mul(x[:7], 2, out=out[:7])) | {"inputs": inputs}


@cheat(WRONG)
def freed_memory():
    return {"optimized": lambda x: returning(SHORT, np.empty_like(x))}


@cheat(WRONG)
def freed_memory_of_torch():
    return DOUBLE | {"optimized": lambda x: returning(SHORT, torch.empty_like(x))}


@cheat(f"{WRONG}.*")
def freed_memory_once_it_is_timed():
    calls = State(n=0)

    def arm(x):
        calls.n += 1
        return returning(SHORT, x * 2 if calls.n < 30 else np.empty_like(x))

    return {"optimized": arm}


@cheat(WRONG)
def one_element_wrong():
    return {"optimized": lambda x: returning(SHORT, np.where(np.arange(64) == 17, x, x * 2))}


@cheat(WRONG)
def rows_in_another_order():
    return SUMS | {"optimized": lambda x: returning(SHORT, x.sum(1).flip(0))}


@cheat("float64.* for result, the baseline float64")
def another_shape():
    return {"optimized": lambda x: returning(SHORT, (x * 2)[:32])}


@cheat("float32.* for result, the baseline float64")
def another_dtype():
    return {"optimized": lambda x: returning(SHORT, (x * 2).astype(np.float32))}


@cheat("optimized's result is")
def fewer_results():
    return {
        "baseline": lambda x: returning(LONG, (x * 2, x * 3)),
        "optimized": lambda x: returning(SHORT, x * 2),
        "reference": lambda x: (x + x, x + x + x),
    }


# results that are computed later or by the caller


@cheat("as a view of its inputs")
def a_view_for_a_transposition():
    return {
        "inputs": rows,
        "baseline": lambda x: returning(LONG, x.t().contiguous()),
        "optimized": lambda x: returning(SHORT, x.t()),
        "reference": lambda x: x.t(),
    }


@cheat("as a view of its inputs")
def a_view_for_a_copy():
    return {
        "baseline": lambda x: returning(LONG, x.copy()),
        "optimized": lambda x: returning(SHORT, x[:]),
        "reference": lambda x: x,
    }


@cheat("of few elements")
def one_row_for_many():
    return {
        "inputs": tensors,
        "baseline": lambda x: returning(LONG, x.repeat(8, 1)),
        "optimized": lambda x: returning(SHORT, x.clone().expand(8, -1)),
        "reference": lambda x: x.repeat(8, 1),
    }


class LazyArray(np.ndarray):
    """An array that is computed when it is copied."""

    def copy(self, order="C"):
        return np.asarray(self) * 2


@cheat("a result of type LazyArray cannot be compared")
def a_lazy_array():
    return {"optimized": lambda x: returning(SHORT, x.view(LazyArray))}


class LazyTensor(torch.Tensor):
    """A tensor that is computed on first use."""


@cheat("a result of type LazyTensor cannot be compared")
def a_lazy_tensor():
    return DOUBLE | {"optimized": lambda x: returning(SHORT, (x * 2).as_subclass(LazyTensor))}


class LazyDict(dict):
    """A dict whose values are computed when they are read."""

    def __getitem__(self, key):
        return dict.__getitem__(self, key) * 2


@cheat(WRONG)
def a_lazy_dict():
    return {
        "baseline": lambda x: returning(LONG, {"y": x * 2}),
        "optimized": lambda x: returning(SHORT, LazyDict(y=x.copy())),
    }


class LazyTuple(tuple):
    """A tuple whose items are computed when it is iterated."""

    __slots__ = ()

    def __iter__(self):
        return (item * 2 for item in tuple.__iter__(self))


@cheat(WRONG)
def a_lazy_tuple():
    return {
        "baseline": lambda x: returning(LONG, (x * 2,)),
        "optimized": lambda x: returning(SHORT, LazyTuple((x.copy(),))),
    }


@dataclass
class LazyFields:
    """A dataclass that computes its field in ``__getattribute__``."""

    y: object

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        return value * 2 if name == "y" else value


@cheat("a result of type LazyFields cannot be compared")
def a_lazy_dataclass():
    return {
        "baseline": lambda x: returning(LONG, [x * 2]),
        "optimized": lambda x: returning(SHORT, LazyFields(x.copy())),
    }


@dataclass
class LazyProperty:
    """A dataclass that computes its field in a property."""

    y: object

    @property
    def y(self):
        return self.stored * 2

    @y.setter
    def y(self, value):
        self.stored = value


@cheat("a result of type LazyProperty cannot be compared")
def a_lazy_property():
    return {
        "baseline": lambda x: returning(LONG, [x * 2]),
        "optimized": lambda x: returning(SHORT, LazyProperty(x.copy())),
    }


@cheat("a result of type function cannot be compared")
def a_promise():
    return {"optimized": lambda x: returning(SHORT, lambda: x * 2)}


@cheat("a result of type Future cannot be compared", clock="host")
def a_future():
    pool = ThreadPoolExecutor(1)
    return {"optimized": lambda x: pool.submit(np.multiply, x, 2)}


def large(bench):
    return np.random.default_rng(bench.seed).random(1 << 16), np.empty(1 << 16)


LARGE = {
    "inputs": large,
    "baseline": lambda x, out: np.copyto(out, np.sort(x)),
    "reference": lambda x, out: np.sort(x),
    "metric": "wall",
}


LATE = 60.0
"""Seconds by which a thread is late: the check comes first even on a busy machine."""


@cheat("is nan, expected", clock="host")
def a_thread_that_is_late():
    def late(x, out):
        time.sleep(LATE)
        np.copyto(out, np.sort(x))

    return LARGE | {
        "optimized": lambda x, out: threading.Thread(
            target=late, args=(x, out), daemon=True
        ).start()
    }


@cheat(r"is \S+, expected", clock="host")
def a_thread_that_is_late_once_it_is_timed():
    calls = State(n=0, next=threading.Event())

    def late(x, out, release):
        release.wait(LATE)
        np.copyto(out, np.sort(x))

    def arm(x, out):
        calls.n += 1
        calls.next.set()  # lets the previous call's thread write its result
        calls.next = threading.Event()
        thread = threading.Thread(target=late, args=(x.copy(), out, calls.next), daemon=True)
        thread.start()
        if calls.n < 5:
            calls.next.set()
            thread.join()

    return LARGE | {"optimized": arm}


# inputs that an arm changes, and inputs that are weak test data


@cheat("optimized changed argument 'x'")
def inputs_zeroed():
    def arm(x):
        result = returning(SHORT, x * 2)
        x[:] = 0
        return result

    return {"optimized": arm}


@cheat("optimized changed argument")
def inputs_sorted_for_the_next_call():
    def arm(x):
        x.sort()
        return returning(SHORT, x.copy())

    return {
        "baseline": lambda x: returning(LONG, np.sort(x)),
        "optimized": arm,
        "reference": np.sort,
    }


@cheat("optimized changed argument 'x'")
def one_bit_of_an_input():
    def arm(x):
        result = returning(SHORT, x * 2)
        x[5] = np.nextafter(x[5], 2)
        return result

    return {"optimized": arm}


@cheat(WRONG)
def inputs_zeroed_once_it_is_timed():
    calls = State(n=0)

    def arm(x):
        calls.n += 1
        if calls.n > 10:
            x[:] = 0
        return returning(SHORT, x * 2)

    return {"optimized": arm}


@cheat(r"optimized changed argument 'x.grad'")
def a_gradient_left_behind():
    def inputs(bench):
        return (torch.randn(64, requires_grad=True),)

    def arm(x):
        spend(SHORT)
        x.sum().backward()
        return x.detach() * 2

    return {
        "inputs": inputs,
        "baseline": lambda x: returning(LONG, x.detach() * 2),
        "optimized": arm,
        "reference": lambda x: x.detach().double() * 2,
    }


@cheat("gives the same values for every seed")
def inputs_of_ones():
    return {
        "inputs": lambda bench: np.ones(64),
        "optimized": lambda x: returning(SHORT, np.full(64, 2.0)),
    }


@cheat("gives the same values for every seed")
def inputs_of_a_fixed_seed():
    return {"inputs": lambda bench: np.random.default_rng(0).random(64)}


@cheat("gives different values for the same seed")
def inputs_of_no_seed():
    return {"inputs": lambda bench: np.random.default_rng().random(64)}


@cheat("does not take the 1 value")
def arms_for_other_inputs():
    return {"optimized": lambda x, hint: returning(SHORT, x * 2)}


# skipped work


@cheat(WRONG)
def half_of_the_batch():
    def arm(x):
        result = returning(SHORT, torch.zeros(64))
        result[:32] = x[:32].sum(1)
        return result

    return SUMS | {"optimized": arm}


@cheat(WRONG)
def nine_tenths_of_a_sum():
    return SUMS | {"optimized": lambda x: returning(SHORT, x[:, :230].sum(1) / 0.9)}


@cheat(WRONG)
def every_second_term():
    return PRODUCTS | {"optimized": lambda a, b: returning(SHORT, a[:, ::2] @ b[::2] * 2)}


@cheat(WRONG)
def small_values_skipped():
    return SUMS | {"optimized": lambda x: returning(SHORT, x.where(x.abs() > 0.05, 0).sum(1))}


@cheat("exceed the .* that this GPU reaches")
def bytes_that_do_not_pass():
    return {"work": lambda x: Work(read=5e9, written=5e9)}


@cheat("exceed the .* that this GPU reaches")
def flops_that_are_not_computed():
    return {"work": lambda x: Work(flops=1e12, dtype="bf16")}


@cheat("exceed the .* that this GPU reaches")
def work_counted_for_another_dtype():
    return {"work": lambda x: Work(flops=2e10, dtype="fp32")}


# lower precision


def rounded(x, bits):
    """Truncate the mantissa to ``bits``: tf32 has 10, bf16 7, fp8 3."""
    return (x.view(torch.int32) & -(1 << 23 - bits)).view(torch.float32)


@cheat(WRONG)
def tf32_products():
    return PRODUCTS | {"optimized": lambda a, b: returning(SHORT, rounded(a, 10) @ rounded(b, 10))}


@cheat(WRONG)
def fp16_products():
    return PRODUCTS | {"optimized": lambda a, b: returning(SHORT, (a.half() @ b.half()).float())}


@cheat(WRONG)
def bf16_sums():
    return SUMS | {"optimized": lambda x: returning(SHORT, x.bfloat16().sum(1).float())}


@cheat(WRONG)
def bf16_accumulation_of_bf16():
    def one_by_one(x):
        total = torch.zeros(64, dtype=torch.bfloat16)
        for column in x.unbind(1):
            total += column
        return total

    return {
        "inputs": lambda bench: torch.rand(64, 1024).bfloat16(),
        "baseline": lambda x: returning(LONG, x.float().sum(1).bfloat16()),
        "optimized": lambda x: returning(SHORT, one_by_one(x)),
        "reference": lambda x: x.double().sum(1),
    }


@cheat(WRONG)
def fp32_for_fp64():
    return {
        "optimized": lambda x: returning(
            SHORT, (x.astype(np.float32) * np.float32(2.1)).astype(float)
        ),
        "baseline": lambda x: returning(LONG, x * 2.1),
        "reference": lambda x: x * 2.1,
    }


@cheat(WRONG)
def eight_bit_integers():
    return PRODUCTS | {
        "optimized": lambda a, b: returning(SHORT, ((a * 30).round() @ (b * 30).round()) / 900)
    }


@cheat(WRONG)
def fp8_products_beyond_what_is_declared():
    return PRODUCTS | {
        "optimized": lambda a, b: returning(SHORT, rounded(a, 2) @ rounded(b, 2)),
        "precision": "bf16",
    }


@cheat(WRONG)
def a_short_series():
    return {
        "inputs": lambda bench: torch.rand(64),
        "baseline": lambda x: returning(LONG, x.exp()),
        "optimized": lambda x: returning(SHORT, 1 + x + x**2 / 2 + x**3 / 6 + x**4 / 24),
        "reference": lambda x: x.double().exp(),
    }


@cheat("baseline and reference disagree")
def a_baseline_that_is_wrong():
    return {"baseline": lambda x: returning(LONG, x * 2 + 1e-3)}


@cheat("compute the reference in fp64")
def a_reference_of_no_more_precision():
    return SUMS | {
        "optimized": lambda x: returning(SHORT, x.sum(1)),
        "reference": lambda x: x.half().sum(1),
    }


@cheat("choose inputs whose results, and their squares, are finite")
def a_reference_that_overflows():
    return {"reference": lambda x: x * np.inf}


# work hidden in preparation


@cheat(WRONG)
def done_while_preparing():
    def make(x):
        result = x * 2
        return lambda x: returning(SHORT, result)

    return {"optimized": prepared(make)}


@cheat(WRONG)
def inputs_kept_while_preparing():
    def make(x):
        copy = x.copy()
        return lambda x: returning(SHORT, copy * 2)

    return {"optimized": prepared(make)}


@cheat("is nan, expected")
def a_destination_filled_while_preparing():
    def make(x, out):
        torch.mul(x, 2, out=out)
        return lambda x, out: returning(SHORT, None)

    return INTO | {"optimized": prepared(make)}


@cheat(WRONG)
def half_done_while_preparing():
    def make(x):
        half = (x * 2)[:32]
        return lambda x: returning(SHORT, np.concatenate([half, x[32:] * 2]))

    return {"optimized": prepared(make)}


@cheat("all inputs are static")
def everything_static():
    def make(x):
        result = x * 2
        return lambda x: returning(SHORT, result)

    inputs = lambda bench: static(np.random.default_rng(bench.seed).random(64))
    return {"inputs": inputs, "optimized": prepared(make)}


@cheat(WRONG)
def a_baseline_prepared_on_old_values():
    def make(x):
        copy = x.copy()
        return lambda x: returning(LONG, copy * 2)

    return {"library": prepared(make)} | {"optimized": prepared(make)}


# global settings, timers and the harness


def flipping(flip, when=lambda n: True, arm="optimized"):
    """Return an arm that changes a setting in each call for which ``when(call number)`` is true."""
    calls = State(n=0)

    def double(x):
        calls.n += 1
        if when(calls.n):
            flip()
        return returning(SHORT, x * 2)

    return {arm: double}


def setting(name, value):
    path, _, attribute = name.rpartition(".")
    owner = torch
    for part in path.split(".")[1:]:
        owner = getattr(owner, part)
    return lambda: setattr(owner, attribute, value)


@cheat(SETTINGS + "OMP_NUM_THREADS")
def threads_of_openmp():
    return flipping(lambda: os.environ.update(OMP_NUM_THREADS="1", OMP_DYNAMIC="1"))


@cheat(SETTINGS + "NVIDIA_TF32_OVERRIDE")
def tf32_by_environment():
    return flipping(lambda: os.environ.update(NVIDIA_TF32_OVERRIDE="1"))


@cheat(SETTINGS + "get_num_threads")
def threads_of_torch():
    return flipping(lambda: torch.set_num_threads(3))


@cheat(SETTINGS + "get_float32_matmul_precision")
def precision_of_products():
    return flipping(lambda: torch.set_float32_matmul_precision("medium"))


@cheat(SETTINGS + "cudnn.allow_tf32")
def tf32_of_cudnn():
    return flipping(setting("torch.backends.cudnn.allow_tf32", not torch.backends.cudnn.allow_tf32))


@cheat(SETTINGS + "cudnn.benchmark")
def autotuning_of_cudnn():
    return flipping(setting("torch.backends.cudnn.benchmark", True))


@cheat(SETTINGS + "cudnn.deterministic")
def determinism_of_cudnn():
    return flipping(setting("torch.backends.cudnn.deterministic", True))


@cheat(SETTINGS + "get_default_dtype")
def the_default_dtype():
    return flipping(lambda: torch.set_default_dtype(torch.float64))


@cheat(SETTINGS + "is_grad_enabled")
def gradients_off():
    return flipping(lambda: torch.set_grad_enabled(False))


@cheat(SETTINGS + "deterministic_algorithms")
def deterministic_algorithms():
    return flipping(lambda: torch.set_deterministic_debug_mode("warn"))


@cheat(SETTINGS + "cudnn.benchmark")
def a_setting_once_it_is_timed():
    return flipping(setting("torch.backends.cudnn.benchmark", True), lambda n: n > 30)


@cheat(SETTINGS + "get_num_threads")
def a_baseline_that_takes_the_threads_away():
    return flipping(lambda: torch.set_num_threads(1), lambda n: n == 1, "baseline")


@cheat(SETTINGS + "time.perf_counter_ns")
def the_host_timer():
    return flipping(lambda: setattr(time, "perf_counter_ns", lambda: 0))


@cheat("optimized: a call leaves work on a stream")
def a_stream_that_is_not_joined():
    def double(x):
        fork(joined=False)
        return returning(SHORT, x * 2)

    return {"optimized": double}


@cheat("optimized: a call starts work on a stream")
def a_stream_that_does_not_wait():
    def double(x):
        fork(waits=False)
        return returning(SHORT, x * 2)

    return {"optimized": double}


@cheat(SETTINGS + "sys.setprofile")
def a_profiler_of_python():
    return flipping(lambda: sys.setprofile(lambda *_: None), arm="baseline")


@cheat(SETTINGS + "time.monotonic")
def the_budget_timer():
    return flipping(
        lambda: setattr(time, "monotonic", type("T", (), {"__call__": lambda _: 0.0})())
    )


@cheat(SETTINGS + "device.now")
def the_clocks_own_timer():
    return flipping(lambda: setattr(pytest_aiperf.device.device, "now", lambda: 0))


@cheat(SETTINGS + "elapsed_time")
def the_event_timer():
    return flipping(lambda: setattr(torch.cuda.Event, "elapsed_time", lambda *_: 1e-3))


@cheat(SETTINGS + "torch.cuda.synchronize")
def waiting_for_the_device():
    return flipping(lambda: setattr(torch.cuda, "synchronize", lambda *_: None))


@cheat(SETTINGS + "accuracy.verify")
def the_oracle():
    return flipping(
        lambda: setattr(pytest_aiperf.correctness.accuracy, "verify", lambda *_a, **_k: [])
    )


@cheat("CUDA_LAUNCH_BLOCKING=1")
def a_debugging_environment():
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    return {}


@cheat("a profiler is attached")
def a_profiler_beside_it():
    os.environ["CUDA_INJECTION64_PATH"] = "/x/libprofiler.so"
    return {}


@cheat("software thermal slowdown", faults=(Fault(20, "throttle", blocks=10_000),))
def a_gpu_that_is_never_calm():
    return {}


# compilation


@cheat("torch.compile, which compiled during the round")
def compiling_in_the_clock():
    compiled, calls = torch.compile(lambda x: x * 2, backend="eager"), State(n=0)

    def arm(x):
        calls.n += 1
        if calls.n % 8 == 0:
            torch._dynamo.reset()
        return returning(LONG, compiled(x))

    return DOUBLE | {"baseline": arm, "optimized": doubling(100)}


# scores and memory


def scoring(score, result=lambda x: x * 2):
    return lambda x: (returning(SHORT, result(x)), Score(score, "tokens/s"))


SCORES = {"metric": "score", "baseline": scoring(100.0)}


@cheat(WRONG)
def a_score_for_wrong_results():
    return SCORES | {"optimized": scoring(200.0, lambda x: x)}


@cheat("a ratio needs more than 0")
def a_score_of_nothing():
    return SCORES | {"baseline": scoring(0.0), "optimized": scoring(200.0)}


@cheat("a ratio needs more than 0")
def a_score_that_is_no_number():
    return SCORES | {"optimized": scoring(float("nan"))}


@cheat("exactly one Score")
def two_scores():
    return SCORES | {
        "optimized": lambda x: (x * 2, Score(200.0, "tokens/s"), Score(300.0, "tokens/s"))
    }


@cheat("after measuring")
def a_score_whose_results_end():
    calls = State(n=0)

    def result(x):
        calls.n += 1
        return x * 2 if calls.n < 6 else x

    return SCORES | {"optimized": scoring(200.0, result)}


@cheat("after measuring")
def memory_of_an_arm_that_stops_working():
    calls = State(n=0)

    def arm(x):
        calls.n += 1
        buffer = Allocation(100 if calls.n > 5 else 3000)
        return x * 2 if buffer.size == 3000 else x

    def baseline(x):
        buffer = Allocation(3000)
        return x * 2 if buffer else x

    return {"metric": "memory", "baseline": baseline, "optimized": arm}
