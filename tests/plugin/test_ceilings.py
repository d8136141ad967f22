"""Ceilings are measured once, cached and computed correctly; no GPU is needed for that."""

import json
import re
import shutil
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from pytest_aiperf import cli
from pytest_aiperf.build.launcher import Kernels
from pytest_aiperf.build.nvcc import build
from pytest_aiperf.cli import main
from pytest_aiperf.device.device import HostDevice
from pytest_aiperf.errors import BuildError, InvalidMeasurement
from pytest_aiperf.limits import ceilings, interconnect, link_survey, microbenchmarks
from pytest_aiperf.limits.link_survey import LinkSurvey
from pytest_aiperf.limits.microbenchmarks import Microbenchmarks, Sizes
from pytest_aiperf.model import Gpu, GpuState
from pytest_aiperf.session import cuda_machine
from pytest_aiperf.session.cuda_machine import CudaMachine
from pytest_aiperf.session.figures import SharedFigures
from tests.fake_gpu import CEILINGS, FAKE_GPU, FakeDevice, FakeMachine

GPU = Gpu("NVIDIA H200", "h200", "GPU-12/34", "sm90", 132, 60 << 20, 141 << 30, "580.1")
SOURCE = ceilings._KERNELS


class Steady:
    """A device on which every call takes a second."""

    torch_device, gpu = "cpu", GPU

    def __init__(self, reasons=()):
        self.reasons = list(reasons)
        self.modes = Counter()
        self.released = 0

    def estimate_s(self, call):
        call()
        return 1.0

    def block(self, calls, mode):
        self.modes[mode.value] += 1
        return SimpleNamespace(run=lambda: [call() for call in calls] and float(len(calls)))

    def telemetry(self):
        return GpuState(sm_mhz=1000, event_reasons=self.reasons.pop() if self.reasons else 0)

    def synchronize(self):
        pass

    def free_bytes(self):
        return 1 << 30

    def release(self):
        self.released += 1


@pytest.fixture
def kernels():
    """Replace the kernels of ceilings.cu: convert each launch's arguments and record them."""
    real = Kernels("ceilings.cu", SOURCE.read_text(), None)

    class Launched(dict):
        def __missing__(self, name):
            def launch(*args):
                for convert, arg in zip(real[name]._converts, args, strict=True):
                    convert(on_gpu(arg) if isinstance(arg, torch.Tensor) else arg, False)
                self.calls.append((name, *args))

            self[name] = launch
            return launch

    def on_gpu(tensor):
        return SimpleNamespace(is_cuda=True, dtype=tensor.dtype, data_ptr=tensor.data_ptr)

    launched = Launched()
    launched.calls = []
    return launched


@pytest.fixture
def measure(kernels, monkeypatch):
    monkeypatch.setattr(microbenchmarks, "_REST_S", 0.0)
    sizes = Sizes(1 << 18, (1 << 12, 1 << 13), 1 << 12, ((32, 64, 16),), launches=7, rounds=3)
    microbenchmark = Microbenchmarks(Steady(), sizes, kernels)
    return lambda name: microbenchmark.benchmarks[name]()


def moved(kernels):
    return [call[3:] for call in kernels.calls if call[0] == "move"]


def test_a_copy_counts_what_is_read_and_what_is_written(measure, kernels):
    assert measure("copy") == 2 << 18
    assert {(size, write, steps) for size, _, write, _, steps in moved(kernels)} == {
        (1 << 18, True, 1)
    }


def test_a_read_counts_what_is_read(measure, kernels):
    assert measure("read") == 1 << 18
    assert {vectors for _, vectors, *_ in moved(kernels)} == {2, 4, 8}


def test_the_l2_rate_counts_every_pass_of_the_kernel(measure, kernels):
    rate = measure("l2")
    launched = set(moved(kernels))
    assert {size for size, _, write, *_ in launched if not write} == {1 << 12, 1 << 13}
    counted = [
        (1 + write) * blocks * steps * 256 * 16 * vectors
        for _, vectors, write, blocks, steps in launched
    ]
    assert rate == max(counted)
    assert min(counted) >= 1 << 18


