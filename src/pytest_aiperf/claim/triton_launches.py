"""Counts, on the CPU, the fewest GPU launches of a call; records its Triton kernels."""

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pytest_aiperf.correctness import tensors

_ALLOCATIONS = ("empty", "new_empty", "_unsafe_view", "lift", "set_", "resize_")
_COPIES = ("copy_", "clone", "_to_copy", "zero_", "_local_scalar_dense")
"""Operators that a GPU may run as copies or memsets: launches, but not kernels."""


@dataclass(slots=True)
class Count:
    """Lower bounds of the launches of a call."""

    launches: int = 0  #: Launches of kernels, copies and memsets.
    kernels: int = 0  #: Launches of kernels.
    triton: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """Each Triton kernel that the call launched, with its positional and keyword arguments."""


def count(call: Callable[..., object], args: tuple[Any, ...]) -> Count:
    """Count a call's torch functions that compute on the inputs, and its Triton launches.

    Each such torch function launches at least once on a GPU. Three kinds are not counted: those
    inside a torch.compile region, which may fuse them; views and allocations; and those that do
    not depend on the inputs, because a GPU arm may compute them on the host.
    """
    counted = Count()
    with contextlib.ExitStack() as modes:
        if torch := sys.modules.get("torch"):
            for mode in (*_torch_modes(torch, args, counted), _counting_interpreter(counted)):
                modes.enter_context(mode)
        call(*args)
    return counted


def _torch_modes(torch: Any, args: tuple[Any, ...], counted: Count) -> tuple[Any, Any]:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    # holds the storages themselves: the id of a freed storage could be reused
    dependent = _storages(torch, [leaf for _, leaf in tensors.walk(args, "")])
    computed: set[str] = set()

    class Operators(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # torch would import its compiler, for a second, to keep it from compiling this class
            return "torch._dynamo" in sys.modules

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if dependent.keys() & _storages(torch, (args, kwargs)).keys():
                dependent.update(_storages(torch, result))
                empty = [not t.numel() for t in _tensors(torch, result)]
                if _computes(func) and not (empty and all(empty)):
                    computed.add(func.overloadpacket.__name__)
            return result

    class Functions(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            computed.clear()
            result = func(*args, **(kwargs or {}))  # functions that func itself calls do not count
            if computed and not _in_compiled_code():
                counted.launches += 1
                counted.kernels += not computed.issubset(_COPIES)
            return result

    return Operators(), Functions()


@contextlib.contextmanager
def _counting_interpreter(counted: Count) -> Iterator[None]:
    """Count a kernel that Triton interprets as one launch; ignore torch functions inside it."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    kind = interpreter.InterpretedFunction
    original = kind.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches, kernels = counted.launches + 1, counted.kernels + 1
        result = original(self, *args, **kwargs)
        counted.launches, counted.kernels = launches, kernels
        arguments = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
        counted.triton.append((self, args, arguments))
        return result

    kind.run = run
    try:
        yield
    finally:
        kind.run = original


def _storages(torch: Any, value: Any) -> dict[int, Any]:
    """Return the storages of the dense tensors in ``value`` by their id."""
    dense = [t for t in _tensors(torch, value) if t.layout is torch.strided]
    return {s._cdata: s for t in dense for s in [t.untyped_storage()]}  # noqa: SLF001


def _tensors(torch: Any, value: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(value)  # noqa: SLF001
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _computes(func: Any) -> bool:
    """Whether an operator does more than view or allocate tensors."""
    name = func.overloadpacket.__name__
    view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)  # noqa: SLF001
    return not view and not name.startswith(_ALLOCATIONS)


def _in_compiled_code() -> bool:
    """Whether the caller is inside a torch.compile region."""
    files = (f.f_code.co_filename for f, _ in traceback.walk_stack(inspect.currentframe()))
    return any(file.endswith("torch/_dynamo/eval_frame.py") for file in files)
