"""A device that lives in virtual time, with the noise and the faults of a real one."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from .errors import CannotCapture, InvalidMeasurement
from .model import Bench, Gpu, Mode, Senses

FAKE_GPU: Final = Gpu(
    name="Fake H200",
    key="fake",
    uuid="fake-0",
    arch="sm90",
    sms=132,
    l2_bytes=0,  # unknown, so that small inputs need not be rotated 256 times to be called cold
    memory_bytes=141 << 30,
    driver="0",
)
_SM_MHZ = 1_980
_THERMAL = 0x20


@dataclass(frozen=True, slots=True)
class Noise:
    """How a device strays from the truth; fractions of a time, and seconds."""

    white: float = 0.002
    """Standard deviation of each block."""
    tail: float = 0.25
    tail_chance: float = 0.01
    """A call takes up to ``tail`` longer, with this chance."""
    drift: float = 0.006
    drift_s: float = 0.020
    """Standard deviation and correlation time of the clock's wandering."""
    ramp: float = 0.03
    ramp_s: float = 0.030
    """How much slower the first work is, and how fast that goes by."""
    throttle: float = 0.06
    throttle_s: float = 0.050
    throttle_per_s: float = 0.02
    """Depth, length and frequency of thermal throttling."""
    layout: float = 0.004
    """Standard deviation of what a block's addresses do to it; drawn anew after each pad."""
    jump: float = 0.03
    jump_chance: float = 0.0005
    """Size of the step between two states, and each block's chance to change state."""

    @classmethod
    def none(cls) -> Noise:
        """Return the noise of a device that tells the truth."""
        return cls(*[0.0] * len(dataclasses.fields(cls)))


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong when the ``block``-th block of a clock runs, counted from 0."""

    block: int
    kind: Literal["throttle", "hang", "raise"]
    blocks: int = 1
    reasons: int = _THERMAL
    error: Exception = dataclasses.field(
        default_factory=lambda: RuntimeError("CUDA error: an illegal memory access was encountered")
    )


class _Ledger:
    """What the calls of the running clock spend and hold."""

    def __init__(self) -> None:
        self.calls: list[float] | None = None
        self.mode: Mode | None = None
        self.capturing = False
        self.held = 0
        self.peak = 0


_ledger = _Ledger()


def spend(seconds: float) -> None:
    """Take this much device time; does nothing outside a clock."""
    if _ledger.calls and not _ledger.capturing:
        _ledger.calls[-1] += seconds


def synchronise() -> None:
    """Wait for the device, as a call does that cannot be captured or held back."""
    if _ledger.capturing:
        raise CannotCapture("the call synchronises")
    if _ledger.mode is Mode.BACKLOG:
        raise InvalidMeasurement('the call synchronises; claim metric="wall"')


class Allocation:
    """Device memory that is free again when this is dropped; made by :func:`allocate`."""

    def __init__(self, size: int) -> None:
        self.size = size
        _ledger.held += size
        _ledger.peak = max(_ledger.peak, _ledger.held)

    def __del__(self) -> None:
        _ledger.held -= self.size


def allocate(size: int) -> Allocation:
    """Take this many bytes of device memory."""
    return Allocation(size)


class FakeMachine:
    """A machine of fake GPUs; each clock it makes draws its own noise from the same seed."""

    def __init__(
        self,
        gpus: Sequence[Gpu] = (FAKE_GPU,),
        noise: Noise | None = None,
        faults: Sequence[Fault] = (),
        seed: int = 0,
    ) -> None:
        self._gpus = tuple(gpus)
        self._noise = Noise() if noise is None else noise
        self._faults = tuple(faults)
        self._random = _generator(seed)

    def gpus(self) -> Sequence[Gpu]:
        """List the fake GPUs."""
        return self._gpus

    def clock(self, gpu: Gpu | None) -> FakeClock:
        """Make a clock in virtual time; without a GPU it is the host's."""
        return FakeClock(gpu, self._noise, self._faults, self._random.getrandbits(64))


