"""Is this measurement valid: a table of pure questions, each answered by a sentence or None."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any, Final

from .errors import Misuse
from .model import Senses, Work

SPAN = 3
"""Input sets of a cold measurement span the L2 this many times, and are at least this many."""
MOST_SETS = 256
SAME_CLOCK = 0.05
"""The SM clock may differ by this much between the two sides of a round."""

# Power cap (0x4), idle (0x1) and a chosen clock (0x2, 0x100) are ordinary; these are not.
_REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_COUNTERS = ("thermal", "board_limit")

_ENVIRONMENT = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for its kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
    "TORCH_SHOW_DISPATCH_TRACE": "every operator is printed",
    "TRITON_INTERPRET": "Triton kernels run in its interpreter",
    "PYTHONDEVMODE": "Python checks itself while it runs",
    "PYTHONTRACEMALLOC": "Python traces every allocation",
}
_EVEN_ZERO = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # torch asks only whether it is there
_PROFILED = re.compile(
    r"(CUDA|NVTX)_INJECTION64_PATH|(NV_(COMPUTE_)?SANITIZER|NV_NSIGHT|NSYS_PROFILING)_.+"
)
_PROFILES = re.compile("sanitizer|asan|injection|nsight", re.IGNORECASE)

_FLAGS = (
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.preferred_blas_library",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
    "backends.cudnn.conv.fp32_precision",
    "get_float32_matmul_precision",
    "get_default_dtype",
    "get_num_threads",
    "get_num_interop_threads",
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "are_deterministic_algorithms_enabled",
)
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
)

PEAKS: Final = {
    "a100": (2.04e12, 312e12),
    "h100": (3.35e12, 990e12),
    "h200": (4.8e12, 990e12),
    "b200": (8.0e12, 2.25e15),
    "b300": (8.0e12, 2.5e15),
}
"""Datasheet limits of a GPU key: bytes a second of its memory, dense bf16 flops a second."""

_LENIENCE = 1.05  # parts are sold by their datasheet, and a few run a little above it
_OVER_BF16 = {"fp64": 1, "fp32": 1, "tf32": 1, "bf16": 1, "fp16": 1, "fp8": 2, "int8": 2, "fp4": 6}


def round_problem(before: Senses, after: Senses) -> str | None:
    """Name what disturbed a round, given what the GPU felt at its two sides."""
    reasons = (before.event_reasons or 0) | (after.event_reasons or 0)
    for bit, name in _REASONS.items():
        if reasons & bit:
            return f"clock event reason {bit:#x} ({name})"
    for counter in _COUNTERS:
        if after.violations.get(counter, 0) > before.violations.get(counter, math.inf):
            return f"the {counter.replace('_', ' ')} violation counter, which grew meanwhile"
    if before.sm_mhz and after.sm_mhz:
        apart = abs(before.sm_mhz - after.sm_mhz) / max(before.sm_mhz, after.sm_mhz)
        if apart > SAME_CLOCK:
            return f"the SM clock, which went from {before.sm_mhz} to {after.sm_mhz} MHz"
    return None


def environment_problem(environ: Mapping[str, str]) -> str | None:
    """Name the environment variable under which no time means anything."""
    for name, value in sorted(environ.items()):
        if name in _ENVIRONMENT and (name == _EVEN_ZERO or value not in ("", "0")):
            return f"{name}={value}: {_ENVIRONMENT[name]}; unset it to measure"
        preloaded = name == "LD_PRELOAD" and _PROFILES.search(value)
        if preloaded or (value and _PROFILED.fullmatch(name)):
            return f"{name}={value}: a profiler is attached; measure without it"
    return None


def rotation(set_bytes: int, l2_bytes: int) -> int:
    """Count the input sets that a cold measurement rotates through."""
    if not l2_bytes:
        return SPAN
    sets = math.ceil(SPAN * l2_bytes / set_bytes) if set_bytes > 0 else MOST_SETS + 1
    if sets > MOST_SETS:
        raise Misuse(
            f"an input set of {set_bytes:,} bytes cannot be kept cold: {SPAN} times the L2 "
            f"({l2_bytes:,} bytes) would take more than {MOST_SETS} sets; "
            'declare cache="warm" or enlarge the inputs'
        )
    return max(SPAN, sets)


def flags() -> dict[str, str]:
    """Read the global switches that no arm may flip; torch's only where torch is loaded."""
    now = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    torch = sys.modules.get("torch")
    if torch is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates some of these names as they are read
            now |= {f"torch.{name}": _flag(torch, name) for name in _FLAGS}
    return now


def changed_flags(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """List each switch that differs, as ``name: before -> after``."""
    return [
        f"{name}: {before.get(name, 'unset')} -> {after.get(name, 'unset')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
        # torch was loaded in between: what it starts with is no change
        and not (name.startswith("torch.") and (name not in before or name not in after))
    ]


def faster_than_physics(
    seconds: float,
    work: Work,
    peak_bytes_per_s: float | None,
    peak_flops_per_s: float | None = None,
) -> str | None:
    """Say what a time would take that no GPU of this kind has (``PEAKS[gpu.key]``).

    Judge bytes only where the cache is cold: pass None for ``peak_bytes_per_s`` where it is warm.
    """
    factor = _OVER_BF16.get(work.dtype or "", 0)
    limits = (
        (work.bytes, peak_bytes_per_s, "bytes", "TB/s of memory traffic"),
        (work.flops, (peak_flops_per_s or 0) * factor, "flops", f"TFLOP/s in {work.dtype}"),
    )
    for amount, peak, name, unit in limits:
        if peak and amount > seconds * peak * _LENIENCE:
            return (
                f"{amount:.3g} {name} in {seconds:.3g} s are {amount / seconds / 1e12:.3g} {unit}, "
                f"and this GPU reaches {peak / 1e12:.3g}: the arm skips work, or work= counts "
                "more than a call must do"
            )
    return None


def _flag(torch: Any, name: str) -> str:
    value = torch
    try:
        for part in name.split("."):
            value = getattr(value, part)
        return str(value() if callable(value) else value)
    except (AttributeError, RuntimeError) as error:
        # not in this version, or torch refuses because an arm mixed its old and new switches
        return f"unreadable ({type(error).__name__})"
