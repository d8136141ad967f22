"""Check what works on this machine, and name a remedy for the rest."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.build import nvcc
from pytest_aiperf.build.nvcc import Build
from pytest_aiperf.errors import AiperfError, ToolMissing
from pytest_aiperf.machine import gpu_lock, nvml
from pytest_aiperf.machine.process_group import run_in_group
from pytest_aiperf.model import FEATURES, Gpu
from pytest_aiperf.profilers import tools
from pytest_aiperf.rules import validity

MIN_FREE_BYTES: Final = 2 << 30  #: Free disk space that the builds and records of a full run need.
DRIVER_PARAMETERS: Final = "/proc/driver/nvidia/params"  #: Says who may read GPU counters.
GOVERNOR: Final = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"  #: Policy of CPU clocks.
HUGE_PAGES: Final = "/sys/kernel/mm/transparent_hugepage/enabled"  #: The setting is in brackets.
LIMITS: Final = "/proc/self/limits"  #: Limits of this process, and of those that it starts.
PERF_PARANOID: Final = "/proc/sys/kernel/perf_event_paranoid"  #: Above 2, perf needs privileges.
_BOARD: Final = (
    *("pci.bus_id", "pstate", "clocks.sm", "clocks.max.sm", "power.limit", "power.default_limit"),
    *("persistence_mode", "compute_mode", "mig.mode.current", "clocks_event_reasons.active"),
    *("memory.used", "memory.total"),
)
MAX_USED: Final = 0.1
"""If at most this share of a GPU's memory is used, no other program is assumed to work on it:
contexts and the driver need some hundred MiB."""
DEADLINE_S: Final = 120.0  #: Time limit of a command: a hung driver must not block the doctor.
_KERNEL: Final = 'extern "C" __global__ void doctor(float* x) { x[threadIdx.x] *= 2.0f; }\n'

# This script runs in its own process, because a broken CUDA may hang or crash the process.
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

_ALL_REDUCE: Final = """
import os, sys, torch, torch.distributed as dist
rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank) if sys.argv[1] == "nccl" else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group(sys.argv[1])
ones = torch.ones(1 << 20, device=device)
dist.all_reduce(ones)
if not bool((ones == count).all()):
    sys.exit(f"rank {rank}: the sum of {count} ones is {ones.unique().tolist()}")
dist.destroy_process_group()
"""
_GRACE_S: Final = 20.0  #: Seconds in which an interrupted torchrun may stop its ranks.


class State(StrEnum):
    """The outcome of a check; the doctor's exit status is 1 only if an outcome is BROKEN."""

    OK = "OK"
    ADVICE = "ADVICE"
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    state: State = field(kw_only=True)
    found: str  #: The observed state, without anything that identifies the machine or its user.
    todo: str = ""  #: The remedy.
    detail: str = ""  #: A path or an error message; bundles omit it, as it may contain names.

    def __str__(self) -> str:
        text = ": ".join(filter(None, (self.found, self.detail, self.todo)))
        return f"{self.state:<7} {self.name:<17} {text}"


_ok = partial(Check, state=State.OK)
_advice = partial(Check, state=State.ADVICE)
_broken = partial(Check, state=State.BROKEN)