class FakeClock:
    """Times calls by what they :func:`spend`, and adds noise; ``now`` is the virtual time."""

    device = "cpu"

    def __init__(
        self,
        gpu: Gpu | None = FAKE_GPU,
        noise: Noise | None = None,
        faults: Sequence[Fault] = (),
        seed: int = 0,
    ) -> None:
        self.gpu: Gpu | None = gpu
        self.now = 0.0
        self.blocks = 0
        self._noise = Noise() if noise is None else noise
        self._faults = tuple(faults)
        self._random = _generator(seed)
        self._layout = _generator(seed + 1)
        self._wander = self._random.gauss() * self._noise.drift
        self._jumped = False
        self._throttled_until = -1.0
        self._slower = self._noise.ramp + self._wander
        self._reasons = 0
        self._violation_ns = 0

    def seed(self, seed: int) -> None:
        """Seed random."""
        random.seed(seed)

    def pad(self, rng: random.Random) -> object:
        """Draw the layout of every block made from now on from ``rng``."""
        self._layout = _generator(rng.getrandbits(64))
        return None

    def block(self, calls: Sequence[Callable[[], object]], mode: Mode) -> FakeBlock:
        """Make a block, with the layout effect that it keeps."""
        if mode is Mode.GRAPH:
            self._execute(calls, mode, capturing=True)
        return FakeBlock(self, calls, mode, self._layout.gauss() * self._noise.layout)

    def once(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call, with noise."""
        return self.measure(self._execute([call], Mode.PLAIN)[0])

    def settle(self, call: Callable[[], object]) -> None:
        """Let the start-up ramp go by."""
        call()
        self._pass(max(0.3, 10 * self._noise.ramp_s))

    def sense(self) -> Senses:
        """Feel what the last block felt."""
        return Senses(
            sm_mhz=round(_SM_MHZ / (1 + max(0.0, self._slower))),
            temperature_c=85 if self._reasons else 55,
            power_w=400.0,
            event_reasons=self._reasons,
            violations={"thermal": self._violation_ns},
        )

    def peak(self, call: Callable[[], object]) -> int:
        """Return the most bytes that a call held through :func:`allocate`."""
        before = _ledger.peak = _ledger.held
        call()
        return _ledger.peak - before

    def synchronize(self) -> None:
        """Have nothing to wait for."""

    def release(self) -> None:
        """Have nothing to give back."""

    def identity(self) -> tuple[Callable[[Bench], tuple[Any, ...]], Callable[..., object]]:
        """Return small inputs and an arm that spends 100 us."""
        import numpy as np

        def inputs(bench: Bench) -> tuple[Any, ...]:
            return (np.random.default_rng(bench.seed).random(64),)

        def negate(x: Any) -> Any:
            spend(100e-6)
            return -x

        return inputs, negate

    def run_block(
        self, calls: Sequence[Callable[[], object]], mode: Mode
    ) -> tuple[list[float], object]:
        """Execute the calls of the next block and meet the faults that are due in it."""
        number, self.blocks = self.blocks, self.blocks + 1
        self._reasons = 0
        for fault in self._faults:
            if not fault.block <= number < fault.block + fault.blocks:
                continue
            if fault.kind == "raise":
                raise fault.error
            while fault.kind == "hang":
                time.sleep(3_600)
            self._reasons = fault.reasons
        return self._execute(calls, mode)

    def measure(self, seconds: Sequence[float], layout: float = 0.0) -> float:
        """Return what the clock reads where calls truly took ``seconds``, and let that pass."""
        noise, draw = self._noise, self._random
        truth = sum(seconds)
        if noise.throttle_per_s and draw.random() < noise.throttle_per_s * truth:
            self._throttled_until = self.now + noise.throttle_s
        if self.now <= self._throttled_until:
            self._reasons |= _THERMAL
        if draw.random() < noise.jump_chance:
            self._jumped = not self._jumped
        self._pass(truth)
        throttle = (noise.throttle or 0.06) if self._reasons else 0.0
        self._violation_ns += int(truth * 1e9) if self._reasons else 0
        self._slower = self._wander + throttle
        if noise.ramp_s:
            self._slower += noise.ramp * math.exp(-self.now / noise.ramp_s)
        late = [
            s * noise.tail * draw.random() for s in seconds if draw.random() < noise.tail_chance
        ]
        step = noise.jump if self._jumped else 0.0
        return (truth * (1 + self._slower + step) + sum(late)) * math.exp(
            layout + noise.white * draw.gauss()
        )

    def _pass(self, seconds: float) -> None:
        noise = self._noise
        self.now += seconds
        if noise.drift_s:  # an Ornstein-Uhlenbeck process, exact for a step of any length
            kept = math.exp(-seconds / noise.drift_s)
            self._wander *= kept
            self._wander += noise.drift * math.sqrt(1 - kept * kept) * self._random.gauss()

    def _execute(
        self, calls: Sequence[Callable[[], object]], mode: Mode, *, capturing: bool = False
    ) -> tuple[list[float], object]:
        last: object = None
        _ledger.calls, _ledger.mode, _ledger.capturing = [], mode, capturing
        try:
            for call in calls:
                _ledger.calls.append(0.0)
                last = call()
            return _ledger.calls, last
        finally:
            _ledger.calls, _ledger.mode, _ledger.capturing = None, None, False


class FakeBlock:
    """Calls whose layout effect stays the same however often they run."""

    def __init__(
        self,
        clock: FakeClock,
        calls: Sequence[Callable[[], object]],
        mode: Mode,
        layout: float,
    ) -> None:
        self._clock = clock
        self._calls = calls
        self._mode = mode
        self._layout = layout
        self.last: object = None

    def run(self) -> float:
        """Run all calls and return the seconds that the clock read."""
        seconds, self.last = self._clock.run_block(self._calls, self._mode)
        return self._clock.measure(seconds, self._layout)


def _generator(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - noise, not secrets
