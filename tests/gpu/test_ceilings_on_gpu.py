"""Ceilings on a real GPU: they repeat, they are what is known of an H200, and they are quick."""

import sys
import time

import pytest
import torch

from pytest_aiperf.build.launcher import Kernels
from pytest_aiperf.build.nvcc import build
from pytest_aiperf.device.cuda import CudaClock
from pytest_aiperf.limits import ceilings, microbenchmarks
from pytest_aiperf.machine.gpu_lock import Lease
from pytest_aiperf.rules import validity
from pytest_aiperf.rules.datasheet import DATASHEET

NAMES = (*ceilings.DEVICE, *ceilings.HOST)
KNOWN = {"h200": {"copy": 4.28e12, "h2d": 55e9}}
LOOSE = ("launch", "h2d_pageable", "d2h_pageable")  # the host's, which has other things to do


@pytest.fixture
def measured(gpu):
    """Measure everything, and how long that took."""
    with Lease([gpu.uuid]).time_host():
        begun = time.monotonic()
        found = ceilings.known(
            CudaClock(gpu), NAMES, lambda line: print(line, file=sys.stderr), fresh=True
        )
        print("\n".join(ceilings.table(found, gpu.key)), file=sys.stderr)
        return found, time.monotonic() - begun


def test_all_is_measured_in_time_and_within_physics(gpu, measured):
    found, seconds = measured
    assert seconds < 25
    assert set(found) == set(NAMES)
    for name, promised in DATASHEET.get(gpu.key, {}).items():
        if name in found:
            assert found[name] < 1.02 * promised, name
    assert found["copy"] < found["read"] < found["l2"] < found["shared"]
    for name, known in KNOWN.get(gpu.key, {}).items():
        assert found[name] == pytest.approx(known, rel=0.03), name


def test_two_runs_agree(gpu, measured):
    first, _ = measured
    with Lease([gpu.uuid]).time_host():
        second = ceilings.known(CudaClock(gpu), NAMES, fresh=True)
    apart = {n: abs(second[n] / first[n] - 1) for n in first if n not in LOOSE}
    assert max(apart.values()) < 0.02, apart


def test_what_a_claim_needs_takes_seconds_and_changes_no_switch(gpu):
    clock = CudaClock(gpu)
    before, random = validity.flags(), torch.cuda.get_rng_state()
    with Lease([gpu.uuid]).time_device():
        begun = time.monotonic()
        ceilings.known(clock, fresh=True)
        assert time.monotonic() - begun < 12
        begun = time.monotonic()
        ceilings.known(clock)
        assert time.monotonic() - begun < 0.1
    assert validity.changed_flags(before, validity.flags()) == []
    assert torch.equal(random, torch.cuda.get_rng_state())
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
    whole = (blocks or chunks) * steps >= chunks
    assert torch.equal(copied, data) is whole
