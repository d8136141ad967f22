"""Judge the functions of a kernel library: each must be right, and faster than its reference.

    python -m examples.judge_library my_library.operations

The module lists ``OPERATIONS`` in the form in which a library keeps them for its own tests: by name
the reference in plain PyTorch, the kernel, and a function that draws inputs on a device. For the
softmax of Triton's tutorials and the SwiGLU of Liger Kernel:

    OPERATIONS = {
        "softmax": (
            lambda x: torch.softmax(x, dim=1),
            softmax,
            lambda device: torch.randn(4096, 1000, device=device),
        ),
        "swiglu": (
            lambda gate, up: torch.nn.functional.silu(gate) * up,
            LigerSiLUMulFunction.apply,
            lambda device: torch.randn(2, 64, 4096, device=device).unbind(),
        ),
    }

The exit status is 1 unless all kernels are right and faster. Kernels run in this process: for code
that may crash or cheat, `python -m pytest_aiperf judge` runs each solution in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from pytest_aiperf import Outcome, Result, measure

Operation = tuple[Callable[..., Any], Callable[..., Any], Callable[[str], Any]]
"""Reference, kernel and inputs."""


def judge(operation: Operation, device: Literal["cuda", "cpu"] | None = None) -> Result:
    """Check a kernel against its reference in fp64, and time it against the reference as it is."""
    reference, kernel, inputs = operation

    def widen(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if is_float else value

    on_gpu = device != "cpu" and torch.cuda.is_available()
    return measure(
        baseline=reference,
        optimized=kernel,
        inputs=lambda bench: inputs(bench.device),
        reference=lambda *args: reference(*map(widen, args)),
        metric="device" if on_gpu else "wall",
        device=device,
        quick=True,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("module", help="module that defines OPERATIONS")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the first GPU, if there is one")
    options = parser.parse_args(arguments)
    operations: Mapping[str, Operation] = importlib.import_module(options.module).OPERATIONS
    failed = 0
    for name, operation in operations.items():
        try:
            result = judge(operation, options.device)
            is_faster, text = result.outcome is Outcome.PASSED, result.message
        except Exception as error:  # noqa: BLE001  a kernel may fail in any way
            is_faster, text = False, f"{type(error).__name__}: {error}"
        failed += not is_faster
        sys.stdout.write(f"{name}: {' '.join(text.split())}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
