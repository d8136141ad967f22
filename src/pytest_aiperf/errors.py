"""Exceptions of the plugin; each message states what is wrong, where, and what to do about it."""


class AiperfError(Exception):
    """Base class of all exceptions of this plugin."""


class UsageError(AiperfError):
    """An argument, a marker, an option or a file is wrong."""


class NeedsGpu(UsageError):
    """A kernel is launched in a check without a GPU, where it is only built."""


class ArmError(AiperfError):
    """An arm raised an error (the cause); this message explains it better than a traceback."""


class BuildError(AiperfError):
    """nvcc is missing, or could not build a source file."""


class LaunchError(AiperfError):
    """A kernel launch returned a CUDA error."""


class InvalidMeasurement(AiperfError):
    """The measured times are not valid, for example because the GPU was throttled."""


class CannotCapture(AiperfError):
    """A call cannot be captured in a CUDA graph."""


class CaptureFailed(AiperfError):
    """A profiler left no artifact, or one that is empty or unreadable."""


class ToolMissing(AiperfError):
    """A profiler is missing, too old or not permitted on this machine."""


class WrongResult(AiperfError, AssertionError):
    """The result of an arm differs from the reference."""


class ClaimNotMet(AiperfError, AssertionError):
    """The optimized arm is not as fast as claimed, or a figure of its evidence is out of bounds."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch or cupy ran out of GPU memory; found by name, so that neither is imported."""
    return type(error).__name__ == "OutOfMemoryError" or "CUDA error: out of memory" in str(error)


def says_out_of_memory(text: str) -> bool:
    """Whether a text reports that a GPU has run out of memory.

    If no further context fits, CUDA may also report that the device is busy or unavailable.
    """
    signs = "OutOfMemoryError", "CUDA error: out of memory", "busy or unavailable"
    return any(sign in text for sign in signs)