def test_shared_memory_and_fp32_count_what_the_kernels_do(measure, kernels):
    text = SOURCE.read_text()
    assert "read_shared<<<blocks, 1024" in text
    assert measure("shared") == 2 * 132 * 1024 * (8 * 16) * 3
    assert measure("fp32") == 8 * 132 * 256 * (8 * 16) * 2 * 3
    assert {call[:3] for call in kernels.calls} == {
        ("shared", 2 * 132, 3),
        ("multiply", 8 * 132, 3),
    }


@pytest.mark.parametrize(("dtype", "parts"), [("bf16", 1), ("tf32", 1), ("int8", 1), ("fp64", 8)])
def test_a_product_counts_two_operations_a_term(measure, dtype, parts):
    assert measure(dtype) == 2 * 32 * 64 * 16 / parts


def test_products_leave_torchs_switches_as_they_were(measure):
    matmul, seen = torch.backends.cuda.matmul, []
    before = matmul.fp32_precision, matmul.allow_tf32, torch.get_float32_matmul_precision()
    real = torch.mm

    def spied(a, b):
        seen.append(matmul.fp32_precision)
        return real(a, b)

    torch.mm = spied
    try:
        measure("tf32")
        measure("bf16")
    finally:
        torch.mm = real
    assert set(seen) == {"tf32", before[0]}
    assert before == (
        matmul.fp32_precision,
        matmul.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


def test_launches_are_counted(measure, kernels):
    assert 0 < measure("launch") < 1e-3
    assert ("launch", 7) in kernels.calls
    assert measure("graph_launch") == 1.0
    assert ("launch", 1) in kernels.calls


@pytest.mark.parametrize("name", ["h2d_pageable", "d2h_pageable"])
def test_pageable_transfers_are_timed_by_the_host(kernels, name):
    device = Steady()
    microbenchmark = Microbenchmarks(device, Sizes(1 << 12, (), 1 << 12, ()), kernels)
    assert microbenchmark.benchmarks[name]() == 1 << 12
    assert set(device.modes) == {"wall"}


def test_only_supported_ceilings_are_measured(kernels):
    sizes = Sizes(1 << 12, (), 1 << 12, ())
    without = Microbenchmarks(Steady(), sizes, None).benchmarks
    assert "copy" in without
    assert not {"read", "l2", "shared", "fp32", "launch", "graph_launch"} & set(without)
    old = Steady()
    old.gpu = SimpleNamespace(sms=80, arch="sm70")
    assert not {"bf16", "tf32", "fp8"} & set(Microbenchmarks(old, sizes, kernels).benchmarks)
    assert "fp16" in Microbenchmarks(old, sizes, kernels).benchmarks
    assert {*ceilings.DEVICE, *ceilings.HOST} == set(
        Microbenchmarks(Steady(), sizes, kernels).benchmarks
    )


@pytest.mark.parametrize(("free", "memory"), [(140 << 30, 4 << 30), (10 << 30, 2 << 30)])
def test_buffers_fit_into_the_free_memory(free, memory):
    sizes = Sizes.of(GPU, free)
    assert sizes.memory == memory
    assert all(size % (256 * 8 * 16) == 0 for size in (sizes.memory, *sizes.l2))
    assert max(sizes.l2) * 2 <= GPU.l2_bytes


def test_the_kernels_have_the_arguments_that_are_passed():
    kernels = Kernels("ceilings.cu", SOURCE.read_text(), None)
    assert {name: len(kernels[name]._converts) for name in kernels} == {
        "move": 7,
        "shared": 3,
        "multiply": 3,
        "launch": 1,
    }


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_kernels_build_without_spills(tmp_path):
    built = build(SOURCE, "sm90", cache=tmp_path)
    assert len(built.kernels) == 9
    assert sum(kernel.spill_bytes for kernel in built.kernels) == 0


# the cache of ceilings


@pytest.fixture
def get(tmp_path, monkeypatch):
    """Return a function that requests ceilings and lists those it measured in ``get.measured``."""
    monkeypatch.setattr(ceilings.metadata, "version", lambda _: "2.13.0")
    monkeypatch.setenv("PYTEST_AIPERF_CACHE", str(tmp_path))

    def measure(device, progress, names):
        get.measured += names
        return {name: 1e12 for name in names if name != "fp8"}

    def get(names=("copy", "bf16"), gpu=GPU, **words):
        get.measured = []
        device = SimpleNamespace(gpu=gpu)
        return ceilings.get(device, names, **words)

    monkeypatch.setattr(ceilings, "_measure", measure)
    return get


def the_file(tmp_path):
    (file,) = (tmp_path / "ceilings").iterdir()
    return file


def test_ceilings_are_measured_once(get, tmp_path):
    assert ceilings.cached(GPU) == {}
    assert get() == {"copy": 1e12, "bf16": 1e12}
    assert get.measured == ["copy", "bf16"]
    assert get() == {"copy": 1e12, "bf16": 1e12}
    assert get.measured == []
    assert the_file(tmp_path).name == "GPU-12_34-580.1.json"
    assert ceilings.cached(GPU) == {"copy": 1e12, "bf16": 1e12}


def test_missing_ceilings_are_measured_on_request(get):
    get(["copy"])
    assert get(["read", "copy", "fp8"]) == {"read": 1e12, "copy": 1e12}
    assert get.measured == ["read", "fp8"]
    assert get(["copy"], fresh=True) == {"copy": 1e12}
    assert get.measured == ["copy"]
    get(["read"])
    assert get.measured == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-20],
        lambda text: text.replace("1000000000000.0", "-1.0", 1),
        lambda text: text.replace("1000000000000.0", "NaN", 1),
        lambda text: text.replace("1000000000000.0", '"fast"', 1),
        lambda text: text.replace('"2.13.0"', '"2.11.0"'),
        lambda text: text.replace('"methods": "', '"methods": "0'),
        lambda text: "[]",
        lambda text: '{"ceilings": 1}',
        lambda text: "",
    ],
)
def test_a_torn_or_older_file_is_measured_anew(get, tmp_path, spoil):
    get()
    file = the_file(tmp_path)
    text = file.read_text()
    file.write_text(spoil(text))
    assert file.read_text() != text
    assert get() == {"copy": 1e12, "bf16": 1e12}
    assert get.measured == ["copy", "bf16"]
    assert file.read_text() == text


