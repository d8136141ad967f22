"""What the code of an arm refers to."""

import json

import pytest
import torch

from pytest_aiperf.correctness.references import References

TABLE = {0: 1.0}


def scaled(x):
    return x * TABLE[0]


def labels(references):
    return {references.label(place) for place in references.states()}


def test_a_changed_global_is_seen(monkeypatch):
    references = References(scaled)
    before = references.states()
    monkeypatch.setitem(TABLE, 0, 2.0)
    after = references.states()
    assert [references.label(p) for p in before if before[p] != after[p]] == ["TABLE"]


class Own:
    def __init__(self):
        self.kept, self.used = None, 1


@pytest.mark.parametrize(
    ("value", "change", "is_replaced"),
    [
        ([1, 2], lambda x: x.append(3), False),
        ([1, 2], lambda x: x.insert(0, 3), True),
        ([1, 2], lambda x: x.pop(), True),
        ({"a": 1}, lambda x: x.update(b=2), False),
        ({"a": 1}, lambda x: x.update(a=2), True),
        ({1, 2}, lambda x: x.add(0), False),
        (Own(), lambda x: setattr(x, "kept", 1), False),
        (Own(), lambda x: setattr(x, "more", 1), False),
        (Own(), lambda x: setattr(x, "used", 2), True),
    ],
)
def test_a_value_that_grows_is_not_replaced(value, change, is_replaced):
    references = References(lambda x: (value, x))
    before = references.states()
    assert references.replaced_since(before) == []
    change(value)
    assert references.replaced_since(before) == ["value"] * is_replaced


@pytest.mark.parametrize(("first", "is_replaced"), [(1, True), (None, False)])
def test_a_name_with_another_value_is_replaced_unless_it_had_none(first, is_replaced):
    value = first
    references = References(lambda x: (value, x))
    before = references.states()
    value = 2
    assert references.replaced_since(before) == ["value"] * is_replaced


def test_what_libraries_refer_to_is_left_out():
    assert labels(References(json.loads)) == set()
    assert labels(References(lambda x: torch.cdist(x, x) * TABLE[0])) >= {"torch", "TABLE"}
    assert "sys.modules" not in labels(References(lambda x: torch.cdist(x, x)))


def test_what_a_launcher_of_the_plugin_keeps_is_left_out():
    class Launcher:
        def __call__(self, x):
            self.loaded = True

    launcher = Launcher()
    assert labels(References(launcher)) >= {"self"}
    Launcher.__module__ = "pytest_aiperf.build.nvcc"
    assert labels(References(launcher)) == set()


def test_what_an_object_of_a_library_keeps_is_left_out():
    """A cache of compiled kernels grows with calls of other arms, which slows none down."""

    class Own:
        cached = None

    library, own = torch.nn.Identity(), Own()
    references = References(lambda x: (library, own, x))
    before = references.states()
    library.cached = own.cached = 1
    after = references.states()
    assert [references.label(p) for p in before if before[p] != after[p]] == ["own"]
