"""Undo an arm's changes to the process; add the number of caught and passed arms to the summary."""

import os
import sys
import time

import pytest
import torch

import pytest_aiperf.correctness.agreement
import pytest_aiperf.device.device

PATCHED = (  # attributes that dishonest arms replace
    (time, "perf_counter_ns"),
    (time, "monotonic"),
    (pytest_aiperf.device.device, "now"),
    (pytest_aiperf.correctness.agreement, "verify"),
    (torch.cuda.Event, "elapsed_time"),
    (torch.cuda, "synchronize"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cuda.matmul, "allow_tf32"),
)
SUMMARY = {  # part of a test id -> text of the summary line that counts the tests with it
    "test_dishonest.py::test_it_is_caught[": "wrong or dishonest arms caught",
    "test_dishonest_on_gpu.py::test_it_is_caught[": "wrong or dishonest arms caught on the GPU",
    "test_honest.py::test_it_passes[": "honest arms that look like cheats passed",
    "test_honest_on_gpu.py::test_it_passes[": "honest arms that look like cheats passed on the GPU",
    "test_guards_off.py::test_without_the_guard_its_test_fails[": "guards tested",
}


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Undo an arm's changes to the process. In a session, each claim has a process of its own."""
    for name in ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER"):  # set by the outer pytest run
        monkeypatch.delenv(name, raising=False)
    environ = dict(os.environ)
    originals = [(owner, name, getattr(owner, name)) for owner, name in PATCHED]
    profiler = sys.getprofile()
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield
    for owner, name, value in originals:
        setattr(owner, name, value)
    sys.setprofile(profiler)
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_deterministic_debug_mode("default")
    os.environ.clear()
    os.environ.update(environ)


def pytest_terminal_summary(terminalreporter):
    for outcome in ("passed", "failed"):
        ids = [report.nodeid for report in terminalreporter.stats.get(outcome, [])]
        for part, words in SUMMARY.items():
            if count := sum(part in nodeid for nodeid in ids):
                terminalreporter.write_line(f"{count} {words}: {outcome}")
