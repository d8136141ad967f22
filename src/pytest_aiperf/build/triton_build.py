"""Collect the machine code of a claim's Triton kernels, with or without a GPU."""

import gc
import hashlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from pytest_aiperf.errors import BuildError
from pytest_aiperf.model import KernelRecord
from pytest_aiperf.rules.evidence import Compiled

from . import sass
from .nvcc import default_cache, display_path

ALIGNED: Final = 16
"""Triton specializes a kernel for integers that are multiples of this, and vectorizes accesses
under a mask only then."""
DEADLINE_S: Final = 300.0  #: Time limit of the process that compiles the Triton kernels of a claim.

Launch = tuple[Any, tuple[Any, ...], Mapping[str, Any]]
"""An interpreted kernel with the positional and keyword arguments of its launch."""


def launched_kernels(call: Callable[[], object]) -> list[Compiled]:
    """Call ``call`` again on the GPU, and return the Triton kernels that it launches.

    An earlier call must have compiled them. Triton does not call its launch hook when a CUDA graph
    is replayed: if the hook is never called, return all kernels that this process compiled.
    """
    kernels = list(_compiled_kernels()) if "triton.knobs" in sys.modules else []
    if not kernels:
        return []
    launched: set[int] = set()

    def record(metadata: Any) -> None:
        launched.add(metadata.data["function"])

    hook = sys.modules["triton.knobs"].runtime.launch_enter_hook
    hook.add(record)
    try:
        call()
    finally:
        hook.remove(record)
    return [
        compiled
        for source, kernel in [k for k in kernels if k[1].function in launched] or kernels
        for compiled in _compiled(kernel.asm["cubin"], source, f"sm_{kernel.metadata.target.arch}")
    ]


def _compiled_kernels() -> Iterator[tuple[str, Any]]:
    """Yield (source file, kernel) for each kernel that Triton compiled in this process."""
    jit = sys.modules["triton.runtime.jit"]
    gc.unfreeze()  # get_objects leaves out frozen objects, and all imported modules are frozen
    # ask the garbage collector, because Triton keeps no list of its functions
    functions = [o for o in gc.get_objects() if type(o) is jit.JITFunction]
    gc.freeze()
    for function in functions:
        if function.fn is None:
            continue  # inductor strips its functions and launches their kernels itself
        source = display_path(Path(function.fn.__code__.co_filename))
        for kernels, *_ in list(function.device_caches.values()):
            for kernel in kernels.values():
                if "cubin" in getattr(kernel, "asm", {}):
                    yield source, kernel


def compile_for_targets(launches: Sequence[Launch], archs: Sequence[str]) -> list[Compiled]:
    """Compile the kernels of interpreted launches for architectures whose GPU is absent.

    Each launch's kernel is specialized for its arguments. A separate process compiles, because in
    this one Triton's interpreter replaces the functions of ``triton.language``.
    """
    jobs: dict[str, dict[str, Any]] = {}
    for kernel, args, kwargs in launches:
        job = {
            "module": kernel.fn.__module__,
            "name": kernel.fn.__qualname__,
            "file": kernel.fn.__code__.co_filename,
            "args": [_to_json(value) for value in args],
            "kwargs": {name: _to_json(value) for name, value in kwargs.items()},
            "note": _integers(kernel, args, kwargs),
        }
        jobs[json.dumps(job)] = job
    with tempfile.TemporaryDirectory() as folder:
        targets = [int(arch.removeprefix("sm")) for arch in archs]
        request = {"folder": folder, "targets": targets, "jobs": list(jobs.values())}
        environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__],
                input=json.dumps(request),
                env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            names = ", ".join(dict.fromkeys(job["name"] for job in jobs.values()))
            raise BuildError(
                f"Triton did not compile the kernels of this claim within {DEADLINE_S:g} s: {names}"
            ) from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise BuildError(f"Triton does not compile the kernels of this claim: {lines[-1]}")
        return [
            compiled
            for cubin, file, arch, note in json.loads(done.stdout)
            for compiled in _compiled(
                Path(cubin).read_bytes(), display_path(Path(file)), arch, note
            )
        ]


