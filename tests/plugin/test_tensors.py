"""Tensors in a value are found, compared, poisoned and overwritten."""

import collections
import dataclasses
import fractions
import math
import mmap
import os
import random
import time
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch

from pytest_aiperf.claim.bound_claim import BoundClaim
from pytest_aiperf.claim.claim import claim_of
from pytest_aiperf.correctness import argument_effects, tensors
from pytest_aiperf.correctness.argument_effects import ArgumentEffects
from pytest_aiperf.correctness.contents import read
from pytest_aiperf.correctness.tensors import Inputs
from pytest_aiperf.device.device import HostDevice
from pytest_aiperf.model import Score


@dataclasses.dataclass
class Pair:
    left: object
    right: object


def test_leaves_are_named_by_their_path():
    value = {"b": [torch.zeros(1), 3], "a": Pair(np.zeros(2), None), "m": torch.nn.Linear(1, 1)}
    assert [path for path, _ in tensors.walk(value, "x")] == [
        "x['a'].left",
        "x['b'][0]",
        "x['b'][1]",
        "x['m'].weight",
        "x['m'].bias",
    ]


def test_a_score_is_no_leaf():
    assert tensors.walk((Score(1.0, "s"), 5), "result") == [("result[1]", 5)]


class Counted(str):
    """A path that counts what it is compared with."""

    __slots__ = ()
    __hash__ = str.__hash__
    others: ClassVar[list[object]] = []

    def __eq__(self, other):
        self.others.append(other)
        return str.__eq__(self, other)


def test_each_path_is_compared_with_few_others():
    args = ([object() for _ in range(100)],)
    skip = [Counted(f"args[0][{i}]") for i in range(50)]
    before = {Counted(path): value for path, value in tensors.fingerprint(args).items()}
    args[0][70] = "text"
    Counted.others.clear()
    assert tensors.changed(before, args, skip) == ("args[0][70]",)
    assert len(Counted.others) < 10 * 100


def test_arguments_that_are_not_written_are_not_walked(monkeypatch):
    monkeypatch.setattr(tensors, "leaves", lambda args: pytest.fail("walked"))
    args = ([object() for _ in range(100)],)
    tensors.poison(args, ())
    assert argument_effects.outputs_of(5.0, args, ArgumentEffects()) == [("result", 5.0)]


def test_shared_bytes_count_once():
    t, a = torch.zeros(100), np.zeros(100)
    assert tensors.nbytes((t, t, t[:50], t.view(torch.int32))) == 400
    assert tensors.nbytes((a, a[::2], 5, "text", None)) == 800
    assert tensors.nbytes((t[:10], torch.zeros(1).expand(1000))) == 44
    assert tensors.nbytes((t[60:], t[:80], torch.zeros(5))) == 420


def test_modules_within_modules_are_read():
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert dict(tensors.walk(model, "m")).keys() == {f"m.{name}" for name in named}


# layout of inputs and results


def test_elements_that_are_not_all_written_are_found(tmp_path):
    x, z, n = torch.rand(8), torch.rand(8, dtype=torch.complex64), np.arange(8.0)
    n.tofile(tmp_path / "n")
    mapped = np.memmap(tmp_path / "n", float, "r")
    deferred = [
        *(x[2:4], x[:1].expand(8), (x * 2).unfold(0, 4, 1), n[::-1], n.reshape(2, 4).T),
        *(z.conj().clone().conj(), z.conj().imag, mapped, np.asarray(mapped)[2:]),
        *(torch.from_file(str(tmp_path / "n"), size=8, dtype=torch.float64),),
    ]
    written = [x * 2, (x * 2)[::2], (x * 2).view(2, 4).t(), x[:0], z.conj().resolve_conj(),
               n.copy(), np.zeros((3, 0)), x.clone().share_memory_(), np.array(mapped)]  # fmt: skip
    memory = tensors.memory_of((x, n))
    assert [tensors.is_deferred(a, memory) for a in deferred] == [True] * len(deferred)
    assert [tensors.is_deferred(a, memory) for a in written] == [False] * len(written)
    assert not tensors.is_deferred(x, tensors.memory_of((x, n), skip=["args[0]"]))


