"""The machine that a session measures on: its GPUs, its devices and their limits."""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Protocol

from pytest_aiperf.device.cuda import CudaDevice
from pytest_aiperf.device.device import Device, HostDevice
from pytest_aiperf.errors import InvalidMeasurement, UsageError
from pytest_aiperf.limits import ceilings
from pytest_aiperf.machine import nvml
from pytest_aiperf.machine.distributed import RankGroup
from pytest_aiperf.model import Gpu
from pytest_aiperf.rules import validity


class Machine(Protocol):
    """Interface of the machine that the hook ``pytest_aiperf_machine`` returns."""

    def gpus(self) -> Sequence[Gpu]:
        """List the GPUs without initializing CUDA: any process may call this."""

    def open_device(self, gpu: Gpu | None, ranks: RankGroup | None = None) -> Device:
        """Open a GPU, or the host if ``gpu`` is None; only the process of a claim calls this."""

    def ceilings(self, device: Device, progress: Callable[[str], object]) -> Mapping[str, float]:
        """Return limits by name. The caller holds the device's lock, because this may measure."""


class CudaMachine:
    """The machine that this process runs on, through CUDA and NVML."""

    __slots__ = ()  # no instance has methods of its own

    def gpus(self) -> Sequence[Gpu]:
        return nvml.visible()

    def open_device(self, gpu: Gpu | None, ranks: RankGroup | None = None) -> Device:
        return HostDevice(ranks) if gpu is None else CudaDevice(gpu, ranks)

    def ceilings(self, device: Device, progress: Callable[[str], object]) -> Mapping[str, float]:
        if device.gpu is None:
            return {}  # a host has none: its limits change with its load
        if device.ranks.count > 1:
            # Each rank measures alone: measuring together, the ranks would wait for any rank that
            # has cached limits and does not measure.
            device = CudaDevice(device.gpu)
        return ceilings.get(device, progress=progress)


def measurable_gpus(machine: Machine) -> Sequence[Gpu]:
    """List the GPUs; raise if there is none, or if this process cannot time them."""
    gpus = machine.gpus()
    if not gpus:
        raise UsageError(f"there is no NVIDIA GPU to measure here: {nvml.absence()}")
    if find_spec("torch") is None:
        raise UsageError("torch is missing: install the extra pytest-aiperf[gpu]")
    if problem := validity.environment_problem(os.environ):
        raise InvalidMeasurement(problem)
    return gpus
