"""Properties and state of GPUs, read from a fake NVML."""

# ruff: noqa: N802 - the names are those of NVML

import sys
from types import SimpleNamespace

import pytest

from pytest_aiperf import EnergyMeter, scores
from pytest_aiperf.errors import InvalidMeasurement, UsageError
from pytest_aiperf.machine import energy, nvml
from pytest_aiperf.model import Gpu, GpuState, Score

UUIDS = ("GPU-aaaa1111-0", "GPU-aaaa2222-1", "GPU-bbbb3333-2")


class FakeNvml:
    """Three boards; the last one supports only the queries that identify it."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_SUCCESS = 0
    NVML_FI_DEV_PERF_POLICY_THERMAL = 75
    NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT = 77

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.names = ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GB10"]
        self.capabilities = [(9, 0), (8, 0), (12, 1)]
        self.cores = [16896, 6912, 6144]
        self.energies_mj = [5_000_000, 0, 0]
        self.broken = False
        self.lost = set()

    def _query(self, handle, answer):
        if handle == 2:
            raise self.NVMLError("Not Supported")
        return answer

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self):
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, i):
        if i in self.lost:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(index=i)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in UUIDS:
            raise self.NVMLError("Not Found")
        return SimpleNamespace(index=UUIDS.index(uuid))

    def nvmlDeviceGetUUID(self, h):
        return UUIDS[h.index]

    def nvmlDeviceGetName(self, h):
        return self.names[h.index]

    def nvmlDeviceGetCudaComputeCapability(self, h):
        return self.capabilities[h.index]

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetNumGpuCores(self, h):
        return self.cores[h.index]

    def nvmlDeviceGetMemoryInfo(self, h):
        return self._query(h.index, SimpleNamespace(total=141 << 30))

    def nvmlDeviceGetClockInfo(self, h, clock):
        assert clock == self.NVML_CLOCK_SM
        return self._query(h.index, 1575)

    def nvmlDeviceGetTemperature(self, h, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._query(h.index, 61)

    def nvmlDeviceGetCurrentClocksEventReasons(self, h):
        return self._query(h.index, 0x4)

    def nvmlDeviceGetFieldValues(self, h, fields):
        assert fields == [
            self.NVML_FI_DEV_PERF_POLICY_THERMAL,
            self.NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT,
        ]
        supported, unsupported = SimpleNamespace(ullVal=11), SimpleNamespace(ullVal=0)
        return self._query(
            h.index,
            [
                SimpleNamespace(nvmlReturn=self.NVML_SUCCESS, value=supported),
                SimpleNamespace(nvmlReturn=3, value=unsupported),
            ],
        )

    def nvmlDeviceGetTotalEnergyConsumption(self, h):
        self.energies_mj[h.index] += 300_500
        return self._query(h.index, self.energies_mj[h.index])

    def nvmlDeviceGetComputeRunningProcesses(self, h):
        return self._query(h.index, [SimpleNamespace(pid=7), SimpleNamespace(pid=3)])


@pytest.fixture
def driver(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def visible_uuids(spec):
    return [g.uuid for g in nvml.visible({} if spec is None else {"CUDA_VISIBLE_DEVICES": spec})]


def test_a_gpu_is_described_without_cuda(driver):
    first, second, third = nvml.visible({})
    assert first == Gpu("NVIDIA H200", "h200", UUIDS[0], "sm90", 132, 0, 141 << 30, "580.1")
    assert (second.arch, second.sms) == ("sm80", 108)
    assert (third.arch, third.sms, third.memory_bytes) == ("sm121", 48, 0)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("GPU-bbbb", [2]),
        (" GPU-aaaa2222-1 , 0 ", [1, 0]),
        ("", []),
        ("-1", []),
        ("1,-1,0", [1]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_choose_and_order(driver, spec, expected):
    assert visible_uuids(spec) == [UUIDS[i] for i in expected]


@pytest.mark.parametrize("spec", ["3", "0,0", "0,,1", "GPU-aaaa", "gpu0", "²", "GPU-x"])
def test_a_value_that_names_no_gpu_is_refused(driver, spec):
    with pytest.raises(
        UsageError, match=r"(?s)CUDA_VISIBLE_DEVICES.*index from 0 to 2.*GPU-bbbb3333"
    ):
        visible_uuids(spec)


@pytest.mark.parametrize("spec", ["MIG-aaaa1111-2222", "0,MIG-GPU-aaaa1111/1/0"])
def test_a_mig_instance_is_refused(driver, spec):
    with pytest.raises(UsageError, match=r"'MIG-.*' is a MIG instance.*measured on whole GPUs"):
        visible_uuids(spec)


def test_a_lost_gpu_is_not_there(driver):
    driver.lost = {1}
    assert visible_uuids(None) == [UUIDS[0], UUIDS[2]]


def test_without_a_driver_there_are_no_gpus(driver, monkeypatch):
    driver.broken = True
    assert nvml.visible({"CUDA_VISIBLE_DEVICES": "0"}) == []
    assert nvml.telemetry(UUIDS[0]) == GpuState()
    assert nvml.absence({}) == "the NVIDIA driver does not answer (Driver Not Loaded)"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.visible({}) == []
    assert nvml.absence({}) == "nvidia-ml-py is not installed"


def test_hidden_gpus_are_reported_as_hidden(driver):
    assert "'-1' hides all 3" in nvml.absence({"CUDA_VISIBLE_DEVICES": "-1"})
    driver.names = []
    assert nvml.absence({}) == "the NVIDIA driver lists no GPU"
    assert visible_uuids("0") == []


def test_telemetry_is_read_and_an_unsupported_figure_is_absent(driver):
    assert nvml.telemetry(UUIDS[0]) == GpuState(1575, 61, 0x4, {"thermal": 11})
    assert nvml.telemetry(UUIDS[2]) == GpuState()
    assert nvml.telemetry("GPU-none") == GpuState()
    assert [nvml.sm_mhz(uuid) for uuid in (UUIDS[0], UUIDS[2], "GPU-none")] == [1575, None, None]


def test_a_figure_that_this_nvml_no_longer_has_is_absent(driver, monkeypatch):
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetFieldValues")
    assert nvml.telemetry(UUIDS[0]).violations == {}
    assert nvml.telemetry(UUIDS[0]).sm_mhz == 1575


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100pcie"),
        ("NVIDIA H200 NVL", "h200nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090laptop"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA", "gpu"),
    ],
)
def test_keys_keep_what_changes_the_speed(name, key):
    assert nvml.key(name) == key


def test_nvcc_names_of_architectures():
    assert [nvml.nvcc_arch(a) for a in ("sm80", "sm89", "sm90", "sm100", "sm103", "sm121")] == [
        "sm_80",
        "sm_89",
        "sm_90a",
        "sm_100a",
        "sm_103a",
        "sm_121a",
    ]


# energy


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(energy.time, "perf_counter", lambda: clock.now)
    return clock


def test_the_energy_of_a_block_is_that_of_the_chosen_gpus(driver, clock):
    with EnergyMeter(nvml.visible({"CUDA_VISIBLE_DEVICES": "0"})) as meter:
        clock.now += 2.5
    assert (meter.joules, meter.seconds) == (300.5, 2.5)  # each query adds 300.5 J
    with EnergyMeter(nvml.visible({"CUDA_VISIBLE_DEVICES": "0,1"})) as meter:
        clock.now += 2.5
    assert meter.joules == 601
    assert scores.energy(meter.joules, 1202) == Score(0.5, "J/token", "lower")


def test_energy_that_cannot_be_measured_is_refused(driver, clock):
    with pytest.raises(UsageError, match="GB10 has no energy counter"), EnergyMeter():
        pass  # all GPUs, of which the last has none
    with (
        pytest.raises(InvalidMeasurement, match=r"the energy of 0.25 s is not precise"),
        EnergyMeter(nvml.visible({"CUDA_VISIBLE_DEVICES": "0"})),
    ):
        clock.now += 0.25
    with pytest.raises(ZeroDivisionError), EnergyMeter(nvml.visible({"CUDA_VISIBLE_DEVICES": "0"})):
        raise ZeroDivisionError  # the error of the block is not hidden
    driver.broken = True
    with pytest.raises(UsageError, match=r"there is no NVIDIA GPU .*Driver Not Loaded"):
        EnergyMeter()


@pytest.mark.parametrize(("joules", "count"), [(0, 5), (5, 0), (float("inf"), 5), (5, -1)])
def test_an_impossible_energy_is_refused(joules, count):
    with pytest.raises(UsageError, match="more than 0 and finite"):
        scores.energy(joules, count)