class Host:
    """The machine that this process runs on; tests substitute a fake one."""

    environ: Mapping[str, str] = os.environ

    def gpus(self) -> Sequence[Gpu]:
        return nvml.visible(self.environ)

    def absence(self) -> str:
        return nvml.absence(self.environ)

    def has_device(self) -> bool:
        """Whether NVIDIA's kernel driver is loaded. NVML may still find no GPU."""
        return Path("/dev/nvidiactl").exists()

    def driver_cuda(self) -> int:
        """Return the newest CUDA version that the driver supports (13000 is 13.0); needs a GPU."""
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlSystemGetCudaDriverVersion_v2())

    def run(self, *command: str, folder: Path | None = None) -> str | None:
        """Run a command and return its output; None if it is missing, fails or hangs."""
        try:
            return subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=DEADLINE_S,
                check=True,
            ).stdout
        except (OSError, subprocess.SubprocessError):
            return None

    def torch(self) -> dict[str, Any] | None:
        """Test torch in a separate process and return its report; None if torch does not work."""
        lines = (self.run(sys.executable, "-c", _TORCH) or "").splitlines()
        reports = [line for line in lines if line.startswith("{")]  # libraries may print as well
        return json.loads(reports[-1]) if reports else None

    def all_reduce(self, ranks: int, backend: str = "nccl") -> str:
        """Return why a sum over one process per GPU fails; "" if it is right."""
        launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        python = ("--no-python", sys.executable, "-c", _ALL_REDUCE, backend)
        environ = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", **self.environ}
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            command = (sys.executable, "-m", *launcher, *python)
            status = run_in_group(command, log, DEADLINE_S, env=environ, grace_s=_GRACE_S)
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if status is None:
            return f"not done after {DEADLINE_S:g} s"
        causes = [line for line in lines if re.search(r"NCCL WARN|Error: |the sum of", line)]
        return "" if not status else (causes or lines or [f"exit status {status}"])[0].strip()

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
        """Return the path of a profiler, or "" if it runs inside Python; raise ToolMissing."""
        return tools.require_tool(name) or ""

    def nvcc(self) -> tuple[str, str]:
        return nvcc.find_nvcc()

    def compile(self, arch: str, folder: Path) -> Build:
        source = folder / "doctor.cu"
        source.write_text(_KERNEL, encoding="utf-8")
        return nvcc.build(source, arch, cache=folder)

    def disassemble(self, built: Build) -> None:
        nvcc.opcode_counts(built)

    def cores(self) -> set[int]:
        return os.sched_getaffinity(0)

    def is_privileged(self) -> bool:
        """Whether this process has CAP_SYS_ADMIN, which lets it read GPU counters."""
        effective = re.search(r"CapEff:\s*([0-9a-f]+)", self.read("/proc/self/status"))
        return bool(effective and int(effective[1], 16) >> 21 & 1)

    def free_bytes(self, folder: Path) -> int | None:
        """Return the free space of a folder, which need not exist; None if it is not writable."""
        while not folder.exists():
            folder = folder.parent
        is_writable = folder.is_dir() and os.access(folder, os.W_OK)
        return shutil.disk_usage(folder).free if is_writable else None

    def lock_folder(self) -> str:
        """Create and return the folder of the GPU locks; raise AiperfError if it cannot be used."""
        gpu_lock.GpuLock([])
        return str(gpu_lock.default_folder())


def checks(host: Host, *, links: bool = False) -> list[Check]:
    """Run all checks; those about GPUs run only if this machine has one.

    With ``links``, also run a collective over all GPUs, which takes half a minute.
    """
    gpus: Sequence[Gpu] = ()
    listed = [_ok("python", f"{platform.python_version()}, {platform.system()}")]
    try:
        gpus = host.gpus()
        listed += _gpus(host, gpus)
    except AiperfError as error:
        listed.append(_broken("GPU", "cannot be used", detail=str(error)))
    if gpus:
        cuda = host.driver_cuda()
        newest = f"CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"
        listed += [_ok("driver", f"{gpus[0].driver}, {newest}"), *_boards(host, gpus)]
    listed += [*_operating_system(host, gpus)]
    listed += [*_compiler(host, gpus), *_libraries(host, gpus), *_profilers(host, gpus)]
    if problem := validity.environment_problem(host.environ):
        listed.append(_broken("environment", "a variable distorts times", detail=problem))
    if links:
        listed.append(_all_reduce(host, len(gpus)))
    return [*listed, *_disk(host)]


def _gpus(host: Host, gpus: Sequence[Gpu]) -> Iterator[Check]:
    for i, gpu in enumerate(gpus):
        size = f"{gpu.memory_bytes / 2**30:.0f} GiB"
        yield _ok(f"GPU {i}", f"{gpu.name} ({gpu.key}, {gpu.arch}, {gpu.sms} SMs, {size})")
        lacking = [name for name in FEATURES if name not in gpu.features]
        without = f"; not {', '.join(lacking)}" if lacking else ""
        yield _ok(f"features {i}", (", ".join(gpu.features) or "none") + without)
    if not gpus and host.has_device():
        todo = "install libraries of the kernel driver's version; in a container, pass the GPUs in"
        yield _broken("GPU", "a driver is loaded, but no GPU can be used", todo, host.absence())
    elif not gpus:
        todo = "pytest checks claims, pytest --cpu measures here"
        yield _advice("GPU", "none", todo, host.absence())


