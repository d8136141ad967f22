"""Honest arms that change objects among their arguments, or read memory that lies inside of one."""

from __future__ import annotations

import collections
import ctypes
import io
from types import SimpleNamespace

import numpy as np

from tests.cheats.case import Corpus
from tests.cheats.dishonest_objects import (
    LARGE,
    a_counting_class,
    a_function_of,
    add_anew,
    add_in_place,
    hook,
    hooking,
    large,
    put,
    put_copies,
    queueing,
    records,
    reference_of,
    requiring,
    rows,
    table,
    vectors,
    with_queue,
)
from tests.cheats.honest import arms

honest = Corpus()
HONEST = honest.entries


def changing(destination, change, baseline=None):
    arm = lambda how: lambda x, d: (how(d, x), x * 2)[1]
    words = {
        "inputs": lambda bench: (*vectors(bench), destination()),
        "reference": reference_of(change),
    }
    return arms(arm(change), arm(baseline or change), **words)


@honest()
def integers_of_128_bits_in_an_argument():
    return changing(lambda: [0] * 64, put(large))


@honest()
def integers_of_128_bits_in_a_result():
    return arms(large, lambda x: list(large(x)), inputs=vectors, reference=large)


@honest()
def negative_integers_beside_some_of_64_bits():
    numbers = lambda x: [(-1) ** i * (int(v * 2**53) << 11) for i, v in enumerate(x.tolist())]
    beside = lambda x: [number if number < 0 else number + 2**63 for number in numbers(x)]
    return arms(beside, inputs=vectors, reference=beside)


def holding(hold, read, other=None):
    words = {
        "inputs": lambda bench: (hold(*vectors(bench)),),
        "reference": lambda d: np.array(read(d)),
    }
    return arms(read, other, **words)


@honest()
def an_argument_that_requires_grad_after_both_arms():
    claim = requiring(baseline=True, optimized=True)
    return arms(claim["baseline"], inputs=claim["inputs"], reference=claim["reference"])


@honest()
def a_hook_that_both_arms_register():
    claim = hooking(hook, hook)
    return arms(claim["baseline"], inputs=claim["inputs"], reference=claim["reference"])


@honest()
def copies_of_an_attribute():
    return holding(lambda x: SimpleNamespace(x=x), lambda d: d.x + 0, lambda d: d.x.copy())


@honest()
def views_of_an_attribute_in_both_arms():
    return holding(lambda x: collections.deque([x]), lambda d: d[0][:])


@honest()
def copies_of_what_a_function_holds():
    return holding(a_function_of, lambda d: d() + 0, lambda d: d().copy())


@honest()
def copies_of_an_array_of_c():
    return holding(
        lambda x: (ctypes.c_double * len(x))(*x), np.array, lambda d: np.ctypeslib.as_array(d) + 0
    )


@honest()
def copies_of_a_file_in_memory():
    return holding(
        lambda x: io.BytesIO(x.tobytes()),
        lambda d: np.frombuffer(d.getbuffer()).copy(),
        lambda d: np.frombuffer(d.getvalue()).copy(),
    )


@honest()
def a_result_in_the_workspace_of_an_object():
    """The arm computes into memory that an argument keeps, and the baseline into new memory."""
    return arms(
        lambda x, d: np.multiply(x, 2, out=d.workspace[: len(x)]),
        lambda x, d: x * 2,
        inputs=lambda bench: (*vectors(bench), SimpleNamespace(workspace=np.zeros(99))),
        reference=lambda x, d: x + x,
    )


@honest()
def copies_of_rows_in_an_argument():
    """The baseline takes the rows of the inputs, and the arm does more: it copies them."""
    return arms(
        lambda r, d: (d.__setitem__(slice(None), [list(row) for row in r]), float(np.sum(r)))[1],
        lambda r, d: (d.__setitem__(slice(None), r), float(np.sum(r)))[1],
        inputs=rows,
        reference=lambda r, d: (float(np.sum(r)), r),
    )


@honest()
def equal_rows_in_an_argument():
    several = lambda x: [x.tolist() for _ in range(8)]
    one = lambda x: [x.tolist()] * 8
    return changing(lambda: [[0.0] * 64 for _ in range(8)], put(several), put(one))


@honest()
def an_item_that_both_arms_change_in_place():
    return changing(table, add_in_place, lambda d, x: np.add(d["total"], x, out=d["total"]))


@honest()
def an_item_that_both_arms_replace():
    return changing(table, add_anew, lambda d, x: d.update(total=d["total"] + x))


@honest()
def an_item_that_is_changed_and_then_replaced_by_a_copy():
    """Whoever holds the item sees the same as with the baseline."""

    def add(d, x):
        d["total"] += x
        d["total"] = d["total"].copy()

    return changing(table, add, add_in_place)


@honest()
def rows_that_are_sorted_in_place_or_by_copies():
    def inputs(bench):
        return (np.random.default_rng(bench.seed).random((9, 20)).tolist(),)

    return arms(
        lambda d: d.sort(),
        lambda d: d.__setitem__(slice(None), sorted(d)),
        inputs=inputs,
        reference=sorted,
    )


@honest()
def a_class_that_is_not_changed():
    return arms(
        lambda x, kind: x * 2,
        inputs=lambda bench: (*vectors(bench), a_counting_class()),
        reference=lambda x, kind: x + x,
    )


