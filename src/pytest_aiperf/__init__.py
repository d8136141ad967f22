"""Every GPU optimization is a benchmark test."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build.nvcc import Nvcc
    from .model import Bench, Gpu, Interval, Result, Score, Work, prepared, static
    from .rules import evidence
    from .session.fixtures import Compare, Stopwatch

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
    "evidence",
    "prepared",
    "static",
]

_ROOMS = {
    "Nvcc": "build.nvcc",
    "Compare": "session.fixtures",
    "Stopwatch": "session.fixtures",
    "evidence": "rules.evidence",
}


def __getattr__(name: str) -> Any:
    # Late: every pytest run imports this package for its plugin, and few of them have claims.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = import_module(f".{_ROOMS.get(name, 'model')}", __name__)
    return getattr(room, name, room)
