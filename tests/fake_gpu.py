"""A fake machine that runs in virtual time, with the noise and the faults of a real GPU.

``pytest -p tests.fake_gpu`` measures on it. The environment variable PYTEST_AIPERF_FAKE describes
the machine as a JSON object, in which every member is optional:
``{"gpus": 2, "noise": "default", "seed": 1, "faults": [{"block": 3, "kind": "throttle"}]}``.
``gpus`` is a count or a list of objects with fields of Gpu. ``noise`` is ``"none"``, ``"default"``
or an object with fields of Noise. ``session_seed`` replaces the random seed of a session; null
leaves it random.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import pytest

from pytest_aiperf.device.device import (
    Block,
    Call,
    Device,
    NoiseProbe,
    PreparedCall,
    nothing,
    run_calls,
    seed_all,
)
from pytest_aiperf.errors import CannotCapture, InvalidMeasurement, UsageError
from pytest_aiperf.machine.distributed import RankGroup
from pytest_aiperf.model import Bench, Gpu, GpuState, Mode, Trace
from pytest_aiperf.schema import from_json, to_json
from pytest_aiperf.session import config as session_config
from pytest_aiperf.session import session

VARIABLE: Final = "PYTEST_AIPERF_FAKE"
"""Environment variable that describes the machine."""

FAKE_GPU: Final = Gpu(
    name="Fake H200",
    key="fake",
    uuid="fake-0",
    arch="sm90",
    sms=132,
    l2_bytes=0,  # unknown, or else the small inputs of tests would need many input sets to be cold
    memory_bytes=141 << 30,
    driver="0",
)
CEILINGS: Final = {
    "copy": 4.28e12, "read": 4.5e12, "l2": 7e12, "shared": 31e12, "fp64": 60e12, "fp32": 60e12,
    "tf32": 400e12, "bf16": 790e12, "fp16": 790e12, "fp8": 1.4e15, "int8": 1.4e15,
    "launch": 2.1e-6, "graph_launch": 0.5e-6,
}  # fmt: skip
"""Limits of the fake GPU: bytes or operations per second, and seconds per launch."""

_SM_MHZ = 1_980
_random_seed = session_config.random_seed
_THERMAL = 0x20
"""NVML's bit for thermal slowdown among the clock event reasons."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How measured times deviate from true times; fractions of a time unless in seconds.

    ``white`` and ``layout`` are fitted to the noisiest arms of results/proof-h200.json, identical
    copies and additions on an H200. Their log ratios have a standard deviation of 0.41 % between
    replicates and of 0.44 % between the rounds of one replicate.
    """

    white: float = 0.002
    """Standard deviation of the independent noise of each block."""
    tail: float = 0.25
    """Largest delay of a late call, as a fraction of its time."""
    tail_chance: float = 0.01
    """Probability that a call is late."""
    drift: float = 0.006
    """Standard deviation of the slowdown as the SM clock drifts."""
    drift_s: float = 0.020
    """Correlation time of the drift."""
    ramp: float = 0.03
    """Slowdown of the first work, before clocks have ramped up."""
    ramp_s: float = 0.030
    """Time constant with which the slowdown of the ramp decays."""
    throttle: float = 0.06
    """Slowdown while throttled."""
    throttle_s: float = 0.050
    """Duration of one period of throttling."""
    throttle_per_s: float = 0.02
    """Periods of throttling per second of work."""
    layout: float = 0.002
    """Standard deviation of the effect of a block's addresses, redrawn with each random padding."""
    jump: float = 0.03
    """Slowdown in the slower of the device's two states."""
    jump_chance: float = 0.0005
    """Probability per block that the device changes its state."""

    @classmethod
    def none(cls) -> Noise:
        return cls(*[0.0] * len(dataclasses.fields(cls)))


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that the tests inject into a device."""

    block: int
    """Number of the block at which the fault begins, counted from 0 per device."""
    kind: Literal["throttle", "hang", "raise"]
    """Whether the block is throttled, never returns, or raises."""
    blocks: int = 1
    """Number of blocks that a throttle lasts."""
    reasons: int = _THERMAL
    """Clock event reasons that the device reports while throttled."""
    error: str = "CUDA error: an illegal memory access was encountered"
    """Message of the error that is raised."""


@dataclass(slots=True)
class _Ledger:
    """Time and memory that the calls of the running block use."""

    calls: list[float] | None = None
    """Seconds of each call so far; None outside a block."""
    count: int = 0  #: Calls of the running block.
    kernels: int = 0
    """Kernels launched so far, one per :func:`spend`."""
    mode: Mode | None = None
    """Mode of the running block; None outside a block."""
    held: int = 0
    """Bytes that are allocated."""
    peak: int = 0
    """Largest ``held`` so far."""
    waits: bool = True
    """Whether side streams waited for the call's own stream, since this was last set."""
    joined: bool = True
    """Whether the call's own stream waited for side streams, since this was last set."""


