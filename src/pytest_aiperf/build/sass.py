"""Disassemble kernels and count their SASS opcodes."""

import json
import os
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pytest_aiperf.errors import BuildError
from pytest_aiperf.machine.cache_folder import create_tagged

DEADLINE_S: Final = 120.0  #: Time limit of one disassembly, which usually takes about a second.
_FUNCTION: Final = re.compile(r"\s*Function\s*:\s*(.+?)\s*")
# an address, an optional predicate (@P0, @!UPT), and the opcode with its modifiers
_INSTRUCTION: Final = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")
_USAGE_HEADER: Final = re.compile(r"\s*Function\s+(.+?):\s*")
_USAGE: Final = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True, slots=True)
class Code:
    """The machine code of one kernel."""

    opcodes: dict[str, int]  #: Number of instructions by opcode.
    registers: int  #: Registers per thread.
    stack: int  #: Bytes of stack per thread, mostly spilled registers.
    shared: int  #: Bytes of static shared memory per block.


def disassemble(
    binary: Path, kernels: Collection[str] = (), nvcc: str | None = None
) -> dict[str, Code]:
    """Disassemble a library or a cubin, which must contain ``kernels`` (demangled names).

    Disassemblers are tried in turn: an older one may not support the architecture.
    """
    problem = "there is no cuobjdump"
    for tool in _disassemblers(nvcc):
        try:
            command = [tool, "-sass", "-res-usage", str(binary)]
            done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = f"{tool}: {error}"
            continue
        codes = parse(demangle(done.stdout.decode(errors="replace")))
        missing = [name for name in kernels if not codes.get(name)]
        if codes and not missing and all(code.opcodes for code in codes.values()):
            return codes
        stderr = done.stderr.decode(errors="replace").strip().splitlines()
        problem = f"{tool} prints no code" + (f" for {missing[0]}" if missing else "")
        problem += f" ({stderr[-1]})" if stderr else ""
    raise BuildError(
        f"cannot read the SASS of {binary}: {problem}; install the extra pytest-aiperf[sass], or "
        "put on PATH the cuobjdump of a CUDA toolkit that supports the architecture"
    )


def cached(folder: Path, disassembly: Callable[[], dict[str, Code]]) -> dict[str, Code]:
    """Read a disassembly from a cache entry; without a readable one, disassemble and write it."""
    file = folder / "sass.json"
    try:
        return {k: Code(**v) for k, v in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError):
        codes = disassembly()
        temporary = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
        with suppress(OSError):  # on a full disk the claim goes on without a cache
            create_tagged(folder, 0o700)
            text = json.dumps({name: asdict(code) for name, code in codes.items()})
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(file)
        return codes


def parse(text: str) -> dict[str, Code]:
    """Count the opcodes of each function in the output of ``cuobjdump -sass -res-usage``."""
    opcodes: dict[str, Counter[str]] = {}
    usage: dict[str, tuple[int, int, int]] = {}
    function = resource_function = ""
    for line in text.splitlines():
        if header := _FUNCTION.fullmatch(line):
            function = header[1]
            opcodes.setdefault(function, Counter())
        elif function and (instruction := _INSTRUCTION.match(line)):
            opcodes[function][instruction[1]] += 1
        elif header := _USAGE_HEADER.fullmatch(line):
            resource_function = header[1]
        elif figures := _USAGE.search(line):
            usage[resource_function] = (int(figures[1]), int(figures[2]), int(figures[3]))
    return {n: Code(dict(count), *usage.get(n, (0, 0, 0))) for n, count in opcodes.items()}


def demangle(text: str) -> str:
    """Demangle the C++ names in a text, where c++filt is installed."""
    if tool := shutil.which("c++filt"):
        done = subprocess.run([tool], input=text, capture_output=True, text=True, check=False)
        return done.stdout or text
    return text


def find_in_packages(program: str) -> str | None:
    """Find a CUDA program in pip packages, conda or a toolkit."""
    from cuda import pathfinder  # imported late: most runs find the program on PATH

    # older versions of pathfinder find libraries only
    path = getattr(pathfinder, "find_nvidia_binary_utility", lambda _: None)(program)
    return str(path) if path else None


def _disassemblers(nvcc: str | None) -> Iterator[str]:
    """Yield the paths of cuobjdump: beside the compiler, on PATH, in packages, in Triton."""
    paths = [nvcc and shutil.which("cuobjdump", path=str(Path(nvcc).resolve().parent))]
    paths += [shutil.which("cuobjdump"), find_in_packages("cuobjdump")]
    if spec := find_spec("triton"):  # find_spec does not import Triton
        folder = Path(spec.origin or "").parent / "backends" / "nvidia" / "bin"
        paths.append(shutil.which("cuobjdump", path=str(folder)))
    yield from dict.fromkeys(path for path in paths if path)
