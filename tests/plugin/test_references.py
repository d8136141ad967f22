"""What the code of an arm refers to."""

import json

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