_ledger = _Ledger()


def spend(seconds: float) -> None:
    """Add device time to the current call; outside a block this has no effect."""
    if _ledger.calls:
        _ledger.calls[-1] += seconds
        _ledger.kernels += 1


def is_last_call() -> bool:
    """Whether the current call is the last one of its block, or outside a block."""
    return _ledger.calls is None or len(_ledger.calls) == _ledger.count


def synchronise() -> None:
    """Synchronize with the device, which fails in a call that is captured or queued as backlog."""
    if _ledger.mode is Mode.GRAPH:
        raise CannotCapture("the call synchronizes")
    if _ledger.mode is Mode.BACKLOG:
        raise InvalidMeasurement('the call synchronizes; claim metric="wall"')


def fork(*, waits: bool = True, joined: bool = True) -> None:
    """Put work on a side stream, which may or may not wait for the call's own and be joined."""
    _ledger.waits = _ledger.waits and waits
    _ledger.joined = _ledger.joined and joined


class Allocation:
    """Device memory of ``size`` bytes, freed when the object is dropped."""

    def __init__(self, size: int) -> None:
        self.size = size
        _ledger.held += size
        _ledger.peak = max(_ledger.peak, _ledger.held)

    def __del__(self) -> None:
        _ledger.held -= self.size


class FakeMachine:
    """A machine of fake GPUs. Each opened device has noise of its own, derived from ``seed``."""

    def __init__(
        self,
        gpus: Sequence[Gpu] = (FAKE_GPU,),
        noise: Noise | None = None,
        faults: Sequence[Fault] = (),
        seed: int = 0,
    ) -> None:
        self._gpus, self._noise, self._faults = tuple(gpus), noise, faults
        self._random = _generator(seed)

    def gpus(self) -> Sequence[Gpu]:
        return self._gpus

    def open_device(self, gpu: Gpu | None, ranks: RankGroup | None = None) -> FakeDevice:
        seed = self._random.getrandbits(64)
        return FakeDevice(gpu, self._noise, self._faults, seed, ranks)

    def ceilings(self, device: Device, progress: Callable[[str], object]) -> Mapping[str, float]:
        if device.gpu is None:
            return {}
        progress("measuring this GPU's limits")
        return CEILINGS


