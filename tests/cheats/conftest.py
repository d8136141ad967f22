"""Undo an arm's changes to the process; add the number of caught and passed arms to the summary."""

import builtins
import ctypes
import decimal
import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

import pytest_aiperf.correctness.accuracy
import pytest_aiperf.device.device
from pytest_aiperf.plugin import CONTEXT
from tests.plugin.conftest import fake_gpu_on_path, project  # noqa: F401  fixtures

PATCHED = (  # attributes that dishonest arms replace
    (builtins, "isinstance"),
    (builtins, "sorted"),
    (json.JSONEncoder, "iterencode"),
    (np, "array"),
    (np, "sort"),
    (np.random, "random"),
    (time, "perf_counter_ns"),
    (time, "monotonic"),
    (pytest_aiperf.device.device, "now"),
    (pytest_aiperf.correctness.accuracy, "verify"),
    (torch.cuda.Event, "elapsed_time"),
    (torch.cuda, "synchronize"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cuda.matmul, "allow_tf32"),
)
SETTERS = (  # functions that dishonest arms call, with the usual arguments
    (decimal.setcontext, decimal.Context()),
    (np.setbufsize, np.getbufsize()),
    (np.random.set_bit_generator, np.random.get_bit_generator()),
    (sys.set_coroutine_origin_tracking_depth, 0),
    (sys.setprofile, None),
    (tracemalloc.stop,),
    (ctypes.CDLL(None).prctl, 41, 0, 0, 0, 0),  # huge pages are not disabled
    (signal.signal, signal.SIGALRM, signal.SIG_DFL),
    (signal.signal, signal.SIGBUS, signal.SIG_DFL),
    (Path("/proc/self/timerslack_ns").write_text, Path("/proc/self/timerslack_ns").read_text()),
    (sys.setswitchinterval, sys.getswitchinterval()),
    (gc.set_threshold, *gc.get_threshold()),
    (os.sched_setaffinity, 0, os.sched_getaffinity(0)),
    (os.umask, os.umask(0o22)),
    (resource.setrlimit, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)),
    (signal.setitimer, signal.ITIMER_VIRTUAL, 0),
    (logging.getLogger().setLevel, logging.getLogger().level),
    (torch.autograd.set_detect_anomaly, False),
    (torch.backends.mkldnn.set_flags, True),
    (torch.set_default_device, None),
    (torch.set_flush_denormal, False),
    (torch.set_default_dtype, torch.float32),
    (torch.set_grad_enabled, True),
    (torch.set_deterministic_debug_mode, "default"),
)
SUMMARY = {  # part of a test id -> text of the summary line that counts the tests with it
    "test_dishonest.py::test_it_is_caught[": "wrong or dishonest arms caught",
    "test_dishonest.py::test_it_is_marked_as_not_checked[": "arms named as not checked",
    "test_dishonest_on_gpu.py::test_it_is_caught[": "wrong or dishonest arms caught on the GPU",
    "test_honest.py::test_it_passes[": "honest arms that look like cheats passed",
    "test_honest_on_gpu.py::test_it_passes[": "honest arms that look like cheats passed on the GPU",
    "test_stack.py::test_it_is_refused": "misuses of pytest refused",
    "test_stack.py::test_a_conftest_cannot_hide_it[": "hooks that hide a failure refused",
    "test_stack.py::test_it_is_accepted[": "honest tests that look like misuses accepted",
    "test_guards_off.py::test_without_the_guard_its_test_fails[": "guards tested",
}


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Undo an arm's changes to the process. In a session, each claim has a process of its own."""
    for name in ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER"):  # set by the outer pytest run
        monkeypatch.delenv(name, raising=False)
    environ = dict(os.environ)
    originals = [(owner, name, getattr(owner, name)) for owner, name in PATCHED]
    finders, folder = list(sys.meta_path), Path.cwd()
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    children = set(multiprocessing.active_children())  # of other tests in this process
    yield
    sys.meta_path[:] = finders
    os.chdir(folder)
    for owner, name, value in originals:
        setattr(owner, name, value)
    for setter, *arguments in SETTERS:
        setter(*arguments)
    for child in set(multiprocessing.active_children()) - children:
        child.kill()
        child.join()
    for thread in threading.enumerate():
        if thread.name == "spinning":
            thread.join()
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environ)


@pytest.fixture
def item(request, gpu):
    """Return the context of a test on a GPU: it has the lock of the session."""
    assert gpu
    return request.node.stash[CONTEXT]


def pytest_terminal_summary(terminalreporter):
    for outcome in ("passed", "failed"):
        ids = [report.nodeid for report in terminalreporter.stats.get(outcome, [])]
        for part, words in SUMMARY.items():
            if count := sum(part in nodeid for nodeid in ids):
                terminalreporter.write_line(f"{count} {words}: {outcome}")