def _boards(host: Host, gpus: Sequence[Gpu]) -> Iterator[Check]:
    query = "--query-gpu=uuid," + ",".join(_BOARD)
    table = host.run("nvidia-smi", query, "--format=csv,noheader,nounits")
    if table is None:
        yield _advice("nvidia-smi", "fails", "clocks, power and processes are not checked")
        return
    rows = {}
    for line in table.splitlines():
        uuid, *values = [word.strip() for word in line.split(",")]
        rows[uuid] = dict(zip(_BOARD, values, strict=False))
    for i, gpu in enumerate(gpus):
        if board := rows.get(gpu.uuid):
            yield _clocks(i, board)
            yield _power(i, board)
            yield _mode(i, board)
            yield _memory(i, board)
            yield _numa(host, i, board)
    yield _other_processes(host, gpus)
    if len(gpus) > 1:
        status = host.run("nvidia-smi", "nvlink", "-s") or ""
        if links := len(re.findall(r"Link \d+: [\d.]+ GB/s", status)):
            yield _ok("NVLink", f"{links // len(gpus)} links per GPU")
        else:
            yield _advice("NVLink", "none", "copies between GPUs use PCIe, which is slower")


def _clocks(i: int, board: Mapping[str, str]) -> Check:
    clocks = f"{board['clocks.sm']} of {board['clocks.max.sm']} MHz, {board['pstate']}"
    reasons = board["clocks_event_reasons.active"]
    if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) and int(reasons, 16) & validity.THROTTLED:
        todo = "check cooling and power: nvidia-smi -q -d PERFORMANCE lists the reason"
        return _advice(f"clocks {i}", f"{clocks}, throttled ({reasons})", todo)
    return _ok(f"clocks {i}", clocks)


def _power(i: int, board: Mapping[str, str]) -> Check:
    name, limit, default = f"power {i}", board["power.limit"], board["power.default_limit"]
    if board["persistence_mode"] == "Disabled":
        todo = "nvidia-smi -pm 1 keeps the driver loaded between claims"
        return _advice(name, "persistence mode is off", todo)
    try:
        is_lowered = float(limit) < float(default)
    except ValueError:  # a virtual GPU reports "[N/A]" as its limit
        return _ok(name, "limit unknown")
    if is_lowered:
        todo = f"nvidia-smi -pl {default}, or do not compare with other machines"
        return _advice(name, f"limited to {limit} of {default} W", todo)
    return _ok(name, f"limit {limit} W")


def _mode(i: int, board: Mapping[str, str]) -> Check:
    name, mode = f"mode {i}", board["compute_mode"]
    if board["mig.mode.current"] == "Enabled":
        todo = "claims measure a slice of the GPU; nvidia-smi -mig 0 disables MIG"
        return _advice(name, "MIG is on", todo)
    if mode == "Prohibited":
        return _broken(name, "compute mode Prohibited", "nvidia-smi -c DEFAULT")
    if mode.startswith("Exclusive"):
        todo = "-n and ranks need several processes: nvidia-smi -c DEFAULT"
        return _advice(name, f"compute mode {mode}", todo)
    return _ok(name, "shared compute mode, no MIG")


def _memory(i: int, board: Mapping[str, str]) -> Check:
    name = f"memory {i}"
    try:
        used, total = (float(board[f"memory.{word}"]) / 1024 for word in ("used", "total"))
    except ValueError:  # a MIG slice reports "[N/A]"
        return _ok(name, "use unknown")
    found = f"{used:.1f} of {total:.1f} GiB in use"
    if used > MAX_USED * total:
        # in a container, nvidia-smi does not list the processes of others
        return _advice(name, found, "end the processes that hold it; they may not be listed here")
    return _ok(name, found)


def _numa(host: Host, i: int, board: Mapping[str, str]) -> Check:
    # nvidia-smi writes the PCI domain with eight digits; sysfs has only the last four of them
    device = board["pci.bus_id"].lower()[-12:]
    node = host.read(f"/sys/bus/pci/devices/{device}/numa_node").strip()
    local = _cores(host.read(f"/sys/bus/pci/devices/{device}/local_cpulist"))
    allowed = host.cores()
    found = f"node {node if node not in ('', '-1') else 'unknown'}, {len(allowed)} cores allowed"
    if local and not local & allowed:
        todo = f"none is near the GPU: numactl --cpunodebind={node}"
        return _advice(f"NUMA {i}", found, todo)
    return _ok(f"NUMA {i}", found)


