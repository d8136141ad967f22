"""Triton's kernels are found as they were compiled and launched, on a GPU that is not here."""

import gc
import sys
from types import SimpleNamespace

import pytest

from pytest_aiperf.build import triton_build
from pytest_aiperf.build.sass import Code
from pytest_aiperf.errors import UsageError
from pytest_aiperf.rules import evidence
from tests.fake_gpu import FakeDevice
from tests.plugin.claims import doubling
from tests.plugin.test_explanation import explained


class JITFunction:
    """Triton's, with the kernels that it compiled for device 0."""

    def __init__(self, *kernels):
        self.fn = lambda: None
        self.device_caches = {0: (dict(enumerate(kernels)), "target", "backend")}


def a_kernel(handle, name):
    """Make a kernel whose machine code is its name."""
    target = SimpleNamespace(target=SimpleNamespace(arch=90))
    return SimpleNamespace(function=handle, asm={"cubin": name.encode()}, metadata=target)


@pytest.fixture
def launch(monkeypatch):
    """Launch by handle, in a process whose modules are frozen as a claim's are."""
    hooks = []
    hook = SimpleNamespace(add=hooks.append, remove=hooks.remove)
    knobs = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=hook))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    jit = SimpleNamespace(JITFunction=JITFunction)
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", jit)
    monkeypatch.setattr(
        triton_build.sass,
        "disassemble",
        lambda file: {file.read_text(): Code({"HGMMA": 1}, 32, 0, 0)},
    )
    gc.freeze()
    yield lambda handle: [told(SimpleNamespace(data={"function": handle})) for told in hooks]
    assert not hooks
    gc.unfreeze()


def names(found):
    return [compiled.kernel.function for compiled in found]


def test_only_what_was_launched_is_looked_at_though_it_is_frozen(launch):
    functions = [JITFunction(a_kernel(1, "small"), a_kernel(2, "large")), JITFunction()]
    gc.freeze()
    [found] = triton_build.launched_kernels(lambda: launch(2))
    assert (found.kernel.function, found.kernel.arch) == ("large", "sm_90")
    assert found.opcodes == {"HGMMA": 1}
    assert functions


def test_a_graph_does_not_tell_so_that_all_kernels_are_looked_at(launch):
    functions = [
        JITFunction(a_kernel(1, "small"), SimpleNamespace()),
        JITFunction(a_kernel(2, "x")),
    ]
    assert names(triton_build.launched_kernels(lambda: None)) == ["small", "x"]
    assert functions


def test_a_function_that_inductor_has_stripped_is_passed_over(launch):
    functions = [JITFunction(a_kernel(1, "theirs")), JITFunction(a_kernel(2, "ours"))]
    functions[0].fn = None
    assert names(triton_build.launched_kernels(lambda: launch(2))) == ["ours"]


def test_a_call_that_goes_wrong_leaves_no_hook(launch):
    functions = [JITFunction(a_kernel(1, "small"))]
    with pytest.raises(ZeroDivisionError):
        triton_build.launched_kernels(lambda: 1 / 0)
    assert functions


def test_a_claim_without_triton_s_kernels_is_not_run_again(launch):
    assert triton_build.launched_kernels(pytest.fail) == []


def test_without_triton_there_is_nothing(monkeypatch):
    monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
    assert triton_build.launched_kernels(lambda: None) == []


def test_code_that_a_gpu_does_not_show_is_no_evidence(launch, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(FakeDevice, "torch_device", "cuda")
    functions = [JITFunction(a_kernel(1, "twice"))]
    pieces = [evidence.opcode("HGMMA", kernel="twice")]
    said, problem = explained(evidence=pieces, optimized=lambda x: (launch(1), doubling(100)(x))[1])
    assert problem is None
    assert said.evidence[0].value == 1
    functions.clear()
    _, problem = explained(evidence=pieces)
    assert isinstance(problem, UsageError)
    assert "no kernel of this claim has 'twice' in its name; its kernels are none" in str(problem)
