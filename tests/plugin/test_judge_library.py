"""The example that judges the functions of a library, on a fake machine."""

import sys
from types import SimpleNamespace

import pytest
import torch

from examples import judge_library
from pytest_aiperf import Outcome
from pytest_aiperf.session import standalone
from tests.fake_gpu import FakeMachine, Noise

from .claims import doubling
from .conftest import STEADY


def vectors(device):
    return torch.rand(64, device=device)


def third(x):
    return x / 3


def narrow_third(x):
    return third(x.bfloat16()).float()


def unknown(x):
    return {}["no kernel for these sizes"]


OPERATIONS = {
    "unknown": (third, unknown, vectors),
    "fast": (doubling(200), doubling(100), vectors),
    "slow": (doubling(100), doubling(200), vectors),
    "wrong": (third, narrow_third, vectors),
    "same": (third, third, vectors),
}


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_AIPERF_LOCKS", str(tmp_path / "locks"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(standalone, "CudaMachine", lambda: FakeMachine(noise=Noise(**STEADY)))
    caches = (standalone._figures, standalone.open_device)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_each_function_of_a_library_is_judged(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "my_library", SimpleNamespace(OPERATIONS=OPERATIONS))
    assert judge_library.main(["my_library"]) == 1
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == OPERATIONS.keys()
    assert lines["fast"].startswith("FASTER: ")
    assert lines["slow"].startswith("SLOWER where FASTER is claimed")
    assert lines["wrong"].startswith("optimized disagrees with the reference")
    assert lines["same"].startswith("UsageError: ")
    assert lines["unknown"] == "KeyError: 'no kernel for these sizes'"
    one = {"fast": OPERATIONS["fast"]}
    monkeypatch.setitem(sys.modules, "my_library", SimpleNamespace(OPERATIONS=one))
    assert judge_library.main(["my_library"]) == 0


def test_the_reference_is_computed_in_fp64():
    widths, double = [], doubling(200)

    def reference(x):
        widths.append(x.dtype)
        return double(x)

    result = judge_library.judge((reference, doubling(100), vectors))
    assert {torch.float32, torch.float64} == set(widths)
    assert result.outcome is Outcome.PASSED