def test_another_gpu_or_driver_is_measured_anew(get):
    from dataclasses import replace

    get()
    get(gpu=replace(GPU, driver="590"))
    assert get.measured
    get(gpu=replace(GPU, uuid="GPU-5678"))
    assert get.measured


def test_a_folder_that_cannot_be_written_costs_only_time(get, tmp_path):
    (tmp_path / "ceilings").write_text("in the way")
    lines = []
    assert get(progress=lines.append) == {"copy": 1e12, "bf16": 1e12}
    assert "the limits are not kept: cannot write" in lines[0]


# errors while measuring


@pytest.fixture
def benchmarks(monkeypatch):
    """Replace the micro-benchmarks; nvcc is missing."""
    made_up = {}
    monkeypatch.setattr(
        microbenchmarks, "Microbenchmarks", lambda *_: SimpleNamespace(benchmarks=made_up)
    )

    def refuse(*_, **__):
        raise BuildError("no nvcc: get one\nhere")

    monkeypatch.setattr(ceilings.nvcc, "build", refuse)
    return made_up


def test_a_ceiling_that_cannot_be_measured_costs_only_itself(benchmarks):
    def fails():
        raise RuntimeError("out of memory\nTried to allocate")

    benchmarks |= {"copy": lambda: 4e12, "fp8": fails}
    device, lines = Steady(), []
    assert ceilings._measure(device, lines.append, ["copy", "read", "fp8"]) == {"copy": 4e12}
    assert lines == [
        "only library calls are measured: no nvcc: get one",
        "measuring this GPU's limits: copy",
        "measuring this GPU's limits: fp8",
        "fp8 is not measured: out of memory",
        "measuring this GPU's limits: copy",
    ]
    assert device.released == 4


def test_rates_of_memory_are_the_higher_ones_of_two(benchmarks):
    rates = iter([2e12, 3e12, 4e12, 3.5e12])
    benchmarks |= {"copy": lambda: next(rates), "read": lambda: next(rates), "fp8": lambda: 1e15}
    measured = ceilings._measure(Steady(), lambda _: None, ["copy", "read", "fp8"])
    assert measured == {"copy": 4e12, "read": 3.5e12, "fp8": 1e15}


@pytest.mark.parametrize(("reasons", "rates"), [([0x20], {"copy": 4e12}), ([0x20] * 8, {})])
def test_a_throttled_measurement_is_redone_once(benchmarks, reasons, rates):
    benchmarks["copy"] = lambda: 4e12
    lines = []
    assert ceilings._measure(Steady(reasons), lines.append, ["copy"]) == rates
    assert ("throttled" in lines[-1]) is not bool(rates)


