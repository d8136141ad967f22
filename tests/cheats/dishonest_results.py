"""Arms whose results are wrong or easy, and the error message that must catch each of them."""

from __future__ import annotations

import array
import contextvars
import decimal
import functools
import mmap
import os
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from pytest_aiperf import Score, prepared
from tests.cheats.case import Corpus, State
from tests.cheats.dishonest import DOUBLE, LONG, SHORT, WRONG, returning, tensors
from tests.plugin.claims import vectors

cheat = Corpus()
CHEATS = cheat.entries
marked = Corpus()
MARKED = marked.entries

EASY = "so an arm could skip the work"
UNLIKE = "all arms must get the same inputs"
VIEW = "as a view of its inputs, of a file or of few elements"
CHANGED = "optimized changed argument"


def pair(baseline, optimized, **words):
    """Return a claim whose optimized arm takes much less time than its baseline."""
    return {
        "baseline": lambda *a: returning(LONG, baseline(*a)),
        "optimized": lambda *a: returning(SHORT, optimized(*a)),
        **words,
    }


# results that need no work


@cheat(f"the result for other inputs would pass.*{EASY}")
def a_length():
    return pair(lambda x: len(np.sort(x)), len, reference=len)


@cheat(EASY)
def an_empty_result():
    return pair(lambda x: np.sort(x)[:0], lambda x: np.empty(0), reference=lambda x: x[:0])


@cheat(EASY)
def a_result_beside_an_empty_one():
    return pair(
        lambda x: (x * 2, np.sort(x)[:0].sum()),
        lambda x: (x * 2, 0.0),
        reference=lambda x: (x + x, 0.0),
    )


@cheat(EASY)
def an_offset_that_hides_the_rest():
    words = {
        "inputs": lambda bench: torch.rand(64, 64),
        "reference": lambda x: x.double().sum(1) + 1e9,
    }
    return pair(lambda x: x.sum(1) + 1e9, lambda x: torch.full((64,), 1e9 + 32), **words)


@cheat(EASY)
def sums_that_are_nearly_equal():
    words = {
        "inputs": lambda bench: torch.rand(64, 16384),
        "reference": lambda x: x.double().sum(1),
        "precision": "bf16",
    }
    return pair(lambda x: x.sum(1), lambda x: torch.full((64,), 8192.0), **words)


@cheat(f"a constant would pass|{EASY}")
def a_mean_that_is_known():
    words = {
        "inputs": lambda bench: torch.rand(1 << 16),
        "reference": lambda x: x.double().mean(),
        "precision": "bf16",
    }
    return pair(torch.mean, lambda x: torch.tensor(0.5), **words)


@cheat(f"x would pass for result, {EASY}")
def a_normalisation_of_normal_values():
    norm = lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:])
    words = {
        "inputs": lambda bench: torch.randn(4, 1 << 16),
        "reference": lambda x: norm(x.double()),
        "precision": "bf16",
    }
    return pair(norm, torch.clone, **words)


@cheat(f"w would pass for w, {EASY}")
def a_step_that_is_too_small():
    def step(w, g):
        w -= 1e-4 * g
        return w

    words = {
        "inputs": lambda bench: (torch.randn(64), torch.randn(64)),
        "reference": lambda w, g: w.double() - 1e-4 * g.double(),
        "precision": "bf16",
    }
    return pair(step, lambda w, g: w.mul_(1 + 1e-7), **words)


@cheat(EASY)
def indices_of_the_largest_element():
    """The largest element is always the last: a constant index is right."""

    def inputs(bench):
        return torch.cat([torch.rand(63), torch.ones(1)])

    return pair(lambda x: x.sort().indices[-1:], lambda x: torch.tensor([63]),
                inputs=inputs, reference=lambda x: x.argmax()[None])  # fmt: skip


@cheat(EASY)
def a_comparison_that_always_holds():
    return pair(
        lambda x: np.sort(x) >= 0, lambda x: np.ones(len(x), bool), reference=lambda x: x >= 0
    )


# errors that a few large elements hide


def with_outliers(count, size, dtype=torch.float32, n=4096):
    def inputs(bench):
        x = torch.randn(n, dtype=dtype)
        x[torch.randperm(n)[:count]] = size
        return x

    return {"inputs": inputs, "reference": lambda x: x.double() * 3}