@pytest.mark.parametrize("name", [b"caf\xe9", "a\u2028/b \x85".encode()])
def test_mapped_files_may_have_any_name(tmp_path, name):
    path = os.path.join(os.fsencode(tmp_path), name)  # noqa: PTH118  of bytes
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    mapped = np.memmap(os.fsdecode(path), mode="w+", shape=(9,))
    found = tensors._file_range(np.asarray(mapped), tensors._file_mappings())
    assert found == (os.fsdecode(path), 0, 9)


def test_parts_of_overlapping_inputs_are_found():
    x, y = np.zeros(100), np.zeros(100)
    memory = tensors.memory_of((x[:60], x[40:50], x[30:], y[10:]))
    assert len(memory.spans) == 2
    assert [tensors.is_deferred(a, memory) for a in (x[:1], x[99:], y[9:11])] == [True] * 3
    assert [tensors.is_deferred(a, memory) for a in (y[:10], x.copy())] == [False] * 2


def test_a_second_mapping_of_an_input_is_found():
    with mmap.mmap(-1, 4096) as memory:  # shared with child processes
        x = np.frombuffer(memory)
        maps = tensors._file_mappings()
        if any(start <= x.ctypes.data < end for start, end, *_ in maps):
            assert not tensors.is_deferred(x, tensors.memory_of(()))
            assert tensors.is_deferred(x[:3], tensors.memory_of((x,)))
        del x


def test_a_layout_differs_in_whatever_a_call_may_depend_on():
    x = torch.zeros(4, 4)
    n = np.zeros((4, 4))
    read_only = n.copy()
    read_only.flags.writeable = False
    memory = np.zeros(n.nbytes + 8, np.uint8)
    shifted = memory[8 - memory.ctypes.data % 16 :][: n.nbytes].view(float).reshape(4, 4)
    kinds = [x, x.t(), x.double(), x[:, :2], torch.zeros(4, 8)[:, ::2], x.clone().requires_grad_(),
             n, n.T, read_only, shifted]  # fmt: skip
    layouts = [tensors.layout(kind) for kind in kinds]
    assert len(set(layouts)) == len(kinds)
    assert tensors.layout(x) == tensors.layout(torch.ones(4, 4))
    assert tensors.layout(n) == tensors.layout(np.ones((4, 4)))


@pytest.mark.parametrize(
    "array", [np.arange(5), torch.rand(3, 7), torch.rand(9, dtype=torch.complex64), np.float32(2)]
)
def test_a_sample_depends_on_positions_and_values_alone(array):
    array = np.asarray(array) if isinstance(array, np.generic) else array
    copied = tensors.backend_of(array).copy(array)
    assert tensors.sample(array, 7) == tensors.sample(copied, 7)
    copied[...] = 0
    assert tensors.sample(array, 7) != tensors.sample(copied, 7)
    assert tensors.sample(array[:0] if array.ndim else np.empty(0), 7) == []


# detection of changes


@pytest.mark.parametrize("zeros", [torch.zeros, np.zeros], ids=["torch", "numpy"])
def test_changes_are_found_bit_by_bit(zeros):
    args = (zeros(4), zeros(4), zeros((4, 4)).T, zeros(()))
    args[1][0] = float("nan")
    before = tensors.fingerprint(args)
    assert tensors.changed(before, args) == ()
    args[0][2] = -0.0
    args[2][1, 3] = 1
    assert tensors.changed(before, args) == ("args[0]", "args[2]")
    assert tensors.changed(before, args, skip=["args[0]"]) == ("args[2]",)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.uint8])
