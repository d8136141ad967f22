"""Honest arms that look like cheats: no guard may refuse them."""

from __future__ import annotations

import collections
import functools
import gc
import math
import os
import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from pytest_aiperf import Score, Work, prepared, static
from tests.cheats.case import Corpus, State
from tests.cheats.dishonest import (
    DOUBLE,
    INTO,
    LARGE,
    PRODUCTS,
    SUMS,
    returning,
    rounded,
    scoring,
    writing,
)
from tests.fake_gpu import Allocation, Fault, fork, spend, synchronise
from tests.plugin.claims import doubling, vectors

honest = Corpus()
HONEST = honest.entries
FAST, SLOW = 100e-6, 200e-6


def arms(optimized, baseline=None, **words):
    """Return a claim whose optimized arm takes half the time of the baseline."""
    baseline = baseline or optimized
    return {
        "baseline": lambda *a: returning(SLOW, baseline(*a)),
        "optimized": lambda *a: returning(FAST, optimized(*a)),
        **words,
    }


def same(claim, optimized):
    """Return the claim with another optimized arm."""
    return claim | {"optimized": lambda *a: returning(FAST, optimized(*a))}


# state that may be kept between calls


@honest()
def one_buffer_for_all_results():
    buffer = np.empty(64)
    return arms(lambda x: np.multiply(x, 2, out=buffer[: len(x)]))


@honest()
def a_plan_for_each_shape():
    plans = {}
    return arms(lambda x: x * plans.setdefault(x.shape, 2))


@honest()
def a_table_that_depends_on_the_size():
    @functools.lru_cache
    def table(n):
        return np.full(n, 2.0)

    return arms(lambda x: x * table(len(x)))


@honest()
def a_handle_made_by_the_first_call():
    handle = State(factor=None)

    def arm(x):
        if handle.factor is None:
            spend(1.0)
            handle.factor = 2
        return x * handle.factor

    return arms(arm)


@honest()
def a_workspace_that_grows():
    workspace = State(array=np.empty(0))

    def arm(x):
        if len(workspace.array) < len(x):
            workspace.array = np.empty(len(x))
        np.copyto(workspace.array[: len(x)], x)
        return workspace.array[: len(x)] * 2

    return arms(arm)


@honest()
def a_count_of_calls():
    calls = collections.Counter()
    return arms(lambda x: [calls.update(n=1), x * 2][1])


@honest()
def what_repeats_within_a_call():
    def arm(x):
        cache = {}
        return np.array([cache.setdefault(v, v * 2) for v in x.tolist() * 2][: len(x)])

    return arms(arm)


@honest()
def compiled_before_it_is_timed():
    return DOUBLE | {"optimized": torch.compile(doubling(100), backend="eager")}


@honest()
def two_buffers_in_turn():
    def arm(seconds):
        state = State(index=0, buffers=(np.empty(64), np.empty(64)))

        def double(x):
            state.index ^= 1
            out = state.buffers[state.index][: len(x)]
            return returning(seconds, np.multiply(x, 2, out=out))

        return double

    return {"baseline": arm(SLOW), "optimized": arm(FAST)}


# work that may be prepared


def with_weights(bench):
    rng = np.random.default_rng(bench.seed)
    return rng.random(64), static(rng.random(64))


WEIGHED = {
    "inputs": with_weights,
    "baseline": lambda x, w: returning(SLOW, x * (w / 2)),
    "reference": lambda x, w: x * w / 2,
}


@honest()
def weights_that_are_quantised_before():
    def make(x, w):
        half = w / 2
        return lambda x, w: returning(FAST, x * half)

    return WEIGHED | {"optimized": prepared(make)}


@honest()
def a_graph_of_the_live_inputs():
    def make(x):
        out = np.empty_like(x)
        return lambda _: returning(FAST, np.multiply(x, 2, out=out))

    return {"optimized": prepared(make)}


