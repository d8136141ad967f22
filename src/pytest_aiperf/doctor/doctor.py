"""What works on this machine, and what to do about the rest."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.build import nvcc
from pytest_aiperf.errors import AiperfError, ToolMissing
from pytest_aiperf.model import Gpu
from pytest_aiperf.profilers import tools
from pytest_aiperf.rules import validity

from .host_facts import Host

LEAST_FREE: Final = 2 << 30
"""Less free bytes than this, and builds or records may not fit."""
NO_ADMIN: Final = "/proc/driver/nvidia/params"
PARANOID: Final = "/proc/sys/kernel/perf_event_paranoid"

_BOARD: Final = (
    *("pci.bus_id", "pstate", "clocks.sm", "clocks.max.sm", "power.limit", "power.default_limit"),
    *("persistence_mode", "compute_mode", "mig.mode.current", "clocks_event_reasons.active"),
)


class State(StrEnum):
    """What a check found; only what is broken fails."""

    OK = "OK"
    ADVICE = "ADVICE"
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, what is there and, unless OK, what to do."""

    name: str
    state: State
    found: str
    todo: str = ""

    def __str__(self) -> str:
        said = ": ".join(part for part in (self.found, self.todo) if part)
        return f"{self.state:<7} {self.name:<17} {said}"


def checks(host: Host) -> list[Check]:
    """Look at everything; without a GPU there are fewer lines."""
    gpus: Sequence[Gpu] = ()
    found = [_ok("python", f"{platform.python_version()}, {platform.system()}")]
    try:
        gpus = host.gpus()
        found += _gpus(host, gpus)
    except AiperfError as why:
        found.append(_broken("GPU", str(why)))
    if gpus:
        found += [*_driver(host, gpus[0]), *_boards(host, gpus)]
    found += [*_compiler(host, gpus), *_libraries(host, gpus), *_profilers(host, gpus)]
    if problem := validity.environment_problem(host.environ):
        found.append(_broken("environment", problem))
    return [*found, *_disk(host)]


def _ok(name: str, found: str) -> Check:
    return Check(name, State.OK, found)


def _todo(name: str, found: str, todo: str = "") -> Check:
    return Check(name, State.ADVICE, found, todo)


def _broken(name: str, found: str, todo: str = "") -> Check:
    return Check(name, State.BROKEN, found, todo)


def _gpus(host: Host, gpus: Sequence[Gpu]) -> Iterator[Check]:
    for i, one in enumerate(gpus):
        size = f"{one.memory_bytes / 2**30:.0f} GiB"
        yield _ok(f"GPU {i}", f"{one.name} ({one.key}, {one.arch}, {one.sms} SMs, {size})")
    if not gpus and host.has_device():
        todo = "let the libraries match the kernel's driver, and mind what the container is given"
        yield _broken("GPU", f"there is one, and none can be used ({host.absence()})", todo)
    elif not gpus:
        yield _todo("GPU", f"none ({host.absence()})", "pytest checks, pytest --cpu measures here")


def _driver(host: Host, one: Gpu) -> Iterator[Check]:
    cuda = host.driver_cuda()
    yield _ok("driver", f"{one.driver}, CUDA up to {cuda // 1000}.{cuda % 1000 // 10}")


def _boards(host: Host, gpus: Sequence[Gpu]) -> Iterator[Check]:
    asked = "--query-gpu=uuid," + ",".join(_BOARD)
    said = host.say("nvidia-smi", asked, "--format=csv,noheader,nounits")
    if said is None:
        yield _todo("nvidia-smi", "does not answer", "clocks, power and processes are not checked")
        return
    rows = {}
    for line in said.splitlines():
        uuid, *values = [word.strip() for word in line.split(",")]
        rows[uuid] = dict(zip(_BOARD, values, strict=False))
    for i, one in enumerate(gpus):
        if board := rows.get(one.uuid):
            yield _clocks(i, board)
            yield _power(i, board)
            yield _mode(i, board)
            yield _numa(host, i, board)
    yield _others(host, gpus)
    if len(gpus) > 1:
        links = len(
            re.findall(r"Link \d+: [\d.]+ GB/s", host.say("nvidia-smi", "nvlink", "-s") or "")
        )
        if links:
            yield _ok("NVLink", f"{links // len(gpus)} links to a GPU")
        else:
            yield _todo("NVLink", "none", "GPUs reach each other through PCIe, slowly")