def test_checksums_depend_on_positions_and_signs(monkeypatch, dtype):
    monkeypatch.setattr(tensors, "HOST_CHUNK", 16)
    array = torch.arange(1, 41).to(dtype)
    for view in (array, array[::2], array.view(5, 8).t()):
        before = tensors.fingerprint((view,))
        assert tensors.changed(before, (view,)) == ()
        for first, second in (((0,), (1,)), ((0,), (-1,))):
            a, b = view[first].clone(), view[second].clone()
            view[first], view[second] = b, a
            assert tensors.changed(before, (view,)) == ("args[0]",), "exchanged"
            view[first], view[second] = a, b
        if dtype is not torch.uint8:
            view.neg_()
            assert tensors.changed(before, (view,)) == ("args[0]",), "all signs are flipped"
            view.neg_()
        assert tensors.changed(before, (view,)) == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda n: n,
        lambda n: [n] * 20,
        lambda n: fractions.Fraction(1, n),
        range,
        lambda n: slice(n, None),
        lambda n: {n, "text", 1},
        lambda n: {n: 1},
        lambda n: {(n, "text"): 1},
    ],
)
def test_integers_may_have_more_digits_than_python_writes(make):
    value, equal, other = (make(10**5000 + i) for i in (0, 0, 1))
    before = tensors.fingerprint((value,))
    assert not tensors.changed(before, (equal,))
    assert tensors.changed(before, (other,))
    states = [read((x, collections.deque([x]))) for x in (value, equal, other)]
    assert states[0] == states[1] != states[2]


def test_a_claim_may_be_about_integers_of_any_length():
    bound = BoundClaim(
        claim_of(
            baseline=lambda a, b: a * b,
            optimized=lambda a, b: b * a,
            inputs=lambda bench: tuple(
                random.Random(bench.seed + i).getrandbits(40_000) for i in (0, 1)
            ),
            reference=lambda a, b: a * b,
            metric="wall",
        ),
        HostDevice(),
        1,
        full=True,
    )
    assert {error.error for error in bound.check_agreement()} == {0.0}


def test_a_fingerprint_holds_no_copy():
    (_, checksums) = tensors.fingerprint((np.ones(3 * tensors.HOST_CHUNK + 1),))["args[0]"]
    assert len(checksums) == 4


@pytest.mark.parametrize(
    "shape", [(), (0,), (3, 0), (25,), (7, 3), (2, 3, 25), (2, 11), (1, 1, 10)]
)
@pytest.mark.parametrize("module", [np, torch], ids=["numpy", "torch"])
def test_parts_are_small_and_in_row_major_order(module, shape):
    count = math.prod(shape)
    array = module.arange(count).reshape(shape)
    parts = list(tensors.parts(array, 10))
    assert [x for _, part in parts for x in part.tolist()] == list(range(count))
    assert all(len(part) <= 10 and start == part[0] for start, part in parts)


def test_a_gradient_that_appears_is_a_change():
    x = torch.ones(3, requires_grad=True)
    before = tensors.fingerprint((x,))
    x.sum().backward()
    assert tensors.changed(before, (x,)) == ("args[0].grad",)


# poison and fresh values


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64],
)
def test_poison_is_nan_in_a_view_only(dtype):
    whole = torch.zeros(4, 6, dtype=dtype)
    tensors.poison((whole[:, ::2],), ["args[0]"])
    bad = torch.view_as_real(whole).sum(-1) if dtype.is_complex else whole.double()
    assert bad[:, ::2].isnan().all()
    assert not bad[:, 1::2].isnan().any()