def only_large(x):
    return torch.where(x.abs() > 100, x * 3, 0)


@cheat(WRONG)
def zeros_beside_one_large_element():
    return pair(lambda x: x * 3, only_large, **with_outliers(1, 1e9))


@cheat(WRONG)
def zeros_beside_many_large_elements():
    return pair(lambda x: x * 3, only_large, **with_outliers(1200, 1e7))


@cheat(WRONG)
def zeros_beside_one_large_element_in_low_precision():
    words = {"precision": "nvfp4"}
    return pair(lambda x: x * 3, only_large, **with_outliers(1, 1e9), **words)


@cheat(WRONG)
def half_precision_beside_one_large_element():
    return pair(lambda x: x * 3, lambda x: (x.clamp(max=9).half() * 3).float() + only_large(x),
                **with_outliers(1, 1e8))  # fmt: skip


@cheat(WRONG)
def fp32_arithmetic_beside_one_large_element():
    words = with_outliers(1, 1e12, torch.float64)
    return pair(lambda x: x * 3, lambda x: (x.float() * 3).double(), **words)


@cheat(WRONG)
def scaled_values_beside_one_large_element():
    words = {"precision": "bf16"}
    return pair(
        lambda x: x * 3, lambda x: torch.where(x > 100, x * 3, x * 2.9), **with_outliers(1, 1e9),
        **words)  # fmt: skip


# inputs that are easier for one arm


def unlike(change, *, reference=lambda x: np.sort(x, axis=None), draw=None):
    """Return a claim whose inputs are changed at every second call."""
    calls = State(n=0)

    def inputs(bench):
        calls.n += 1
        rng = np.random.default_rng(bench.seed)
        x = draw(rng) if draw else rng.random((64, 64))
        return change(x) if calls.n % 2 else x

    arm = lambda x: np.sort(x, axis=None)
    return pair(arm, arm, inputs=inputs, reference=reference)


@cheat(UNLIKE)
def other_strides():
    return unlike(np.asfortranarray)


@cheat(UNLIKE)
def a_slice_of_a_larger_array():
    return unlike(lambda x: np.stack([x, x], -1)[..., 0])


@cheat(UNLIKE)
def another_alignment():
    def shifted(x):
        memory = np.empty(x.nbytes + 8, np.uint8)
        array = memory[4 : 4 + x.nbytes].view(x.dtype).reshape(x.shape)
        array[...] = x
        return array

    return unlike(shifted)


@cheat(UNLIKE)
def another_dtype_of_the_inputs():
    return unlike(lambda x: x.astype(np.float32), draw=lambda rng: rng.integers(0, 9, (64, 64)))


@cheat(f"{UNLIKE}|different values for the same seed")
def values_that_are_sorted_already():
    return unlike(lambda x: np.sort(x, axis=None).reshape(x.shape))


@cheat(UNLIKE)
def values_that_are_sorted_once_they_are_timed():
    calls = State(n=0)

    def inputs(bench):
        calls.n += 1
        x = np.random.default_rng(bench.seed).random(4096)
        return np.sort(x) if calls.n > 8 and calls.n % 2 else x

    return pair(np.sort, np.sort, inputs=inputs, reference=np.sort)


# results that whoever reads them has to compute


def memory_file(content):
    """Map a file in memory twice; the mappings show each other's writes."""
    file = os.memfd_create("cheat")
    os.ftruncate(file, len(content))
    maps = [np.frombuffer(mmap.mmap(file, len(content)), float) for _ in range(2)]
    maps[0][...] = np.frombuffer(content)
    os.close(file)
    return maps


@cheat(VIEW)
def a_second_mapping_of_the_input():
    seconds = {}

    def inputs(bench):
        x, second = memory_file(np.random.default_rng(bench.seed).random(512).tobytes())
        seconds[x.ctypes.data] = second
        return x

    return pair(np.copy, lambda x: seconds[x.ctypes.data], inputs=inputs, reference=np.copy)


def data_file(bench):
    """Return the name of a file of numbers, which lives as long as the file object."""
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115  closed when it is collected
    vectors(bench)[0].tofile(file.name)
    return file


