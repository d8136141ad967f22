"""Ceilings on a real GPU: repeatable, within the known values of an H200, and measured quickly."""

import sys
import time

import pytest
import torch

from pytest_aiperf.build.launcher import Kernels
from pytest_aiperf.build.nvcc import build
from pytest_aiperf.device.cuda import CudaDevice
from pytest_aiperf.limits import ceilings, interconnect, link_survey, microbenchmarks
from pytest_aiperf.machine import nvml
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.rules import validity
from pytest_aiperf.rules.roofline import DATASHEET

NAMES = (*ceilings.DEVICE, *ceilings.HOST)
KNOWN = {"h200": {"copy": 4.28e12, "h2d": 55e9}}
"""Rates of a healthy GPU in bytes per second, by kind of GPU."""
NOISY = ("launch", "h2d_pageable", "d2h_pageable")
"""Ceilings that depend on the CPU: other load on it changes them."""


@pytest.fixture
def measured(gpu):
    """Measure all ceilings; return them with the seconds that this took."""
    with GpuLock([gpu.uuid]).exclusive_host():
        start = time.monotonic()
        rates = ceilings.get(
            CudaDevice(gpu), NAMES, lambda line: print(line, file=sys.stderr), fresh=True
        )
        print("\n".join(ceilings.table(rates, gpu.key)), file=sys.stderr)
        return rates, time.monotonic() - start


def test_all_ceilings_are_measured_in_time_and_below_the_datasheet(gpu, measured):
    rates, seconds = measured
    assert seconds < 25
    assert set(rates) == set(NAMES)
    for name, specified in DATASHEET.get(gpu.key, {}).items():
        if name in rates:
            assert rates[name] < 1.02 * specified, name
    assert rates["copy"] < rates["read"] < rates["l2"] < rates["shared"]
    for name, rate in KNOWN.get(gpu.key, {}).items():
        assert rates[name] == pytest.approx(rate, rel=0.03), name


def test_two_runs_agree(gpu, measured):
    first, _ = measured
    with GpuLock([gpu.uuid]).exclusive_host():
        second = ceilings.get(CudaDevice(gpu), NAMES, fresh=True)
    differences = {n: abs(second[n] / first[n] - 1) for n in first if n not in NOISY}
    assert max(differences.values()) < 0.02, differences


def test_the_ceilings_of_a_claim_take_seconds_and_change_no_setting(gpu):
    device = CudaDevice(gpu)
    before, rng_state = validity.flags(), torch.cuda.get_rng_state()
    with GpuLock([gpu.uuid]).exclusive_gpu():
        start = time.monotonic()
        ceilings.get(device, fresh=True)
        assert time.monotonic() - start < 12
        start = time.monotonic()
        ceilings.get(device)
        assert time.monotonic() - start < 0.1
    assert validity.changed_flags(before, validity.flags()) == []
    assert torch.equal(rng_state, torch.cuda.get_rng_state())
    assert torch.cuda.memory_allocated() < 128 << 20  # cuBLAS keeps workspaces: 66 MiB on an H200


@pytest.mark.parametrize("vectors", [2, 4, 8])
@pytest.mark.parametrize(("blocks", "steps"), [(0, 1), (8, 20), (500, 3)])
def test_the_moving_kernel_moves_every_byte(gpu, vectors, blocks, steps):
    source = ceilings._KERNELS
    kernels = Kernels(source.name, source.read_text(), build(source, gpu.arch).path)
    data = torch.randint(255, (1 << 21,), dtype=torch.uint8, device="cuda")
    copied = torch.zeros_like(data)
    kernels["move"](data, copied, data.nbytes, vectors, True, blocks, steps)
    torch.cuda.synchronize()
    chunks = data.nbytes // (microbenchmarks._THREADS * vectors * 16)
    complete = (blocks or chunks) * steps >= chunks
    assert torch.equal(copied, data) is complete


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU or none")
def test_a_survey_agrees_with_the_ceilings_of_the_links(gpu):
    gpus = nvml.visible()
    with GpuLock([each.uuid for each in gpus]).exclusive_host():
        rates = ceilings.get_links(gpus, fresh=True)
        found = link_survey.survey(len(gpus))
    print("\n".join(link_survey.lines(found)), file=sys.stderr)
    for a, row in enumerate(found.rates):
        for b, rate in enumerate(row):
            assert (a == b) == (rate == 0)
            assert a == b or 1e-6 < found.latencies[a][b] < 1e-3
    if "p2p" in rates:  # GPUs without peer access copy through the host
        assert found.rates[0][1] == pytest.approx(rates["p2p"], rel=0.1)
    for name, seconds in found.collectives.items():
        largest = max(seconds, key=int)
        rate = interconnect.bus_bytes(name, int(largest), len(gpus)) / seconds[largest]
        assert rate == pytest.approx(rates[name], rel=0.15)
        assert seconds["1024"] < seconds[largest]
