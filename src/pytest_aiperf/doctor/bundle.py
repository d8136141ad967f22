"""Pack facts about a machine for a bug report.

Only listed facts are packed. Output of the checks, paths and error messages are left out, because
they may contain the names of the machine, its user or their files. For a command that the user
wants to show, see triage.py.
"""

import io
import platform
import re
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Final

from pytest_aiperf.errors import ToolMissing
from pytest_aiperf.machine import environment
from pytest_aiperf.records.results import dumps, writing
from pytest_aiperf.schema import to_json

from .doctor import Check, Host

_CAPTURED: Final = ("torch", "nsys", "ncu")  #: Profilers that are tried on the example.
_TOPOLOGY: Final = re.compile(
    r"X|(GPU|NIC|NV)\d{1,3}|SYS|NODE|PHB|PXB|PIX|\d{1,3}([,-]\d{1,3})*|N/A"
    r"|CPU|GPU|NUMA|ID|Affinity"
)
"""Words of the matrix of links that identify nobody. Any other becomes ``?``."""
_STYLE: Final = re.compile(r"\x1b\[[\d;]*m")  #: Codes with which nvidia-smi underlines the matrix.
_EXAMPLE: Final = """\
import torch

a = torch.ones(512, 512, device="cuda" if torch.cuda.is_available() else "cpu")


def product():
    return a @ a
"""


def contents(host: Host, checks: Sequence[Check], *, capture: bool) -> dict[str, str]:
    """Return the text of each file of the bundle, by file name."""
    packages = {}
    for name in sorted(_requirements()):
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    facts = {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "packages": packages,
        "environment": environment.recorded(host.environ),
    }
    lines = [{k: v for k, v in to_json(check).items() if k != "detail"} for check in checks]
    files = {
        "doctor.txt": "".join(f"{replace(check, detail='')}\n" for check in checks),
        "doctor.json": dumps(lines, "doctor", indent=1),
        "versions.json": dumps(facts, "versions", indent=1),
    }
    if topology := _topology(host):
        files["topology.txt"] = topology
    return files | (_captures(host) if capture else {})


def _topology(host: Host) -> str:
    """Return the matrix of the links between GPUs and NICs, without the names of the NICs."""
    lines = _STYLE.sub("", host.run("nvidia-smi", "topo", "-m") or "").splitlines()
    rows = [line for line in lines if re.match(r"\s+GPU0\b|(GPU|NIC)\d+\t", line)]
    return "".join(
        "".join(
            word if word.isspace() or _TOPOLOGY.fullmatch(word) else "?"
            for word in re.findall(r"\s+|\S+", row)
        )
        + "\n"
        for row in rows
    )


def _requirements() -> set[str]:
    """Return the names of the packages that this project requires, also for its extras."""
    try:
        requirements = metadata.requires("pytest-aiperf") or ()
    except metadata.PackageNotFoundError:  # run from its sources, without installation
        return {"numpy", "nvidia-ml-py", "pytest", "torch", "triton"}
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}


def _captures(host: Host) -> dict[str, str]:
    """Profile a matrix product with each installed profiler; record only whether it worked."""
    files = {}
    for name in _CAPTURED:
        try:
            host.tool(name)
        except ToolMissing:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "example.py")
            source.write_text(_EXAMPLE, encoding="utf-8")
            command = (sys.executable, "-m", "pytest_aiperf", "capture", name, f"{source}::product")
            output = host.run(*command, "--deadline", "60", folder=Path(folder))
        result = "could not capture" if output is None else "captured"
        files[f"capture-{name}.txt"] = f"{name} {result} a matrix product\n"
    return files


def write(path: Path, files: Mapping[str, str]) -> None:
    """Write the archive, without file owners and modification times."""
    with writing(path), tarfile.open(path, "w:gz") as archive:
        for name in sorted(files):
            data = files[name].encode()
            entry = tarfile.TarInfo(f"aiperf-doctor/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
