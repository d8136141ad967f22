"""The protocol of a device, the choice of a timing mode, and the host as a device."""

import contextlib
import gc
import math
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pytest_aiperf.machine.distributed import RankGroup
from pytest_aiperf.model import Bench, Gpu, GpuState, Metric, Mode, Trace
from pytest_aiperf.rules.validity import watched

# bound at import, so that an arm that patches time.perf_counter_ns changes nothing here
now = watched(time.perf_counter_ns, __name__, "now")

GRAPH_BELOW_S: Final = 50e-6
"""Calls shorter than this are captured in a graph, because launch gaps would lengthen them."""
PLAIN_ABOVE_S: Final = 20e-3
"""Calls longer than this need no blocking kernel: the time that the host adds is negligible."""
MAX_BLOCK_S: Final = 20e-3
"""Longest block with more than one call; longer blocks would leave time for fewer rounds."""
_MIN_BLOCK_S: Final = {Mode.GRAPH: 5e-4, Mode.BACKLOG: 1e-3, Mode.PLAIN: 5e-3, Mode.WALL: 2e-3}
"""Shortest block in each mode: long enough that the timer's resolution is negligible."""
_MAX_CALLS: Final = {Mode.GRAPH: 1_000, Mode.BACKLOG: 200, Mode.PLAIN: 1_000, Mode.WALL: 100_000}
"""Most calls per block. Backlog mode has the fewest: a stream's queue holds about 1,024 launches,
and one call may need several."""

Call = Callable[[], object]
NoiseProbe = tuple[Callable[[Bench], tuple[Any, ...]], Callable[..., object]]
"""An inputs function and an arm."""


class Block(Protocol):
    """Calls that are timed together."""

    last: object  #: Return value of the last call.

    # Run all calls; return their total seconds.
    def run(self) -> float: ...
    def run_untimed(self) -> None: ...


class Device(Protocol):
    """A device that runs and times calls."""

    gpu: Gpu | None  #: None on the host.
    torch_device: str  #: Name of the device in torch: ``cuda`` or ``cpu``.
    ranks: RankGroup  #: Processes that measure the same claim.

    def seed(self, seed: int) -> None: ...
    def synchronize(self) -> None: ...
    def telemetry(self) -> GpuState: ...
    # Allocate a random size to shift later allocations; deleting the result frees it.
    def random_padding(self, rng: random.Random) -> object: ...
    # Make a block of calls that are warmed up; graph mode may raise CannotCapture.
    def block(self, calls: Sequence[Call], mode: Mode) -> Block: ...
    # Raise InvalidMeasurement if work of a call is not ordered with its stream: before timing by
    # a capture, after timing by a trace. The call must have run before.
    def refuse_unjoined(self, call: Call) -> None: ...
    def refuse_unordered(self, call: Call) -> None: ...
    # Estimate the seconds per call, to choose the mode and the calls per block.
    def estimate_s(self, call: Call) -> float: ...
    # Repeat a call until the device's clocks are those of sustained work.
    def stabilize_clocks(self, call: Call) -> None: ...
    # Run blocks untimed, each at least once, until the device has recovered from being idle.
    def warm_up(self, blocks: Sequence[Block]) -> None: ...
    # Return the peak bytes that a call allocates, without those allocated before it.
    def peak_bytes(self, call: Call) -> int: ...
    # Trace one warmed-up call in the state in which it was timed; None on the host.
    def trace(self, call: Call, mode: Mode, *, cold: bool) -> Trace | None: ...
    # Read hardware counters over one call, by name of the metric; empty on the host.
    def counters(
        self, call: Call, metrics: Sequence[str], *, cold: bool
    ) -> Mapping[str, float]: ...
    # Free cached memory, so that the next replicate allocates anew.
    def release(self) -> None: ...
    # Return the device memory that no process has allocated.
    def free_bytes(self) -> int: ...
    # Return inputs and an arm; comparing this arm with itself shows the device's noise.
    def noise_probe(self) -> NoiseProbe: ...