@honest()
def static_inputs_of_a_graph_that_copies():
    def make(x):
        static_x, out = np.empty_like(x), np.empty_like(x)

        def replay(x):
            np.copyto(static_x, x)
            return returning(FAST, np.multiply(static_x, 2, out=out))

        return replay

    return {"optimized": prepared(make)}


@honest()
def both_arms_prepared():
    def make(seconds):
        return prepared(lambda x, w: lambda x, w: returning(seconds, x * w / 2))

    return WEIGHED | {"baseline": make(SLOW), "optimized": make(FAST)}


@honest()
def a_long_preparation():
    def make(x):
        spend(10.0)
        return doubling(100)

    return {"optimized": prepared(make)}


@honest()
def a_destination_of_a_prepared_arm():
    return INTO | {
        "optimized": prepared(lambda x, out: lambda x, out: writing(FAST, torch.add(x, x, out=out)))
    }


@honest()
def a_file_opened_while_preparing():
    def inputs(bench):
        file = tempfile.TemporaryFile()  # noqa: SIM115  it is closed when its inputs are freed
        file.write(np.random.default_rng(bench.seed).random(64).tobytes())
        file.flush()
        return file, np.empty(64)

    def read(file, out):
        file.seek(0)
        np.copyto(out, np.frombuffer(file.read()) * 2)

    def reference(file, out):
        read(file, out)
        return out

    return {
        "inputs": inputs,
        "baseline": lambda file, out: writing(SLOW, read(file, out)),
        "optimized": prepared(lambda file, out: lambda f, o: writing(FAST, read(file, o))),
        "reference": reference,
    }


# forms in which results may be returned


@honest()
def a_destination():
    return INTO | {"optimized": lambda x, out: writing(FAST, torch.add(x, x, out=out))}


@honest()
def a_destination_that_is_returned():
    return INTO | {"optimized": lambda x, out: returning(FAST, torch.add(x, x, out=out))}


@honest()
def a_strided_destination():
    inputs = lambda bench: (torch.randn(8, 4), torch.empty(4, 8).t())
    return INTO | {
        "inputs": inputs,
        "optimized": lambda x, out: writing(FAST, out.copy_(x * 2)),
    }


@honest()
def an_update_in_place():
    def add(seconds):
        return lambda x: writing(seconds, np.add(x, 1, out=x))

    return {"baseline": add(SLOW), "optimized": add(FAST), "reference": lambda x: x + 1}


@honest()
def an_update_in_place_that_is_returned():
    def add(seconds):
        return lambda x: returning(seconds, np.add(x, 1, out=x))

    return {"baseline": add(SLOW), "optimized": add(FAST), "reference": lambda x: x + 1}


@honest()
def a_sort_in_place():
    def sort(seconds):
        return lambda x: writing(seconds, x.sort())

    return {"baseline": sort(SLOW), "optimized": sort(FAST), "reference": np.sort}


@honest()
def views_by_both_arms():
    words = {"inputs": lambda bench: (torch.randn(64, 8),), "reference": lambda x: x.t()}
    return arms(lambda x: x.t(), **words)


@honest()
def a_view_of_its_own_result():
    words = {
        "inputs": lambda bench: (torch.randn(8, 8),),
        "reference": lambda x: 2 * x.double().t(),
    }
    return arms(lambda x: (x * 2).t(), lambda x: (x.t() * 2).contiguous(), **words)


@honest()
def results_in_a_dict():
    return arms(lambda x: {"y": x * 2, "z": x + 1}, reference=lambda x: {"y": x + x, "z": x + 1})


@honest()
def results_in_an_ordered_dict():
    return arms(lambda x: collections.OrderedDict(y=x * 2))


class Pair(NamedTuple):
    left: object
    right: object


@honest()
def results_in_a_named_tuple():
    return arms(lambda x: Pair(x * 2, x + 1), reference=lambda x: (x + x, x + 1))


@dataclass
class Boxed:
    value: object
    missing: object = None


@dataclass(slots=True)
class Slotted:
    value: object


@honest()
def results_in_a_dataclass():
    return arms(lambda x: Boxed(x * 2))


@honest()
def results_in_slots():
    return arms(lambda x: Slotted(x * 2))


