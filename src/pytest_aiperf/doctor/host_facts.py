"""Facts about this machine for the doctor's checks: commands, libraries and files."""

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
from pytest_aiperf.build.nvcc import Build
from pytest_aiperf.machine import gpu_lock, nvml
from pytest_aiperf.model import Gpu
from pytest_aiperf.profilers import tools

DEADLINE_S: Final = 120.0  #: Time limit of a command: a hanging driver must not block the doctor.
_KERNEL: Final = 'extern "C" __global__ void doctor(float* x) { x[threadIdx.x] *= 2.0f; }\n'

# in a process of its own: broken CUDA may hang or crash, and this process never initializes it
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
    """The machine of this process; tests use one with other facts."""

    environ: Mapping[str, str] = os.environ

    def gpus(self) -> Sequence[Gpu]:
        return nvml.visible(self.environ)

    def absence(self) -> str:
        return nvml.absence(self.environ)

    def has_device(self) -> bool:
        """Whether a kernel driver is loaded, even if the libraries find no GPU."""
        return Path("/dev/nvidiactl").exists()

    def driver_cuda(self) -> int:
        """Return the newest CUDA that the driver supports, as 13000; only call with a GPU."""
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlSystemGetCudaDriverVersion_v2())

    def run(self, *command: str, folder: Path | None = None) -> str | None:
        """Run a command and return its output; None if it is missing, fails or hangs."""
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if done.returncode else done.stdout

    def torch(self) -> dict[str, Any] | None:
        """Try torch in a process of its own; None if it does not work."""
        lines = (self.run(sys.executable, "-c", _TORCH) or "").splitlines()
        test: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
        return test

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
        """Return the path of a profiler, "" if it has no program; raise ToolMissing."""
        return tools.find(name) or ""

    def nvcc(self) -> tuple[str, str]:
        return nvcc.find_nvcc()

    def compile(self, arch: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._build(arch, Path(folder))

    def disassemble(self, arch: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            nvcc.opcode_counts(self._build(arch, Path(folder)))

    def _build(self, arch: str, folder: Path) -> Build:
        source = folder / "doctor.cu"
        source.write_text(_KERNEL, encoding="utf-8")
        return nvcc.build(source, arch, cache=folder)

    def cores(self) -> set[int]:
        return os.sched_getaffinity(0)

    def is_privileged(self) -> bool:
        """Whether this process has CAP_SYS_ADMIN."""
        effective = re.search(r"CapEff:\s*([0-9a-f]+)", self.read("/proc/self/status"))
        return bool(effective and int(effective[1], 16) >> 21 & 1)

    def free_bytes(self, folder: Path) -> int | None:
        """Return the free space of a folder, which need not exist; None if it is not writable."""
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else None

    def lock_folder(self) -> str:
        """Create the folder of the GPU locks; AiperfError names a problem with it."""
        gpu_lock.GpuLock([])
        return str(gpu_lock.default_folder())
