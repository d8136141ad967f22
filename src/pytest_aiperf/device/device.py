"""What a clock is, how calls share a block, and the clock of the host."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from pytest_aiperf.machine.distributed import RankGroup
from pytest_aiperf.model import Bench, Gpu, GpuState, Metric, Mode, Trace
from pytest_aiperf.rules.validity import watched

# bound at import, so that an arm that patches time.perf_counter_ns changes nothing here
now = watched(time.perf_counter_ns, __name__, "now")

SHORT = 50e-6
"""Below this a call's launch shows in its time, and a block is captured in a graph."""
LONG = 20e-3
"""Above this plain events do: a shorter call of many kernels may still wait for a busy host."""
LONGEST_BLOCK = 20e-3

# The seconds that a block takes at least, and the calls that it holds at most: a launch queue
# has room for about 1,024 launches, and a call may be several of them.
_BLOCK: Final = {
    Mode.GRAPH: (5e-4, 1_000),
    Mode.BACKLOG: (1e-3, 200),
    Mode.PLAIN: (5e-3, 1_000),
    Mode.WALL: (2e-3, 100_000),
}

Call = Callable[[], object]
NoiseProbe = tuple[Callable[[Bench], tuple[Any, ...]], Callable[..., object]]
"""An inputs function and an arm."""


class Block(Protocol):
    """Calls that are timed together; ``last`` is what the last of them returned."""

    last: object

    def run(self) -> float: ...  # the seconds of all calls together
    def run_untimed(self) -> None: ...  # the same, of which nobody wants to know the seconds


class Device(Protocol):
    """Times calls on one device, and says what else a measurement needs of it."""

    gpu: Gpu | None
    torch_device: str
    ranks: RankGroup

    def seed(self, seed: int) -> None: ...

    # an allocation of random size, so that what is allocated next lies elsewhere; drop to free
    def random_padding(self, rng: random.Random) -> object: ...

    # may raise CannotCapture in graph mode; each call has run before
    def block(self, calls: Sequence[Call], mode: Mode) -> Block: ...

    # an estimate of one call's seconds, to choose a mode and a call count
    def estimate_s(self, call: Call) -> float: ...

    # run a call until the device's clocks are those of sustained work
    def stabilize_clocks(self, call: Call) -> None: ...

    # run blocks, each once at least, until the device has forgotten the pause before them
    def warm_up(self, blocks: Sequence[Block]) -> None: ...
    def telemetry(self) -> GpuState: ...

    # the most bytes that a call held allocated at once, beyond those before it
    def peak_bytes(self, call: Call) -> int: ...

    # what one warmed call does on the device; None on the host
    def trace(self, call: Call) -> Trace | None: ...

    # this device's limits by name; measured where they are not known, so have the device alone
    def ceilings(self, say: Callable[[str], object]) -> Mapping[str, float]: ...
    def synchronize(self) -> None: ...

    # give unused memory back, so that the next replicate allocates afresh
    def release(self) -> None: ...

    # bytes of the device's memory that nobody has
    def free_bytes(self) -> int: ...

    # inputs and an arm that show this device's noise when compared with itself
    def noise_probe(self) -> NoiseProbe: ...


class Machine(Protocol):
    """Where clocks come from: ``gpus`` in any process, ``clock`` only in a claim's own."""

    def gpus(self) -> Sequence[Gpu]: ...

    # of the host where there is no GPU
    def open_device(self, gpu: Gpu | None, ranks: RankGroup | None = None) -> Device: ...


def choose_mode(metric: Metric, fast: float) -> Mode:
    """Choose how all arms are timed, from the seconds of a call of the fastest."""
    if metric is not Metric.DEVICE:
        return Mode.WALL
    if fast < SHORT:
        return Mode.GRAPH
    return Mode.BACKLOG if fast < LONG else Mode.PLAIN


def calls_per_block(mode: Mode, fast: float, slow: float) -> int:
    """Count the calls of a block: long enough for the faster arm, bearable for the slower."""
    seconds, most = _BLOCK[mode]
    wanted = math.ceil(seconds / max(fast, 1e-9))
    bearable = int(LONGEST_BLOCK / max(slow, 1e-9))
    return max(1, min(wanted, bearable, most))


class HostDevice:
    """Times calls with the host's monotonic clock, whatever the mode."""

    gpu: Gpu | None = None
    torch_device = "cpu"

    def __init__(self, ranks: RankGroup | None = None) -> None:
        self.ranks = ranks or RankGroup()

    def seed(self, seed: int) -> None:
        seed_all(seed)

    def random_padding(self, rng: random.Random) -> object:
        return bytearray(rng.randrange(1, 1_024) * 64), bytearray(rng.randrange(64, 8_192) * 4_096)

    def block(self, calls: Sequence[Call], mode: Mode) -> Block:  # noqa: ARG002  one clock here
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

    def warm_up(self, blocks: Sequence[Block]) -> None:
        pass

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

    def trace(self, call: Call) -> Trace | None:  # noqa: ARG002  a call has no launches here
        return None

    def ceilings(self, say: Callable[[str], object]) -> Mapping[str, float]:  # noqa: ARG002
        return {}  # a host's limits are those of the day

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        gc.collect()

    def free_bytes(self) -> int:
        return 0  # nobody asks: what a host claim needs is made when it is timed

    def noise_probe(self) -> NoiseProbe:
        import numpy as np

        # a sort of 100,000 numbers: about a millisecond of memory and arithmetic
        def inputs(bench: Bench) -> tuple[Any, ...]:
            return (np.random.default_rng(bench.seed).random(bench.size(100_000, check=100)),)

        return inputs, np.sort


class WallBlock:
    """What the caller waits, from an empty queue to an empty queue."""

    def __init__(
        self,
        calls: Sequence[Call],
        ranks: RankGroup,
        drain: Call = lambda: None,
        current: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._calls, self._ranks, self._drain, self._current = calls, ranks, drain, current
        self.last: object = None

    @watched
    def run(self) -> float:
        with undisturbed(), self._current():
            self._drain()
            self._ranks.barrier()
            begun = now()
            for call in self._calls:
                self.last = call()
            self._drain()
            seconds = (now() - begun) * 1e-9
        return self._ranks.max(seconds)

    def run_untimed(self) -> None:
        self.run()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Collect no garbage: a collection in mid-block would be the arm's only by chance."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def seed_all(seed: int) -> None:
    """Seed random, and numpy and torch where they are loaded."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # torch.manual_seed would note 2 ms of who asked, each time
            torch.cuda.manual_seed_all(seed)
