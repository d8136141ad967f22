"""How each ceiling of one GPU is measured: the best block of the best way to run into it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pytest_aiperf.device.device import Call, Device, calls_per_block, choose_mode, now
from pytest_aiperf.model import Gpu, Metric, Mode

_BLOCKS = 10
_BURSTS = 8
_REST = 0.03
_LONGEST = 0.6  # seconds that one way to reach a ceiling may take
_THREADS = 256  # as in ceilings.cu
_SINCE: Final = {"fp16": 70, "tf32": 80, "bf16": 80, "int8": 80, "fp8": 89}

Kernels = Mapping[str, Callable[..., object]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is moved and multiplied: bytes, and the rows, columns and depths of products."""

    memory: int
    l2: tuple[int, ...]
    host: int
    products: tuple[tuple[int, int, int], ...]
    launches: int = 200
    rounds: int = 1_000

    @classmethod
    def of(cls, gpu: Gpu, free: int) -> Sizes:
        """Choose sizes for a GPU with so many free bytes."""
        l2 = gpu.l2_bytes or 32 << 20
        return cls(
            memory=min(4 << 30, 1 << (max(free, 1 << 20) // 4).bit_length() - 1),
            l2=tuple(max(1 << 20, l2 // part >> 20 << 20) for part in (8, 4, 2)),
            host=256 << 20,
            # a cube, and 16 whole waves of tiles of 128 by 256 on all multiprocessors
            products=((8192, 8192, 8192), (128 * gpu.sms, 4096, 8192)),
        )


class Microbenchmarks:
    """Measures ceilings on a clock; random data throughout, from a generator of its own."""

    def __init__(self, clock: Device, sizes: Sizes, kernels: Kernels | None) -> None:
        """Without ``kernels`` (those of ceilings.cu) some ceilings cannot be measured."""
        import torch

        assert clock.gpu is not None
        self._torch: Any = torch
        self._clock, self._sizes = clock, sizes
        self._sms, self._arch = clock.gpu.sms, int(clock.gpu.arch.removeprefix("sm"))
        self._random = torch.Generator(clock.torch_device).manual_seed(1)
        ways: dict[str, Callable[[], float]] = {"copy": self._copy}
        if kernels is not None:
            self._kernels = kernels
            ways |= {
                "read": self._read,
                "l2": self._l2,
                "shared": self._shared,
                "fp32": self._fp32,
                "launch": self._launch,
                "graph_launch": self._graph_launch,
            }
        for dtype in ("fp64", "tf32", "bf16", "fp16", "fp8", "int8"):
            if self._arch >= _SINCE.get(dtype, 0):
                ways[dtype] = partial(self._product, dtype)
        for name, down in (("h2d", False), ("d2h", True)):
            ways[name] = partial(self._transfer, down=down, pinned=True)
            ways[f"{name}_pageable"] = partial(self._transfer, down=down, pinned=False)
        self.ways: Final[Mapping[str, Callable[[], float]]] = ways
        """Name to what measures it, of the ceilings that this GPU has here."""

    # device memory and caches

    def _copy(self) -> float:
        source, target = self._bytes(self._sizes.memory), self._bytes(self._sizes.memory)
        ways = [lambda: target.copy_(source)]
        if "read" in self.ways:
            ways += [self._moving(source, target, v, write=True) for v in (2, 4, 8)]
        return 2 * self._sizes.memory / min(map(self._best, ways))

    def _read(self) -> float:
        source, target = self._bytes(self._sizes.memory), self._bytes(16)
        ways = (self._moving(source, target, v, write=False) for v in (2, 4, 8))
        return self._sizes.memory / min(map(self._best, ways))

    def _l2(self) -> float:
        """Read, or copy, again and again what lies in the L2; the rate of whichever is faster."""
        blocks, found = 8 * self._sms, 0.0
        for size in self._sizes.l2:
            source, target = self._bytes(size), self._bytes(size)
            for vectors, write in ((4, False), (8, False), (4, True)):
                # as many bytes as device memory would be asked for
                step = blocks * _THREADS * vectors * 16
                steps = math.ceil(self._sizes.memory / step)
                part = size // 2 if write else size
                call = self._moving(source, target, vectors, write, part, blocks, steps)
                found = max(found, (1 + write) * step * steps / self._best(call))
        return found

    def _moving(  # noqa: PLR0917  the launcher's own arguments
        self,
        source: Any,
        target: Any,
        vectors: int,
        write: bool,
        size: int = 0,
        blocks: int = 0,
        steps: int = 1,
    ) -> Call:
        move = self._kernels["move"]
        return lambda: move(source, target, size or source.nbytes, vectors, write, blocks, steps)

    def _shared(self) -> float:
        target, blocks, rounds = self._bytes(16), 2 * self._sms, self._sizes.rounds
        best = self._best(lambda: self._kernels["shared"](blocks, rounds, target))
        return blocks * rounds * 1024 * 8 * 16 / best

    # arithmetic

    def _fp32(self) -> float:
        """Multiply and add in bursts, as in products."""
        target, blocks, rounds = self._bytes(16), 8 * self._sms, self._sizes.rounds
        target = target.view(self._torch.float32)
        best = self._best(lambda: self._kernels["multiply"](blocks, rounds, target), _BURSTS)
        return blocks * rounds * _THREADS * 128 * 2 / best

    def _product(self, dtype: str) -> float:
        """Multiply matrices in bursts after a rest and on and on.

        Under sustained work the power cap lowers the clock; right after a rest it does not. A
        claim's blocks come somewhere in between, so the ceiling is the best of both.
        """
        found = 0.0
        for m, n, k in self._sizes.products:
            if dtype == "fp64":  # a cube of it takes long enough
                m, n, k = m // 2, n // 2, k // 2  # noqa: PLW2901
            call = self._multiplying(dtype, m, n, k)
            with self._tf32() if dtype == "tf32" else contextlib.nullcontext():
                found = max(found, 2.0 * m * n * k / self._best(call, _BURSTS))
        return found

    def _multiplying(self, dtype: str, m: int, n: int, k: int) -> Call:
        torch = self._torch
        a, b = (self._matrix(dtype, rows, k) for rows in (m, n))
        b = b.t()  # both lie along k, as the 8-bit products ask for
        if dtype == "int8":
            return lambda: torch._int_mm(a, b)  # noqa: SLF001  no public name
        if dtype == "fp8":
            one = torch.ones((), device=a.device)
            scaled = partial(torch._scaled_mm, scale_a=one, scale_b=one)  # noqa: SLF001
            return lambda: scaled(a, b, out_dtype=torch.bfloat16, use_fast_accum=True)
        return lambda: torch.mm(a, b)

    def _matrix(self, dtype: str, rows: int, columns: int) -> Any:
        torch = self._torch
        if dtype == "int8":
            return self._bytes(rows * columns).view(torch.int8).view(rows, columns)
        kinds = {"fp64": "float64", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
        kind = getattr(torch, kinds.get(dtype, "float32"))
        made = torch.empty(rows, columns, dtype=kind, device=self._clock.torch_device)
        made.normal_(generator=self._random)
        return made.to(torch.float8_e4m3fn) if dtype == "fp8" else made

    @contextlib.contextmanager
    def _tf32(self) -> Iterator[None]:
        matmul = self._torch.backends.cuda.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
        try:
            yield
        finally:
            matmul.fp32_precision = before

    # the host and its link

    def _launch(self) -> float:
        """Seconds that a launch costs the host, from C++: no caller pays less."""
        launch, times, best = self._kernels["launch"], self._sizes.launches, math.inf
        for _ in range(2 * _BLOCKS):
            self._clock.synchronize()  # the queue has room for all of them
            begun = now()
            launch(times)
            best = min(best, (now() - begun) * 1e-9 / times)
        self._clock.synchronize()
        return best

    def _graph_launch(self) -> float:
        launch, times = self._kernels["launch"], self._sizes.launches
        launch(1)
        block = self._clock.block([lambda: launch(1)] * times, Mode.GRAPH)
        return min(block.run() for _ in range(_BLOCKS)) / times

    def _transfer(self, *, down: bool, pinned: bool) -> float:
        size = self._sizes.host
        there = self._bytes(size)
        here = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=pinned)
        here.copy_(there)  # touches every page
        target, source = (here, there) if down else (there, here)
        # pageable memory passes through the host's hands: only the host knows how long it took
        mode = Mode.PLAIN if pinned else Mode.WALL
        block = self._clock.block([lambda: target.copy_(source, non_blocking=True)], mode)
        return size / min(block.run() for _ in range(_BLOCKS))

    # how

    def _bytes(self, size: int) -> Any:
        made = self._torch.empty(size, dtype=self._torch.uint8, device=self._clock.torch_device)
        return made.random_(generator=self._random)

    def _best(self, call: Call, bursts: int = 0) -> float:
        """Return the seconds of a call in its best block; some of them may follow a rest."""
        for _ in range(2):  # the first may load libraries
            call()
        once = self._clock.estimate_s(call)
        mode = choose_mode(Metric.DEVICE, once)
        calls = calls_per_block(mode, once, once)
        block = self._clock.block([call] * calls, mode)
        best, begun = math.inf, now()
        for i in range(bursts + _BLOCKS):
            if i < bursts:
                time.sleep(_REST)
            best = min(best, block.run())
            if (now() - begun) * 1e-9 > _LONGEST:
                break
        return best / calls