# machines and sessions


def test_a_machine_has_its_devices_ceilings():
    lines = []
    assert CudaMachine().ceilings(HostDevice(), lines.append) == {}
    assert FakeMachine().ceilings(FakeDevice(None), lines.append) == {}
    assert lines == []
    assert FakeMachine().ceilings(FakeDevice(FAKE_GPU), lines.append) == CEILINGS
    assert lines == ["measuring this GPU's limits"]
    assert set(CEILINGS) == set(ceilings.DEVICE)


@pytest.mark.parametrize(("count", "alone"), [(1, False), (2, True)])
def test_a_rank_measures_on_a_device_that_waits_for_no_other(monkeypatch, count, alone):
    device = SimpleNamespace(gpu=GPU, ranks=SimpleNamespace(count=count))
    monkeypatch.setattr(cuda_machine, "CudaDevice", lambda gpu: ("alone", gpu))
    monkeypatch.setattr(ceilings, "get", lambda device, progress: device)
    measured = CudaMachine().ceilings(device, print)
    assert measured == (("alone", GPU) if alone else device)


def test_a_session_measures_once_and_holds_all_claims_to_the_same(tmp_path):
    first, second = (SharedFigures(tmp_path) for _ in "ab")
    lines = []

    def ceilings_of(figures, device):
        return figures.ceilings(device, lambda: FakeMachine().ceilings(device, lines.append))

    device = FakeDevice(FAKE_GPU)
    assert ceilings_of(first, device) == CEILINGS
    assert ceilings_of(first, device) == CEILINGS
    assert ceilings_of(second, FakeDevice(FAKE_GPU)) == CEILINGS
    assert len(lines) == 1
    assert ceilings_of(first, FakeDevice(None)) == {}


# the links between GPUs


def test_a_collective_sends_what_its_algorithm_must():
    assert interconnect.bus_bytes("all_reduce", 1 << 30, 2) == 1 << 30
    assert interconnect.bus_bytes("all_gather", 1 << 30, 2) == 1 << 29
    assert interconnect.bus_bytes("reduce_scatter", 800, 8) == 700


@pytest.fixture
def child(tmp_path, monkeypatch):
    def child(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))

    return child


def test_links_are_measured_in_processes_of_their_own(child, tmp_path, monkeypatch):
    monkeypatch.setattr(ceilings.metadata, "version", lambda _: "2.13.0")
    monkeypatch.setenv("PYTEST_AIPERF_CACHE", str(tmp_path))
    right = 'test "$2 $3" = "pytest_aiperf.limits.interconnect 2"'
    child(f'{right} && echo \'{{"p2p": 3.7e11}}\' >"$4/{interconnect.RANKS_FILE}"')
    lines = []
    rates = ceilings.get_links([GPU, FAKE_GPU], lines.append)
    assert rates == {"p2p": 3.7e11}
    assert lines == ["measuring the links of 2 GPUs"]
    assert the_file(tmp_path).name.startswith("2-")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo begun; echo NCCL error >&2; exit 3", r"\(status 3\): NCCL error"),
        ("sleep 60", r"\(killed after 0.5 s\): no output"),
    ],
)
def test_links_that_fail_or_hang_are_one_sentence(child, monkeypatch, script, message):
    monkeypatch.setattr(interconnect, "_DEADLINE_S", 0.5)
    child(script)
    with pytest.raises(InvalidMeasurement, match=message):
        interconnect.measure(2)


SURVEY = LinkSurvey(
    rates=((0.0, 390e9), (195e9, 0.0)),
    copy_bytes=256 << 20,
    latencies=((0.0, 9.5e-6), (12e-6, 0.0)),
    collectives={
        "all_reduce": {"1024": 10e-6, "1073741824": 4e-3},
        "all_gather": {"1024": 20e-6, "1073741824": 2e-3},
    },
)