def _clocks(i: int, board: Mapping[str, str]) -> Check:
    name, now, most = f"clocks {i}", board["clocks.sm"], board["clocks.max.sm"]
    said = f"{now} of {most} MHz, {board['pstate']}"
    reasons = board["clocks_event_reasons.active"]
    if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) and int(reasons, 16) & validity.THROTTLED:
        return _todo(name, f"{said}, slowed down ({reasons})", "mind cooling and power: "
                     "nvidia-smi -q -d PERFORMANCE says which")  # fmt: skip
    return _ok(name, said)


def _power(i: int, board: Mapping[str, str]) -> Check:
    name, limit, usual = f"power {i}", board["power.limit"], board["power.default_limit"]
    if board["persistence_mode"] == "Disabled":
        todo = "nvidia-smi -pm 1 keeps the driver loaded between claims"
        return _todo(name, "persistence mode is off", todo)
    try:
        low = float(limit) < float(usual)
    except ValueError:  # virtual GPUs do not say
        return _ok(name, "limit unknown")
    if low:
        todo = f"nvidia-smi -pl {usual}, or do not compare with other machines"
        return _todo(name, f"limited to {limit} of {usual} W", todo)
    return _ok(name, f"limit {limit} W")


def _mode(i: int, board: Mapping[str, str]) -> Check:
    name, mode, mig = f"mode {i}", board["compute_mode"], board["mig.mode.current"]
    if mig == "Enabled":
        return _todo(name, "MIG is on", "claims measure a slice; nvidia-smi -mig 0 ends that")
    if mode == "Prohibited":
        return _broken(name, "compute mode Prohibited", "nvidia-smi -c DEFAULT")
    if mode.startswith("Exclusive"):
        todo = "-n and ranks need several processes: nvidia-smi -c DEFAULT"
        return _todo(name, f"compute mode {mode}", todo)
    return _ok(name, "shared by processes, whole")


def _numa(host: Host, i: int, board: Mapping[str, str]) -> Check:
    # nvidia-smi writes an eight-digit PCI domain, the kernel one of four
    device = board["pci.bus_id"].lower()[-12:]
    node = host.read(f"/sys/bus/pci/devices/{device}/numa_node").strip()
    near = _cpus(host.read(f"/sys/bus/pci/devices/{device}/local_cpulist"))
    mine = host.cores()
    said = f"node {node if node not in ('', '-1') else 'unknown'}, {len(mine)} cores allowed"
    if near and not near & mine:
        todo = f"none is near the GPU: numactl --cpunodebind={node}"
        return _todo(f"NUMA {i}", said, todo)
    return _ok(f"NUMA {i}", said)


