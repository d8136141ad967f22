"""Errors of arms that a sentence explains better than their traceback."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

from pytest_aiperf.errors import AiperfError, ArmError

_NEEDS_GPU: Final = re.compile(r"\bcuda\b|nvidia driver", re.IGNORECASE)
"""Errors of libraries that find no GPU, or no support for one."""
_NOT_INTERPRETED: Final = re.compile(r"\d+ active drivers|cpu tensor\?")
"""Errors that Triton raises when it launches a kernel without a GPU, or on a CPU tensor."""


def needs_gpu(error: BaseException) -> bool:
    """Whether an error says that there is no GPU to use."""
    return _NEEDS_GPU.search(str(error)) is not None


def is_triton_launch(error: BaseException) -> bool:
    """Whether Triton raised an error because a kernel was launched without a GPU."""
    return _NOT_INTERPRETED.search(str(error)) is not None


@contextmanager
def explained(name: str, *, on_cpu: bool) -> Iterator[None]:
    """In errors that are typical of checks on the CPU, name the arm that failed and a remedy."""
    try:
        yield
    except AiperfError:
        raise
    except Exception as error:
        if (message := _explain(name, error)) and on_cpu:
            raise ArmError(message) from error
        raise


def _explain(name: str, error: Exception) -> str:
    what = str(error).strip().partition("\n")[0]
    if type(error).__name__ == "InterpreterError":  # by name, so that Triton is not imported
        return f"{name}, in Triton's interpreter: {_in_kernel(error)}"
    if is_triton_launch(error):
        return (
            f"{name} launches a Triton kernel on tensors of the CPU, but not in Triton's "
            f"interpreter ({what}): set aiperf_interpret = true and unset TRITON_INTERPRET, or "
            "measure it with --gpu"
        )
    if needs_gpu(error):
        return (
            f"{name} needs a GPU ({what}): mark the test @pytest.mark.gpu, and the check skips it"
        )
    return ""


def _in_kernel(error: BaseException) -> str:
    """Return the place in the kernel where an interpreted kernel failed, and the error there."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    place = ""
    frame: TracebackType | None = error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if "triton" not in Path(file).parts:
            place = f"{os.path.relpath(file)}:{frame.tb_lineno}: "
        frame = frame.tb_next
    return f"{place}{type(error).__name__}: {error}"
