"""What can go wrong; every message says what, where and what to do."""

from __future__ import annotations


class AiperfError(Exception):
    """Anything this plugin refuses."""


class UsageError(AiperfError):
    """A claim, a flag or a file is written wrong."""


class BuildError(AiperfError):
    """nvcc refused a source, or is missing."""


class LaunchError(AiperfError):
    """A kernel launch reported a CUDA error."""


class InvalidMeasurement(AiperfError):
    """A guard says that these figures mean nothing."""


class CannotCapture(AiperfError):
    """A call that cannot be captured in a CUDA graph."""


class CaptureFailed(AiperfError):
    """A profiler's artefact is missing, empty or unreadable."""


class ToolMissing(AiperfError):
    """A profiler is absent, too old or not permitted here."""


def is_out_of_memory(why: Exception) -> bool:
    """Whether a GPU had too little memory left: torch says so, or cupy, neither imported here."""
    return type(why).__name__ == "OutOfMemoryError"


class WrongResult(AiperfError, AssertionError):
    """An arm's result is wrong."""


class ClaimNotMet(AiperfError, AssertionError):
    """The verdict does not hold the claim."""