def choose_mode(metric: Metric, fastest_s: float) -> Mode:
    """Choose the mode of all arms from the seconds per call of the fastest arm."""
    if metric is not Metric.DEVICE:
        return Mode.WALL
    if fastest_s < GRAPH_BELOW_S:
        return Mode.GRAPH
    return Mode.BACKLOG if fastest_s < PLAIN_ABOVE_S else Mode.PLAIN


def calls_per_block(mode: Mode, fastest_s: float, slowest_s: float) -> int:
    """Return the calls per block: the fastest arm sets the minimum, the slowest the maximum."""
    enough = math.ceil(_MIN_BLOCK_S[mode] / max(fastest_s, 1e-9))
    affordable = int(MAX_BLOCK_S / max(slowest_s, 1e-9))
    return max(1, min(enough, affordable, _MAX_CALLS[mode]))


class HostDevice:
    """Times calls with the host's monotonic clock in every mode."""

    gpu: Gpu | None = None
    torch_device = "cpu"

    def __init__(self, ranks: RankGroup | None = None) -> None:
        self.ranks = ranks or RankGroup()

    def seed(self, seed: int) -> None:
        seed_all(seed)

    def random_padding(self, rng: random.Random) -> object:
        return bytearray(rng.randrange(1, 1_024) * 64), bytearray(rng.randrange(64, 8_192) * 4_096)

    def block(self, calls: Sequence[Call], mode: Mode) -> Block:  # noqa: ARG002  one timer for all modes
        return WallBlock(calls, self.ranks)

    def estimate_s(self, call: Call) -> float:
        seconds = WallBlock([call], self.ranks).run()
        return seconds if seconds > 1e-3 else WallBlock([call] * 10, self.ranks).run() / 10

    def stabilize_clocks(self, call: Call) -> None:
        until = now() + 200_000_000
        for _ in range(10):
            call()
            if not self.ranks.all(now() < until):
                break

    def refuse_unjoined(self, call: Call) -> None: ...
    def refuse_unordered(self, call: Call) -> None: ...
    def warm_up(self, blocks: Sequence[Block]) -> None: ...
    def synchronize(self) -> None: ...

    def telemetry(self) -> GpuState:
        return GpuState()

    def peak_bytes(self, call: Call) -> int:
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            held = call()
            _, peak = tracemalloc.get_traced_memory()
            del held
        finally:
            tracemalloc.stop()
        return int(self.ranks.max(max(0, peak - before)))

    def trace(self, *_call: object, **_state: object) -> Trace | None:
        return None  # no GPU to trace

    def counters(self, *_call: object, **_state: object) -> Mapping[str, float]:
        return {}

    def release(self) -> None:
        gc.collect()

    def free_bytes(self) -> int:
        return 0  # never called: only GPU claims and ceilings ask for device memory

    def noise_probe(self) -> NoiseProbe:
        import numpy as np

        # 100,000 numbers: about a millisecond per call
        def inputs(bench: Bench) -> tuple[Any, ...]:
            return (np.random.default_rng(bench.seed).random(bench.size(100_000, check=100)),)

        return inputs, np.sort


@dataclass(eq=False)
class WallBlock:
    """Calls timed by the host's clock, from an empty queue of the device to an empty queue."""

    calls: Sequence[Call]  #: The calls, in order.
    ranks: RankGroup  #: Processes that start together; the slowest one's time counts.
    drain: Call = lambda: None  #: Waits until the device's queue is empty.
    current: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Makes the timed stream current."""
    last: object = None  #: Return value of the last call.

    @watched
    def run(self) -> float:
        with gc_disabled(), self.current():
            self.drain()
            self.ranks.barrier()
            begun = now()
            for call in self.calls:
                self.last = call()
            self.drain()
            seconds = (now() - begun) * 1e-9
        return self.ranks.max(seconds)

    def run_untimed(self) -> None:
        self.run()


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection, which would lengthen a block of an arm at random."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def seed_all(seed: int) -> None:
    """Seed random, and numpy and torch if they are loaded."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # faster than torch.manual_seed, which takes 2 ms
            torch.cuda.manual_seed_all(seed)