def mapped(as_array):
    return pair(
        lambda file: np.fromfile(file.name),
        lambda file: as_array(np.memmap(file.name, float, "r")),
        inputs=data_file,
        reference=lambda file: np.fromfile(file.name),
    )


@cheat(VIEW)
def a_file_that_is_not_read():
    return mapped(lambda x: x)


@cheat(VIEW)
def a_file_that_is_not_read_as_an_array():
    return mapped(np.asarray)


@cheat(VIEW)
def a_file_that_is_not_read_as_a_tensor():
    words = mapped(lambda x: x)
    baseline = words["baseline"]
    return words | {
        "baseline": lambda file: torch.from_numpy(baseline(file)),
        "optimized": lambda file: returning(
            SHORT, torch.from_file(file.name, size=Path(file.name).stat().st_size // 8,
                                   dtype=torch.float64)),
    }  # fmt: skip


@cheat(VIEW)
def overlapping_windows():
    return DOUBLE | pair(
        lambda x: (x * 2).unfold(0, 8, 1).contiguous(),
        lambda x: (x * 2).unfold(0, 8, 1),
        reference=lambda x: (x.double() * 2).unfold(0, 8, 1),
    )


@cheat(VIEW)
def overlapping_windows_of_numpy():
    windows = functools.partial(np.lib.stride_tricks.sliding_window_view, window_shape=8)
    return pair(
        lambda x: windows(x * 2).copy(),
        lambda x: windows(x * 2),
        reference=lambda x: windows(x * 2),
    )


def complex_vectors(bench):
    return (torch.randn(64, dtype=torch.complex64),)


CONJUGATES = {"inputs": complex_vectors, "reference": lambda x: x.to(torch.complex128).conj() * 2}


@cheat(VIEW)
def a_conjugate_that_is_only_marked():
    return pair(lambda x: (x * 2).conj().resolve_conj(), lambda x: (x * 2).conj(), **CONJUGATES)


@cheat(VIEW)
def a_sign_that_is_only_marked():
    words = CONJUGATES | {"reference": lambda x: -2 * x.imag.double()}
    return pair(lambda x: -(x * 2).imag, lambda x: (x * 2).conj().imag, **words)


# objects whose own methods do the work


class LazyModule(torch.nn.Module):
    def __init__(self, x):
        super().__init__()
        self.source = weakref.ref(x)
        self.result = torch.nn.Parameter(torch.zeros_like(x), requires_grad=False)

    def named_parameters(self, *_a, **_k):
        self.result.copy_(self.source() * 2)
        return super().named_parameters()

    _named_members = named_modules = named_parameters


def module_of(x):
    module = torch.nn.Module()
    module.result = torch.nn.Parameter(x * 2, requires_grad=False)
    return module


@cheat(WRONG)
def a_module_with_methods_of_its_own():
    return pair(module_of, LazyModule, inputs=tensors, reference=lambda x: x.double() * 2)


class LazyAttributes(torch.nn.Module):
    """A module that is computed when its attributes are read."""

    def __getattribute__(self, name):
        own = object.__getattribute__(self, "__dict__")
        if name == "__dict__" and "source" in own:
            own["_parameters"]["result"].copy_(own["source"]() * 2)
        return own if name == "__dict__" else super().__getattribute__(name)


@cheat(WRONG)
def a_module_whose_attributes_are_computed():
    def arm(x):
        module = module_of(x * 0)
        module.source, module.__class__ = weakref.ref(x), LazyAttributes
        return module

    return pair(module_of, arm, inputs=tensors, reference=lambda x: x.double() * 2)


def computing(x):
    """Return an array, and a function that writes the result into it."""
    result = np.zeros_like(x)
    return result, lambda: np.multiply(x, 2, out=result)


class LazyClass:
    """An object that is computed when its class is read, and that claims to be no result."""

    def __init__(self, work):
        self.work = work

    @property
    def __class__(self):
        self.work()
        return Score


@cheat("a result of type LazyClass cannot be compared")
def a_class_that_is_computed():
    def arm(x):
        result, work = computing(x)
        return LazyClass(work), result

    return pair(lambda x: x * 2, arm)


class LazyKind(type):
    """A type of lists that are computed when it is compared with another type."""

    def __eq__(cls, other):
        cls.work()
        return cls is other

    __hash__ = type.__hash__


