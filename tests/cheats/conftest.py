"""What an arm changed is put back, and what was proven is counted."""

import os
import time

import pytest
import torch

import pytest_aiperf.claim.agree
import pytest_aiperf.timing.clock

PATCHED = (
    (time, "perf_counter_ns"),
    (time, "monotonic"),
    (pytest_aiperf.timing.clock, "now"),
    (pytest_aiperf.claim.agree, "verify"),
    (torch.cuda.Event, "elapsed_time"),
    (torch.cuda, "synchronize"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cuda.matmul, "allow_tf32"),
)
COUNTED = {
    "test_dishonest.py::test_it_is_caught[": "wrong or dishonest arms caught",
    "test_dishonest_on_gpu.py::test_it_is_caught[": "wrong or dishonest arms caught on the GPU",
    "test_honest.py::test_it_is_not_flagged[": "honest look-alikes not flagged",
    "test_honest_on_gpu.py::test_it_is_not_flagged[": "honest look-alikes not flagged on the GPU",
    "test_guards_off.py::test_off_it_turns_its_test_red[": "guards proven",
}


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Undo what an arm does to the process, as the end of its own process does otherwise."""
    for name in ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER"):  # of the run that tests us
        monkeypatch.delenv(name, raising=False)
    before, kept = dict(os.environ), [(o, name, getattr(o, name)) for o, name in PATCHED]
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield
    for owner, name, value in kept:
        setattr(owner, name, value)
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_deterministic_debug_mode("default")
    os.environ.clear()
    os.environ.update(before)


def pytest_terminal_summary(terminalreporter):
    for outcome in ("passed", "failed"):
        ids = [report.nodeid for report in terminalreporter.stats.get(outcome, [])]
        for part, said in COUNTED.items():
            if count := sum(part in nodeid for nodeid in ids):
                terminalreporter.write_line(f"{count} {said}: {outcome}")
