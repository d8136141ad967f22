"""Counters are read in the right order, and every refusal has a reason; CUPTI itself is faked."""

import contextlib
import ctypes
import dataclasses
import functools
import math

import pytest
import torch

from pytest_aiperf.device import counters
from pytest_aiperf.errors import BuildError, CaptureFailed, ToolMissing
from pytest_aiperf.model import Gpu

GPU = Gpu("NVIDIA H200", "h200", "GPU-1", "sm90", 132, 60 << 20, 141 << 30, "580.1")
KNOWN = {"dram__bytes.sum": 4096.0, "smsp__inst_executed.sum": 77.0, "l1tex__hit.ratio": math.nan}
ENABLE, SET_CONFIG = "cuptiRangeProfilerEnable", "cuptiRangeProfilerSetConfig"


class FakeCupti:
    """A library whose functions note their calls; ``statuses`` are those of functions that fail."""

    def __init__(self, events, passes=1, missing=(), **statuses):
        self.events, self.passes, self.missing, self.statuses = events, passes, missing, statuses
        self.structures = {}

    def __getattr__(self, name):
        if name in self.missing:
            raise AttributeError(name)
        return functools.partial(self.run, name)

    def run(self, name, reference):
        parameters = self.structures[name] = reference._obj
        self.events.append(name.removeprefix("cupti"))
        if name in self.statuses:
            return self.statuses[name]
        fake = getattr(type(self), f"_{name.removeprefix('cupti')}", None)
        return fake(self, parameters) if fake else 0

    def cuptiGetResultString(self, status, reference):  # noqa: N802  CUPTI's name
        reference._obj.value = b"CUPTI_ERROR_HARDWARE"

    def _DeviceGetChipName(self, parameters):  # noqa: N802
        parameters.chip = b"GH100"
        return 0

    def _ProfilerHostConfigAddMetrics(self, parameters):  # noqa: N802
        return 0 if all(name in KNOWN for name in self._metrics(parameters)) else 1

    def _ProfilerHostGetConfigImageSize(self, parameters):  # noqa: N802
        parameters.bytes = 16
        return 0

    def _RangeProfilerStop(self, parameters):  # noqa: N802
        self.passes -= 1
        parameters.is_last_pass = not self.passes
        return 0

    def _ProfilerHostEvaluateToGpuValues(self, parameters):  # noqa: N802
        values = ctypes.cast(parameters.values, ctypes.POINTER(ctypes.c_double))
        for index, name in enumerate(self._metrics(parameters)):
            values[index] = KNOWN[name]
        return 0

    def _metrics(self, parameters):
        names = ctypes.cast(parameters.metrics, ctypes.POINTER(ctypes.c_char_p))
        return [names[index].decode() for index in range(parameters.count)]


class FakeDevice:
    torch_device, gpu = "cpu", dataclasses.replace(GPU, l2_bytes=1 << 20)

    def __init__(self, events):
        self.events = events

    @contextlib.contextmanager
    def current(self):
        try:
            yield
        finally:
            self.events.append("left the stream")

    def synchronize(self):
        self.events.append("synchronize")


@pytest.fixture
def read(monkeypatch):
    """Return a function that reads metrics through a fake library; ``read.events`` is its log."""
    events = []

    def read(*metrics, call=lambda: events.append("call"), flush=None, **fake):
        read.library = FakeCupti(events, **fake)
        monkeypatch.setattr(counters, "_load", lambda _: counters._Cupti(read.library))
        monkeypatch.setattr(counters, "_current_context", lambda: 7)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        return counters.read(call, metrics, FakeDevice(events), flush)

    read.events = events
    return read


def test_values_have_their_names_and_one_without_a_value_is_left_out(read):
    assert read(*KNOWN) == {"dram__bytes.sum": 4096.0, "smsp__inst_executed.sum": 77.0}


def test_each_pass_counts_one_call_between_two_idle_states(read):
    read("dram__bytes.sum", passes=2, flush=lambda: read.events.append("flush"))
    events = read.events
    one_pass = [
        *("flush", "synchronize", "RangeProfilerStart", "RangeProfilerPushRange"),
        *("call", "synchronize", "RangeProfilerPopRange", "RangeProfilerStop"),
    ]
    assert events[:2] == ["call", "synchronize"]  # the warm-up comes before anything is counted
    first = events.index("flush")
    assert events[first:] == [
        *(one_pass * 2),
        *("RangeProfilerDecodeData", "ProfilerHostEvaluateToGpuValues", "RangeProfilerDisable"),
        *("ProfilerHostDeinitialize", "ProfilerDeInitialize", "left the stream"),
    ]


def test_structures_have_the_layout_of_cuptis_headers(read):
    read("dram__bytes.sum")
    structures = read.library.structures
    sizes = {name: structures[f"cupti{name}"].own_size for name in (
        "ProfilerInitialize", "DeviceGetChipName", "ProfilerHostInitialize",
        "ProfilerHostConfigAddMetrics", "ProfilerHostGetConfigImageSize",
        "ProfilerHostGetConfigImage", "ProfilerHostEvaluateToGpuValues", "RangeProfilerEnable",
        "RangeProfilerGetCounterDataSize", "RangeProfilerCounterDataImageInitialize",
        "RangeProfilerSetConfig", "RangeProfilerPushRange", "RangeProfilerStop",
        "RangeProfilerDecodeData",
    )}  # fmt: skip
    assert list(sizes.values()) == [16, 32, 48, 40, 32, 40, 72, 32, 64, 40, 90, 32, 41, 32]
    config = structures[SET_CONFIG]
    assert (type(config).min_level.offset, type(config).pass_index.offset) == (74, 80)
    assert (config.range, config.replay, config.max_ranges) == (2, 3, 1)  # user range, user replay
    assert (config.levels, config.min_level, config.target_level) == (1, 1, 1)
    assert structures[ENABLE].context == 7