@cheat(WRONG)
def a_type_that_computes():
    def arm(x):
        result, work = computing(x)
        return LazyKind("LazyKindOfList", (list,), {"work": work})([result])

    return pair(lambda x: [x * 2], arm)


class LazyKey(str):  # noqa: SLOT000  it has attributes
    """A key that computes the item when it is written out."""

    def __repr__(self):
        self.work()
        return str.__repr__(self)


@cheat(WRONG)
def a_key_that_computes():
    def arm(x):
        key = LazyKey("y")
        result, key.work = computing(x)
        return {key: result}

    return pair(lambda x: {"y": x * 2}, arm)


class Field:
    """A descriptor that computes the field of a dataclass."""

    def __get__(self, instance, kind):
        if instance is not None:
            vars(instance)["work"]()
            return vars(instance)["y"]
        return None

    def __set__(self, instance, value):
        vars(instance)["y"] = value


@dataclass
class Fields:
    y: object


@dataclass
class LazyField(Fields):
    pass


LazyField.y = Field()


@cheat(WRONG)
def a_field_that_is_computed():
    def arm(x):
        result, work = computing(x)
        fields = LazyField(result)
        fields.work = work
        return fields

    return pair(lambda x: Fields(x * 2), arm)


class LazyDictOfFields(Fields):
    """A dataclass that is computed when its attributes are read."""

    @property
    def __dict__(self):
        own = Fields.__dict__["__dict__"].__get__(self)
        own["work"]()
        return own


@cheat(WRONG)
def a_dataclass_whose_attributes_are_computed():
    def arm(x):
        result, work = computing(x)
        fields = LazyDictOfFields(result)
        fields.work = work
        return fields

    return pair(lambda x: Fields(x * 2), arm)


def shared_memory(x):
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        return np.memmap(file.name, x.dtype, "w+", shape=x.shape)


@cheat(WRONG)
def a_memory_map_with_a_copy_of_its_own():
    def baseline(x):
        result = shared_memory(x)
        return np.multiply(x, 2, out=result)

    def arm(x):
        result = shared_memory(x)
        result.copy = lambda *_: np.multiply(x, 2, out=result)
        return result

    return pair(baseline, arm)


class LazyList(list):
    def __iter__(self):
        return iter([self.source * 2])


class LazyNumber(float):
    """A number that is computed when it is read."""

    def __new__(cls, compute):
        number = super().__new__(cls, 0.0)
        number.compute = compute
        return number

    def __float__(self):
        return self.compute()


@cheat("a result of type LazyNumber cannot be compared", clock="host")
def a_lazy_number():
    return {
        "inputs": lambda bench: np.random.default_rng(bench.seed).random(20_000),
        "baseline": lambda x: float(np.sort(x)[7]),
        "optimized": lambda x: LazyNumber(lambda: float(np.sort(x)[7])),
        "reference": lambda x: float(np.partition(x, 7)[7]),
    }


def lazy_list(x):
    result = LazyList([x])
    result.source = x
    return result


@cheat(f"{WRONG}|{VIEW}")
def a_list_with_methods_of_its_own():
    return pair(lambda x: [x * 2], lazy_list)


@cheat(f"{WRONG}|{VIEW}")
def a_tensor_with_methods_of_its_own():
    def arm(x):
        result = torch.zeros_like(x)
        work = lambda *_a: result.copy_(x * 2) and torch.Tensor.clone(result)
        result.clone = result.detach = result.contiguous = result.double = work
        return result

    return pair(lambda x: x * 2, arm, inputs=tensors, reference=lambda x: x.double() * 2)


@cheat("drawn elements of .* are the same for other seeds, so an arm could keep them")
def a_part_that_no_seed_changes():
    table, kept = np.random.default_rng(1).random(3000), []

    def inputs(bench):
        return (np.concatenate([table, np.random.default_rng(bench.seed).random(1000)]),)

    def arm(x):
        if not kept:
            kept.append(x[:3000] * 2)
        return np.concatenate([kept[0], x[3000:] * 2])

    return pair(lambda x: x * 2, arm, inputs=inputs, reference=lambda x: x + x)


# results that leave work to their reader


