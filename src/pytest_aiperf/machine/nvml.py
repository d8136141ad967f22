"""Properties and state of the GPUs, read from NVML so that CUDA stays uninitialized."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Gpu, GpuLoad, GpuState

ARCHS: Final = {"sm90": "sm_90a", "sm100": "sm_100a", "sm103": "sm_103a", "sm121": "sm_121a"}
"""nvcc's names of the architectures that have architecture-specific instructions."""

_LIST_END: Final = ("-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs after them; Slurm writes the second."""
_64_CORES_PER_SM: Final = ("sm60", "sm70", "sm72", "sm75", "sm80")
"""Architectures with 64 FP32 cores per SM; all others have 128."""
_POLICIES: Final = {"thermal": "PERF_POLICY_THERMAL", "board_limit": "PERF_POLICY_BOARD_LIMIT"}
"""Violation counters that are read, with their NVML fields."""
_NOT_IN_KEY: Final = r"nvidia|tesla|geforce|gpu|sxm\d*|ac|hbm\w*|\d+gb|edition|generation"
"""Words of a product name that do not change the speed."""


def nvcc_arch(arch: str) -> str:
    """Return nvcc's name of an architecture: ``sm90`` is ``sm_90a``, ``sm80`` is ``sm_80``."""
    return ARCHS.get(arch) or arch.replace("sm", "sm_", 1)


def key(name: str) -> str:
    """Shorten a product name to its key in expectations.yaml: ``NVIDIA H200`` is ``h200``.

    Words that do not change the speed (memory size, socket) are left out; others (PCIe, NVL,
    Laptop) stay.
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "".join(w for w in words if w and not re.fullmatch(_NOT_IN_KEY, w)) or "gpu"


def visible(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """List the GPUs that CUDA may use here, in the order of ``CUDA_VISIBLE_DEVICES``.

    Indices count in PCI order, as in nvidia-smi. Without a driver the list is empty.
    """
    nvml, _ = _nvml()
    if nvml is None:
        return []
    indices = range(nvml.nvmlDeviceGetCount())
    handles = [h for i in indices if (h := _read(nvml, "HandleByIndex", i))]
    by_uuid = {str(nvml.nvmlDeviceGetUUID(h)): h for h in handles}
    uuids = _select(environ.get("CUDA_VISIBLE_DEVICES"), list(by_uuid))
    return [_describe(nvml, by_uuid[uuid], uuid) for uuid in uuids]


def absence(environ: Mapping[str, str] = os.environ) -> str:
    """Return the reason why :func:`visible` lists nothing."""
    nvml, why = _nvml()
    if nvml is None:
        return why
    count, selection = nvml.nvmlDeviceGetCount(), environ.get("CUDA_VISIBLE_DEVICES")
    if count and selection is not None:
        return f"CUDA_VISIBLE_DEVICES={selection!r} hides all {count} GPUs of this machine"
    return "the NVIDIA driver lists no GPU"


def sm_mhz(uuid: str) -> int | None:
    """Read the SM clock only, in a tenth of the time of :func:`telemetry`."""
    nvml, handle = _board(uuid)
    clock: int | None = handle and _read(nvml, "ClockInfo", handle, nvml.NVML_CLOCK_SM)
    return clock


def telemetry(uuid: str) -> GpuState:
    """Read a GPU's clock, temperature, clock event reasons and violation counters (ns)."""
    nvml, handle = _board(uuid)
    if not handle:
        return GpuState()
    # one query for all fields, because a query takes half a millisecond
    fields = [getattr(nvml, f"NVML_FI_DEV_{field}") for field in _POLICIES.values()]
    values = _read(nvml, "FieldValues", handle, fields) or ()
    violations = {
        policy: int(field.value.ullVal)
        for policy, field in zip(_POLICIES, values, strict=False)
        if field.nvmlReturn == nvml.NVML_SUCCESS
    }
    return GpuState(
        sm_mhz=_read(nvml, "ClockInfo", handle, nvml.NVML_CLOCK_SM),
        temperature_c=_read(nvml, "Temperature", handle, nvml.NVML_TEMPERATURE_GPU),
        event_reasons=_read(nvml, "CurrentClocksEventReasons", handle),
        violations=violations,
    )


def load(uuid: str) -> GpuLoad:
    """Read a GPU's utilization, clocks, power and used memory."""
    nvml, handle = _board(uuid)
    if not handle:
        return GpuLoad()
    utilization = _read(nvml, "UtilizationRates", handle)
    power_mw = _read(nvml, "PowerUsage", handle)
    memory = _read(nvml, "MemoryInfo", handle)
    return GpuLoad(
        utilization_percent=utilization and utilization.gpu,
        sm_mhz=_read(nvml, "ClockInfo", handle, nvml.NVML_CLOCK_SM),
        memory_mhz=_read(nvml, "ClockInfo", handle, nvml.NVML_CLOCK_MEM),
        power_w=power_mw and power_mw / 1e3,
        memory_used_bytes=memory and memory.used,
    )


def energy_j(uuid: str) -> float | None:
    """Read the joules that a GPU has used since the driver was loaded; None without a counter."""
    nvml, handle = _board(uuid)
    energy_mj: int | None = handle and _read(nvml, "TotalEnergyConsumption", handle)
    return None if energy_mj is None else energy_mj / 1e3


def _nvml() -> tuple[Any, str]:
    """Return the initialized NVML, or None and the reason.

    NVML may be initialized repeatedly, also in a forked process, so nothing is cached.
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


def _read(nvml: Any, figure: str, *arguments: object) -> Any:
    # not every board, driver or virtual machine supports a query, and newer NVMLs drop some
    try:
        return getattr(nvml, f"nvmlDeviceGet{figure}")(*arguments)
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
        sms=int(cores) // (64 if arch in _64_CORES_PER_SM else 128),
        l2_bytes=0,  # NVML lacks it; the claim's process reads it from CUDA
        memory_bytes=int(memory.total) if memory else 0,
        driver=str(nvml.nvmlSystemGetDriverVersion()),
    )


def _select(spec: str | None, uuids: Sequence[str]) -> list[str]:
    """Return the UUIDs that a value of CUDA_VISIBLE_DEVICES selects, in its order."""
    if spec is None or not uuids:
        return list(uuids)
    selected: list[str] = []
    for word in (w.strip() for w in spec.split(",")) if spec.strip() else ():
        if word in _LIST_END:
            break
        if word.startswith("MIG-"):
            raise UsageError(
                f"CUDA_VISIBLE_DEVICES={spec!r}: {word!r} is a MIG instance, a slice of a GPU, and "
                "claims are measured on whole GPUs only: name a GPU on which MIG is off "
                "(nvidia-smi -mig 0 turns it off)"
            )
        if word.isdecimal():
            matches = list(uuids[int(word) : int(word) + 1])
        else:
            matches = [u for u in uuids if word.startswith("GPU-") and u.startswith(word)]
        if len(matches) != 1 or matches[0] in selected:
            raise UsageError(
                f"CUDA_VISIBLE_DEVICES={spec!r}: {word!r} does not name one more GPU; give each "
                f"GPU once, as an index from 0 to {len(uuids) - 1} or as the start of one of "
                + ", ".join(uuids)
            )
        selected += matches
    return selected