def _integers(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Describe the integers that the code is specialized for; "" if there are none.

    Triton assumes that a pointer plus such an integer is aligned only if the integer is a multiple
    of 16.
    """
    try:
        parameters = inspect.signature(kernel.fn)
        values = parameters.bind_partial(*args, **kwargs).arguments
    except TypeError:  # autotuners supply some of the arguments
        return ""
    integers = {
        name: value
        for name, value in values.items()
        if type(value) is int and "constexpr" not in str(parameters.parameters[name].annotation)
    }
    if not integers:
        return ""
    unaligned = f"which is no multiple of {ALIGNED}"
    return "compiled for " + ", ".join(
        f"{name}={value}" + f", {unaligned}" * (value % ALIGNED != 0)
        for name, value in integers.items()
    )


def _compiled(cubin: bytes, source: str, arch: str, note: str = "") -> Iterator[Compiled]:
    def disassemble() -> dict[str, sass.Code]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            return sass.disassemble(Path(file.name))

    entry = default_cache() / hashlib.sha256(cubin).hexdigest()[:32]
    for name, code in sass.cached(entry, disassemble).items():
        resources = (code.registers, code.stack, code.shared)
        yield Compiled(KernelRecord(source, arch, name, *resources), code.opcodes, note)


def _to_json(value: Any) -> Any:
    """Describe a kernel's argument in JSON.

    For a tensor the dtype suffices: apart from it, the code depends only on whether the address is
    aligned to 16 bytes, which is assumed.
    """
    if hasattr(value, "data_ptr"):
        return {"dtype": str(value.dtype).removeprefix("torch.")}
    if hasattr(value, "block_shape"):  # a tensor descriptor
        fields = ("shape", "strides", "block_shape")
        return {"base": _to_json(value.base), **{f: list(getattr(value, f)) for f in fields}}
    if hasattr(value, "value"):  # a constexpr
        value = value.value
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise BuildError(f"a Triton kernel's argument {value!r} cannot be passed to its compiler")
    return value


def _main() -> None:
    """Compile the jobs on standard input; write cubins and list them on standard output."""
    request = json.load(sys.stdin)
    stdout = sys.stdout
    sys.stdout = sys.stderr  # imported modules may print; stdout is for the reply only
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    cubins = []
    pairs = [(target, job) for target in request["targets"] for job in request["jobs"]]
    for number, (target, job) in enumerate(pairs):
        driver.set_active(_absent_driver(GPUTarget("cuda", target, 32)))
        kernel = _jit_function(job)
        kernel.device_caches.clear()  # they hold the code for the previous target
        args = [_from_json(value) for value in job["args"]]
        kwargs = {name: _from_json(value) for name, value in job["kwargs"].items()}
        compiled = kernel.warmup(*args, grid=(1,), **kwargs)
        file = Path(request["folder"]) / f"{number}.cubin"
        file.write_bytes(compiled.asm["cubin"])
        cubins.append((str(file), job["file"], f"sm_{target}", job["note"]))
    json.dump(cubins, stdout)


def _absent_driver(target: Any) -> Any:
    """Imitate the part of Triton's driver that compiling needs, for a GPU that is not present."""
    return SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
    )


def _jit_function(job: Mapping[str, Any]) -> Any:
    try:
        module: Any = importlib.import_module(job["module"])
    except ImportError:  # a test file may not be importable by name
        spec: Any = importlib.util.spec_from_file_location(job["module"], job["file"])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    function = getattr(module, job["name"])
    while not hasattr(function, "device_caches"):  # unwrap autotuners and heuristics
        function = function.fn
    return function


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "base" in value:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(**{**value, "base": _from_json(value["base"])})
    import torch
    from triton.runtime.jit import MockTensor

    return MockTensor(getattr(torch, value["dtype"]))


if __name__ == "__main__":
    _main()
