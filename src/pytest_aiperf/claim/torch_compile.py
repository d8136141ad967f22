"""When torch compiles: not at all in a check, and in nobody's way in a measurement."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from pytest_aiperf.device.device import Device
from pytest_aiperf.machine.gpu_lock import GpuLock

_PARTS = ("", "_gemm", "_pointwise")
_HOSTS = ("DYNAMO", "LAZY_BACKWARD")
"""What torch calls compiling and the GPU has no part in; it also tells of graphs it records."""


def uncompiled() -> AbstractContextManager[object]:
    """Have torch.compile leave its arms as they are: of a GPU its CPU code would say nothing."""
    torch = sys.modules.get("torch")
    if torch is None or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return nullcontext()  # there is nothing to say, or it is said already
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def beside(lease: GpuLock, clock: Device, files: Iterable[Path]) -> Iterator[None]:
    """Let others time on the GPU while torch compiles a claim, which takes seconds of the host.

    Not where the compiler itself times on the GPU: where torch is set to autotune, and for a claim
    whose files speak of it. What files that those import ask for is not seen.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or any(b"autotune" in file.read_bytes() for file in files):
        yield
        return

    def begin(told: Any) -> None:
        set_to = sys.modules.get("torch._inductor.config")
        timing = any(getattr(set_to, f"max_autotune{part}", False) for part in _PARTS)
        if told.callback_trigger.name in _HOSTS and not timing:
            lease.suspend(clock.synchronize)

    def end(*_: object) -> None:
        lease.resume()

    handler = dynamo.callback_handler
    handler.register_start_callback(begin)
    handler.register_end_callback(end)
    try:
        yield
    finally:
        with suppress(ValueError):  # torch._dynamo.reset() has removed them
            handler.remove_start_callback(begin)
            handler.remove_end_callback(end)