@cheat("optimized returns arrays that share")
def one_array_for_many_copies():
    copies = lambda x: [x * 2 for _ in range(8)]
    return pair(copies, lambda x: [x * 2] * 8, reference=lambda x: [x + x] * 8)


@cheat("optimized returns arrays that share")
def rows_of_one_array_in_turn():
    def arm(x):
        first, second = x * 2, x * 2
        return {"rows": [first, second] * 4}

    copies = lambda x: {"rows": [x * 2 for _ in range(8)]}
    return pair(copies, arm, reference=lambda x: {"rows": [x + x] * 8})


TABLE = np.random.default_rng(1).random(2**20)


def a_start(bench):
    return (int(np.random.default_rng(bench.seed).integers(0, 2**20 - 64)),)


BORROWED = "copies of the result: optimized returns memory that its own code refers to"


@marked(BORROWED)
def a_window_of_a_table():
    window = lambda start: TABLE[start : start + 64]
    return pair(lambda i: window(i).copy(), window, inputs=a_start, reference=window)


CURRENT = contextvars.ContextVar("CURRENT", default=TABLE)


@functools.lru_cache
def table_of(seed):
    return np.random.default_rng(seed).random(2**20)


def of_context(start):
    return CURRENT.get()[start : start + 64]


def of_cache(start):
    return table_of(1)[start : start + 64]


@marked(BORROWED)
def a_window_of_a_context():
    return pair(lambda i: of_context(i).copy(), of_context, inputs=a_start, reference=of_context)


@marked(BORROWED)
def a_window_of_a_context_that_the_first_call_fills():
    current = contextvars.ContextVar("current")

    def window(start):
        try:
            table = current.get()
        except LookupError:
            current.set(table := TABLE.copy())
        return table[start : start + 64]

    return pair(lambda i: of_cache(i).copy(), window, inputs=a_start, reference=of_cache)


@marked(BORROWED)
def a_window_of_a_cached_table():
    return pair(lambda i: of_cache(i).copy(), of_cache, inputs=a_start, reference=of_cache)


@marked(BORROWED)
def a_window_of_a_table_that_a_generator_keeps():
    def windows():
        table, start = TABLE.copy(), 0
        while True:
            start = yield table[start : start + 64]

    kept = windows()
    next(kept)
    return pair(lambda i: of_cache(i).copy(), kept.send, inputs=a_start, reference=of_cache)


BYTES = bytearray(TABLE.tobytes())


@marked(BORROWED)
def a_window_of_bytes():
    window = lambda start: np.frombuffer(BYTES)[start : start + 64]
    return pair(lambda i: window(i).copy(), window, inputs=a_start, reference=window)


ROWS = [[float(i), float(i * i % 977)] for i in range(2**14)]


@marked(BORROWED)
def rows_of_a_table_of_lists():
    def inputs(bench):
        return (np.random.default_rng(bench.seed).permutation(2**14)[:8].tolist(),)

    rows = lambda at: [ROWS[i] for i in at]
    return pair(lambda at: [list(r) for r in rows(at)], rows, inputs=inputs, reference=rows)


@cheat("optimized returns result in memory that cannot be written")
def bytes_as_an_array():
    arm = lambda x: np.frombuffer((x * 2).tobytes())
    return pair(lambda x: x * 2, arm, reference=lambda x: x + x)


# inputs that make results easy to keep


@marked("results cached by value: inputs.. gave .* different sets of values")
def one_of_few_numbers():
    def inputs(bench):
        return (int(np.random.default_rng(bench.seed).integers(100, 120)),)

    squares = lambda n: np.arange(float(n)) ** 2
    return pair(squares, functools.cache(squares), inputs=inputs, reference=squares)


SAME = "what arms keep of m: the values are the same for all seeds"


@marked(SAME)
def a_matrix_for_all_seeds():
    def inputs(bench):
        random = np.random.default_rng
        return random(0).random((32, 32)) + np.eye(32) * 32, random(bench.seed).random(32)

    kept = {}

    def arm(m, x):
        if not kept:
            kept["inverse"] = np.linalg.inv(m)
        return kept["inverse"] @ x

    def solved(m, x):
        return np.linalg.solve(m, x)

    return pair(solved, arm, inputs=inputs, reference=solved)


