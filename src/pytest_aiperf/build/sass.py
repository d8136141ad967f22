"""The machine code of kernels, as counts of their opcodes."""

from __future__ import annotations

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

DEADLINE: Final = 120.0

KEPT: Final = "sass.json"
"""What lies beside a binary in the cache: its code, since a disassembler takes about a second."""

_FUNCTION: Final = re.compile(r"\s*Function\s*:\s*(.+?)\s*")
# an address, perhaps a predicate (@P0, @!UPT), and the opcode with its modifiers
_INSTRUCTION: Final = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")
_USAGE: Final = re.compile(r"\s*Function\s+(.+?):\s*")
_FIGURES: Final = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True, slots=True)
class Code:
    """What one kernel of a binary is made of; ``stack`` bytes a thread are mostly spills."""

    opcodes: dict[str, int]
    registers: int
    stack: int
    shared: int


def read(binary: Path, kernels: Collection[str] = (), nvcc: str | None = None) -> dict[str, Code]:
    """Disassemble a library or a cubin; each of ``kernels``, by demangled name, must be in it.

    The first disassembler that can read it does: an older one may not know the architecture.
    """
    why = "there is no cuobjdump"
    for tool in _tools(nvcc):
        try:
            done = subprocess.run(
                [tool, "-sass", "-res-usage", str(binary)],
                capture_output=True,
                timeout=DEADLINE,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"{tool}: {error}"
            continue
        found = parse(demangled(done.stdout.decode(errors="replace")))
        missing = [name for name in kernels if not found.get(name)]
        if found and not missing and all(code.opcodes for code in found.values()):
            return found
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = f"{tool} gives no code" + (f" of {missing[0]}" if missing else "")
        why += f" ({said[-1]})" if said else ""
    raise BuildError(
        f"the SASS of {binary} cannot be read: {why}; pip install 'pytest-aiperf[sass]', or put "
        "the cuobjdump of a CUDA toolkit on PATH that knows the architecture"
    )


def kept(path: Path, look: Callable[[], dict[str, Code]]) -> dict[str, Code]:
    """Return the code that a file keeps, or look and have the file keep it."""
    try:
        return {k: Code(**v) for k, v in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError):
        found = look()
        fresh = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        with suppress(OSError):  # what cannot be kept is looked at again the next time
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = json.dumps({name: asdict(code) for name, code in found.items()})
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(path)
        return found


def parse(text: str) -> dict[str, Code]:
    """Count the opcodes of each function in what ``cuobjdump -sass -res-usage`` prints."""
    opcodes: dict[str, Counter[str]] = {}
    usage: dict[str, tuple[int, int, int]] = {}
    name = counted = ""
    for line in text.splitlines():
        if header := _FUNCTION.fullmatch(line):
            counted = header[1]
            opcodes.setdefault(counted, Counter())
        elif counted and (instruction := _INSTRUCTION.match(line)):
            opcodes[counted][instruction[1]] += 1
        elif header := _USAGE.fullmatch(line):
            name = header[1]
        elif figures := _FIGURES.search(line):
            usage[name] = (int(figures[1]), int(figures[2]), int(figures[3]))
    return {n: Code(dict(count), *usage.get(n, (0, 0, 0))) for n, count in opcodes.items()}


def demangled(text: str) -> str:
    """Put C++ names as their author wrote them, where there is a c++filt."""
    if tool := shutil.which("c++filt"):
        done = subprocess.run([tool], input=text, capture_output=True, text=True, check=False)
        return done.stdout or text
    return text


def packaged(program: str) -> str | None:
    """Find a program of CUDA in pip packages, conda or a toolkit."""
    from cuda import pathfinder  # late: most runs find it on PATH

    # older pathfinders find libraries only
    found = getattr(pathfinder, "find_nvidia_binary_utility", lambda _: None)(program)
    return str(found) if found else None


def _tools(nvcc: str | None) -> Iterator[str]:
    """List the disassemblers here, the one that belongs to the compiler first."""
    found = [nvcc and shutil.which("cuobjdump", path=str(Path(nvcc).resolve().parent))]
    found.append(shutil.which("cuobjdump"))
    found.append(packaged("cuobjdump"))
    if spec := find_spec("triton"):  # found, not imported
        folder = Path(spec.origin or "").parent / "backends" / "nvidia" / "bin"
        found.append(shutil.which("cuobjdump", path=str(folder)))
    yield from dict.fromkeys(tool for tool in found if tool)