def _cores(text: str) -> set[int]:
    """Parse a list of cores in the kernel's notation, such as "0-3,8"."""
    cores: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _other_processes(host: Host, gpus: Sequence[Gpu]) -> Check:
    query = ("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
    uuids = [line.partition(",")[0] for line in (host.run("nvidia-smi", *query) or "").splitlines()]
    if count := sum(uuid in {gpu.uuid for gpu in gpus} for uuid in uuids):
        todo = "end them before you measure: their work distorts the times"
        return _advice("other processes", f"{count} on these GPUs", todo)
    return _ok("other processes", "none on these GPUs")


def _operating_system(host: Host, gpus: Sequence[Gpu]) -> Iterator[Check]:
    """Check settings that change times of the host; containers and virtual machines hide some."""
    if governor := host.read(GOVERNOR).strip():
        todo = "cpupower frequency-set -g performance keeps the CPU's clock up"
        is_slow = governor in ("powersave", "conservative")
        yield (
            _advice("CPU governor", governor, todo) if is_slow else _ok("CPU governor", governor)
        )
    if setting := re.search(r"\[(\w+)\]", host.read(HUGE_PAGES)):
        todo = f"echo madvise > {HUGE_PAGES}: large arrays then need fewer page-table entries"
        is_off = setting[1] == "never"
        found = f"transparent huge pages: {setting[1]}"
        yield _advice("huge pages", found, todo) if is_off else _ok("huge pages", found)
    limit = re.search(r"Max locked memory\s+(\w+)", host.read(LIMITS))
    if limit and gpus:
        if limit[1] == "unlimited":
            yield _ok("locked memory", "unlimited")
        else:
            found = f"at most {int(limit[1]) / 2**20:.3g} MiB per process"
            todo = "ulimit -l unlimited, if NCCL uses InfiniBand, which locks its buffers"
            yield _advice("locked memory", found, todo)


def _compiler(host: Host, gpus: Sequence[Gpu]) -> Iterator[Check]:
    try:
        path, output = host.nvcc()
    except AiperfError as error:
        yield _advice("nvcc", "not usable", detail=str(error))
        return
    version = re.search(r"release (\d+)\.(\d+)", output)
    release = f"{version[1]}.{version[2]}" if version else "unknown"
    cuda = host.driver_cuda() // 1000 if gpus else 0
    if version and gpus and int(version[1]) > cuda:
        todo = f"install a newer driver, or the nvcc of CUDA {cuda}"
        yield _broken("nvcc", f"CUDA {release}, newer than the driver's {cuda}", todo)
    else:
        yield _ok("nvcc", f"CUDA {release}", detail=path)
    arch = gpus[0].arch if gpus else "sm90"
    with tempfile.TemporaryDirectory() as folder:
        try:
            built = host.compile(arch, Path(folder))
        except AiperfError as error:
            todo = "install g++, or name a compiler in NVCC_CCBIN"
            yield _broken("host compiler", f"no kernel for {arch}", todo, _start(error))
            return
        yield _ok("host compiler", f"builds a kernel for {arch}")
        try:
            host.disassemble(built)
            yield _ok("cuobjdump", f"reads a kernel for {arch}")
        except AiperfError as error:
            todo = "install the extra pytest-aiperf[sass]"
            cause = _start(error).partition(";")[0]  # the rest repeats the remedy
            yield _advice("cuobjdump", f"cannot read a kernel for {arch}", todo, cause)


def _start(error: AiperfError) -> str:
    return " ".join(str(error).splitlines()[:2])


def _release(version: str) -> tuple[int, ...]:
    """Return (major, minor) of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _libraries(host: Host, gpus: Sequence[Gpu]) -> Iterator[Check]:
    install = f"install the extra pytest-aiperf[{'gpu' if gpus else 'cpu'}]"
    torch, test = host.version("torch"), None
    if torch:
        test = host.torch()
        yield _torch(torch, test, gpus)
    else:
        yield _advice("torch", "not installed", f"most claims need it: {install}")
    triton, numpy = host.version("triton"), host.version("numpy")
    if not triton:
        yield _advice("triton", "not installed", install)
    elif _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        problem = "its interpreter, which checks claims without a GPU, fails"
        todo = "pip install 'numpy<2.4'"
        yield _advice("triton", f"{triton} with NumPy {numpy}: {problem}", todo)
    else:
        yield _ok("triton", triton)
    cupy = host.version("cupy-cuda13x") or host.version("cupy-cuda12x")
    todo = "pip install cupy-cuda13x, if your arms use CuPy"
    yield _ok("cupy", cupy) if cupy else _advice("cupy", "not installed", todo)
    if test and test["cuda"]:
        yield _ok("NCCL", test["nccl"])
        if len(gpus) > 1 and all(test["peers"]):
            yield _ok("P2P", f"between all {len(gpus)} GPUs")
        elif len(gpus) > 1:
            todo = "NCCL copies through the host; check the IOMMU, ACS and the container"
            yield _advice("P2P", "not between all GPUs", todo)


def _torch(version: str, test: Mapping[str, Any] | None, gpus: Sequence[Gpu]) -> Check:
    if test is None:
        return _broken("torch", f"{version} does not work", "run: python -c 'import torch'")
    if gpus and not test["built"]:
        todo = "pip install --force-reinstall a torch that is built with CUDA"
        return _broken("torch", f"{version} is built without CUDA", todo)
    if gpus and not test["cuda"]:
        todo = "install a newer driver or a torch for the driver's CUDA version"
        return _broken("torch", f"{version} (CUDA {test['built']}) finds no GPU", todo)
    if not test["right"]:
        return _broken("torch", f"{version} computes a wrong sum", "have the GPU's memory tested")
    arch = gpus[0].arch.replace("sm", "sm_", 1) if gpus else ""
    if arch and arch not in test["archs"]:
        todo = "its kernels are missing or compiled at their first call: install a newer torch"
        return _advice("torch", f"{version} has no code for {arch}", todo)
    return _ok("torch", f"{version}, CUDA {test['built'] or 'none'}")


def _all_reduce(host: Host, count: int) -> Check:
    name = "all-reduce"
    if not count:
        return _advice(name, "not tried", "--links needs a GPU")
    gpus = f"{count} GPU{'s' * (count > 1)}"
    if problem := host.all_reduce(count):
        todo = "NCCL_DEBUG=INFO shows more; see NCCL_SOCKET_IFNAME, the firewall and /dev/shm"
        return _broken(name, f"over {gpus}: fails", todo, problem)
    return _ok(name, f"over {gpus}: right")


def _profilers(host: Host, gpus: Sequence[Gpu]) -> Iterator[Check]:
    for tool in tools.TOOLS.values():
        name, has_use = f"profile {tool.name}", bool(gpus) or tool.host
        why = "" if has_use else ", profiles only GPUs"
        try:
            path = host.tool(tool.name)
            yield _ok(name, f"installed{why}", detail=path or "in this Python")
        except ToolMissing as error:
            if has_use:
                yield _advice(name, "not usable", detail=str(error))
            else:
                yield _ok(name, f"not needed{why}")
    if gpus:
        admins_only = re.search(r"RmProfilingAdminOnly:\s*(\d)", host.read(DRIVER_PARAMETERS))
        if admins_only and admins_only[1] == "1" and not host.is_privileged():
            option = "NVreg_RestrictProfilingToAdminUsers=0"
            todo = f"load nvidia with {option}, or give the container CAP_SYS_ADMIN"
            yield _advice("GPU counters", "for administrators only (ERR_NVGPUCTRPERM)", todo)
        else:
            yield _ok("GPU counters", "permitted" if admins_only else "no restriction found")
    level = host.read(PERF_PARANOID).strip()
    if level.removeprefix("-").isdecimal() and int(level) > 2 and not host.is_privileged():
        todo = "sysctl kernel.perf_event_paranoid=2"
        yield _advice("perf events", f"perf_event_paranoid is {level}", todo)


def _disk(host: Host) -> Iterator[Check]:
    for name, folder in (("cache", nvcc.default_cache()), ("records", Path.cwd())):
        free = host.free_bytes(folder)
        if free is None:
            todo = "set PYTEST_AIPERF_CACHE" if name == "cache" else "work in another folder"
            yield _broken(name, "cannot be written", todo, str(folder))
        elif free < MIN_FREE_BYTES:
            todo = "python -m pytest_aiperf clean removes builds and runs"
            yield _advice(name, f"{free / 2**30:.1f} GiB free", todo, str(folder))
        else:
            yield _ok(name, f"{free / 2**30:.0f} GiB free", detail=str(folder))
    try:
        yield _ok("locks", "writable", detail=host.lock_folder())
    except AiperfError as error:
        yield _broken("locks", "cannot be used", detail=str(error))
