"""The Triton kernels of a claim as the compiler leaves them, with a GPU and without."""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.errors import BuildError
from pytest_aiperf.model import KernelRecord
from pytest_aiperf.rules.evidence import Compiled

from . import sass
from .nvcc import default_cache, shown

DEADLINE: Final = 300.0

Launch = tuple[Any, tuple[Any, ...], Mapping[str, Any]]
"""An interpreted kernel, and what it was launched with."""


def launched_by(run: Callable[[], object]) -> list[Compiled]:
    """Run once more what has run on a GPU, and return the Triton kernels that it launched.

    The replay of a graph does not tell: then it is all that Triton compiled in this process.
    """
    known = list(_compiled_here()) if "triton.knobs" in sys.modules else []
    if not known:
        return []
    told: set[int] = set()

    def note(metadata: Any) -> None:
        told.add(metadata.data["function"])

    hook = sys.modules["triton.knobs"].runtime.launch_enter_hook
    hook.add(note)
    try:
        run()
    finally:
        hook.remove(note)
    return [
        compiled
        for source, kernel in [made for made in known if made[1].function in told] or known
        for compiled in _compiled(kernel.asm["cubin"], source, f"sm_{kernel.metadata.target.arch}")
    ]


def _compiled_here() -> Iterator[tuple[str, Any]]:
    """List what Triton's functions have compiled: their source and a kernel."""
    jit = sys.modules["triton.runtime.jit"]
    gc.unfreeze()  # the collector leaves out what is frozen, and so is what was imported
    # Triton keeps no list of its functions
    functions = [o for o in gc.get_objects() if type(o) is jit.JITFunction]
    gc.freeze()
    for function in functions:
        if function.fn is None:
            continue  # inductor takes it from what it has compiled, and launches that itself
        source = shown(Path(function.fn.__code__.co_filename))
        for kernels, *_ in list(function.device_caches.values()):
            for kernel in kernels.values():
                if "cubin" in getattr(kernel, "asm", {}):
                    yield source, kernel


def compile_apart(launches: Sequence[Launch], archs: Sequence[str]) -> list[Compiled]:
    """Compile interpreted kernels for GPUs that are not here, for arguments like those given.

    That takes a process of its own: in this one Triton's language is the interpreter's.
    """
    wanted: dict[str, dict[str, Any]] = {}
    for kernel, args, kwargs in launches:
        one = {
            "module": kernel.fn.__module__,
            "name": kernel.fn.__qualname__,
            "file": kernel.fn.__code__.co_filename,
            "args": [_described(value) for value in args],
            "kwargs": {name: _described(value) for name, value in kwargs.items()},
        }
        wanted[json.dumps(one)] = one
    with tempfile.TemporaryDirectory() as folder:
        targets = [int(arch.removeprefix("sm")) for arch in archs]
        order = {"folder": folder, "targets": targets, "wanted": list(wanted.values())}
        environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(order),
            env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            raise BuildError(f"Triton does not compile the kernels of this claim: {said[-1]}")
        return [
            compiled
            for cubin, file, arch in json.loads(done.stdout)
            for compiled in _compiled(Path(cubin).read_bytes(), shown(Path(file)), arch)
        ]


def _compiled(cubin: bytes, source: str, arch: str) -> Iterator[Compiled]:
    def read() -> dict[str, sass.Code]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            return sass.read(Path(file.name))

    entry = default_cache() / hashlib.sha256(cubin).hexdigest()[:32]
    for name, code in sass.kept(entry / sass.KEPT, read).items():
        figures = (code.registers, code.stack, code.shared)
        yield Compiled(KernelRecord(source, arch, name, *figures), code.opcodes)


def _described(value: Any) -> Any:
    """Put an argument into JSON: a tensor is its dtype, aligned as allocators align."""
    if hasattr(value, "data_ptr"):
        return {"dtype": str(value.dtype).removeprefix("torch.")}
    if hasattr(value, "block_shape"):  # a tensor descriptor
        fields = ("shape", "strides", "block_shape")
        return {"base": _described(value.base), **{f: list(getattr(value, f)) for f in fields}}
    if hasattr(value, "value"):  # a constexpr
        value = value.value
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise BuildError(f"a Triton kernel's argument {value!r} cannot be given to its compiler")
    return value


def _main() -> None:
    """Compile what standard input asks for; write the cubins, and say where they are."""
    order = json.load(sys.stdin)
    said = sys.stdout
    sys.stdout = sys.stderr  # what a module prints while it is imported
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    found = []
    for number, (target, one) in enumerate(
        (target, one) for target in order["targets"] for one in order["wanted"]
    ):
        driver.set_active(_Absent(GPUTarget("cuda", target, 32)))
        kernel = _function(one)
        kernel.device_caches.clear()  # or the target before this one would be asked
        args = [_made(value) for value in one["args"]]
        kwargs = {name: _made(value) for name, value in one["kwargs"].items()}
        compiled = kernel.warmup(*args, grid=(1,), **kwargs)
        file = Path(order["folder"]) / f"{number}.cubin"
        file.write_bytes(compiled.asm["cubin"])
        found.append((str(file), one["file"], f"sm_{target}"))
    json.dump(found, said)


class _Absent:
    """The driver of a GPU that is not here: all that compiling asks of one."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def _function(one: Mapping[str, Any]) -> Any:
    try:
        module: Any = importlib.import_module(one["module"])
    except ImportError:  # a test's own file, which pytest imports by its path
        spec = importlib.util.spec_from_file_location(one["module"], one["file"])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found = getattr(module, one["name"])
    while not hasattr(found, "device_caches"):  # autotuned, or with heuristics
        found = found.fn
    return found


def _made(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "base" in value:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(**{**value, "base": _made(value["base"])})
    import torch
    from triton.runtime.jit import MockTensor

    return MockTensor(getattr(torch, value["dtype"]))


if __name__ == "__main__":
    _main()
