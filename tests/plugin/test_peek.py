"""Elements that are read when the clock stops, and compared once the result has been copied."""

import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_aiperf.correctness.peek import Peek


def an_array():
    return np.zeros((4, 5))


RESULTS = {
    "array": (an_array, lambda x: x.fill(1)),
    "strided": (lambda: np.zeros((8, 9))[::2, ::-3], lambda x: x.fill(1)),
    "one number": (lambda: np.zeros(()), lambda x: x.fill(1)),
    "tensor": (lambda: torch.zeros(3, 4).t(), lambda x: x.fill_(1)),
    "parameter": (lambda: torch.nn.Parameter(torch.zeros(3)), lambda x: x.data.fill_(1)),
    "bfloat16": (lambda: torch.zeros((), dtype=torch.bfloat16), lambda x: x.fill_(1)),
    "sparse tensor": (lambda: torch.ones(3, 4).to_sparse(), lambda x: x.mul_(2)),
    "sparse rows": (lambda: torch.ones(3, 4).to_sparse_csr(), lambda x: x.mul_(2)),
    "NaN": (lambda: np.full(7, np.nan), lambda x: x.fill(1)),
    "list": (lambda: [0.0] * 5, lambda x: x.__setitem__(slice(None), [1.0] * 5)),
    "nested": (lambda: {"a": ([an_array()],)}, lambda x: x["a"][0][0].fill(1)),
    "dict": (lambda: {"a": 1}, lambda x: x.update(a=2)),
}


@pytest.mark.parametrize("result", RESULTS)
def test_a_result_that_changes_is_noticed_and_another_is_not(result):
    make, change = RESULTS[result]
    value = make()
    peek = Peek(random.Random(1))
    peek.read([value])
    assert not peek.has_changed()
    change(value)
    assert peek.has_changed()


def test_of_a_small_part_that_changes_some_call_shows_it():
    noticed = 0
    for seed in range(40):
        value = np.zeros(1000)
        peek = Peek(random.Random(seed))
        peek.read([value])
        value[300:350] = 1
        noticed += peek.has_changed()
    assert 5 < noticed < 35


@pytest.mark.parametrize("make", [lambda: np.zeros((30, 40)), lambda: [0.0] * 1000])
@pytest.mark.parametrize("at", [0, -1])
def test_the_first_and_the_last_element_are_always_read(make, at):
    value = make()
    peek = Peek(random.Random(1))
    peek.read([value])
    if isinstance(value, list):
        value[at] = 1.0
    else:
        value[at, at] = 1
    assert peek.has_changed()


class Code:
    """An object whose code must not run while the clock has just stopped."""

    def __getattribute__(self, name):
        pytest.fail(f"{name} was read")

    def __hash__(self):
        return 1


UNREAD = {
    "nothing": lambda: None,
    "object": Code,
    "objects": lambda: [Code()],
    "key": lambda: {Code(): 1},
    "empty dict": dict,
    "empty list": list,
    "empty array": lambda: np.empty((0, 3)),
    "array of objects": lambda: np.array([None, [1]], dtype=object),
    "meta tensor": lambda: torch.empty(2, device="meta"),
    "sparse tensor without values": lambda: torch.zeros(2, 2).to_sparse(),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "empty tensor": lambda: torch.empty(0),
}


@pytest.mark.parametrize("value", UNREAD)
def test_what_cannot_be_read_is_left_out(value):
    peek = Peek(random.Random(1))
    peek.read([UNREAD[value]()])
    assert not peek.has_changed()


def test_containers_in_themselves_come_to_an_end():
    endless = []
    endless.append(endless)
    peek = Peek(random.Random(1))
    peek.read([endless])
    assert not peek.has_changed()


def test_a_sparse_tensor_is_never_indexed():
    """To find one element, torch would compare all indices."""
    called = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append((str(func), args[0].layout))
            return func(*args, **(kwargs or {}))

    value = torch.eye(9).to_sparse()
    with Calls():
        peek = Peek(random.Random(1))
        peek.read([value])
        assert not peek.has_changed()
    assert {func for func, layout in called if layout is torch.sparse_coo} == {
        "aten._values.default"
    }