@honest()
def an_argument_that_both_arms_leave_read_only():
    return arms(lambda x: (x.setflags(write=False), x * 2)[1], reference=lambda x: x + x)


@honest()
def a_bytearray_that_is_viewed_and_released():
    def optimized(x, d):
        with memoryview(d) as view:
            view[:] = x.tobytes()
        return x * 2

    def baseline(x, d):
        d[:] = x.tobytes()
        return x * 2

    words = {"inputs": lambda bench: (*vectors(bench), bytearray(512))}
    return arms(optimized, baseline, reference=lambda x, d: x + x, **words)


@honest()
def few_numbers_of_numpy_in_a_result():
    figures = lambda x: {"sum": float(x.sum()), "largest": float(x.max())}
    return arms(
        lambda x: {"sum": x.sum(), "largest": x.max()}, figures, inputs=vectors, reference=figures
    )


@honest()
def truth_values_of_a_view():
    return arms(
        lambda x: (x > x.mean()).view(np.uint8).view(bool),
        lambda x: ~(x <= x.mean()),
        inputs=vectors,
        reference=lambda x: x > x.mean(),
    )


def _count(d, keys, step):
    for key in keys:
        d[key] = d.get(key, 0) + step


@honest()
def a_long_dict_that_calls_fill():
    """The reference returns such a dict, as anybody would write it."""
    return arms(
        lambda d, keys: _count(d, keys, 1),
        lambda d, keys: d.update(collections.Counter(keys)),
        inputs=lambda bench: ({}, [int(1e6 * value) % 300 for value in vectors(bench)[0]]),
        reference=lambda d, keys: dict(collections.Counter(keys)),
    )


@honest()
def a_tensor_that_both_arms_replace():
    import torch

    def anew(d, x):
        d.data = torch.from_numpy(x) * 2

    return arms(
        anew,
        lambda d, x: setattr(d, "data", torch.from_numpy(x) * 2),
        inputs=lambda bench: (torch.zeros(len(vectors(bench)[0])).double(), *vectors(bench)),
        reference=lambda d, x: x + x,
    )


@honest()
def numbers_of_python_in_a_result():
    """The arm does more: it converts the numbers."""
    return arms(
        lambda x: (x * 2).tolist(),
        lambda x: list(x * 2),
        inputs=vectors,
        reference=lambda x: list(x + x),
    )


@honest()
def ordinary_tensors_for_an_inference_tensor():
    import torch

    double = lambda x: torch.from_numpy(x) * 2
    return arms(
        torch.no_grad()(double),
        torch.inference_mode()(double),
        inputs=vectors,
        reference=lambda x: x + x,
    )


def _numbers(bench):
    return (np.random.default_rng(bench.seed).random(LARGE),)


@honest()
def parts_of_one_fused_result():
    """The arm computes all in one array, and returns all of it in windows."""
    split = lambda x: tuple(np.split(x * 2, 4))
    apart = lambda x: tuple(part * 2 for part in np.split(x, 4))
    return arms(split, apart, inputs=_numbers, reference=apart)


@honest()
def most_of_a_padded_result():
    padded = lambda x: np.concatenate([x * 2, np.zeros(LARGE // 4)])[:LARGE]
    return arms(padded, lambda x: x * 2, inputs=_numbers, reference=lambda x: x + x)


@honest()
def windows_by_both_arms():
    first = lambda x: np.sort(x)[:64]
    return arms(first, lambda x: np.sort(x, kind="stable")[:64], inputs=_numbers, reference=first)


@honest()
def a_small_window_of_a_large_workspace():
    """The result lies in memory that the caller passes and keeps."""
    return arms(
        lambda x, d: np.multiply(x, 2, out=d.workspace[: len(x)]),
        lambda x, d: x * 2,
        inputs=lambda bench: (*vectors(bench), SimpleNamespace(workspace=np.zeros(LARGE))),
        reference=lambda x, d: x + x,
    )


@honest()
def many_rows_of_an_index_and_a_number():
    return arms(
        lambda x: list(enumerate((x * 2).tolist())), records, inputs=vectors, reference=records
    )


class Odd:
    """An object of which nothing can be read or compared."""

    @property
    def __dict__(self):
        raise RuntimeError

    def __eq__(self, other):
        raise RuntimeError

    def __getattr__(self, name):
        raise RuntimeError

    __hash__ = None


@honest()
def copies_in_a_queue():
    other = lambda d, rows, data: d.extend([*(row + 0 for row in rows), *map(bytearray, data)])
    return arms(queueing(put_copies), queueing(other), **with_queue())


@honest()
def items_of_the_inputs_in_the_queues_of_both_arms():
    share = lambda d, rows, data: d.extend([*rows, *data])
    one_by_one = lambda d, rows, data: [d.append(item) for item in (*rows, *data)]
    return arms(queueing(share), queueing(one_by_one), **with_queue())


@honest()
def odd_objects_among_the_arguments():
    def inputs(bench):
        loop = [Odd(), SimpleNamespace(), (n for n in range(9)), memoryview(b""), object()]
        loop[1].own, loop[1].items = loop[1], loop
        return *vectors(bench), SimpleNamespace(loop=loop, odd=Odd())

    return arms(lambda x, d: x * 2, inputs=inputs, reference=lambda x, d: x + x)
