"""Arms that leave other objects in their arguments, or return memory that lies inside of one."""

from __future__ import annotations

import array
import collections
import ctypes
import io
from types import SimpleNamespace

import numpy as np
import torch

from tests.cheats.case import Corpus
from tests.cheats.dishonest_results import VIEW, pair

cheat = Corpus()
CHEATS = cheat.entries
marked = Corpus()
MARKED = marked.entries


def vectors(bench):
    return (np.random.default_rng(bench.seed).random(64),)


def large(x):
    """Return integers of 128 bits that depend on an array."""
    return [int(value * 2**53) << 75 | i for i, value in enumerate(x.tolist())]


def changing(destination, baseline, optimized):
    """Return a claim whose arms change an argument and return an array."""

    def arm(change):
        return lambda x, d: (change(d, x), x * 2)[1]

    words = {
        "inputs": lambda bench: (*vectors(bench), destination()),
        "reference": reference_of(baseline),
    }
    return pair(arm(baseline), arm(optimized), **words)


def reference_of(baseline):
    """Return a reference that gives the result and the numbers in the changed argument."""

    def reference(x, d):
        baseline(d, x)
        return x + x, numbers_in(d)

    return reference


def numbers_in(value):
    """Return a container without what is neither a container nor a number."""
    if isinstance(value, dict):
        return {key: numbers_in(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [numbers_in(item) for item in value]
    return value if isinstance(value, (float, int, np.ndarray)) else None


def put(make):
    """Return a change that replaces the items of a list."""
    return lambda d, x: d.__setitem__(slice(None), make(x))


@cheat("optimized disagrees with the reference: d")
def integers_of_128_bits():
    return changing(
        lambda: [0] * 64, put(large), put(lambda x: [number + 1 for number in large(x)])
    )


@cheat("optimized disagrees with the reference: d")
def integers_that_are_rounded_to_doubles():
    signed = lambda x: [(-1) ** i * (int(v * 2**53) << 10) + i for i, v in enumerate(x.tolist())]
    unsigned = lambda x: [abs(number) << 1 for number in signed(x)]
    both = lambda x: signed(x)[:32] + unsigned(x)[32:]
    rounded = lambda x: [int(float(number)) for number in both(x)]
    return changing(lambda: [0] * 64, put(both), put(rounded))


def holding(hold, view, copy):
    """Return a claim whose baseline copies what an object holds, and whose arm returns a view."""
    words = {
        "inputs": lambda bench: (hold(*vectors(bench)),),
        "reference": lambda d: np.array(copy(d)),
    }
    return pair(copy, view, **words)


def a_function_of(x):
    return lambda: x


@cheat(VIEW)
def a_view_of_an_attribute():
    return holding(lambda x: SimpleNamespace(x=x), lambda d: d.x[:], lambda d: d.x.copy())


@cheat(VIEW)
def a_view_of_an_item_of_a_queue():
    return holding(lambda x: collections.deque([x]), lambda d: d[0][:], lambda d: d[0].copy())


@cheat(VIEW)
def a_view_of_what_a_function_holds():
    return holding(a_function_of, lambda d: d()[:], lambda d: d().copy())


@cheat(VIEW)
def a_view_of_an_array_of_c():
    as_array = np.ctypeslib.as_array
    return holding(lambda x: (ctypes.c_double * len(x))(*x), as_array, lambda d: as_array(d) + 0)


@cheat(VIEW)
def a_view_of_a_file_in_memory():
    return holding(
        lambda x: io.BytesIO(x.tobytes()),
        lambda d: np.frombuffer(d.getbuffer()),
        lambda d: np.frombuffer(d.getvalue()).copy(),
    )


@cheat(VIEW)
def a_view_of_the_bytes_of_a_file_in_memory():
    copy = lambda d: np.frombuffer(d.getvalue()).copy()
    # read-only, as the arm's
    locked = lambda d: (result := copy(d)).setflags(write=False) or result
    return holding(lambda x: io.BytesIO(x.tobytes()), lambda d: np.frombuffer(d.getvalue()), locked)


@cheat(VIEW)
def a_view_of_numbers_in_an_object():
    return holding(
        lambda x: SimpleNamespace(x=array.array("d", x)),
        lambda d: np.frombuffer(d.x),
        lambda d: np.array(d.x),
    )


def rows(bench):
    (x,) = vectors(bench)
    return x.reshape(8, -1).tolist(), [[0.0] * (len(x) // 8) for _ in range(8)]


def filling(baseline, optimized):
    """Return a claim whose arms put rows into a list."""
    reference = lambda r, d: (float(np.sum(r)), r)
    arm = lambda how: lambda r, d: (d.__setitem__(slice(None), how(r)), float(np.sum(r)))[1]
    return pair(arm(baseline), arm(optimized), inputs=rows, reference=reference)


@cheat("optimized puts lists, dicts, arrays or objects of its inputs into an argument")
def rows_of_the_inputs_in_an_argument():
    return filling(lambda r: [list(row) for row in r], lambda r: r)


@cheat("optimized leaves lists, dicts or objects that appear 7 times more in an argument")
def one_row_many_times_in_an_argument():
    return changing(
        lambda: [[0.0] * 64 for _ in range(8)],
        put(lambda x: [x.tolist() for _ in range(8)]),
        put(lambda x: [x.tolist()] * 8),
    )


BORROWED = "optimized puts lists, dicts, arrays or objects of its inputs into an argument"


def with_queue(destination=collections.deque):
    """Return an inputs function that gives arrays, bytes, and where items of them are put."""

    def inputs(bench):
        (x,) = vectors(bench)
        return x, [x * i for i in range(3)], [bytearray(x.tobytes())], destination()

    return {"inputs": inputs, "reference": lambda x, rows, data, d: x + x}


def queueing(put):
    return lambda x, rows, data, d: (put(d, rows, data), x * 2)[1]


def put_copies(d, rows, data):
    d.extend([row.copy() for row in rows])
    d.extend(map(bytearray, data))


@cheat(BORROWED)
def arrays_of_the_inputs_in_a_queue():
    share = lambda d, rows, data: d.extend([*rows, *map(bytearray, data)])
    return pair(queueing(put_copies), queueing(share), **with_queue())


@cheat(BORROWED)
def views_of_the_inputs_in_a_queue():
    share = lambda d, rows, data: d.extend([*(row[:] for row in rows), *map(bytearray, data)])
    return pair(queueing(put_copies), queueing(share), **with_queue())


@cheat(BORROWED)
def bytes_of_the_inputs_in_a_queue():
    share = lambda d, rows, data: d.extend([*map(np.copy, rows), *data])
    return pair(queueing(put_copies), queueing(share), **with_queue())


@cheat(BORROWED)
def arrays_of_the_inputs_in_an_array_of_objects():
    put = lambda copy: queueing(lambda d, rows, _: d.__setitem__(0, copy(rows[1])))
    return pair(put(np.copy), put(lambda row: row), **with_queue(lambda: np.empty(1, object)))


def table():
    return {"total": np.ones(64)}


def add_in_place(d, x):
    d["total"] += x[:64]


def add_anew(d, x):
    d["total"] = d["total"] + x[:64]


@cheat(r"optimized puts a new object into d\['total'\], and the baseline changes the one that is")
def an_item_that_is_replaced():
    return changing(table, add_in_place, add_anew)


@marked(r"the objects that were in d\['total'\]: optimized changes them in place")
def an_item_that_is_changed_in_place():
    return changing(table, add_anew, add_in_place)


@cheat(r"optimized puts a new object into d\['row'\], and the baseline changes the one that is")
def a_row_that_is_replaced():
    return changing(
        lambda: {"row": [1.0] * 20},
        lambda d, x: d["row"].__setitem__(slice(None), x[:20].tolist()),
        lambda d, x: d.__setitem__("row", x[:20].tolist()),
    )


def a_counting_class():
    class Counter:
        total = 0.0

    return Counter


def a_counting_function():
    def count():
        pass

    count.total = 0.0
    return count


@marked("what calls change in d: optimized leaves other objects than the baseline")
def an_attribute_of_a_class_that_is_not_written():
    return attributes_of(a_counting_class)


@marked("what calls change in d: optimized leaves other objects than the baseline")
def an_attribute_of_a_function_that_is_not_written():
    return attributes_of(a_counting_function)


def attributes_of(make):
    return pair(
        lambda x, d: (setattr(d, "total", float(np.sort(x)[0])), x * 2)[1],
        lambda x, d: x * 2,
        inputs=lambda bench: (*vectors(bench), make()),
        reference=lambda x, d: x + x,
    )


def locking(baseline, optimized):
    arm = lambda locks: lambda x: (x.setflags(write=not locks), x * 2)[1]
    return pair(arm(baseline), arm(optimized), reference=lambda x: x + x)


@cheat("optimized leaves an array that cannot be written in x")
def an_argument_that_is_left_read_only():
    return locking(baseline=False, optimized=True)


@cheat("optimized leaves an array that can be written in x")
def an_argument_that_is_not_locked():
    return locking(baseline=True, optimized=False)


def requiring(baseline, optimized):
    arm = lambda required: lambda x, t: (t.requires_grad_(required), x * 2)[1]
    words = {
        "inputs": lambda bench: (*vectors(bench), torch.from_numpy(vectors(bench)[0])),
        "reference": lambda x, t: x + x,
    }
    return pair(arm(baseline), arm(optimized), **words)


@cheat("optimized leaves a tensor that does not require grad in t")
def an_argument_that_does_not_require_grad():
    return requiring(baseline=True, optimized=False)


@cheat("optimized leaves a tensor that requires grad in t")
def an_argument_that_requires_grad():
    return requiring(baseline=False, optimized=True)


def hooking(baseline, optimized):
    def inputs(bench):
        x, t = *vectors(bench), torch.from_numpy(vectors(bench)[0])
        return x, t.requires_grad_()

    arm = lambda hook: lambda x, t: (hook(t), x * 2)[1]
    return pair(arm(baseline), arm(optimized), inputs=inputs, reference=lambda x, t: x + x)


def hook(t):
    t.register_hook(lambda grad: grad)


def hook_on_accumulation(t):
    t.register_post_accumulate_grad_hook(lambda t: None)


@cheat("optimized leaves a tensor without hooks in t")
def a_hook_that_is_not_registered():
    return hooking(hook, lambda t: None)


@cheat("optimized leaves a tensor without hooks in t")
def a_hook_on_accumulation_that_is_not_registered():
    return hooking(hook_on_accumulation, lambda t: None)


VIEWS: list[memoryview] = []


@cheat("optimized leaves d locked by a view of its memory")
def a_bytearray_that_is_left_locked():
    def optimized(x, d):
        d[:] = x.tobytes()
        VIEWS[:] = [memoryview(d)]
        return x * 2

    def baseline(x, d):
        d[:] = x.tobytes()
        return x * 2

    words = {"inputs": lambda bench: (*vectors(bench), bytearray(vectors(bench)[0].nbytes))}
    return pair(baseline, optimized, reference=lambda x, d: x + x, **words)


BOXED = "numbers as objects of numpy"


@cheat(BOXED)
def numbers_of_numpy_in_a_result():
    return pair(
        lambda x: (x * 2).tolist(),
        lambda x: list(x * 2),
        inputs=vectors,
        reference=lambda x: list(x + x),
    )


@cheat("truth values in bytes other than 0 and 1")
def truth_values_of_many_bytes():
    """A mask of bits, read as truth values: as many are true, and their sum is another."""
    return pair(
        lambda x: x > x.mean(),
        lambda x: ((x > x.mean()).view(np.uint8) * 3).view(bool),
        inputs=vectors,
        reference=lambda x: x > x.mean(),
    )


@cheat("addresses are no multiples of their elements' size")
def arrays_that_are_not_aligned():
    message = lambda x: np.concatenate([np.zeros(3, np.uint8), x.view(np.uint8)])
    return pair(
        lambda x: np.frombuffer(message(x)[3:].tobytes()).copy(),
        lambda x: message(x)[3:].view(np.float64),
        inputs=vectors,
        reference=lambda x: x + 0,
    )


@cheat("gives d other memory or strides")
def a_tensor_with_other_memory():
    import torch

    def in_place(d, x):
        d.copy_(torch.from_numpy(x) * 2)
        return x * 2

    def anew(d, x):
        d.data = torch.from_numpy(x) * 2
        return x * 2

    return pair(
        in_place,
        anew,
        inputs=lambda bench: (torch.zeros(len(vectors(bench)[0])).double(), *vectors(bench)),
        reference=lambda d, x: (x + x, x + x),
    )


@cheat(BOXED)
def numbers_of_numpy_in_rows_of_a_result():
    shaped = lambda x: (x * 2).reshape(-1, 4)
    return pair(
        lambda x: shaped(x).tolist(),
        lambda x: [list(row) for row in shaped(x)],
        inputs=vectors,
        reference=lambda x: shaped(x).tolist(),
    )


@cheat(BOXED)
def numbers_of_numpy_in_an_argument():
    return changing(
        lambda: [0.0] * 64, put(lambda x: (x * 3)[:64].tolist()), put(lambda x: list((x * 3)[:64]))
    )


def in_mode(mode):
    """Return a claim whose arm computes in another mode of autograd than its baseline."""
    import torch

    return pair(
        lambda x: torch.from_numpy(x) * 2,
        mode(lambda x: torch.from_numpy(x) * 2),
        inputs=vectors,
        reference=lambda x: x + x,
    )


TRAIT = "optimized returns result as {}, the baseline as an ordinary tensor"


@cheat(TRAIT.format("an inference tensor"))
def an_inference_tensor():
    import torch

    return in_mode(torch.inference_mode())


@cheat(TRAIT.format("a tensor that requires grad"))
def a_tensor_that_requires_grad():
    return in_mode(lambda arm: lambda x: arm(x).requires_grad_())


LARGE = 1 << 19  # elements: 4 MiB
KEPT = "memory that results keep alive: optimized's keep"


def few_of_many(copy, window):
    """Return a claim whose results are a few of many numbers."""
    inputs = lambda bench: (np.random.default_rng(bench.seed).random(LARGE),)
    return pair(copy, window, inputs=inputs, reference=lambda x: (x * 2)[:64].copy())


@marked(KEPT)
def a_window_of_a_large_array():
    return few_of_many(lambda x: (x * 2)[:64].copy(), lambda x: (x * 2)[:64])


@marked(KEPT)
def a_window_of_a_large_tensor():
    import torch

    double = lambda x: (torch.from_numpy(x) * 2)[:64]
    return few_of_many(lambda x: double(x).clone(), double)


@marked(KEPT)
def a_window_of_large_bytes():
    double = lambda x: np.frombuffer(memoryview(bytearray((x * 2).tobytes())), count=64)
    return few_of_many(lambda x: double(x).copy(), double)


def records(x):
    """Return many rows of an index and a number."""
    return [(i, value) for i, value in enumerate((x * 2).tolist())]


@cheat("optimized disagrees with the reference: result\\[:\\]\\[1\\]\\[63\\] is 0")
def a_wrong_number_in_one_of_many_rows():
    return pair(records, lambda x: [*records(x)[:-1], (63, 0.0)], inputs=vectors, reference=records)


@cheat("optimized gives int64.* for result\\[:\\]\\[1\\], the baseline float64")
def rows_of_integers():
    whole = lambda x: [(i, int(value)) for i, value in records(x)]
    return pair(records, whole, inputs=vectors, reference=records)


def owners(bench):
    return [SimpleNamespace(name=str(i)) for i in range(8)], [None] * 8, *vectors(bench)


def keeping(baseline, optimized):
    """Return a claim whose arms put objects into an argument."""
    arm = lambda make: lambda o, d, x: (d.__setitem__(slice(None), make(o)), x * 2)[1]
    reference = lambda o, d, x: x + x
    return pair(arm(baseline), arm(optimized), inputs=owners, reference=reference)


def copied(o):
    return [SimpleNamespace(name=each.name) for each in o]


@cheat("optimized puts lists, dicts, arrays or objects of its inputs into an argument")
def objects_of_the_inputs_in_an_argument():
    return keeping(copied, list)


@cheat("optimized leaves lists, dicts or objects that appear 7 times more in an argument")
def one_object_many_times_in_an_argument():
    return keeping(copied, lambda o: copied(o)[:1] * 8)


@marked("copies of the result: optimized returns lists, dicts or objects of its inputs")
def a_module_of_the_inputs():
    import torch

    return pair(
        lambda m, x: (torch.nn.Sequential(torch.nn.ReLU()), x * 2),
        lambda m, x: (m, x * 2),
        inputs=lambda bench: (torch.nn.Sequential(torch.nn.ReLU()), *vectors(bench)),
        reference=lambda m, x: x + x,
    )
