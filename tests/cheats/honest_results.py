"""Honest arms whose results or inputs look like those of cheats: no guard may refuse them."""

from __future__ import annotations

import enum
import functools
import mmap
from dataclasses import dataclass

import numpy as np
import torch

from tests.cheats.case import Corpus
from tests.cheats.dishonest import tensors
from tests.cheats.dishonest_results import (
    CONJUGATES,
    bytes_of,
    complex_vectors,
    data_file,
    module_of,
    numbers,
    row_of_numbers,
    shared_memory,
    sort_in_place,
    with_outliers,
)
from tests.cheats.honest import arms

honest = Corpus()
HONEST = honest.entries


# results that need work, although they look alike for all inputs


@honest()
def a_check_beside_the_result():
    return arms(lambda x: (x * 2, True, len(x)), reference=lambda x: (x + x, True, len(x)))


@honest()
def an_offset_that_leaves_the_rest_visible():
    words = {"inputs": tensors, "reference": lambda x: x.double() + 100}
    return arms(lambda x: x + 100, **words)


@honest()
def a_copy():
    return arms(np.copy, reference=np.copy)


@honest()
def a_copy_in_low_precision():
    words = {"inputs": tensors, "reference": lambda x: x.double(), "precision": "bf16"}
    return arms(lambda x: x.bfloat16().float(), torch.clone, **words)


@honest()
def a_loss_and_its_gradients():
    def step(x, w):
        error = x @ w
        return (error**2).mean(), x.t() @ error

    words = {
        "inputs": lambda bench: (torch.randn(64, 64), torch.randn(64)),
        "reference": lambda x, w: step(x.double(), w.double()),
    }
    return arms(step, **words)


@honest()
def few_elements_of_many_written():
    def update(table, rows, values):
        table[rows] = values

    def reference(table, rows, values):
        result = table.double()
        result[rows] = values.double()
        return result

    words = {
        "inputs": lambda bench: (
            torch.zeros(4096, 16),
            torch.randperm(4096)[:4],
            torch.rand(4, 16),
        ),
        "reference": reference,
    }
    return arms(update, **words)


@honest()
def indices_of_the_largest_elements():
    words = {
        "inputs": lambda bench: torch.rand(64, 4),
        "reference": lambda x: x.argmax(1),
    }
    return arms(lambda x: x.argmax(1), **words)


# sizes that differ much


@honest()
def one_large_element():
    return arms(lambda x: x * 3, lambda x: x + x + x, **with_outliers(1, 1e9))


@honest()
def one_large_element_in_low_precision():
    words = with_outliers(1, 1e9) | {"precision": "bf16"}
    return arms(lambda x: (x.bfloat16() * 3).float(), lambda x: x * 3, **words)


@honest()
def probabilities():
    words = {
        "inputs": lambda bench: 10 * torch.randn(16, 512),
        "reference": lambda x: torch.softmax(x.double(), 1),
    }
    arm = lambda x: (x - x.amax(1, keepdim=True)).exp()
    return arms(
        lambda x: arm(x) / arm(x).sum(1, keepdim=True), lambda x: torch.softmax(x, 1), **words
    )


@honest()
def probabilities_that_underflow():
    words = {
        "inputs": lambda bench: 100 * torch.randn(16, 512),
        "reference": lambda x: torch.softmax(x.double(), 1),
    }
    powers = lambda x: (x - x.amax(1, keepdim=True)).exp()
    return arms(
        lambda x: powers(x) / powers(x).sum(1, keepdim=True), lambda x: x.softmax(1), **words
    )


@honest()
def probabilities_in_low_precision():
    words = {
        "inputs": lambda bench: torch.randn(16, 512),
        "reference": lambda x: torch.softmax(x.double(), 1),
        "precision": "bf16",
    }
    softmax = lambda x: torch.softmax(x, 1)
    return arms(lambda x: softmax(x.bfloat16()).float(), softmax, **words)


