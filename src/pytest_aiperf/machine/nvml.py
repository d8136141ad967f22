"""What the GPUs of this machine are and feel, asked of NVML so that CUDA stays uninitialised."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Gpu, GpuState

ARCHS: Final = {"sm90": "sm_90a", "sm100": "sm_100a", "sm103": "sm_103a", "sm121": "sm_121a"}
"""What nvcc calls an architecture whose own instructions kernels may use."""

_NOBODY = ("-1", "NoDevFiles")  # CUDA sees nothing from here on; the second is Slurm's word for it
_FEW_CORES = ("sm60", "sm70", "sm72", "sm75", "sm80")
_POLICIES = {"thermal": "PERF_POLICY_THERMAL", "board_limit": "PERF_POLICY_BOARD_LIMIT"}
_NO_KEY = re.compile(r"nvidia|tesla|geforce|gpu|sxm\d*|ac|hbm\w*|\d+gb|edition|generation")


def nvcc_arch(arch: str) -> str:
    """Name an architecture as nvcc does: ``sm90`` is ``sm_90a``, ``sm80`` is ``sm_80``."""
    return ARCHS.get(arch) or arch.replace("sm", "sm_", 1)


def key(name: str) -> str:
    """Shorten a product name to what expectations call it: ``NVIDIA H200`` is ``h200``.

    Words that do not change the speed (memory size, socket) go; those that do (PCIe, NVL, Laptop)
    stay.
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "".join(w for w in words if w and not _NO_KEY.fullmatch(w)) or "gpu"


def visible(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """List the GPUs that CUDA may use here, in the order of ``CUDA_VISIBLE_DEVICES``.

    Indices count in PCI order, as nvidia-smi's do. Without a driver there are none.
    """
    nvml, _ = _nvml()
    if nvml is None:
        return []
    every = range(nvml.nvmlDeviceGetCount())
    handles = [h for i in every if (h := _read(nvml, "HandleByIndex", i))]
    known = {str(nvml.nvmlDeviceGetUUID(h)): h for h in handles}
    return [
        _describe(nvml, known[uuid], uuid)
        for uuid in _chosen(environ.get("CUDA_VISIBLE_DEVICES"), list(known))
    ]


def absence(environ: Mapping[str, str] = os.environ) -> str:
    """Say why :func:`visible` lists nothing."""
    nvml, why = _nvml()
    if nvml is None:
        return why
    count, chosen = nvml.nvmlDeviceGetCount(), environ.get("CUDA_VISIBLE_DEVICES")
    if count and chosen is not None:
        return f"CUDA_VISIBLE_DEVICES={chosen!r} hides all {count} of this machine"
    return "the NVIDIA driver lists none"


def sm_mhz(uuid: str) -> int | None:
    """Read the clock of a GPU's SMs, which takes a tenth of what all senses do."""
    nvml, handle = _board(uuid)
    clock: int | None = handle and _read(nvml, "ClockInfo", handle, nvml.NVML_CLOCK_SM)
    return clock


def telemetry(uuid: str) -> GpuState:
    """Read a GPU's clock, temperature, clock event reasons and violation counters (ns)."""
    nvml, handle = _board(uuid)
    if not handle:
        return GpuState()
    # in one question, as each takes NVML half a millisecond
    fields = [getattr(nvml, f"NVML_FI_DEV_{field}") for field in _POLICIES.values()]
    answers = _read(nvml, "FieldValues", handle, fields) or ()
    violations = {
        policy: int(answer.value.ullVal)
        for policy, answer in zip(_POLICIES, answers, strict=False)
        if answer.nvmlReturn == nvml.NVML_SUCCESS
    }
    return GpuState(
        sm_mhz=_read(nvml, "ClockInfo", handle, nvml.NVML_CLOCK_SM),
        temperature_c=_read(nvml, "Temperature", handle, nvml.NVML_TEMPERATURE_GPU),
        event_reasons=_read(nvml, "CurrentClocksEventReasons", handle),
        violations=violations,
    )


def _nvml() -> tuple[Any, str]:
    """Return NVML, or None and why there is none.

    No state of ours: NVML counts its initialisations, and a forked process simply adds one.
    """
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"the NVIDIA driver does not answer ({error})"
    return pynvml, ""


def _board(uuid: str) -> tuple[Any, Any]:
    nvml, _ = _nvml()
    return nvml, nvml and _read(nvml, "HandleByUUID", uuid)


def _read(nvml: Any, figure: str, *about: object) -> Any:
    # a board, a driver or a virtual machine may refuse any figure, and newer NVMLs drop some
    try:
        return getattr(nvml, f"nvmlDeviceGet{figure}")(*about)
    except (nvml.NVMLError, AttributeError):
        return None


def _describe(nvml: Any, handle: Any, uuid: str) -> Gpu:
    name = str(nvml.nvmlDeviceGetName(handle))
    arch = "sm{}{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle))
    cores = _read(nvml, "NumGpuCores", handle) or 0
    memory = _read(nvml, "MemoryInfo", handle)
    return Gpu(
        name=name,
        key=key(name),
        uuid=uuid,
        arch=arch,
        sms=int(cores) // (64 if arch in _FEW_CORES else 128),
        l2_bytes=0,  # NVML does not know it; the clock asks CUDA in the claim's process
        memory_bytes=int(memory.total) if memory else 0,
        driver=str(nvml.nvmlSystemGetDriverVersion()),
    )


def _chosen(spec: str | None, uuids: Sequence[str]) -> list[str]:
    if spec is None or not uuids:
        return list(uuids)
    chosen: list[str] = []
    for word in (w.strip() for w in spec.split(",")) if spec.strip() else ():
        if word in _NOBODY:
            break
        if word.isdecimal():
            found = list(uuids[int(word) : int(word) + 1])
        else:
            found = [u for u in uuids if word.startswith("GPU-") and u.startswith(word)]
        if len(found) != 1 or found[0] in chosen:
            raise UsageError(
                f"CUDA_VISIBLE_DEVICES={spec!r}: {word!r} does not name one more GPU; give each "
                f"GPU once, as an index from 0 to {len(uuids) - 1} or as the start of one of "
                + ", ".join(uuids)
            )
        chosen += found
    return chosen
