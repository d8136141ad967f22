"""Triton's kernels are found as compiled and launched, on a simulated GPU."""

import gc
import sys
from types import SimpleNamespace

import pytest

from pytest_aiperf.build import triton_build
from pytest_aiperf.build.sass import Code
from pytest_aiperf.errors import BuildError, UsageError
from pytest_aiperf.rules import evidence
from tests.fake_gpu import FakeDevice
from tests.plugin.claims import doubling
from tests.plugin.test_explanation import explained


class JITFunction:
    """Stands in for a Triton function whose kernels are compiled for device 0."""

    def __init__(self, *kernels):
        self.fn = lambda: None
        self.device_caches = {0: (dict(enumerate(kernels)), "target", "backend")}


def a_kernel(handle, name):
    """Make a kernel whose machine code is its name."""
    target = SimpleNamespace(target=SimpleNamespace(arch=90))
    return SimpleNamespace(function=handle, asm={"cubin": name.encode()}, metadata=target)


@pytest.fixture
def launch(monkeypatch):
    """Return a function that launches a kernel by its handle. As in a claim, objects are frozen."""
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
    yield lambda handle: [hook(SimpleNamespace(data={"function": handle})) for hook in hooks]
    assert not hooks
    gc.unfreeze()


def names(compiled):
    return [kernel.kernel.function for kernel in compiled]


def test_only_launched_kernels_are_returned_although_they_are_frozen(launch):
    functions = [JITFunction(a_kernel(1, "small"), a_kernel(2, "large")), JITFunction()]
    gc.freeze()
    [compiled] = triton_build.launched_kernels(lambda: launch(2))
    assert (compiled.kernel.function, compiled.kernel.arch) == ("large", "sm_90")
    assert compiled.opcodes == {"HGMMA": 1}
    assert functions


def test_without_a_visible_launch_all_kernels_are_returned(launch):
    functions = [
        JITFunction(a_kernel(1, "small"), SimpleNamespace()),
        JITFunction(a_kernel(2, "x")),
    ]
    assert names(triton_build.launched_kernels(lambda: None)) == ["small", "x"]
    assert functions


def test_a_function_that_inductor_stripped_is_skipped(launch):
    functions = [JITFunction(a_kernel(1, "theirs")), JITFunction(a_kernel(2, "ours"))]
    functions[0].fn = None
    assert names(triton_build.launched_kernels(lambda: launch(2))) == ["ours"]


def test_a_call_that_raises_leaves_no_hook(launch):
    functions = [JITFunction(a_kernel(1, "small"))]
    with pytest.raises(ZeroDivisionError):
        triton_build.launched_kernels(lambda: 1 / 0)
    assert functions


def test_a_compiler_that_hangs_is_a_sentence(monkeypatch):
    monkeypatch.setattr(triton_build, "DEADLINE_S", 0.01)
    kernel = SimpleNamespace(fn=names)
    with pytest.raises(BuildError, match=r"did not compile .* within 0\.01 s: names"):
        triton_build.compile_for_targets([(kernel, (), {"compiled": 1})], ["sm90"])


def test_a_claim_without_triton_kernels_is_not_called_again(launch):
    assert triton_build.launched_kernels(pytest.fail) == []


def test_without_triton_there_are_no_kernels(monkeypatch):
    monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
    assert triton_build.launched_kernels(lambda: None) == []


def test_kernels_that_did_not_run_are_no_evidence(launch, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(FakeDevice, "torch_device", "cuda")
    functions = [JITFunction(a_kernel(1, "twice"))]
    pieces = [evidence.opcode("HGMMA", kernel="twice")]
    explanation, problem = explained(
        evidence=pieces, optimized=lambda x: (launch(1), doubling(100)(x))[1]
    )
    assert problem is None
    assert explanation.evidence[0].value == 1
    functions.clear()
    _, problem = explained(evidence=pieces)
    assert isinstance(problem, UsageError)
    assert "no kernel of this claim has 'twice' in its name; its kernels are none" in str(problem)