@honest()
def a_spectrum_with_a_peak():
    words = {
        "inputs": lambda bench: torch.rand(4096),
        "reference": lambda x: torch.fft.rfft(x.double()),
    }
    return arms(lambda x: torch.fft.fft(x)[: len(x) // 2 + 1].clone(), torch.fft.rfft, **words)


@honest()
def products_of_quantized_matrices():
    """Two products with a nonlinear function between, in fp8: many results are small."""

    def steps(x, v, w, cast=lambda x: x):
        return cast(torch.nn.functional.gelu(cast(x) @ cast(v))) @ cast(w)

    words = {
        "inputs": lambda bench: (torch.randn(64, 256), torch.randn(256, 256) / 16,
                                 torch.randn(256, 64)),
        "reference": lambda *a: steps(*(x.double() for x in a)),
        "precision": "fp8",
    }  # fmt: skip
    quantized = lambda x: x.to(torch.float8_e4m3fn).float()
    return arms(lambda *a: steps(*a, quantized), steps, **words)


@honest()
def rows_of_other_sizes():
    def inputs(bench):
        return torch.logspace(-3, 3, 64)[:, None] * torch.randn(64, 64), torch.randn(64, 64)

    words = {"inputs": inputs, "reference": lambda a, b: a.double() @ b.double()}
    return arms(lambda a, b: (b.t() @ a.t()).t().contiguous(), torch.matmul, **words)


# inputs that are alike


@honest()
def strides_that_both_arms_get():
    inputs = lambda bench: np.asfortranarray(np.random.default_rng(bench.seed).random((64, 64)))
    return arms(lambda x: x * 2, inputs=inputs)


@honest()
def an_offset_that_the_seed_decides():
    def inputs(bench):
        x = np.random.default_rng(bench.seed).random(128)
        return x[bench.seed % 7 :][:64]

    return arms(lambda x: x * 2, inputs=inputs)


@honest()
def inputs_that_threads_sum_in_any_order():
    """Values that differ by rounding from call to call are found by their sum's last bits only."""
    inputs = lambda bench: torch.randn(64, 4096) @ torch.randn(4096)
    return arms(lambda x: x * 2, inputs=inputs, reference=lambda x: x.double() * 2)


# views, files and marks that both arms return, or that cost the optimized arm work


@honest()
def a_file_that_both_arms_map():
    arm = lambda file: np.memmap(file.name, float, "r")
    return arms(arm, inputs=data_file, reference=lambda file: np.fromfile(file.name))


@honest()
def a_file_that_is_read():
    arm = lambda file: np.fromfile(file.name)
    return arms(
        lambda file: np.array(np.memmap(file.name, float, "r")),
        arm,
        inputs=data_file,
        reference=arm,
    )


@honest()
def memory_that_processes_share():
    """Batches of a data loader's workers arrive in shared memory."""

    def arm(x):
        result = np.frombuffer(mmap.mmap(-1, x.nbytes), x.dtype)
        np.multiply(x, 2, out=result)
        return result

    return arms(arm, lambda x: x * 2)


@honest()
def a_tensor_in_shared_memory():
    words = {"inputs": tensors, "reference": lambda x: x.double() * 2}
    return arms(lambda x: (x * 2).share_memory_(), lambda x: x * 2, **words)


@honest()
def a_conjugate_that_both_arms_mark():
    return arms(lambda x: (x * 2).conj(), **CONJUGATES)


@honest()
def a_conjugate_that_is_computed():
    return arms(lambda x: (x * 2).conj().resolve_conj(), lambda x: (x * 2).conj(), **CONJUGATES)


@honest()
def inputs_that_are_marked_as_conjugated():
    words = {
        "inputs": lambda bench: (complex_vectors(bench)[0].conj(),),
        "reference": lambda x: x.to(torch.complex128) * 2,
    }
    return arms(lambda x: (x * 2).resolve_conj(), **words)


@honest()
def a_part_of_a_larger_result():
    words = {"inputs": tensors, "reference": lambda x: x.double()[::2] * 2}
    return arms(lambda x: (x * 2)[::2], lambda x: x[::2] * 2, **words)


@honest()
def modules_as_results():
    return arms(module_of, inputs=tensors, reference=lambda x: x.double() * 2)


@honest()
def keys_that_are_members_of_an_enumeration():
    side = enum.Enum("Side", "LEFT RIGHT")
    words = {"reference": lambda x: {side.LEFT: x + x, side.RIGHT: x + 1}}
    return arms(lambda x: {side.LEFT: x * 2, side.RIGHT: x + 1}, **words)


@honest()
def keys_in_another_order():
    words = {"reference": lambda x: (x + x, x + 1)}
    return arms(lambda x: {"y": x * 2, "z": x + 1}, lambda x: {"z": x + 1, "y": x * 2}, **words)


@dataclass(frozen=True)
class Doubled:
    """A dataclass with a method, a default, and properties beside its fields."""

    y: object
    scale: object = None

    @property
    def halved(self):
        return self.y / 2

    @functools.cached_property
    def total(self):
        return self.y.sum()


@dataclass(frozen=True, slots=True)
class Quadrupled(Doubled):
    z: object = None


@honest()
def dataclasses_with_properties():
    def arm(x):
        result = Doubled(x * 2)
        assert result.total is not None
        return result, Quadrupled(x * 2, z=x * 4)

    return arms(arm, reference=lambda x: (x + x, x + x, x * 4))


class Doubler(torch.nn.Module):
    """A module with a property beside its parameter."""

    def __init__(self, x):
        super().__init__()
        self.y = torch.nn.Parameter(x * 2, requires_grad=False)

    @property
    def halved(self):
        return self.y / 2


@honest()
def modules_with_properties():
    return arms(Doubler, inputs=tensors, reference=lambda x: x.double() * 2)


@honest()
def results_in_shared_memory_by_both_arms():
    return arms(lambda x: np.multiply(x, 2, out=shared_memory(x)))


@honest()
def numbers_of_many_types():
    def arm(x):
        total = x.sum()
        return float(total), total, np.int64(total * 1e6), [total * i for i in range(1, 21)]

    return arms(arm, reference=arm)


@honest()
def a_tensor_with_attributes():
    def arm(x):
        result = x * 2
        result.scale = 2.0
        return result

    return arms(arm, inputs=tensors, reference=lambda x: x.double() * 2)


@honest()
def a_gradient_that_is_returned():
    """The baseline returns a copy of the gradient, the optimized arm the gradient itself."""

    def gradient(w):
        w.grad = None
        (w * w).sum().backward()
        return w.grad

    words = {
        "inputs": lambda bench: (torch.randn(64, requires_grad=True),),
        "reference": lambda w: (2 * w.detach().double(), 2 * w.detach().double()),
    }
    return arms(gradient, lambda w: gradient(w).clone(), **words)


# lists and other objects of Python


@honest()
def a_long_list_of_numbers():
    return arms(lambda x: [2 * i for i in x], inputs=numbers(20_000),
                reference=lambda x: [i + i for i in x])  # fmt: skip


@honest()
def a_list_that_is_copied_and_sorted():
    return arms(lambda x: sort_in_place(x[:]), sorted, inputs=numbers(99), reference=sorted)


@honest()
def a_list_that_both_arms_sort():
    def reference(x):
        return sorted(x), sorted(x)

    return arms(sort_in_place, inputs=numbers(99), reference=reference)


@honest()
def a_counter_of_python_that_both_arms_set():
    def arm(x, counter):
        counter["calls"] = len(x)
        return x * 2

    inputs = lambda bench: (np.random.default_rng(bench.seed).random(64), {"calls": 0})
    return arms(arm, inputs=inputs, reference=lambda x, counter: (x * 2, len(x)))


@honest()
def text_that_differs_at_each_call():
    """The name of a temporary file is no value that the seed decides."""

    def inputs(bench):
        x = np.random.default_rng(bench.seed).random(64)
        return x, f"name {np.random.default_rng().integers(1 << 30)}"

    return arms(lambda x, name: x * 2, inputs=inputs, reference=lambda x, name: x * 2)


@honest()
def parts_of_one_buffer():
    """They interleave in memory, but no element is in two of them."""
    inputs = lambda bench: (np.random.default_rng(bench.seed).random((64, 96)),)
    reference = lambda x: [x[:, i : i + 32] * 2 for i in (0, 32, 64)]
    return arms(lambda x: np.split(x * 2, 3, axis=1), inputs=inputs, reference=reference)


@honest()
def equal_lists_that_are_not_one():
    words = {"inputs": row_of_numbers, "reference": lambda x: [x + x] * 8}
    return arms(lambda x: [(x * 2).tolist() for _ in range(8)], **words)


@honest()
def one_list_in_both_arms():
    words = {"inputs": row_of_numbers, "reference": lambda x: [x + x] * 8}
    return arms(lambda x: [(x * 2).tolist()] * 8, **words)


@honest()
def one_tuple_for_many_rows():
    words = {"inputs": row_of_numbers, "reference": lambda x: [x + x] * 8}
    rows = lambda x: [tuple((x * 2).tolist()) for _ in range(8)]
    return arms(rows, lambda x: [tuple((x * 2).tolist())] * 8, **words)


@dataclass(frozen=True)
class Row:
    total: float


@honest()
def one_frozen_dataclass_for_equal_rows():
    words = {"inputs": row_of_numbers, "reference": lambda x: [Row(float(sum(x)))] * 8}
    rows = lambda x: [Row(float(x.sum())) for _ in range(8)]
    return arms(rows, lambda x: [Row(float(x.sum()))] * 8, **words)


@honest()
def views_of_bytes_in_both_arms():
    return arms(lambda b: np.frombuffer(b[0]), inputs=bytes_of(bytes), reference=lambda b: b[1])


@honest()
def copies_of_bytes():
    copied = lambda b: np.array(np.frombuffer(b[0]))
    return arms(copied, inputs=bytes_of(bytearray), reference=lambda b: b[1])


@honest()
def a_result_in_the_bytes_of_a_destination():
    """The baseline fills the destination, too, so the result need not be copied from it."""

    def fill(x, out):
        view = np.frombuffer(out)
        np.multiply(x, 2, out=view)
        return view

    def inputs(bench):
        return (*row_of_numbers(bench), bytearray(256))

    copied = lambda x, out: fill(x, out).copy()
    return arms(fill, copied, inputs=inputs, reference=lambda x, out: x + x)


@honest()
def a_generator_that_both_arms_draw_from():
    def arm(x, generator):
        generator.standard_normal(9)
        return x * 2

    def inputs(bench):
        generator = np.random.default_rng(bench.seed)
        return generator.random(64), generator

    return arms(arm, inputs=inputs, reference=lambda x, generator: x + x)


@honest()
def a_sum_of_doubles_in_another_order():
    """The reference is no more precise than the arms, so its own error counts twice."""

    def inputs(bench):
        generator = np.random.default_rng(bench.seed)
        return generator.standard_normal((99, 4096)), generator.standard_normal(4096)

    return arms(
        lambda a, x: (a * x).sum(1), inputs=inputs, reference=lambda a, x: a[:, ::-1] @ x[::-1]
    )


@honest()
def a_border_that_no_seed_changes():
    border = np.random.default_rng(1).random(400)

    def inputs(bench):
        return (np.concatenate([border, np.random.default_rng(bench.seed).random(1000)]),)

    return arms(lambda x: x * 2, inputs=inputs, reference=lambda x: x + x)


@honest()
def zeros_in_most_elements():
    def inputs(bench):
        return (np.triu(np.random.default_rng(bench.seed).random((64, 64)), 40),)

    return arms(lambda x: x * 2, inputs=inputs, reference=lambda x: x + x)
