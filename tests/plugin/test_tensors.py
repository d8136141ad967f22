"""Tensors in a value are found, compared, poisoned and overwritten."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from pytest_aiperf.correctness import tensors
from pytest_aiperf.errors import UsageError
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


def test_shared_bytes_count_once():
    t, a = torch.zeros(100), np.zeros(100)
    assert tensors.nbytes((t, t, t[:50], t.view(torch.int32))) == 400
    assert tensors.nbytes((a, a[::2], 5, "text", None)) == 800
    assert tensors.nbytes((t[:10], torch.zeros(1).expand(1000))) == 44
    assert tensors.nbytes((t[60:], t[:80], torch.zeros(5))) == 420


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


def test_overwrite_copies_in_place_and_drops_gradients():
    live = (torch.nn.Linear(2, 2), np.zeros(2), torch.zeros(4)[::2])
    fresh = (torch.nn.Linear(2, 2), np.ones(2), torch.ones(2))
    live[0](torch.ones(2)).sum().backward()
    weight = live[0].weight
    tensors.overwrite(live, fresh)
    assert live[0].weight is weight
    assert weight.equal(fresh[0].weight)
    assert weight.grad is None
    assert live[1].tolist() == live[2].tolist() == [1, 1]


def test_overwrite_refuses_another_shape():
    with pytest.raises(UsageError, match="another shape"):
        tensors.overwrite((torch.zeros(2),), (torch.zeros(3),))
