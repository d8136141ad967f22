"""The load of GPUs over a run: sampled from a fake NVML, stored and drawn."""

import csv
import time

import pytest

from pytest_aiperf.machine import nvml, telemetry
from pytest_aiperf.model import GpuLoad
from pytest_aiperf.report import charts, page

from .records import result

FAKE_PYNVML = '''
"""An NVML with one GPU, the power of which rises with each query."""
import itertools
from types import SimpleNamespace

NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
_milliwatts = itertools.count(100_000, 1_000)

class NVMLError(Exception):
    pass

def nvmlInit():
    pass

def nvmlDeviceGetHandleByUUID(uuid):
    if uuid != "fake-0":
        raise NVMLError("Not Found")
    return uuid

def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=87)

def nvmlDeviceGetPowerUsage(handle):
    return next(_milliwatts)

def nvmlDeviceGetClockInfo(handle, clock):
    if clock == NVML_CLOCK_MEM:
        raise NVMLError("Not Supported")
    return 1980

def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(used=3 << 30)
'''


class Stop(Exception):  # noqa: N818  ends a recording
    pass


@pytest.mark.parametrize("part", ["17.5,a,30", "17.5,a,30,1980,2619,300.5,107"])
def test_samples_survive_the_file(tmp_path, monkeypatch, part):
    loads = iter([GpuLoad(50, 1980, None, 300.5, 2**30), GpuLoad(), GpuLoad(0), GpuLoad(100)])
    monkeypatch.setattr(nvml, "load", lambda _: next(loads))
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            raise Stop

    with (tmp_path / "t.csv").open("w") as file, pytest.raises(Stop):
        telemetry.record(["a", "b"], file, pause)
    with (tmp_path / "t.csv").open("a") as file:
        file.write(part)  # the session read it while this row was written
    samples = telemetry.read(tmp_path / "t.csv")
    assert [load for _, load in samples["a"]] == [GpuLoad(50, 1980, None, 300.5, 2**30), GpuLoad(0)]
    assert [load for _, load in samples["b"]] == [GpuLoad(), GpuLoad(100)]
    assert pauses == [telemetry.PERIOD_S] * 2


def test_curves_rise_from_zero_to_their_highest_value():
    samples = [(10.0 + i / 10, GpuLoad(power_w=100.0 + i, sm_mhz=0.0)) for i in range(1001)]
    [power] = charts.telemetry(samples)  # a clock of 0 and figures that are not reported: no curve
    assert (power.name, power.text) == ("power", "mean 600 W, highest 1100 W")
    points = [tuple(map(float, point.split(","))) for point in power.points.split()]
    assert len(points) == 101
    assert points[0] == pytest.approx((0.5, 100 * (1 - 104.5 / 1100)), abs=0.1)
    assert points[-1] == (100, 0)


def test_a_run_with_the_option_has_its_load_in_the_report(project, monkeypatch):
    project.write("modules/pynvml.py", FAKE_PYNVML)
    monkeypatch.setenv("PYTHONPATH", str(project.path / "modules"), prepend=":")
    project.tests("def test_it(compare):\n    compare(**usual)\n")
    run = project.run("--gpu", "--quick", "--telemetry", "--aiperf-report=report")
    run.assert_outcomes(passed=1)
    file = project.path / ".aiperf/latest" / telemetry.FILE
    first, *others = telemetry.read(file)["fake-0"]
    assert first[1] == GpuLoad(87, 1980, None, 100, 3 << 30)
    assert time.time() - 600 < first[0] < others[0][0]
    written = file.stat().st_size
    time.sleep(3 * telemetry.PERIOD_S)
    assert file.stat().st_size == written, "the recorder outlives the session"
    text = (project.path / "report/index.html").read_text()
    assert "power: mean " in text
    assert "memory clock" not in text  # this GPU does not report it


def test_a_run_without_the_option_has_no_samples(project):
    project.tests("def test_it(compare):\n    compare(**usual)\n")
    project.run("--gpu", "--quick").assert_outcomes(passed=1)
    assert not (project.path / ".aiperf/latest" / telemetry.FILE).exists()


@pytest.mark.parametrize("options", [(), ("--cpu",), ("--gpu", "--update-expectations")])
def test_samples_need_a_measurement_that_they_may_disturb(project, options):
    project.tests("def test_it(compare):\n    compare(**usual)\n")
    run = project.run("--telemetry", *options)
    assert run.ret != 0
    run.stderr.fnmatch_lines(["*--telemetry *add --gpu*"])


def test_a_report_without_samples_has_no_section(tmp_path):
    data = tmp_path / "results.json"
    assert 'id="loads"' not in page.page([result()], {}, "Report", data=[data])
    with (tmp_path / telemetry.FILE).open("w") as file:
        rows = csv.writer(file)
        rows.writerows([[at, "GPU-1", 100, "", "", 500 + at, ""] for at in range(3)])
    assert 'id="loads"' in page.page([result()], {}, "Report", data=[data])