def _kept_ranks(same, words=lambda m: m):
    """Return a cheat whose arm keeps what it computes from an argument that never changes."""
    ranks = lambda m: _ranks(words(m))

    def inputs(bench):
        return same(), np.random.default_rng(bench.seed).random(200)

    kept = []

    def arm(m, x):
        if not kept:
            kept.extend(ranks(m))
        return x[kept]

    ordered = lambda m, x: x[ranks(m)]
    return pair(ordered, arm, inputs=inputs, reference=ordered)


def _ranks(words):
    words = words.split() if isinstance(words, (str, bytes)) else words
    return np.argsort([int(word) for word in words])


@marked(SAME)
def a_text_for_all_seeds():
    return _kept_ranks(lambda: " ".join(str(i * i % 977) for i in range(200)))


@marked(SAME)
def bytes_for_all_seeds():
    return _kept_ranks(lambda: b" ".join(b"%d" % (i * i % 977) for i in range(200)))


@marked(SAME)
def a_queue_for_all_seeds():
    return _kept_ranks(lambda: deque(i * i % 977 for i in range(200)))


SQUARES = [i * i % 977 for i in range(200)]


@marked(SAME)
def a_dict_for_all_seeds():
    return _kept_ranks(lambda: dict(enumerate(SQUARES)), lambda m: m.values())


@marked(SAME)
def rows_for_all_seeds():
    return _kept_ranks(lambda: [*enumerate(SQUARES)], lambda m: [square for _, square in m])


@marked(SAME)
def records_for_all_seeds():
    return _kept_ranks(lambda: np.array([*enumerate(SQUARES)], "i8, i8"), lambda m: m["f1"])


@marked(SAME)
def objects_for_all_seeds():
    return _kept_ranks(lambda: np.array(SQUARES, object))


@marked(SAME)
def a_sparse_tensor_for_all_seeds():
    return _kept_ranks(lambda: torch.tensor(SQUARES).to_sparse(), lambda m: m.to_dense())


@marked(SAME)
def a_masked_array_for_all_seeds():
    return _kept_ranks(lambda: np.ma.array(SQUARES))


@marked(SAME)
def a_module_for_all_seeds():
    def make():
        module = torch.nn.Linear(2, 2)
        module.squares = [*SQUARES]
        return module

    return _kept_ranks(make, lambda m: m.squares)


@marked(SAME)
def an_object_for_all_seeds():
    return _kept_ranks(lambda: SimpleNamespace(squares=[*SQUARES]), lambda m: m.squares)


@marked(SAME)
def a_function_for_all_seeds():
    return _kept_ranks(lambda: lambda squares=tuple(SQUARES): squares, lambda m: m())


@marked(SAME)
def decimals_for_all_seeds():
    return _kept_ranks(lambda: [*map(decimal.Decimal, SQUARES)])


@marked(SAME)
def dates_of_numpy_for_all_seeds():
    return _kept_ranks(lambda: [*np.array(SQUARES, "M8[s]")], lambda m: np.array(m).astype(int))


@marked(SAME)
def slices_for_all_seeds():
    return _kept_ranks(lambda: [*map(slice, SQUARES)], lambda m: [part.stop for part in m])


@marked(SAME)
def a_code_object_for_all_seeds():
    code = f"squares = {tuple(SQUARES)}"
    return _kept_ranks(lambda: compile(code, "<code>", "exec"), lambda m: m.co_consts[0])


@marked(SAME)
def fields_for_all_seeds():
    fields = [(f"{i}: {square}", "i8") for i, square in enumerate(SQUARES)]
    return _kept_ranks(lambda: np.dtype(fields), lambda m: [n.split()[-1] for n in m.names])


def file_of(data):
    file = tempfile.TemporaryFile()  # noqa: SIM115  it is an argument
    file.write(data)
    file.flush()
    return file


@marked(SAME)
def a_file_for_all_seeds():
    make = lambda: file_of(" ".join(map(str, SQUARES)).encode())
    return _kept_ranks(make, lambda m: os.pread(m.fileno(), 10_000, 0).split())


def _prepared_on(make, read):
    """Return a cheat whose setup reads what inputs() draws into an attribute."""

    def inputs(bench):
        random = np.random.default_rng(bench.seed)
        return random.random(64), make(float(random.random()))

    def setup(x, m):
        power = sum(read(m) ** i for i in range(100))
        return lambda x, m: returning(SHORT, x * power)

    arm = lambda x, m: x * sum(read(m) ** i for i in range(100))
    claim = pair(arm, arm, inputs=inputs, reference=arm)
    return claim | {"optimized": prepared(setup)}


