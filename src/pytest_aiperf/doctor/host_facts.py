"""What the doctor asks of a machine: commands, libraries and files, none of which may stop it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.build import nvcc
from pytest_aiperf.machine import gpu_lock, nvml
from pytest_aiperf.model import Gpu
from pytest_aiperf.profilers import tools

DEADLINE: Final = 120.0

_KERNEL: Final = 'extern "C" __global__ void doctor(float* x) { x[threadIdx.x] *= 2.0f; }\n'
# In a process of its own: CUDA that is broken may hang or crash, and is never initialised in ours.
_TORCH: Final = """
import json, torch
cuda = torch.cuda.is_available()
n = torch.cuda.device_count() if cuda else 0
peers = [torch.cuda.can_device_access_peer(a, b) for a in range(n) for b in range(n) if a != b]
twice = float((torch.ones(8, device="cuda" if cuda else "cpu") * 2).sum().item())
nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else ""
print(json.dumps({"built": torch.version.cuda or "", "cuda": cuda, "peers": peers, "nccl": nccl,
                  "archs": torch.cuda.get_arch_list() if cuda else [], "right": twice == 16}))
"""


class Host:
    """What the checks ask of a machine; a test's has other answers."""

    environ: Mapping[str, str] = os.environ

    def gpus(self) -> Sequence[Gpu]:
        return nvml.visible(self.environ)

    def absence(self) -> str:
        return nvml.absence(self.environ)

    def has_device(self) -> bool:
        """Whether a kernel driver offers GPUs, whatever the libraries say."""
        return Path("/dev/nvidiactl").exists()

    def driver_cuda(self) -> int:
        """Return the newest CUDA that the driver knows, as 13000; only where there is a GPU."""
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlSystemGetCudaDriverVersion_v2())

    def say(self, *command: str, folder: Path | None = None) -> str | None:
        """Run a command, in a folder; None where it is not here, fails or hangs."""
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=DEADLINE,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if done.returncode else done.stdout

    def torch(self) -> dict[str, Any] | None:
        """Try torch in a process of its own; None where it does not work."""
        lines = (self.say(sys.executable, "-c", _TORCH) or "").splitlines()
        found: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
        return found

    def read(self, path: str) -> str:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def version(self, package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return ""

    def tool(self, name: str) -> str:
        """Find a profiler; ToolMissing says what to do."""
        return tools.find(name) or ""

    def nvcc(self) -> tuple[str, str]:
        return nvcc.find_nvcc()

    def compiles(self, arch: str, *, disassemble: bool) -> None:
        """Build a kernel, or also read its machine code; AiperfError says what is missing."""
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch, "doctor.cu")
            source.write_text(_KERNEL, encoding="utf-8")
            made = nvcc.build(source, arch, cache=Path(scratch))
            if disassemble:
                nvcc.opcode_counts(made)

    def cores(self) -> set[int]:
        return os.sched_getaffinity(0)

    def privileged(self) -> bool:
        """Whether this process has CAP_SYS_ADMIN, which the counters of a GPU may need."""
        held = re.search(r"CapEff:\s*([0-9a-f]+)", self.read("/proc/self/status"))
        return bool(held and int(held[1], 16) >> 21 & 1)

    def free(self, folder: Path) -> int | None:
        """Return the free bytes where a folder is or will be; None where it cannot be written."""
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else None

    def locks(self) -> str:
        """Make the folder of the locks; AiperfError says what is wrong with it."""
        gpu_lock.GpuLock([])
        return str(gpu_lock.default_folder())
