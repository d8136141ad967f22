"""What the CPU can count of a call: how often it would launch on a GPU, at least."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from . import tensors

_ALLOCATIONS = ("empty", "new_empty", "_unsafe_view", "lift", "set_", "resize_")
_NO_KERNELS = ("copy_", "clone", "_to_copy", "zero_", "_local_scalar_dense")  # copies and memsets


@dataclass(slots=True)
class Count:
    """How often a call launches at least; ``triton`` are its launches of Triton kernels."""

    launches: int = 0
    kernels: int = 0
    triton: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


def count(call: Callable[..., object], args: tuple[Any, ...]) -> Count:
    """Count the calls of torch's functions that compute on the inputs, and Triton launches.

    One function may be several kernels on a GPU, and is at least one, except within what is
    compiled there: that is not counted. Nor are views and allocations, nor what does not depend
    on the inputs: it may be the host's own.
    """
    found = Count()
    with contextlib.ExitStack() as stack:
        if torch := sys.modules.get("torch"):
            _watch_torch(torch, args, found, stack)
        call(*args)
    return found


def _watch_torch(
    torch: Any, args: tuple[Any, ...], found: Count, stack: contextlib.ExitStack
) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    # storages are held, or a new one could take the place of one that depended on the inputs
    depend = _storages(torch, [leaf for _, leaf in tensors.walk(args, "")])
    seen: set[str] = set()

    class Operators(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if depend.keys() & _storages(torch, (args, kwargs)).keys():
                depend.update(_storages(torch, result))
                empty = [not t.numel() for t in _tensors(torch, result)]
                if _computes(func) and not (empty and all(empty)):
                    seen.add(func.overloadpacket.__name__)
            return result

    class Functions(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.clear()
            result = func(*args, **(kwargs or {}))  # torch's own calls in it come not here
            if seen and not _compiled():
                found.launches += 1
                found.kernels += any(name not in _NO_KERNELS for name in seen)
            return result

    stack.enter_context(Operators())
    stack.enter_context(Functions())
    stack.enter_context(_interpreted(found))


@contextlib.contextmanager
def _interpreted(found: Count) -> Iterator[None]:
    """Count what Triton's interpreter runs as one launch each, whatever it does inside."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    kind = interpreter.InterpretedFunction
    run = kind.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches, kernels = found.launches + 1, found.kernels + 1
        result = run(self, *args, **kwargs)
        found.launches, found.kernels = launches, kernels
        given = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
        found.triton.append((self, args, given))
        return result

    kind.run = counted
    try:
        yield
    finally:
        kind.run = run


def _storages(torch: Any, value: Any) -> dict[int, Any]:
    """Find the memory that dense tensors lie in, by its only identity."""
    dense = [t for t in _tensors(torch, value) if t.layout is torch.strided]
    return {s._cdata: s for t in dense for s in [t.untyped_storage()]}  # noqa: SLF001


def _tensors(torch: Any, value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(torch, item)
    elif isinstance(value, dict):
        yield from _tensors(torch, list(value.values()))


def _computes(func: Any) -> bool:
    """Whether an operator does more than look at its tensors anew or allocate some."""
    name = func.overloadpacket.__name__
    view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)  # noqa: SLF001
    return not view and not name.startswith(_ALLOCATIONS)


def _compiled() -> bool:
    """Whether the caller is within what torch.compile compiles on a GPU, and runs as it is here."""
    frame: Any = sys._getframe(2)  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/_dynamo/eval_frame.py"):
            return True
        frame = frame.f_back
    return False