NOT_OVERWRITTEN = "results on new values: m could not be overwritten"


@marked(NOT_OVERWRITTEN)
def an_attribute_of_a_module_in_the_setup():
    def make(factor):
        return torch.nn.Sequential(torch.nn.LeakyReLU(factor))

    return _prepared_on(make, lambda m: m[0].negative_slope)


@marked(NOT_OVERWRITTEN)
def an_attribute_of_a_tensor_in_the_setup():
    def make(factor):
        tensor = torch.rand(3)
        tensor.factor = factor
        return tensor

    return _prepared_on(make, lambda m: m.factor)


@marked(NOT_OVERWRITTEN)
def a_private_array_of_a_module_in_the_setup():
    def make(factor):
        module = torch.nn.Identity()
        module._factors = np.array([factor])
        return module

    return _prepared_on(make, lambda m: m._factors[0])


@marked(NOT_OVERWRITTEN)
def a_hook_of_a_module_in_the_setup():
    def make(factor):
        module = torch.nn.Identity()
        module.register_forward_hook(lambda *_: factor)
        return module

    return _prepared_on(make, lambda m: m(None))


@marked(SAME)
def a_list_for_all_seeds():
    numbers = [i * i % 977 for i in range(200)]

    def inputs(bench):
        return list(numbers), np.random.default_rng(bench.seed).random(200)

    kept = []

    def arm(m, x):
        if not kept:
            kept.extend(np.argsort(m))
        return x[kept]

    ordered = lambda m, x: x[np.argsort(m)]
    return pair(ordered, arm, inputs=inputs, reference=ordered)


def row_of_numbers(bench):
    return (np.random.default_rng(bench.seed).random(32),)


REPEATED = "optimized returns lists, dicts or objects that appear 7 times more"


@cheat(f"{REPEATED}, the baseline's 0 times")
def one_list_for_many_rows():
    rows = lambda x: [(x * 2).tolist() for _ in range(8)]
    one = lambda x: [(x * 2).tolist()] * 8
    return pair(rows, one, inputs=row_of_numbers, reference=lambda x: [x + x] * 8)


@dataclass
class Row:
    total: float


@cheat(REPEATED)
def one_dataclass_for_equal_rows():
    rows = lambda x: [Row(float(x.sum())) for _ in range(8)]
    one = lambda x: [Row(float(x.sum()))] * 8
    return pair(rows, one, inputs=row_of_numbers, reference=lambda x: [Row(float(sum(x)))] * 8)


def rows_of_numbers(bench):
    return (np.random.default_rng(bench.seed).random((8, 4)).tolist(),)


@marked("copies of the result: optimized returns lists, dicts or objects of its inputs")
def rows_that_are_not_copied():
    rows = lambda x: sorted(map(list, x))
    return pair(rows, sorted, inputs=rows_of_numbers, reference=sorted)


@marked("copies of the result: optimized returns lists, dicts or objects of its inputs")
def records_that_are_not_copied():
    inputs = lambda bench: [{"total": sum(row)} for row in rows_of_numbers(bench)[0]]
    key = lambda record: record["total"]
    ordered = lambda x: sorted(x, key=key)
    rows = lambda x: [dict(record) for record in ordered(x)]
    return pair(rows, ordered, inputs=lambda bench: (inputs(bench),), reference=ordered)


@cheat(REPEATED)
def one_list_in_many_dicts():
    def shared(x):
        row = (x * 2)[:4].tolist()
        return {i: ({"row": row},) for i in range(8)}

    rows = lambda x: {i: ({"row": (x * 2)[:4].tolist()},) for i in range(8)}
    reference = lambda x: {i: ({"row": [v + v for v in x[:4]]},) for i in range(8)}
    return pair(rows, shared, inputs=row_of_numbers, reference=reference)


def bytes_of(kind):
    """Return inputs that are random bytes of a kind, in a tuple."""

    def inputs(bench):
        (x,) = row_of_numbers(bench)
        return ((kind(x.tobytes()), x),)

    return inputs