def test_an_unknown_metric_is_named(read):
    with pytest.raises(CaptureFailed, match=r"GH100 has no counter 'launch__grid_size'"):
        read("dram__bytes.sum", "launch__grid_size")
    assert ENABLE.removeprefix("cupti") not in read.events
    assert read.events[-2:] == ["ProfilerDeInitialize", "left the stream"]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (35, "NVreg_RestrictProfilingToAdminUsers=0, or give the container CAP_SYS_ADMIN"),
        (26, "another tool holds the GPU's counters"),
        (9, r"cuptiRangeProfilerEnable returned 9 \(CUPTI_ERROR_HARDWARE\)"),
    ],
)
def test_a_refusal_has_a_reason(read, status, reason):
    with pytest.raises(ToolMissing, match=reason):
        read("dram__bytes.sum", **{ENABLE: status})
    assert "RangeProfilerDisable" not in read.events


def test_a_cupti_without_the_range_profiler_is_too_old(read):
    with pytest.raises(ToolMissing, match=r"install torch for CUDA 12\.6 or newer"):
        read("dram__bytes.sum", missing=["cuptiProfilerHostInitialize"])


def test_a_torch_without_cuda_has_no_cupti():
    with pytest.raises(ToolMissing, match=r"which torch for CUDA brings: .*libcupti\.so\."):
        counters._load(None)


def test_a_call_that_raises_ends_the_profiler(read):
    def call():
        if "RangeProfilerPushRange" in read.events:
            raise ArithmeticError

    ends = ("RangeProfilerDisable", "ProfilerHostDeinitialize", "ProfilerDeInitialize")
    with pytest.raises(ArithmeticError):  # an illegal access makes these functions fail as well
        read("dram__bytes.sum", call=call, **{f"cupti{name}": 9 for name in ends})
    assert set(ends) <= set(read.events)
    assert read.events[-1] == "left the stream"


def test_the_flusher_reads_more_than_the_cache_holds():
    events = []
    flush = counters.flusher(FakeDevice(events))
    assert flush.__self__.nbytes == 3 << 20
    assert flush() == 0


METRICS = ("dram__bytes.sum", "smsp__inst_executed.sum")


def test_kept_values_come_back_for_the_same_code_gpu_and_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_AIPERF_CACHE", str(tmp_path / "new"))
    key = counters.key("ch01::test_a", "optimized", "c0de", METRICS, GPU)
    assert counters.cached(key) is None
    counters.keep(key, {"dram__bytes.sum": 1.5})
    assert counters.cached(key) == {"dram__bytes.sum": 1.5}
    same = dataclasses.replace(GPU, uuid="GPU-2")
    assert counters.key("ch01::test_a", "optimized", "c0de", METRICS[::-1], same) == key


@pytest.mark.parametrize(
    "other",
    [
        ("ch01::test_b", "optimized", "c0de", METRICS, GPU),
        ("ch01::test_a", "baseline", "c0de", METRICS, GPU),
        ("ch01::test_a", "optimized", "beef", METRICS, GPU),
        ("ch01::test_a", "optimized", "c0de", METRICS[:1], GPU),
        ("ch01::test_a", "optimized", "c0de", METRICS, dataclasses.replace(GPU, key="b200")),
        ("ch01::test_a", "optimized", "c0de", METRICS, dataclasses.replace(GPU, driver="590")),
    ],
)
def test_other_code_or_another_machine_has_another_key(other):
    assert counters.key(*other) != counters.key("ch01::test_a", "optimized", "c0de", METRICS, GPU)


def test_another_torch_triton_or_nvcc_has_another_key(monkeypatch):
    key = functools.partial(counters.key, "ch01::test_a", "optimized", "c0de", METRICS, GPU)
    versions = {"torch": "2.13", "triton": "3.7"}
    monkeypatch.setattr(counters.metadata, "version", lambda package: versions[package])
    monkeypatch.setattr(counters, "find_nvcc", lambda: ("/cuda/nvcc", "V13.0.88"))
    keys = {key()}
    for package in versions:
        monkeypatch.setitem(versions, package, "99.0")
        keys.add(key())
    monkeypatch.setattr(counters, "find_nvcc", lambda: ("/cuda/nvcc", "V13.1.2"))
    keys.add(key())
    assert len(keys) == 4


def test_counters_are_kept_without_triton_and_without_nvcc(monkeypatch):
    def version(package):
        if package == "torch":
            return "2.13"
        raise counters.metadata.PackageNotFoundError(package)

    def find_nvcc():
        raise BuildError("no nvcc")

    monkeypatch.setattr(counters.metadata, "version", version)
    monkeypatch.setattr(counters, "find_nvcc", find_nvcc)
    assert counters.key("ch01::test_a", "optimized", "c0de", METRICS, GPU)


@pytest.mark.parametrize("content", ["", "[1.0]", '{"a": "1"}', '{"a": NaN}', "[" * 10_000, "{"])
def test_a_damaged_file_is_read_as_nothing(monkeypatch, tmp_path, content):
    monkeypatch.setenv("PYTEST_AIPERF_CACHE", str(tmp_path))
    counters.keep("k", {"a": 1.0})
    [file] = (tmp_path / "counters").iterdir()
    file.write_text(content)
    assert counters.cached("k") is None


def test_a_cache_that_cannot_be_written_costs_nothing_else(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PYTEST_AIPERF_CACHE", str(tmp_path / "file"))
    counters.keep("k", {"a": 1.0})
    assert counters.cached("k") is None