def _cpus(text: str) -> set[int]:
    """Read a kernel's list of cores: 0-3,8."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _others(host: Host, gpus: Sequence[Gpu]) -> Check:
    asked = ("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
    said = host.say("nvidia-smi", *asked) or ""
    mine = [line for line in said.splitlines() if line.partition(",")[0] in {g.uuid for g in gpus}]
    if mine:
        todo = "end them before measuring, or their work is in the figures"
        return _todo("other processes", f"{len(mine)} on these GPUs", todo)
    return _ok("other processes", "none on these GPUs")


def _compiler(host: Host, gpus: Sequence[Gpu]) -> Iterator[Check]:
    try:
        path, said = host.nvcc()
    except AiperfError as why:
        yield _todo("nvcc", str(why))
        return
    version = re.search(r"release (\d+)\.(\d+)", said)
    release = f"{version[1]}.{version[2]}" if version else "unknown"
    cuda = host.driver_cuda() // 1000 if gpus else 0
    if version and gpus and int(version[1]) > cuda:
        todo = f"install a newer driver, or an nvcc of CUDA {cuda}"
        yield _broken("nvcc", f"CUDA {release}, newer than the driver's {cuda}", todo)
    else:
        yield _ok("nvcc", f"CUDA {release} ({path})")
    arch = gpus[0].arch if gpus else "sm90"
    for name, disassemble in (("host compiler", False), ("cuobjdump", True)):
        try:
            host.compiles(arch, disassemble=disassemble)
        except AiperfError as why:
            line = " ".join(str(why).splitlines()[:2])
            if disassemble:
                yield _todo(name, line, "pip install 'pytest-aiperf[sass]'")
            else:
                yield _broken(name, line, "install g++, or name a compiler in NVCC_CCBIN")
                return
        else:
            yield _ok(name, f"a kernel for {arch} is {'read' if disassemble else 'built'}")


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, to compare."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _libraries(host: Host, gpus: Sequence[Gpu]) -> Iterator[Check]:
    extra = "gpu" if gpus else "cpu"
    install = f"pip install 'pytest-aiperf[{extra}]'"
    torch, tried = host.version("torch"), None
    if torch:
        tried = host.torch()
        yield _torch(torch, tried, gpus)
    else:
        yield _todo("torch", "not installed", f"most claims need it: {install}")
    triton, numpy = host.version("triton"), host.version("numpy")
    if not triton:
        yield _todo("triton", "not installed", install)
    elif _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        breaks = "its interpreter, which checks claims without a GPU, breaks"
        yield _todo("triton", f"{triton} with NumPy {numpy}: {breaks}", "pip install 'numpy<2.4'")
    else:
        yield _ok("triton", triton)
    cupy = next((v for n in ("13x", "12x") if (v := host.version(f"cupy-cuda{n}"))), "")
    yield _ok("cupy", cupy) if cupy else _todo("cupy", "not installed", install)
    if tried and tried["cuda"]:
        yield _ok("NCCL", tried["nccl"])
        if len(gpus) > 1 and all(tried["peers"]):
            yield _ok("P2P", f"all {len(gpus)} GPUs reach each other")
        elif len(gpus) > 1:
            todo = "NCCL goes through the host; mind the IOMMU, ACS and the container"
            yield _todo("P2P", "not between all GPUs", todo)


def _torch(version: str, tried: Mapping[str, Any] | None, gpus: Sequence[Gpu]) -> Check:
    if tried is None:
        return _broken("torch", f"{version} does not work", "python -c 'import torch' says why")
    if gpus and not tried["built"]:
        todo = "pip install --force-reinstall one that is built with CUDA"
        return _broken("torch", f"{version} is built without CUDA", todo)
    if gpus and not tried["cuda"]:
        todo = "install a newer driver or a torch of the driver's CUDA"
        return _broken("torch", f"{version} (CUDA {tried['built']}) finds no GPU", todo)
    if not tried["right"]:
        return _broken("torch", f"{version} adds up wrongly", "have the GPU's memory tested")
    arch = gpus[0].arch.replace("sm", "sm_", 1) if gpus else ""
    if arch and arch not in tried["archs"]:
        todo = "its kernels are compiled at their first call, or missing: install a newer torch"
        return _todo("torch", f"{version} has no code for {arch}", todo)
    return _ok("torch", f"{version}, CUDA {tried['built'] or 'none'}")


def _profilers(host: Host, gpus: Sequence[Gpu]) -> Iterator[Check]:
    for tool in tools.TOOLS.values():
        if not gpus and not tool.host:
            continue
        try:
            yield _ok(f"profile {tool.name}", host.tool(tool.name) or "in this Python")
        except ToolMissing as why:
            yield _todo(f"profile {tool.name}", str(why))
    if gpus:
        for_admins = re.search(r"RmProfilingAdminOnly:\s*(\d)", host.read(NO_ADMIN))
        if for_admins and for_admins[1] == "1" and not host.privileged():
            kept = "for administrators only (ERR_NVGPUCTRPERM)"
            todo = (
                "load nvidia with NVreg_RestrictProfilingToAdminUsers=0, or give the container "
                "CAP_SYS_ADMIN"
            )
            yield _todo("GPU counters", kept, todo)
        else:
            yield _ok("GPU counters", "permitted" if for_admins else "the driver forbids nothing")
    level = host.read(PARANOID).strip()
    if level.removeprefix("-").isdecimal() and int(level) > 2 and not host.privileged():
        todo = "sysctl kernel.perf_event_paranoid=2"
        yield _todo("perf events", f"perf_event_paranoid is {level}", todo)


def _disk(host: Host) -> Iterator[Check]:
    for name, folder in (("cache", nvcc.default_cache()), ("records", Path.cwd())):
        free = host.free(folder)
        if free is None:
            todo = "PYTEST_AIPERF_CACHE names another" if name == "cache" else "work elsewhere"
            yield _broken(name, f"{folder} cannot be written", todo)
        elif free < LEAST_FREE:
            todo = "python -m pytest_aiperf clean frees what is ours"
            yield _todo(name, f"{folder}, {free / 2**30:.1f} GiB free", todo)
        else:
            yield _ok(name, f"{folder}, {free / 2**30:.0f} GiB free")
    try:
        yield _ok("locks", host.locks())
    except AiperfError as why:
        yield _broken("locks", str(why))
