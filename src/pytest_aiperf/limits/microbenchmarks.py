"""Micro-benchmarks of one GPU: the fastest block of the fastest variant gives the limit."""

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

_BLOCKS: Final = 10  #: Timed blocks per micro-benchmark; the fastest counts.
_BURSTS: Final = 8  #: Additional blocks of an arithmetic benchmark, each after a pause.
_REST_S: Final = 0.03  #: Pause before a burst, in which the average power falls below its cap.
_MAX_S: Final = 0.6  #: Time budget per micro-benchmark: all limits take about ten seconds.
_THREADS: Final = 256  #: Threads per block in ceilings.cu.
_MIN_ARCH: Final = {"fp16": 70, "tf32": 80, "bf16": 80, "int8": 80, "fp8": 89}
"""Compute capability (times ten) from which tensor cores support a type."""

Kernels = Mapping[str, Callable[..., object]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the buffers and matrices that the micro-benchmarks use."""

    memory: int  #: Bytes that are read or copied in device memory.
    l2: tuple[int, ...]  #: Sizes in bytes of the buffers that are read or copied in the L2.
    host: int  #: Bytes that are copied between host and GPU.
    products: tuple[tuple[int, int, int], ...]  #: M, N and K of matrix products.
    launches: int = 200  #: Launches that are timed together.
    rounds: int = 1_000  #: Iterations of the shared-memory and the FMA kernel.

    @classmethod
    def of(cls, gpu: Gpu, free: int) -> Sizes:
        """Choose sizes for a GPU with ``free`` bytes of unused memory."""
        l2 = gpu.l2_bytes or 32 << 20
        return cls(
            memory=min(4 << 30, 1 << (max(free, 1 << 20) // 4).bit_length() - 1),
            l2=tuple(max(1 << 20, l2 // part >> 20 << 20) for part in (8, 4, 2)),
            host=256 << 20,
            # a cube, and a product of 16 full waves of 128 x 256 tiles
            products=((8192, 8192, 8192), (128 * gpu.sms, 4096, 8192)),
        )


class Microbenchmarks:
    """Measures the limits of a device, on random data from a private generator."""

    def __init__(self, device: Device, sizes: Sizes, kernels: Kernels | None) -> None:
        """Without ``kernels`` (those of ceilings.cu) only library calls are measured."""
        import torch

        assert device.gpu is not None
        self._torch: Any = torch
        self._device, self._sizes = device, sizes
        self._sms, self._arch = device.gpu.sms, int(device.gpu.arch.removeprefix("sm"))
        self._random = torch.Generator(device.torch_device).manual_seed(1)
        benchmarks: dict[str, Callable[[], float]] = {"copy": self._copy}
        if kernels is not None:
            self._kernels = kernels
            benchmarks |= {"read": self._read, "l2": self._l2, "shared": self._shared}
            benchmarks |= {"fp32": self._fp32, "launch": self._launch}
            benchmarks["graph_launch"] = self._graph_launch
        for dtype in ("fp64", "tf32", "bf16", "fp16", "fp8", "int8"):
            if self._arch >= _MIN_ARCH.get(dtype, 0):
                benchmarks[dtype] = partial(self._product, dtype)
        for name, down in (("h2d", False), ("d2h", True)):
            benchmarks[name] = partial(self._transfer, down=down, pinned=True)
            pageable = partial(self._transfer, down=down, pinned=False)
            benchmarks[f"{name}_pageable"] = pageable
        self.benchmarks: Final[Mapping[str, Callable[[], float]]] = benchmarks
        """Limit name to the function that measures it; only limits that this GPU supports."""

    def _copy(self) -> float:
        source, target = self._bytes(self._sizes.memory), self._bytes(self._sizes.memory)
        calls = [lambda: target.copy_(source)]
        if "read" in self.benchmarks:
            calls += self._passes(source, target, write=True)
        return 2 * self._sizes.memory / min(map(self._best_s, calls))

    def _read(self) -> float:
        source, target = self._bytes(self._sizes.memory), self._bytes(16)
        calls = self._passes(source, target, write=False)
        return self._sizes.memory / min(map(self._best_s, calls))

    def _passes(self, source: Any, target: Any, *, write: bool) -> list[Call]:
        """Return a call per number of vectors per thread; each reads or copies the buffer once."""
        move = partial(self._kernels["move"], source, target, source.nbytes)
        # blocks=0, steps=1: one thread block per chunk, which it moves in one step
        return [partial(move, vectors, write, 0, 1) for vectors in (2, 4, 8)]

    def _l2(self) -> float:
        """Return the highest rate of reading or copying a buffer that stays in the L2."""
        move, blocks, highest = self._kernels["move"], 8 * self._sms, 0.0
        for size in self._sizes.l2:
            source, target = self._bytes(size), self._bytes(size)
            for vectors, write in ((4, False), (8, False), (4, True)):
                # repeat until as many bytes have moved as in the benchmark of device memory
                step = blocks * _THREADS * vectors * 16
                steps = math.ceil(self._sizes.memory / step)
                part = size // 2 if write else size
                call = partial(move, source, target, part, vectors, write, blocks, steps)
                highest = max(highest, (1 + write) * step * steps / self._best_s(call))
        return highest

    def _shared(self) -> float:
        target, blocks, rounds = self._bytes(16), 2 * self._sms, self._sizes.rounds
        best_s = self._best_s(lambda: self._kernels["shared"](blocks, rounds, target))
        return blocks * rounds * 1024 * 8 * 16 / best_s

    def _fp32(self) -> float:
        """Return the highest rate of a kernel of FMAs, in bursts and continuously."""
        target, blocks, rounds = self._bytes(16), 8 * self._sms, self._sizes.rounds
        target = target.view(self._torch.float32)
        best_s = self._best_s(lambda: self._kernels["multiply"](blocks, rounds, target), _BURSTS)
        return blocks * rounds * _THREADS * 128 * 2 / best_s

    def _product(self, dtype: str) -> float:
        """Multiply matrices, in bursts after a pause and continuously; return the higher rate.

        Under sustained work the power cap lowers the SM clock; right after a pause it does not.
        The blocks of a claim lie in between, so the limit is the higher of the two rates.
        """
        highest = 0.0
        for m, n, k in self._sizes.products:
            if dtype == "fp64":  # fp64 is slow: an eighth of the work suffices
                m, n, k = m // 2, n // 2, k // 2  # noqa: PLW2901
            call = self._multiplication(dtype, m, n, k)
            with self._tf32() if dtype == "tf32" else contextlib.nullcontext():
                highest = max(highest, 2.0 * m * n * k / self._best_s(call, _BURSTS))
        return highest

    def _multiplication(self, dtype: str, m: int, n: int, k: int) -> Call:
        torch = self._torch
        a, b = (self._matrix(dtype, rows, k) for rows in (m, n))
        b = b.t()  # both are contiguous along k, as 8-bit products require
        if dtype == "int8":
            return lambda: torch._int_mm(a, b)  # noqa: SLF001  it has no public name
        if dtype == "fp8":
            scale = torch.ones((), device=a.device)
            product = partial(torch._scaled_mm, scale_a=scale, scale_b=scale)  # noqa: SLF001
            return lambda: product(a, b, out_dtype=torch.bfloat16, use_fast_accum=True)
        return lambda: torch.mm(a, b)

    def _matrix(self, dtype: str, rows: int, columns: int) -> Any:
        torch = self._torch
        if dtype == "int8":
            return self._bytes(rows * columns).view(torch.int8).view(rows, columns)
        names = {"fp64": "float64", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
        torch_dtype = getattr(torch, names.get(dtype, "float32"))
        matrix = torch.empty(rows, columns, dtype=torch_dtype, device=self._device.torch_device)
        matrix.normal_(generator=self._random)
        return matrix.to(torch.float8_e4m3fn) if dtype == "fp8" else matrix

    @contextlib.contextmanager
    def _tf32(self) -> Iterator[None]:
        matmul = self._torch.backends.cuda.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
        try:
            yield
        finally:
            matmul.fp32_precision = before

    def _launch(self) -> float:
        """Return the host's seconds per launch, in a loop in C++ because Python would add time."""
        launch, times, best_s = self._kernels["launch"], self._sizes.launches, math.inf
        for _ in range(2 * _BLOCKS):
            self._device.synchronize()  # empty the launch queue: a full one would block
            begun = now()
            launch(times)
            best_s = min(best_s, (now() - begun) * 1e-9 / times)
        self._device.synchronize()
        return best_s

    def _graph_launch(self) -> float:
        launch, times = self._kernels["launch"], self._sizes.launches
        launch(1)
        block = self._device.block([lambda: launch(1)] * times, Mode.GRAPH)
        return min(block.run() for _ in range(_BLOCKS)) / times

    def _transfer(self, *, down: bool, pinned: bool) -> float:
        size = self._sizes.host
        on_device = self._bytes(size)
        on_host = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=pinned)
        on_host.copy_(on_device)  # the write makes the host allocate every page
        target, source = (on_host, on_device) if down else (on_device, on_host)
        # the host itself copies pageable memory: events on the GPU would not cover all of it
        mode = Mode.PLAIN if pinned else Mode.WALL
        block = self._device.block([lambda: target.copy_(source, non_blocking=True)], mode)
        return size / min(block.run() for _ in range(_BLOCKS))

    def _bytes(self, size: int) -> Any:
        buffer = self._torch.empty(size, dtype=self._torch.uint8, device=self._device.torch_device)
        return buffer.random_(generator=self._random)

    def _best_s(self, call: Call, bursts: int = 0) -> float:
        """Return the fastest block's seconds per call; pause before each of ``bursts`` blocks."""
        for _ in range(2):  # warm up: the first call may load libraries
            call()
        estimate_s = self._device.estimate_s(call)
        mode = choose_mode(Metric.DEVICE, estimate_s)
        calls = calls_per_block(mode, estimate_s, estimate_s)
        block = self._device.block([call] * calls, mode)
        best_s, begun = math.inf, now()
        for i in range(bursts + _BLOCKS):
            if i < bursts:
                time.sleep(_REST_S)
            best_s = min(best_s, block.run())
            if (now() - begun) * 1e-9 > _MAX_S:
                break
        return best_s / calls