@honest()
def numbers_of_python():
    return arms(lambda x: float(x.sum()), reference=math.fsum)


@honest()
def numbers_of_numpy():
    return arms(lambda x: x.max(), reference=lambda x: x.max())


@honest()
def gradients():
    words = {
        "inputs": lambda bench: (torch.randn(64, requires_grad=True),),
        "reference": lambda x: 2 * x.detach().double(),
    }
    return arms(lambda x: (x * x).sum().backward(), **words)


@honest()
def modules():
    def inputs(bench):
        return torch.nn.Linear(8, 8), torch.randn(4, 8)

    def reference(model, x):
        return model.double()(x.double())

    return arms(torch.no_grad()(lambda model, x: model(x)), inputs=inputs, reference=reference)


# dtypes and precision


@honest()
def integers():
    inputs = lambda bench: np.random.default_rng(bench.seed).integers(0, 1 << 40, 64)
    return {"inputs": inputs}


@honest()
def truth_values():
    inputs = lambda bench: (torch.randn(64), torch.empty(64, dtype=torch.bool))
    return arms(
        lambda x, out: writing(0, torch.gt(x, 0, out=out)),
        inputs=inputs,
        reference=lambda x, out: x > 0,
    )


@honest()
def complex_numbers():
    inputs = lambda bench: torch.randn(64, dtype=torch.complex64)
    return arms(lambda x: x * 2, inputs=inputs, reference=lambda x: x.to(torch.complex128) * 2)


@honest()
def half_precision_of_both():
    inputs = lambda bench: torch.randn(64).half()
    return arms(
        lambda x: x * 2.1, lambda x: 2.1 * x, inputs=inputs, reference=lambda x: x.double() * 2.1
    )


@honest()
def bf16_with_fp32_sums():
    inputs = lambda bench: torch.rand(64, 1024).bfloat16()
    words = {"inputs": inputs, "reference": lambda x: x.double().sum(1)}
    return arms(lambda x: x.float().sum(1).bfloat16(), lambda x: x.sum(1), **words)


@honest()
def fp8_results():
    inputs = lambda bench: torch.randn(64).to(torch.float8_e4m3fn)
    words = {"inputs": inputs, "reference": lambda x: x.double() * 2}
    return arms(
        lambda x: (x.float() * 2).to(x.dtype), lambda x: (x.double() * 2).to(x.dtype), **words
    )


@honest()
def a_sum_in_another_order():
    return same(SUMS, lambda x: x.flip(1).cumsum(1)[:, -1].clone())


@honest()
def a_sum_in_parts():
    return same(SUMS, lambda x: x.view(64, 16, 16).sum(2).sum(1))


@honest()
def a_sum_in_fp64():
    return same(SUMS, lambda x: x.double().sum(1).float())


@honest()
def a_product_in_blocks():
    return same(
        PRODUCTS, lambda a, b: sum(a[:, k : k + 64] @ b[k : k + 64] for k in range(0, 512, 64))
    )


@honest()
def tf32_that_is_declared():
    words = same(PRODUCTS, lambda a, b: rounded(a, 10) @ rounded(b, 10))
    return words | {"precision": "tf32"}


@honest()
def bf16_that_is_declared():
    return same(SUMS, lambda x: x.bfloat16().sum(1).float()) | {"precision": "bf16"}


@honest()
def a_formula_that_is_exact_to_rounding():
    words = {"inputs": lambda bench: torch.rand(64), "reference": lambda x: x.double().expm1()}
    return arms(torch.expm1, lambda x: torch.exp(x.double()).sub(1).float(), **words)


# inputs of all kinds


@honest()
def an_input_that_is_passed_twice():
    def inputs(bench):
        (x,) = vectors(bench)
        return x, x

    return arms(lambda x, y: x + y, inputs=inputs, reference=lambda x, y: x * 2)


@honest()
def numbers_texts_and_nothing():
    def inputs(bench):
        return (*vectors(bench), 2, "a text", None)

    return arms(lambda x, n, *_: x * n, inputs=inputs, reference=lambda x, n, *_: x + x)


