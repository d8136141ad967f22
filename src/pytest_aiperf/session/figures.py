"""Noise floor and limits, measured once and shared by all claims of a session."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from pytest_aiperf.claim import measure
from pytest_aiperf.claim.claim import Claim, Progress
from pytest_aiperf.claim.measure import ClaimContext
from pytest_aiperf.device.device import Device
from pytest_aiperf.errors import AiperfError, InvalidMeasurement
from pytest_aiperf.model import Gpu, Result
from pytest_aiperf.records.results import atomic_write, dumps, read_json
from pytest_aiperf.rules import validity

from .cuda_machine import Machine


class SharedFigures:
    """Figures of this machine that all claims use; the first claim that needs one measures it.

    The figures are files in the run's folder, so that all processes of the session can read them;
    without a folder they stay in memory. In a rank, ``noise_floor`` is the value that the process
    which started the ranks already knows, if any.
    """

    def __init__(self, folder: Path | None, noise_floor: float | None = None) -> None:
        self._folder = folder
        self._noise_floor = noise_floor
        self._memory: dict[str, Any] = {}

    def noise_floor(self, gpus: Sequence[Gpu]) -> float | None:
        """Return the noise floor of a set of GPUs, or None if it is not measured yet."""
        if self._noise_floor is not None:
            return self._noise_floor
        value = self._read(_floor_name(gpus))
        return None if value is None else float(value)

    def keep_noise_floor(self, gpus: Sequence[Gpu], value: float) -> None:
        self._write(_floor_name(gpus), value)

    def ceilings(
        self, device: Device, measure: Callable[[], Mapping[str, float]]
    ) -> Mapping[str, float]:
        """Return a device's limits; measure unknown ones. The caller holds the exclusive lock."""
        ceilings = self._ceilings(device)
        if ceilings is None:
            assert device.gpu is not None
            ceilings = dict(measure())
            self._write(_ceilings_name(device.gpu), ceilings)
        return ceilings

    def measure_ladder(
        self,
        claims: Sequence[tuple[Claim, ClaimContext]],
        gpus: Sequence[Gpu],
        machine: Machine,
    ) -> list[tuple[Result, Exception | None]]:
        """Measure claims with these figures; return each one's record and the error to raise."""
        with_work = [(c, t) for c, t in claims if c.work] or list(claims)
        try:
            measure.refuse_debug_environment()
            if problem := validity.tracer_problem() or validity.replaced_problem():
                raise InvalidMeasurement(problem)
            floor, ceilings = self._for_claim(*with_work[0], gpus, machine)
        except AiperfError as error:
            return [(measure.failed(_unmeasured(c, t), error), error) for c, t in claims]
        return measure.measure_ladder(
            [(c, replace(t, noise_floor=floor, ceilings=ceilings)) for c, t in claims]
        )

    def _for_claim(
        self, claim: Claim, context: ClaimContext, gpus: Sequence[Gpu], machine: Machine
    ) -> tuple[float, Mapping[str, float]]:
        """Return the noise floor and the limits; take the lock and measure what is unknown."""
        device, lock, progress = context.device, context.lock, context.progress
        floor = self.noise_floor(gpus)
        limits = self._ceilings(device) if claim.work else {}
        if floor is None or limits is None:
            with lock.exclusive_host() if device.gpu is None else lock.exclusive_gpu():
                floor = self.noise_floor(gpus)  # perhaps measured during the wait for the lock
                if floor is None:
                    seed = context.record.seed
                    floor = measure.noise_floor(
                        device, seed, context.rule, partial(_floor_progress, progress)
                    )
                    self.keep_noise_floor(gpus, floor)
                if claim.work:
                    limits = self.ceilings(device, partial(machine.ceilings, device, progress))
                device.release()  # still locked: freeing memory later disturbs the next claim
        return floor, limits or {}

    def _ceilings(self, device: Device) -> Mapping[str, float] | None:
        if device.gpu is None:
            return {}
        return cast("dict[str, float] | None", self._read(_ceilings_name(device.gpu)))

    def _read(self, name: str) -> Any:
        if self._folder is None:
            return self._memory.get(name)
        path = self._folder / name
        return read_json(path) if path.exists() else None

    def _write(self, name: str, value: object) -> None:
        if self._folder is None:
            self._memory[name] = value
        else:
            atomic_write(self._folder / name, dumps(value, name))


def _floor_progress(
    progress: Progress, _phase: str, replicate: int | None = None, **_figures: object
) -> None:
    """Report the measurement of the noise floor without its ratio, which is not the claim's."""
    progress("measuring the noise floor with identical arms", replicate=replicate)


def _unmeasured(claim: Claim, context: ClaimContext) -> Result:
    code, gpu = context.code, context.device.gpu
    return replace(context.record, against=claim.against, code=code, gpu=gpu)


def _floor_name(gpus: Sequence[Gpu]) -> str:
    return f"floor-{'-'.join(gpu.uuid for gpu in gpus) or 'host'}.json"


def _ceilings_name(gpu: Gpu) -> str:
    return f"ceilings-{gpu.uuid.replace('/', '_')}.json"
