"""Disables torch.compile in checks; in measurements, releases the GPU lock while it compiles."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from pytest_aiperf.device.device import Device
from pytest_aiperf.machine.gpu_lock import GpuLock

_AUTOTUNE = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
_HOST_ONLY = ("DYNAMO", "LAZY_BACKWARD")
"""Events of Dynamo's callbacks in which only the host works (CUDA graph capture uses the GPU)."""


def uncompiled() -> AbstractContextManager[object]:
    """Run compiled arms eagerly: on the CPU, torch.compile would not generate the GPU's code."""
    torch = sys.modules.get("torch")
    if torch is None or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def suspend_while_compiling(lock: GpuLock, device: Device, files: Iterable[Path]) -> Iterator[None]:
    """Suspend the lock while torch compiles, which takes seconds and only needs the host.

    The lock stays held if the compiler itself times kernels on the GPU: when torch is set to
    autotune, or when one of the claim's ``files`` mentions autotune.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or any(b"autotune" in file.read_bytes() for file in files):
        yield
        return

    def begin(event: Any) -> None:
        inductor = sys.modules.get("torch._inductor.config")
        autotunes = any(getattr(inductor, name, False) for name in _AUTOTUNE)
        if event.callback_trigger.name in _HOST_ONLY and not autotunes:
            lock.suspend(device.synchronize)

    def end(_event: Any) -> None:
        lock.resume()

    handler = dynamo.callback_handler
    handler.register_start_callback(begin)
    handler.register_end_callback(end)
    try:
        yield
    finally:
        with suppress(ValueError):  # torch._dynamo.reset() may have removed the callbacks
            handler.remove_start_callback(begin)
            handler.remove_end_callback(end)
