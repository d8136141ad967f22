"""Every GPU optimization is a benchmark test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .model import Bench, Gpu, Interval, Result, Score, Work, prepared, static

if TYPE_CHECKING:
    from .build import Nvcc
    from .plugin import Compare, Stopwatch

__all__ = [
    "Bench",
    "Compare",
    "Gpu",
    "Interval",
    "Nvcc",
    "Result",
    "Score",
    "Stopwatch",
    "Work",
    "prepared",
    "static",
]


def __getattr__(name: str) -> Any:
    # The fixtures' types are for annotations: importing them must not cost the package's users.
    if name == "Nvcc":
        from .build import Nvcc

        return Nvcc
    if name in ("Compare", "Stopwatch"):
        from . import plugin

        return getattr(plugin, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