@honest()
def shapes_that_the_seed_decides():
    inputs = lambda bench: np.random.default_rng(bench.seed).random(50 + bench.seed % 17)
    return {"inputs": inputs}


@honest()
def lengths_that_belong_to_the_values():
    def inputs(bench):
        rng = np.random.default_rng(bench.seed)
        starts = np.sort(rng.integers(0, 64, 8))
        return rng.random(64), starts, int(np.diff(starts).max())

    def segment_sums(x, starts, longest):
        ends = np.minimum(starts[:-1] + longest, starts[1:])
        return np.array([x[s:e].sum() for s, e in zip(starts[:-1], ends, strict=True)])

    return arms(segment_sums, inputs=inputs, reference=segment_sums)


@honest()
def inputs_that_cannot_be_written():
    def inputs(bench):
        (x,) = vectors(bench)
        x.flags.writeable = False
        return x

    return {"inputs": inputs}


@honest()
def inputs_that_are_expanded():
    inputs = lambda bench: torch.randn(1, 64).expand(4, 64)
    return DOUBLE | {"inputs": inputs, "optimized": doubling(100)}


@honest()
def inputs_that_are_transposed():
    return DOUBLE | {"inputs": lambda bench: torch.randn(8, 8).t(), "optimized": doubling(100)}


@honest()
def a_file_that_is_mapped():
    def inputs(bench):
        with tempfile.NamedTemporaryFile() as file:
            vectors(bench)[0].tofile(file.name)
            return np.memmap(file.name, float, "r")

    return arms(lambda x: np.array(x) * 2, inputs=inputs, reference=lambda x: np.array(x) * 2)


@honest()
def a_table_beside_what_is_drawn():
    def inputs(bench):
        return (*vectors(bench), np.arange(64.0))

    return arms(lambda x, t: x * t, inputs=inputs, reference=lambda x, t: x * t)


@honest()
def nothing_that_is_read():
    inputs = lambda bench: np.empty(64)
    return {
        "inputs": inputs,
        "baseline": lambda out: writing(SLOW, out.fill(7)),
        "optimized": lambda out: writing(FAST, out.fill(7)),
        "reference": lambda out: np.full(64, 7.0),
    }


@honest()
def counters_that_are_reset():
    inputs = lambda bench: (torch.randint(0, 8, (64,)), torch.zeros(8, dtype=torch.int64))

    def count(seconds):
        return lambda x, n: writing(seconds, n.copy_(torch.bincount(x, minlength=8)))

    return {
        "inputs": inputs,
        "baseline": count(SLOW),
        "optimized": count(FAST),
        "reference": lambda x, n: torch.bincount(x, minlength=8),
    }


# work that depends on the values


@honest()
def zeros_that_are_skipped():
    def inputs(bench):
        rng = np.random.default_rng(bench.seed)
        return rng.random(64) * (rng.random(64) < 0.1)

    def arm(x):
        out = np.zeros_like(x)
        (indices,) = np.nonzero(x)
        out[indices] = x[indices] * 2
        return out

    return arms(arm, inputs=inputs)


@honest()
def an_early_end():
    def arm(x):
        spend(50e-6 * float(x[0] + 1))
        return x * 2

    return {"baseline": doubling(400), "optimized": arm}


@honest()
def a_time_that_depends_on_the_call():
    generator = random.Random(3)

    def arm(x):
        spend(generator.uniform(95e-6, 105e-6))
        return x * 2

    return {"optimized": arm}


@honest()
def a_baseline_that_is_slower_at_first_sight():
    seen = set()

    def baseline(x):
        spend(250e-6 if float(x[0]) not in seen else SLOW)
        seen.add(float(x[0]))
        return x * 2

    return {"baseline": baseline}


@honest()
def a_call_that_waits():
    def arm(x):
        spend(FAST)
        synchronise()
        return x * 2

    return {"optimized": arm}


# settings and the host


