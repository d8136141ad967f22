"""What a machine is, in an archive that can be shown to others."""

from __future__ import annotations

import getpass
import io
import os
import platform
import re
import socket
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from pytest_aiperf.errors import ToolMissing
from pytest_aiperf.records.results import dumps, writing
from pytest_aiperf.schema import to_json

from .doctor import Check, State
from .host_facts import Host

_COMMANDS: Final = {
    "nvidia-smi.txt": ("nvidia-smi", "-q"),
    "topology.txt": ("nvidia-smi", "topo", "-m"),
    "nvlink.txt": ("nvidia-smi", "nvlink", "-s"),
    "lscpu.txt": ("lscpu",),
}
_FILES: Final = {
    "driver-params.txt": "/proc/driver/nvidia/params",
    "driver-version.txt": "/proc/driver/nvidia/version",
    "memory.txt": "/proc/meminfo",
}
_PACKAGES: Final = re.compile(r"(?i)(pytest|torch|triton|cupy|numpy|scipy|nvidia|cuda|nvtx)[\w.-]*")
# settings of ours and of CUDA's libraries; what else is in an environment is nobody's business
_VARIABLES: Final = re.compile(r"(CUDA|NVCC|NCCL|TRITON|PYTORCH|CUBLAS|PYTEST_AIPERF)_\w+|OMP_\w+")
_SECRET: Final = re.compile(r"(?i)key|token|secret|passw|auth|credential|url|remote|redis")
# who this machine is, and who works on it: whole lines of nvidia-smi -q, and words anywhere
_LINES: Final = re.compile(
    r"(?im)^.*\b(serial|uuid|guid|host ?name|process id|process name|name *: /|module id"
    r"|board id|chassis|slot number|tray index|gpu part number).*\n?"
)
_WORDS: Final = (
    r"\b(GPU-|MIG-)?[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b",
    r"(?<=://)[^/\s@]+@",
    r"\b([0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b",
    r"\b(?!127\.)\d{1,3}(\.\d{1,3}){3}\b(?=[:/\s])",
)
_CAPTURED: Final = ("torch", "nsys", "ncu")
_EXAMPLE: Final = '''\
"""A product of two matrices, for a short capture."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
a = torch.ones(512, 512, device=device)


def product():
    return a @ a
'''
_CAPTURE: Final = (sys.executable, "-m", "pytest_aiperf", "capture")


def scrub(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Take out what says which machine this is, whose, or what it may open."""
    text = _LINES.sub("", text)
    for pattern in _WORDS:
        text = re.sub(pattern, "<taken out>", text)
    host = socket.gethostname()
    names = {
        environ.get("HOME", ""): "~",
        host: "<host>",
        host.partition(".")[0]: "<host>",
        _user(): "<user>",
    }
    for name, instead in sorted(names.items(), key=lambda pair: -len(pair[0])):
        if len(name) > 1:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return ""
    return "" if name == "root" else name  # it is everybody's


def contents(host: Host, found: Sequence[Check], *, capture: bool) -> dict[str, str]:
    """Gather all that is shared, as text by file name; nothing that says which machine it is."""
    packages = {d.name: d.version for d in metadata.distributions()}
    told = {
        "python": platform.python_version(),
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "packages": {n: packages[n] for n in sorted(packages) if _PACKAGES.fullmatch(n)},
        "environment": {
            name: value
            for name, value in sorted(host.environ.items())
            if _VARIABLES.fullmatch(name) and not _SECRET.search(name)
        },
    }
    files = {
        "doctor.txt": "".join(f"{check}\n" for check in found),
        "doctor.json": dumps(to_json([to_json(check) for check in found]), "doctor", indent=1),
        "versions.json": dumps(told, "versions", indent=1),
    }
    files |= {name: host.say(*command) or "" for name, command in _COMMANDS.items()}
    files |= {name: host.read(path) for name, path in _FILES.items()}
    if capture:
        files |= _captures(host)
    return {name: scrub(text, host.environ) for name, text in files.items() if text}


def _captures(host: Host) -> dict[str, str]:
    """Capture a small product with each profiler that is here; what it printed is kept.

    The artefacts are not: they name the machine in places that cannot be taken out.
    """
    files = {}
    for name in _CAPTURED:
        try:
            host.tool(name)
        except ToolMissing:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch, "example.py")
            source.write_text(_EXAMPLE, encoding="utf-8")
            said = host.say(
                *_CAPTURE, name, f"{source}::product", "--deadline", "60", folder=Path(scratch)
            )
            files[f"capture-{name}.txt"] = said or f"{name} could not capture here\n"
    return files


def write(path: Path, files: Mapping[str, str]) -> None:
    """Write the archive; its entries say neither who wrote them nor when."""
    with writing(path), tarfile.open(path, "w:gz") as archive:
        for name in sorted(files):
            data = files[name].encode()
            entry = tarfile.TarInfo(f"aiperf-doctor/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def broken(found: Sequence[Check]) -> bool:
    return any(check.state == State.BROKEN for check in found)