def test_a_survey_is_shown_as_a_matrix_of_pairs_and_a_row_per_size():
    assert link_survey.lines(SURVEY) == [
        "",
        "copies of 256.0 MiB from row to column",
        "          GPU 0     GPU 1",
        "GPU 0         -  390 GB/s",
        "GPU 1  195 GB/s         -",
        "",
        "latency of a copy of 4 bytes, with the host's wait for it",
        "         GPU 0    GPU 1",
        "GPU 0        -  9.50 µs",
        "GPU 1  12.0 µs        -",
        "",
        "collectives over 2 GPUs: time per call, and bytes that each GPU sends",
        "bytes      all_reduce       bus  all_gather        bus",
        "1.000 KiB     10.0 µs  102 MB/s     20.0 µs  25.6 MB/s",
        "1.000 GiB     4.00 ms  268 GB/s     2.00 ms   268 GB/s",
    ]


def test_a_survey_measures_all_pairs_and_sizes():
    """The same code runs with NCCL on GPUs; here two processes exchange messages on the host."""
    found = link_survey.survey(2, "gloo", sizes=(1 << 10, 1 << 14), copy_bytes=1 << 12)
    for matrix in (found.rates, found.latencies):
        assert [[figure > 0 for figure in row] for row in matrix] == [[False, True], [True, False]]
    assert set(found.collectives) == {"all_reduce", "all_gather", "reduce_scatter"}
    for seconds in found.collectives.values():
        assert list(seconds) == ["1024", "16384"]
        assert min(seconds.values()) > 0


def test_a_survey_that_fails_is_one_sentence(child):
    child("echo begun; echo NCCL error >&2; exit 3")
    with pytest.raises(InvalidMeasurement, match=r"measured \(status 3\): NCCL error"):
        link_survey.survey(2)


# the command `ceilings`


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Run the command on a machine with ``gpus`` H200s."""
    monkeypatch.setenv("PYTEST_AIPERF_LOCKS", str(tmp_path / "locks"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    measured = {"copy": 4.28e12, "launch": 2.1e-6, "h2d": 55.3e9}
    monkeypatch.setattr(ceilings, "get", lambda *_a, fresh: measured)
    monkeypatch.setattr(ceilings, "get_links", lambda *_a, fresh: {"p2p": 372e9})
    machine = SimpleNamespace(open_device=lambda gpu: SimpleNamespace(gpu=gpu))

    def command(*options, gpus=1):
        machine.gpus = lambda: [GPU] * gpus
        monkeypatch.setattr(cli, "CudaMachine", lambda: machine)
        status = main(["ceilings", *options])
        return (status, *capsys.readouterr())

    return command


def test_the_table_has_the_datasheet_beside_it(command):
    status, out, err = command()
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "NVIDIA H200",
        "limit    measured  datasheet  share",
        "copy    4.28 TB/s  4.80 TB/s   89 %",
        "launch    2.10 µs",
        "h2d     55.3 GB/s  64.0 GB/s   86 %",
    ]


def test_the_file_has_the_gpus_model_and_no_uuid(command, tmp_path):
    file = tmp_path / "results" / "ceilings-h200.json"
    status, out, _ = command("--json", str(file), gpus=2)
    assert status == 0
    assert re.search("p2p +372 GB/s +450 GB/s +83 %", out)
    content = json.loads(file.read_text())
    assert content["ceilings"]["p2p"] == 372e9
    assert (content["gpu"]["key"], content["gpu"]["driver"]) == ("h200", "580.1")
    assert "12/34" not in file.read_text()


def test_links_are_surveyed_if_asked_for(command, tmp_path, monkeypatch):
    monkeypatch.setattr(link_survey, "survey", lambda count: SURVEY if count == 2 else None)
    file = tmp_path / "links.json"
    status, out, err = command("--links", "--json", str(file), gpus=2)
    assert status == 0
    assert "surveying the links of 2 GPUs" in err
    assert out.endswith("\n".join(link_survey.lines(SURVEY)) + "\n")
    assert json.loads(file.read_text())["links"]["rates"] == [[0.0, 390e9], [195e9, 0.0]]
    status, _, err = command("--links")
    assert (status, err) == (2, "ceilings: --links is for machines with several GPUs\n")


def test_without_a_gpu_it_is_one_sentence(command):
    status, out, err = command(gpus=0)
    assert (status, out) == (2, "")
    assert err.startswith("ceilings: there is no NVIDIA GPU to measure here: ")
    assert len(err.splitlines()) == 1


def test_a_debugging_environment_measures_no_ceilings(command, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    status, _, err = command()
    assert status == 2
    assert "CUDA_LAUNCH_BLOCKING" in err