@honest()
def a_setting_for_one_call():
    def arm(x):
        with torch.backends.cudnn.flags(benchmark=True):
            return x * 2

    return same(DOUBLE, arm)


@honest()
def gradients_off_for_one_call():
    return same(DOUBLE, torch.no_grad()(lambda x: x * 2))


@honest()
def a_variable_for_one_call():
    def arm(x):
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            return x * 2
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before

    return arms(arm)


@honest()
def a_variable_of_its_own():
    return arms(lambda x: [os.environ.update(MY_KERNEL="1"), x * 2][1])


@honest()
def an_arm_that_reads_the_time():
    return arms(lambda x: [time.perf_counter_ns(), time.monotonic(), x * 2][2])


@honest()
def random_numbers_of_its_own():
    generator = np.random.default_rng(1)
    return arms(lambda x: [generator.random(100), x * 2][1])


@honest()
def an_arm_that_collects_garbage():
    return arms(lambda x: [gc.collect(0), x * 2][1])


@honest()
def an_exception_that_is_handled():
    def arm(x):
        try:
            raise KeyError  # noqa: TRY301  the arm handles its own exception
        except KeyError:
            return x * 2

    return arms(arm)


@honest(clock="host")
def threads_that_are_joined():
    def arm(x, out):
        threads = [threading.Thread(target=lambda: np.copyto(out, np.sort(x))) for _ in range(1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return LARGE | {"optimized": arm}


@honest(clock="host")
def a_pool_that_is_waited_for():
    pool = ThreadPoolExecutor(2)

    def arm(x, out):
        half = len(x) // 2
        parts = pool.map(np.sort, (x[:half], x[half:]))
        np.copyto(out, np.sort(np.concatenate(list(parts)), kind="stable"))

    return LARGE | {"optimized": arm}


@honest(clock="host")
def threads_of_torch_that_spin_on():
    return {
        "inputs": lambda bench: torch.rand(1 << 18),
        "baseline": lambda x: x * 2,
        "optimized": lambda x: torch.add(x, x),
        "reference": lambda x: x.double() * 2,
        "metric": "wall",
    }


@honest(clock="host")
def the_same_values_sorted_again():
    return LARGE | {"optimized": lambda x, out: np.copyto(out, np.sort(x, kind="stable"))}


# limits, metrics and ordinary GPU behavior


@honest()
def near_the_limit():
    return {"work": lambda x: Work(read=2.0e12 * 100e-6, written=2.0e12 * 100e-6)}


@honest()
def a_warm_cache_that_is_declared():
    return {"work": lambda x: Work(read=3e12 * 100e-6, written=3e12 * 100e-6), "cache": "warm"}


@honest()
def flops_near_the_limit():
    return {"work": lambda x: Work(flops=780e12 * 100e-6, dtype="bf16")}


@honest()
def a_library_beside_it():
    return {"library": doubling(150)}


@honest()
def a_score():
    return {"metric": "score", "baseline": scoring(100.0), "optimized": scoring(150.0)}


@honest()
def a_score_where_less_is_better():
    def scored(score):
        return lambda x: (x * 2, Score(score, "ms", "lower"))

    return {"metric": "score", "baseline": scored(9.0), "optimized": scored(3.0)}


@honest()
def less_memory():
    def holding(size):
        def double(x):
            buffer = Allocation(size)
            return x * 2 if buffer else x

        return double

    return {"metric": "memory", "baseline": holding(3000), "optimized": holding(1000)}


@honest(faults=(Fault(20, "throttle", blocks=1),))
def a_throttle_that_passes():
    return {}


@honest()
def figures_of_two_metrics():
    return {"metric": ("device", "wall")}


@honest()
def captured_calls():
    return {"baseline": doubling(20), "optimized": doubling(10)}


@honest()
def long_calls():
    return {"baseline": doubling(20_000), "optimized": doubling(10_000)}


@honest()
def a_stream_that_the_caller_waits_for():
    def double(x):
        fork(waits=False, joined=False)
        return returning(FAST, x * 2)

    return {"optimized": double, "metric": "wall"}
