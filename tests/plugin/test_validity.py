"""Each guard refuses its fault and accepts an ordinary measurement."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import GpuState
from pytest_aiperf.rules import validity


def gpu_state(mhz=1980, reasons=0, **violations):
    return GpuState(sm_mhz=mhz, event_reasons=reasons, violations=violations)


@pytest.mark.parametrize("bit", [0x08, 0x20, 0x40, 0x80])
def test_throttling_on_either_side_drops_the_round(bit):
    assert f"{bit:#x}" in validity.round_problem(gpu_state(reasons=bit), gpu_state())
    assert f"{bit:#x}" in validity.round_problem(gpu_state(), gpu_state(reasons=bit | 0x1))


@pytest.mark.parametrize("bits", [0x0, 0x1, 0x2, 0x4, 0x5, 0x10, 0x100, None])
def test_power_cap_idle_and_set_clocks_are_accepted(bits):
    assert validity.round_problem(gpu_state(reasons=bits), gpu_state(reasons=bits)) is None


def test_throttling_that_ended_within_the_round_shows_in_the_counters():
    before = gpu_state(power=1, thermal=5, board_limit=0)
    assert "thermal" in validity.round_problem(before, gpu_state(power=1, thermal=6, board_limit=0))
    assert "board limit" in validity.round_problem(
        before, gpu_state(power=1, thermal=5, board_limit=9)
    )
    assert validity.round_problem(before, gpu_state(power=9, thermal=5, board_limit=0)) is None
    unread = gpu_state()
    assert validity.round_problem(unread, gpu_state(thermal=7)) is None


@pytest.mark.parametrize(
    ("before", "after", "dropped"),
    [(1980, 1890, False), (1980, 1870, True), (1870, 1980, True), (None, 345, False)],
)
def test_clocks_that_differ_between_the_sides_drop_the_round(before, after, dropped):
    problem = validity.round_problem(gpu_state(before), gpu_state(after))
    assert (problem is not None) is dropped
    if problem:
        assert f"from {before} to {after} MHz" in problem


@pytest.mark.parametrize(("after", "dropped"), [(1445, False), (1425, True)])
def test_under_the_power_cap_the_clock_may_fluctuate_more(after, dropped):
    sides = gpu_state(1680), gpu_state(after, reasons=0x4)
    assert (validity.round_problem(*sides) is not None) is dropped
    assert validity.round_problem(gpu_state(1680), gpu_state(1575, reasons=0x1)) is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0"),  # torch tests only whether it is set
        ("TORCH_SHOW_DISPATCH_TRACE", "1"),
        ("TRITON_INTERPRET", "1"),
        ("PYTHONDEVMODE", "1"),
        ("PYTHONTRACEMALLOC", "5"),
        ("CUDA_INJECTION64_PATH", "/x/libprofiler.so"),
        ("NVTX_INJECTION64_PATH", "/x/libprofiler.so"),
        ("NV_SANITIZER_INJECTION_PORT_BASE", "49152"),
        ("NV_NSIGHT_INJECTION_PORT_BASE", "49152"),
        ("NSYS_PROFILING_SESSION_ID", "3"),
        ("LD_PRELOAD", "/x/libsanitizer-public.so"),
    ],
)
def test_an_environment_variable_that_changes_times_is_named(name, value):
    assert validity.environment_problem({"PATH": "/bin", name: value}).startswith(name)


def test_an_ordinary_environment_is_accepted():
    environment = {
        "CUDA_LAUNCH_BLOCKING": "0",
        "TRITON_INTERPRET": "",
        "LD_PRELOAD": "libjemalloc.so",
    }
    assert validity.environment_problem(environment) is None


@pytest.mark.parametrize(
    ("setter", "getter"),
    [
        ("sys.settrace", "sys.gettrace"),
        ("sys.setprofile", "sys.getprofile"),
        ("threading.settrace", "threading.gettrace"),
        ("threading.setprofile", "threading.getprofile"),
    ],
)
def test_a_tracer_is_named_and_is_a_setting(monkeypatch, setter, getter):
    for name in ("sys.gettrace", "sys.getprofile", "threading.gettrace", "threading.getprofile"):
        monkeypatch.setattr(name, lambda: None)  # this test may run under coverage
    monkeypatch.setattr(sys, "monitoring", None, raising=False)
    before = validity.flags()
    assert validity.tracer_problem() is None
    monkeypatch.setattr(getter, lambda: test_a_tracer_is_named_and_is_a_setting)
    assert validity.tracer_problem().startswith(f"{setter} is <function test_a_tracer")
    (changed,) = validity.changed_flags(before, validity.flags())
    assert changed.startswith(f"{setter}: None -> <function test_a_tracer")


def test_tools_of_sys_monitoring_are_tracers(monkeypatch):
    tools = {1: "coverage", 5: "optimizer"}
    monkeypatch.setattr(sys, "monitoring", SimpleNamespace(get_tool=tools.get), raising=False)
    for name in ("sys.gettrace", "sys.getprofile", "threading.gettrace", "threading.getprofile"):
        monkeypatch.setattr(name, lambda: None)
    assert validity.tracer_problem().startswith("sys.monitoring is 'coverage, optimizer'")
    tools.clear()
    assert validity.tracer_problem() is None


@pytest.mark.parametrize(
    ("set_bytes", "l2_bytes", "sets"),
    [
        (8 << 30, 60 << 20, 3),
        (60 << 20, 60 << 20, 3),
        (50 << 20, 60 << 20, 4),
        (1 << 20, 50 << 20, 150),
        (1 << 20, 0, 3),
        (0, 0, 3),
    ],
)
def test_rotation_spans_the_l2_three_times(set_bytes, l2_bytes, sets):
    assert validity.rotation(set_bytes, l2_bytes) == sets
    assert sets * set_bytes >= 3 * l2_bytes


@pytest.mark.parametrize("set_bytes", [0, 4096, (3 * (50 << 20) - 1) // 256])
def test_inputs_too_small_to_be_kept_cold_are_refused(set_bytes):
    with pytest.raises(UsageError, match='declare cache="warm" or enlarge the inputs'):
        validity.rotation(set_bytes, 50 << 20)


def fake_torch(**changes):
    matmul = SimpleNamespace(
        allow_tf32=changes.get("tf32", False), fp32_precision=changes.get("precision", "ieee")
    )
    return SimpleNamespace(
        backends=SimpleNamespace(cuda=SimpleNamespace(matmul=matmul), cudnn=SimpleNamespace()),
        get_default_dtype=lambda: changes.get("dtype", "torch.float32"),
        get_num_threads=lambda: changes.get("threads", 8),
        is_grad_enabled=lambda: changes.get("grad", True),
    )


def flags_of(monkeypatch, **changes):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(**changes))
    return validity.flags()


@pytest.mark.parametrize(
    ("change", "listed"),
    [
        ({"tf32": True}, "torch.backends.cuda.matmul.allow_tf32: False -> True"),
        ({"precision": "tf32"}, "torch.backends.cuda.matmul.fp32_precision: ieee -> tf32"),
        ({"dtype": "torch.half"}, "torch.get_default_dtype: torch.float32 -> torch.half"),
        ({"threads": 1}, "torch.get_num_threads: 8 -> 1"),
        ({"grad": False}, "torch.is_grad_enabled: True -> False"),
    ],
)
def test_a_changed_setting_is_listed_once(monkeypatch, change, listed):
    before = flags_of(monkeypatch)
    assert validity.changed_flags(before, flags_of(monkeypatch)) == []
    assert validity.changed_flags(before, flags_of(monkeypatch, **change)) == [listed]


def test_environment_variables_of_libraries_are_settings(monkeypatch):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    before = flags_of(monkeypatch)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert validity.changed_flags(before, validity.flags()) == ["NVIDIA_TF32_OVERRIDE: unset -> 1"]


@pytest.mark.parametrize("name", ["CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "LD_LIBRARY_PATH"])
def test_an_empty_variable_is_an_unset_one(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    before = validity.flags()
    monkeypatch.setenv(name, "")
    assert validity.changed_flags(before, validity.flags()) == []
    monkeypatch.setenv(name, ":4096:8")
    assert validity.changed_flags(before, validity.flags()) == [f"{name}: unset -> :4096:8"]


def test_loading_torch_changes_no_setting_and_flags_load_no_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = validity.flags()
    assert "torch" not in sys.modules
    assert not any(name.startswith("torch.") for name in before)
    assert validity.changed_flags(before, flags_of(monkeypatch)) == []


def test_settings_that_warn_or_fail_on_access_are_read_quietly(monkeypatch):
    class Matmul:
        @property
        def allow_tf32(self):
            warnings.warn("use the new name", UserWarning, stacklevel=1)
            return True

        @property
        def fp32_precision(self):
            raise RuntimeError("old and new names are mixed")

    torch = fake_torch()
    torch.backends.cuda.matmul = Matmul()
    monkeypatch.setitem(sys.modules, "torch", torch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = validity.flags()
    assert settings["torch.backends.cuda.matmul.allow_tf32"] == "True"
    assert settings["torch.backends.cuda.matmul.fp32_precision"] == "unreadable (RuntimeError)"


def test_torch_has_all_settings():
    import torch

    before = validity.flags()
    missing = [name for name, value in before.items() if value.startswith("unreadable")]
    assert missing == []
    torch.set_float32_matmul_precision("high")
    try:
        changed = validity.changed_flags(before, validity.flags())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "torch.get_float32_matmul_precision: highest -> high" in changed


def test_processes_may_end_while_they_are_looked_up(monkeypatch):
    monkeypatch.setattr(Path, "is_dir", lambda _: True)  # it ends right after glob() has seen it
    assert validity._children("0") == set()
    with subprocess.Popen(["sleep", "60"]) as child:
        assert str(child.pid) in validity._children(str(os.getpid()))
        child.kill()


RENAMING = "import ctypes; ctypes.CDLL(None).prctl(15, b'caf\\xe9'); print(flush=True); input()"
"""Gives the process a name that is not UTF-8."""


def test_processes_may_have_names_that_are_not_utf_8(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", RENAMING], **pipes) as child:
        child.stdout.readline()
        assert str(child.pid) in validity._started()
        validity._background()
        assert validity.faults_of_started() > 0
        child.kill()
    status = tmp_path / "status"
    status.write_bytes(b"Name:\tcaf\xe9\nUmask:\t0022\n")
    assert validity._text_of(str(status)).endswith("0022")
