"""Every GPU optimization is a benchmark test."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import Nvcc
    from .fixtures import Compare, Stopwatch
    from .model import Bench, Gpu, Interval, Result, Score, Work, prepared, static

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

_ROOMS = {"Nvcc": "build", "Compare": "fixtures", "Stopwatch": "fixtures"}


def __getattr__(name: str) -> Any:
    # Late: every pytest run imports this package for its plugin, and few of them have claims.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_ROOMS.get(name, 'model')}", __name__), name)