def view_of(kind):
    """Return a claim whose baseline copies bytes of a kind, and whose optimized arm does not."""
    copied, view = (lambda b: np.frombuffer(b[0]).copy()), (lambda b: np.frombuffer(b[0]))
    return pair(copied, view, inputs=bytes_of(kind), reference=lambda b: b[1])


def anonymous(data):
    """Return anonymous mapped memory that holds these bytes."""
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


@cheat(VIEW)
def a_view_of_bytes():
    return view_of(bytes)


@cheat(VIEW)
def a_view_of_a_bytearray():
    return view_of(bytearray)


@cheat(VIEW)
def a_view_of_a_memoryview():
    return view_of(memoryview)


@cheat(VIEW)
def a_view_of_an_array_of_numbers():
    return view_of(lambda data: array.array("d", data))


@cheat(VIEW)
def a_view_of_mapped_memory():
    return view_of(anonymous)


@cheat("optimized returns result as a lazy copy")
def a_copy_that_is_made_when_it_is_written():
    return pair(torch.clone, torch._lazy_clone, inputs=tensors, reference=lambda x: x.double())


def parameters(bench):
    (x,) = tensors(bench)
    return (x.requires_grad_(),)


@cheat("optimized returns result without autograd's graph")
def no_graph_for_the_gradient():
    return pair(
        lambda x: x * 2,
        torch.no_grad()(lambda x: x * 2),
        inputs=parameters,
        reference=lambda x: x.detach().double() * 2,
    )


@marked("gradients of result: return them as well")
def a_gradient_of_zeros():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 0

    reference = lambda x: x.detach().double() * 2
    return pair(lambda x: x * 2, Doubled.apply, inputs=parameters, reference=reference)


# parts of results that hardly count


@marked(r"small parts of result: optimized's error is")
def a_small_term_that_is_left_out():
    def inputs(bench):
        return (np.random.default_rng(bench.seed).random(999, np.float32),)

    whole = lambda x: x * 2 + np.float32(6e-6) * np.sin(x)
    reference = lambda x: x.astype(float) * 2 + 6e-6 * np.sin(x.astype(float))
    return pair(whole, lambda x: x * 2, inputs=inputs, reference=reference)


# inputs of Python that an arm changes


def numbers(count):
    return lambda bench: (np.random.default_rng(bench.seed).random(count).tolist(),)


def sort_in_place(x):
    x.sort()
    return x[:]


@cheat(CHANGED)
def a_list_that_is_sorted_for_the_next_call():
    return pair(sorted, sort_in_place, inputs=numbers(99), reference=sorted)


@cheat(CHANGED)
def a_short_list_that_is_sorted_for_the_next_call():
    return pair(sorted, sort_in_place, inputs=numbers(9), reference=sorted)


@cheat(CHANGED)
def decimals_that_are_sorted_for_the_next_call():
    total = lambda m: float(sum(m))

    def arm(m):
        m.sort()
        return total(m)

    def inputs(bench):
        return ([decimal.Decimal(number) for number in numbers(9)(bench)[0]],)

    return pair(lambda m: total(sorted(m)), arm, inputs=inputs, reference=total)


@cheat(CHANGED)
def a_result_that_is_left_in_a_dict():
    def inputs(bench):
        return {"x": numbers(9)(bench)[0], "total": 0.0}

    def arm(state):
        state["total"] = state["total"] or sum(state["x"])
        return state["total"]

    words = {"inputs": inputs, "reference": lambda state: sum(state["x"])}
    return pair(lambda state: sum(state["x"]), arm, **words)


@cheat(CHANGED)
def bytes_that_are_sorted_for_the_next_call():
    def inputs(bench):
        return (bytearray(np.random.default_rng(bench.seed).bytes(99)),)

    def arm(x):
        x[:] = bytes(sorted(x))
        return list(x)

    return pair(sorted, arm, inputs=inputs, reference=sorted)


@cheat(CHANGED)
def words_that_are_sorted_for_the_next_call():
    def inputs(bench):
        return (list(map(str, numbers(9)(bench)[0])),)

    def arm(x):
        x.sort()
        return list(map(float, x))

    honest = lambda x: list(map(float, sorted(x)))
    return pair(honest, arm, inputs=inputs, reference=honest)
