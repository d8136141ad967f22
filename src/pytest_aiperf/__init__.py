"""Every GPU optimization is a benchmark test."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from .errors import (
    AiperfError,
    BuildError,
    CannotCapture,
    CaptureFailed,
    ClaimNotMet,
    InvalidMeasurement,
    LaunchError,
    ToolMissing,
    UsageError,
    WrongResult,
)

if TYPE_CHECKING:
    from .build.nvcc import Nvcc
    from .machine.energy import EnergyMeter
    from .model import (
        Bench,
        Evidence,
        Gpu,
        Interval,
        Outcome,
        Profile,
        Result,
        Score,
        Verdict,
        Work,
        prepared,
        static,
    )
    from .rules import evidence, scores
    from .session.fixtures import Capture, Compare, Stopwatch
    from .session.standalone import measure, measure_each

    __version__: str

__all__ = [
    "AiperfError",
    "Bench",
    "BuildError",
    "CannotCapture",
    "Capture",
    "CaptureFailed",
    "ClaimNotMet",
    "Compare",
    "EnergyMeter",
    "Evidence",
    "Gpu",
    "Interval",
    "InvalidMeasurement",
    "LaunchError",
    "Nvcc",
    "Outcome",
    "Profile",
    "Result",
    "Score",
    "Stopwatch",
    "ToolMissing",
    "UsageError",
    "Verdict",
    "Work",
    "WrongResult",
    "__version__",
    "evidence",
    "measure",
    "measure_each",
    "prepared",
    "scores",
    "static",
]

_MODULES = {
    "Capture": "session.fixtures",
    "Compare": "session.fixtures",
    "EnergyMeter": "machine.energy",
    "Nvcc": "build.nvcc",
    "Stopwatch": "session.fixtures",
    "evidence": "rules.evidence",
    "measure": "session.standalone",
    "measure_each": "session.standalone",
    "scores": "rules.scores",
}
"""Submodule that defines each public name; names not listed are defined in ``model``."""


def __getattr__(name: str) -> Any:
    # A name's submodule is imported on first use: every pytest run loads this package for its
    # plugin, and few runs have claims.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        try:
            return metadata.version("pytest-aiperf")
        except metadata.PackageNotFoundError:  # run from its sources, without installation
            return "0+unknown"
    module = import_module(f".{_MODULES.get(name, 'model')}", __name__)
    return getattr(module, name, module)  # `evidence` and `scores` are modules