class FakeDevice:
    """A device on which a call takes the time that it passes to :func:`spend`, plus noise.

    ``now`` is the virtual time in seconds.
    """

    torch_device = "cpu"
    renews = True

    def __init__(
        self,
        gpu: Gpu | None = FAKE_GPU,
        noise: Noise | None = None,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        ranks: RankGroup | None = None,
    ) -> None:
        self.ranks = ranks or RankGroup()
        self.gpu = gpu
        self.now = 0.0
        self._blocks = 0
        self._noise = noise or Noise()
        self._faults = faults
        self._random = _generator(seed)
        self._layout = _generator(seed + 1)
        self._wander = self._random.gauss() * self._noise.drift
        self._jumped = False
        self._throttled_until = -1.0
        self._slower = self._noise.ramp + self._wander
        self._reasons = 0
        self._violation_ns = 0

    def seed(self, seed: int) -> None:
        seed_all(seed)
        # mixed into the generator's state: setting it would repeat the noise when a seed recurs,
        # and leaving it unchanged would give claims forked from one process the same noise
        self._random.seed(self._random.getrandbits(64) ^ seed)

    def random_padding(self, rng: random.Random) -> object:
        self._layout = _generator(self._random.getrandbits(64) ^ rng.getrandbits(64))
        return None

    def block(self, calls: Sequence[Call], mode: Mode, keep: int = -1) -> FakeBlock:
        if mode is Mode.GRAPH:
            self._execute(calls, mode)  # the capture, in which a synchronizing call is refused
            mode = Mode.PLAIN
        return FakeBlock(self, calls, mode, self._layout.gauss() * self._noise.layout, keep)

    def estimate_s(self, call: Call) -> float:
        return self.ranks.max(self._read(self._execute([call], Mode.PLAIN)[0]))

    def time_in_thread(self, prepare: Callable[[], PreparedCall]) -> float:
        if self.gpu is not None:
            return math.inf
        call, args = prepare()
        return self.estimate_s(lambda: call(*args))

    def refuse_unjoined(self, call: Call) -> None:
        _ledger.joined = True
        call()
        if not _ledger.joined:
            raise InvalidMeasurement("a call leaves work on a stream")

    def refuse_unordered(self, call: Call) -> None:
        _ledger.waits = True
        call()
        if not _ledger.waits:
            raise InvalidMeasurement("a call starts work on a stream")

    def stabilize_clocks(self, call: Call) -> None:
        call()
        self._pass(max(0.3, 10 * self._noise.ramp_s))

    def warm_up(self, blocks: Sequence[Block]) -> None:
        pass

    def telemetry(self) -> GpuState:
        return GpuState(
            sm_mhz=round(_SM_MHZ / (1 + max(0.0, self._slower))),
            temperature_c=85 if self._reasons else 55,
            event_reasons=self._reasons,
            violations={"thermal": self._violation_ns},
        )

    def flush(self) -> None:
        pass

    def peak_bytes(self, first: Call, second: Call) -> tuple[int, object]:
        before = _ledger.held
        first()
        _ledger.peak = _ledger.held
        result = second()
        return _ledger.peak - before, result

    held_noise_bytes = 0

    def held_bytes(self) -> int:
        return _ledger.held

    def load_tracer(self) -> None:
        pass

    def trace(self, call: Call, mode: Mode, *, cold: bool) -> Callable[[], Trace | None]:
        """Count each :func:`spend` as one kernel, without gaps between kernels."""
        before = _ledger.kernels
        (seconds,), _ = self._execute([call], Mode.PLAIN)
        kernels = _ledger.kernels - before
        if not (self.gpu and kernels):
            return lambda: None
        named = {"names": ("spend",), "counts": (kernels,), "grids": (self.gpu.sms,)}
        trace = Trace(
            kernels, kernels, 0, seconds, seconds, **named, total=seconds, api_calls=kernels
        )
        return lambda: trace

    def counters(
        self,
        call: Call,
        metrics: Sequence[str],
        *,
        cold: bool,
    ) -> Mapping[str, float]:
        """Return the call's time in ns as the value of each metric."""
        (seconds,), _ = self._execute([call], Mode.PLAIN)
        return dict.fromkeys(metrics, seconds * 1000000000.0)

    def synchronize(self) -> None:
        pass

    def separate_memory(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def release(self) -> None:
        pass

    def is_idle(self) -> bool:
        return True

    def free_bytes(self) -> int:
        return self.gpu.memory_bytes - _ledger.held if self.gpu else 0

    def noise_probe(self) -> NoiseProbe:
        import numpy as np

        def inputs(bench: Bench) -> tuple[Any, ...]:
            return (np.random.default_rng(bench.seed).random(64),)

        def negate(x: Any) -> Any:
            spend(100e-6)
            return -x

        return inputs, negate

    def run(
        self, calls: Sequence[Call], mode: Mode, layout: float, keep: int
    ) -> tuple[float, object]:
        """Run one block, with the faults that are scheduled for it."""
        number, self._blocks = self._blocks, self._blocks + 1
        self._reasons = 0
        for fault in self._faults:
            if not fault.block <= number < fault.block + fault.blocks:
                continue
            if fault.kind == "raise":
                raise RuntimeError(fault.error)
            while fault.kind == "hang":
                time.sleep(3_600)
            self._reasons = fault.reasons
        seconds, kept = self._execute(calls, mode, keep)
        return self.ranks.max(self._read(seconds, layout)), kept

    def _execute(
        self, calls: Sequence[Call], mode: Mode, keep: int = -1
    ) -> tuple[list[float], object]:
        """Return the true seconds of each call, and the result of the call number ``keep``."""
        seconds: list[float] = []
        _ledger.calls, _ledger.count, _ledger.mode = seconds, len(calls), mode

        def timed(call: Call) -> Call:
            return lambda: (seconds.append(0.0), call())[1]

        try:
            kept = run_calls([timed(call) for call in calls], keep)
        finally:
            _ledger.calls = _ledger.mode = None
        return seconds, kept

    def _read(self, seconds: Sequence[float], layout: float = 0.0) -> float:
        """Advance virtual time by the true ``seconds`` of the calls; return the measured time."""
        noise, draw = self._noise, self._random
        truth = sum(seconds)
        if noise.throttle_per_s and draw.random() < noise.throttle_per_s * truth:
            self._throttled_until = self.now + noise.throttle_s
        if self.now <= self._throttled_until:
            self._reasons |= _THERMAL
        if draw.random() < noise.jump_chance:
            self._jumped = not self._jumped
        self._pass(truth)
        self._slower = self._wander
        if self._reasons:
            self._slower += noise.throttle or 0.06
            self._violation_ns += int(truth * 1e9)
        if noise.ramp_s:
            self._slower += noise.ramp * math.exp(-self.now / noise.ramp_s)
        step = noise.jump if self._jumped else 0.0
        late = [
            s * noise.tail * draw.random() for s in seconds if draw.random() < noise.tail_chance
        ]
        error = math.exp(layout + noise.white * draw.gauss())
        return (truth * (1 + self._slower + step) + sum(late)) * error

    def _pass(self, seconds: float) -> None:
        noise = self._noise
        self.now += seconds
        if noise.drift_s:  # an Ornstein-Uhlenbeck process, exact for a step of any length
            decay = math.exp(-seconds / noise.drift_s)
            self._wander *= decay
            self._wander += noise.drift * math.sqrt(1 - decay * decay) * self._random.gauss()


class RepeatingDevice(FakeDevice):
    """A fake device whose blocks repeat their values, as those of a GPU do."""

    renews = False


@dataclass(slots=True)
class FakeBlock:
    """A block of calls; the effect of its addresses is the same in every run."""

    device: FakeDevice
    calls: Sequence[Call]
    mode: Mode
    layout: float
    keep: int = -1
    kept: object = None
    stopped: int = 0

    def run(self, before: Call = nothing, after: Call = nothing) -> float:
        before()
        seconds, self.kept = self.device.run(self.calls, self.mode, self.layout, self.keep)
        after()
        return seconds


@dataclass(frozen=True, slots=True)
class _Description:
    gpus: Any = 1
    noise: Any = "default"
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    session_seed: int | None = 1
    """An honest 99 % interval misses the true ratio in one session of a hundred: with random seeds,
    a test of a verdict would fail as often."""


def _describe(text: str) -> _Description:
    try:
        return from_json(_Description, json.loads(text), VARIABLE)
    except (TypeError, ValueError) as why:
        raise UsageError(f"{VARIABLE}={text}: {why} (see tests/fake_gpu.py)") from why


def machine(text: str) -> FakeMachine:
    """Return the machine that the JSON in ``text`` describes."""
    described = _describe(text)
    try:
        objects = [{}] * described.gpus if type(described.gpus) is int else described.gpus
        gpus = [
            from_json(Gpu, {**to_json(FAKE_GPU), "uuid": f"fake-{i}", **gpu}, f"gpus[{i}]")
            for i, gpu in enumerate(objects)
        ]
        noise = {"none": Noise.none(), "default": Noise()}.get(str(described.noise)) or from_json(
            Noise, described.noise, "noise"
        )
    except (TypeError, ValueError) as why:
        raise UsageError(f"{VARIABLE}={text}: {why} (see tests/fake_gpu.py)") from why
    return FakeMachine(gpus, noise, described.faults, described.seed)


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Let tests accept figures of the fake machine, as those of the machine they stand for."""
    try:
        seed = _describe(os.environ.get(VARIABLE, "{}")).session_seed
    except UsageError as why:
        raise pytest.UsageError(str(why)) from why
    session_config.random_seed = _random_seed if seed is None else lambda: seed
    session.CudaMachine = FakeMachine


def pytest_aiperf_machine() -> FakeMachine:
    """Return the fake machine; this hook makes the plugin measure on it."""
    return machine(os.environ.get(VARIABLE, "{}"))


def _generator(seed: int) -> random.Random:
    return random.Random(seed)
