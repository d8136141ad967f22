"""The energy that GPUs use while a part of a program runs."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from pytest_aiperf.errors import InvalidMeasurement, UsageError
from pytest_aiperf.model import Gpu

from . import nvml

MIN_S: Final = 1.0
"""Shortest time that is measured. NVIDIA does not state how often it updates the counter; with ten
updates per second, the energy of one second is right to 10 %."""


class EnergyMeter:
    """Measures the energy of GPUs in a ``with`` block, in joules, with NVML's energy counters.

    The energy is that of the whole boards: idle power and the work of other processes count, too.
    Repeat the work until the block takes at least one second, and synchronize at its end.

    .. code-block:: python

        with EnergyMeter() as meter:
            for _ in range(200):
                step()
            torch.cuda.synchronize()
        print(meter.joules / 200, scores.energy(meter.joules, 200 * tokens))

    Args:
        gpus: The GPUs to add up, such as that of the fixture ``gpu``; by default all visible ones.

    Raises:
        UsageError: There is no GPU, or a GPU is older than Volta and has no such counter.
        InvalidMeasurement: The block took less than one second.

    """

    def __init__(self, gpus: Sequence[Gpu] | None = None) -> None:
        self._gpus = nvml.visible() if gpus is None else gpus
        if not self._gpus:
            raise UsageError(f"there is no NVIDIA GPU whose energy is counted: {nvml.absence()}")
        self._begun_s = 0.0
        self._before_j = 0.0
        self.joules = 0.0  #: Energy of the last block, in joules.
        self.seconds = 0.0  #: Duration of the last block, in seconds.

    def __enter__(self) -> Self:
        self._before_j = self._read_j()
        self._begun_s = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            return
        self.seconds = time.perf_counter() - self._begun_s
        self.joules = self._read_j() - self._before_j
        if self.seconds < MIN_S:
            raise InvalidMeasurement(
                f"the energy of {self.seconds:.3g} s is not precise: repeat the work for at least "
                f"{MIN_S:g} s"
            )

    def _read_j(self) -> float:
        total_j = 0.0
        for gpu in self._gpus:
            if (energy_j := nvml.energy_j(gpu.uuid)) is None:
                raise UsageError(f"{gpu.name} has no energy counter: NVML has one from Volta on")
            total_j += energy_j
        return total_j