def test_complex_numbers_of_numpy_are_compared_and_poisoned():
    whole = np.zeros((4, 6), np.complex64)
    before = tensors.fingerprint((whole,))
    whole[1, 1] = 1j
    assert tensors.changed(before, (whole,)) == ("args[0]",)
    tensors.poison((whole[:, ::2],), ["args[0]"])
    assert np.isnan(whole.imag[:, ::2]).all()
    assert not np.isnan(whole[:, 1::2]).any()


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint64"])
def test_poison_of_integers(dtype):
    t, a = torch.zeros(4, dtype=getattr(torch, dtype)), np.zeros((4, 4), dtype=dtype)
    tensors.poison((t, a[:, 1:3]), ["args[0]", "args[1]"])
    assert t.numpy().tobytes() == b"\xa5" * t.nbytes
    assert a[:, 1:3].tobytes() == b"\xa5" * (a.nbytes // 2)
    assert not a[:, 0].any()


def test_poison_of_truth_values_alternates():
    t, a = torch.zeros(2, 2, dtype=torch.bool), np.ones((2, 2), dtype=bool)
    tensors.poison((t, a.T), ["args[0]", "args[1]"])
    assert t.tolist() == a.T.tolist() == [[False, True], [False, True]]


def test_poison_leaves_the_rest_alone():
    model = torch.nn.Linear(2, 2)
    tensors.poison((model, "text"), ["args[0].bias"])
    assert model.bias.isnan().all()
    assert model.weight.isfinite().all()


def one_set(*args):
    return Inputs(args=args, dynamic=range(len(args)), seed=0)


def test_overwrite_copies_in_place_and_drops_gradients():
    live = one_set(torch.nn.Linear(2, 2), np.zeros(2), torch.zeros(4)[::2])
    fresh = one_set(torch.nn.Linear(2, 2), np.ones(2), torch.ones(2))
    model, *arrays = live.args
    model(torch.ones(2)).sum().backward()
    weight = model.weight
    assert live.overwrite(fresh) == ()
    assert (live.args[0], model.weight) == (model, weight)
    assert weight.equal(fresh.args[0].weight)
    assert weight.grad is None
    assert arrays[0].tolist() == arrays[1].tolist() == [1, 1]


def test_overwrite_does_not_show_in_torchs_version_counter():
    live = torch.zeros(4)
    assert one_set(live).overwrite(one_set(torch.ones(4))) == ()
    assert (live.tolist(), live._version) == ([1] * 4, 0)


def contents(seed):
    """Values of every kind that can change in place."""
    rng = np.random.default_rng(seed)
    column = torch.from_numpy(rng.random((3, 1)))
    z = torch.from_numpy(rng.random(3) + 1j * rng.random(3))
    return (
        {"numbers": rng.random(99).tolist(), "few": [seed, (seed, seed + 1)]},
        {seed: "another key"},
        bytearray(rng.bytes(5)),
        column.expand(3, 4),
        z.conj(),
        Pair(seed, torch.full((2,), seed)),
        [torch.full((), seed)],
        torch.full((2,), float(seed), requires_grad=True),
    )


def test_everything_that_can_change_in_place_does():
    live = one_set(*contents(1))
    before, few = live.args, live.args[0]["few"]
    array = live.args[5].right
    assert live.overwrite(one_set(*contents(2))) == ()
    assert all(a is b for a, b in zip(live.args, before, strict=True))
    assert (live.args[0]["few"], live.args[5].right) == ([2, (2, 3)], array)
    assert live.args[0]["few"] is few
    assert_equal(live.args, contents(2))


def assert_equal(first, second):
    for (path, a), (other, b) in zip(*(tensors.walk(x, "") for x in (first, second)), strict=True):
        assert path == other
        assert tensors.same_identity(tensors.identify(a), tensors.identify(b)), path


def fixed(seed):
    """Values that cannot change in place, and one that can."""
    read_only = np.full(2, seed)
    read_only.flags.writeable = False
    return (
        torch.full((2,), seed),
        read_only,
        torch.zeros(seed),
        (seed, torch.full((2,), seed)),
        [torch.zeros(1)] * seed,
        "text" * seed,
    )


def test_what_cannot_change_in_place_is_named_and_nothing_changes():
    live = one_set(*fixed(1))
    left = live.overwrite(one_set(*fixed(2)))
    assert left == ("args[1]", "args[2]", "args[4]", "args[3][0]", "args[5]")
    assert_equal(live.args, fixed(1))
    assert live.overwrite(one_set(*fixed(1))) == (), "equal values need no change"


def test_only_the_given_positions_change():
    live = Inputs(args=(torch.zeros(1), 1, torch.zeros(1)), dynamic=[0], seed=0)
    fresh = one_set(torch.ones(1), 2, torch.ones(1))
    assert live.overwrite(fresh) == ()
    assert live.args == (torch.ones(1), 1, torch.zeros(1))
    assert live.overwrite_in_place(fresh, [1, 2]) == []
    assert live.args == (torch.ones(1), 1, torch.ones(1))


def test_overwrite_in_place_names_only_arrays():
    live = one_set(*fixed(1))
    assert live.overwrite_in_place(one_set(*fixed(2))) == ["args[1]", "args[2]", "args[4]"]
    assert live.args[0].tolist() == live.args[3][1].tolist() == [2, 2]


def test_equal_objects_are_found_without_their_warnings(recwarn):
    class Warns:
        def __eq__(self, other):
            warnings.warn("comparing is slow", stacklevel=2)
            return True

        __hash__ = None

    assert tensors.alike((Warns(),), (Warns(),))
    assert not recwarn


def test_many_objects_are_walked_without_looking_at_their_class_again(monkeypatch):
    """20,000 of them would take a minute and more, as each set of inputs is walked twice."""

    @dataclasses.dataclass
    class Point:
        x: float

    looked = []
    look = tensors.stored._in_class
    monkeypatch.setattr(tensors.stored, "_in_class", lambda *a: looked.append(a) or look(*a))
    assert len(tensors.walk([Point(float(i)) for i in range(100)], "args")) == 100
    assert len(looked) < 10


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
@pytest.mark.parametrize("of", [float, lambda x: np.full(2, x)])
def test_overwrite_gives_dicts_the_order_of_the_new_values(kind, of):
    live = one_set(kind(a=of(1), b=of(2), c=of(3)))
    fresh = kind(a=of(4), c=of(6), b=of(5))
    if kind is collections.OrderedDict:
        fresh.move_to_end("a")
    assert live.overwrite(one_set(fresh)) == ()
    assert list(live.args[0]) == list(fresh)
    assert [np.mean(x) for x in live.args[0].values()] == [np.mean(x) for x in fresh.values()]


@dataclasses.dataclass
class Point:
    x: float
    y: int


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (lambda i: (0.5, i), ("[0]", "[1]")),
        (lambda i: [0.5, np.int64(i)], ("[0]", "[1]")),
        (lambda i: Point(0.5, i), (".x", ".y")),
    ],
)
def test_many_rows_of_numbers_are_columns(row, names):
    rows = [row(i) for i in range(17)]
    leaves = tensors.walk({"a": rows}, "result", is_result=True)
    assert [path for path, _ in leaves] == [f"result['a'][:]{name}" for name in names]
    assert [list(values) for _, values in leaves] == [[0.5] * 17, list(range(17))]
    assert len(tensors.walk(rows[:16], "result", is_result=True)) == 32
    assert len(tensors.walk(rows, "args")) == 34


@pytest.mark.parametrize(
    "odd", [(0.5,), (0.5, None), [0.5, 1], (0.5, np.ones(2)), 0.5, (), (*range(17),)]
)
def test_rows_that_are_not_alike_are_no_columns(odd):
    leaves = tensors.walk([(0.5, 1)] * 17 + [odd], "result", is_result=True)
    assert "result[0][1]" in dict(leaves)


def test_sixty_thousand_rows_are_checked_within_seconds():
    started = time.monotonic()
    rows = [(0.5, i) for i in range(60_000)]
    assert len(tensors.walk(rows, "result", is_result=True)) == 2
    assert time.monotonic() - started < 2


def test_the_storage_of_an_array_is_all_that_it_keeps_alive():
    x, t = np.ones((8, 8)), torch.ones(8, 8)
    size = lambda array: np.diff(tensors.storage(array))[0]
    assert size(x[2:3, ::2]) == size(x) == x.nbytes
    assert size(t[1]) == size(t[1].numpy()) == 256
    assert size(np.frombuffer(bytearray(64), np.uint8, 8)) == 64
    assert size(np.frombuffer(memoryview(bytes(64))[:32], np.uint8, 8)) == 64
