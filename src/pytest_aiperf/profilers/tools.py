"""The profilers: how to find each, how to start it, and why it may refuse to work."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pytest_aiperf.build.sass import find_in_packages
from pytest_aiperf.errors import ToolMissing, UsageError

from .ncu import NCU_SECTIONS
from .timeline import RANGE


@dataclass(frozen=True, slots=True)
class Fallback:
    """One way to run a preset."""

    arguments: tuple[str, ...] = ()  #: Arguments of the tool.
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the profiled process."""
    note: str = ""  #: What this way leaves out, for the report.


@dataclass(frozen=True, slots=True)
class Tool:
    """A profiler.

    In ``command``, ``steps`` and ``report``, ``{stem}`` is the artefact's path without its suffix,
    ``{step}`` the name of the step and ``{scratch}`` a folder that exists during the run.
    """

    name: str  #: Name in ``--profile=NAME``.
    install: str  #: What to do where it is missing.
    suffix: str  #: Suffix of its artefact.
    presets: Mapping[str, tuple[Fallback, ...]]
    """Ways to run each preset: the next one is tried when one fails."""
    program: str = ""  #: Program to run, if it is one.
    min_version: tuple[int, int] = (0, 0)  #: Oldest version of the program that works.
    module: str = ""  #: Python module that it needs.
    command: tuple[str, ...] = ()  #: Arguments between the program and the profiled command.
    report: tuple[str, ...] = ()
    """Arguments that print the artefact, if the program's own file cannot be read."""
    steps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Runs of their own, each with further arguments; their artefacts form a folder."""
    hook: Literal["", "torch", "proton", "memory", "perf"] = ""
    """What the profiled process itself does around the calls."""
    host: bool = False  #: Whether it can profile claims of the host.
    is_checker: bool = False  #: Whether its findings fail the claim; a checker looks at no time.
    no_kernels: str = ""  #: What it prints when no kernel ran and it leaves no artefact.
    ranks: bool = False  #: Whether it can capture all processes of a claim of several GPUs.


def _once(*arguments: str, **environ: str) -> tuple[Fallback, ...]:
    return (Fallback(arguments, environ),)


_IN_PROCESS: Final = {"minimal": _once(), "deep_dive": _once()}
"""Presets of profilers that are Python modules: their hooks know what a preset means."""
_LIBRARIES: Final = "--trace=cuda,nvtx,osrt,cublas,cudnn"
_NSYS: Final = (_LIBRARIES, "--cudabacktrace=all")
_UNSAMPLED: Final = ("--sample=none", "--cpuctxsw=none")
_PYTHON: Final = ("--sample=process-tree", "--python-sampling=true", "--python-backtrace=cuda")

_TOOLS: Final = (
    Tool(
        "nsys",
        "install NVIDIA Nsight Systems (it also comes with Nsight Compute)",
        ".nsys-rep",
        {
            "minimal": _once("--trace=cuda,nvtx", *_UNSAMPLED),
            "deep_dive": (
                Fallback((*_NSYS, *_PYTHON, "--gpu-metrics-devices=cuda-visible")),
                Fallback((*_NSYS, *_PYTHON), note="without GPU metrics: not permitted here"),
                Fallback(
                    (_LIBRARIES, *_UNSAMPLED),
                    note="without GPU metrics, CPU samples and backtraces: not permitted here",
                ),
            ),
        },
        program="nsys",
        min_version=(2023, 1),
        command=(
            *("profile", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
            *("--cuda-graph-trace=node", "--force-overwrite=true", "--output={stem}"),
        ),
        ranks=True,
    ),
    Tool(
        "ncu",
        "install NVIDIA Nsight Compute",
        ".ncu-rep",
        {
            "minimal": _once(*(w for s in NCU_SECTIONS for w in ("--section", s))),
            "deep_dive": _once("--set", "full", "--import-source", "yes"),
            "roofline": _once("--set", "roofline"),
        },
        program="ncu",
        min_version=(2022, 3),
        command=(
            *("--clock-control", "none"),
            *("--nvtx", "--nvtx-include", f"{RANGE}/"),
            *("--force-overwrite", "--export", "{stem}"),
        ),
        no_kernels="No kernels were profiled",
    ),
    Tool(
        "torch",
        "pip install torch",
        ".json",
        _IN_PROCESS,
        module="torch",
        hook="torch",
        host=True,
        ranks=True,
    ),
    Tool("proton", "pip install triton", ".hatchet", _IN_PROCESS, module="triton", hook="proton"),
    Tool("memory", "pip install torch", ".json", _IN_PROCESS, module="torch", hook="memory"),
    Tool(
        "sanitizer",
        "install compute-sanitizer, a part of the CUDA toolkit",
        ".xml",
        {
            "minimal": (
                # one allocation per tensor: in a shared one, an access beyond a tensor hits
                # its neighbour, and reused memory counts as initialized
                Fallback((), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
                Fallback(
                    note="with torch's caching allocator, which hides accesses beyond a tensor "
                    "(without it this arm does not run: it captures a graph, say)"
                ),
            )
        },
        program="compute-sanitizer",
        min_version=(2022, 1),
        command=(
            *("--tool", "{step}", "--xml", "--save", "{stem}.xml"),
            *("--destroy-on-device-error", "kernel"),  # go on after the first finding
        ),
        steps={
            # libraries try calls that the driver may refuse; a failed launch raises anyway
            "memcheck": ("--report-api-errors", "no"),
            "racecheck": (),
            "initcheck": (),
            "synccheck": (),
        },
        is_checker=True,
    ),
    Tool(
        "hta",
        "pip install HolisticTraceAnalysis",
        ".json",
        {"minimal": _once()},
        module="hta",
        steps={"0": ()},  # the rank: HTA reads a folder of traces
        hook="torch",
        ranks=True,
    ),
    Tool(
        "perf",
        "install your distribution's linux-perf (linux-tools)",
        ".txt",
        {
            "minimal": _once("--call-graph", "fp", PYTHONPERFSUPPORT="1"),
            "deep_dive": _once("--call-graph", "dwarf", PYTHONPERFSUPPORT="1"),
        },
        program="perf",
        min_version=(5, 10),
        command=(
            *("record", "--freq", "999", "--delay", "-1"),
            *("--control", "fifo:{scratch}/control,{scratch}/answered"),
            *("--output", "{stem}.perf"),
        ),
        report=("report", "--stdio", "--no-children", "--input", "{stem}.perf"),
        hook="perf",
        host=True,
    ),
)
TOOLS: Final = {tool.name: tool for tool in _TOOLS}

_REFUSALS: Final = {
    r"ERR_NVGPUCTRPERM|[Ii]nsufficient privilege": (
        "the driver keeps GPU counters for administrators (ERR_NVGPUCTRPERM): load nvidia with "
        "NVreg_RestrictProfilingToAdminUsers=0, or give the container CAP_SYS_ADMIN"
    ),
    r"driver resource was unavailable": (
        "another tool holds the GPU's counters: stop it (DCGM: dcgmi profile --pause)"
    ),
    r"error while loading shared libraries: (?P<what>[\w.+-]+)": (
        "it needs {what}: install the package that brings it (libdw1 and libelf1 for nsys)"
    ),
    r"perf_event_paranoid|No permission to enable": (
        "the kernel keeps perf events for administrators: set kernel.perf_event_paranoid to 2 or "
        "less, or give the container CAP_PERFMON"
    ),
    r"not supported on (this|the) (GPU|device)|Unsupported GPU|unsupported.*driver": (
        "this version does not know this GPU or driver: install a newer one"
    ),
}
"""Patterns in a tool's output where it may not or cannot work, and what to do; first match wins."""


def parse(text: str) -> tuple[Tool, str]:
    """Parse TOOL[:PRESET]; raise UsageError with the known ones."""
    name, _, preset = text.partition(":")
    tool = TOOLS.get(name)
    if tool is None:
        raise UsageError(f"no profiler {name!r}: known are {', '.join(TOOLS)}")
    preset = preset or "minimal"
    if preset not in tool.presets:
        raise UsageError(f"{name} has no preset {preset!r}: known are {', '.join(tool.presets)}")
    return tool, preset


@functools.cache
def find(name: str) -> str | None:
    """Return the path of a tool's program, None for a tool without one; raise ToolMissing."""
    tool = TOOLS[name]
    if tool.module and importlib.util.find_spec(tool.module) is None:
        raise ToolMissing(f"--profile={name} needs {tool.module}: {tool.install}")
    if not tool.program:
        return None
    path = program(tool.program)
    if path is None:
        raise ToolMissing(f"{tool.program} is not installed: {tool.install}")
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolMissing(f"{path} does not start ({error}): {tool.install}") from None
    output = done.stdout + done.stderr
    version = re.search(r"(\d+)\.(\d+)", output)
    if done.returncode or version is None:
        raise_if_refused(tool, output)
        raise ToolMissing(f"{path} --version fails: {tool.install}")
    if tuple(map(int, version.groups())) < tool.min_version:
        oldest = ".".join(map(str, tool.min_version))
        raise ToolMissing(
            f"{tool.program} {version[0]} is too old, {oldest} is needed: {tool.install}"
        )
    return path


def raise_if_refused(tool: Tool, output: str) -> None:
    """Raise ToolMissing if a tool printed that it may not work here, or cannot."""
    for pattern, advice in _REFUSALS.items():
        if match := re.search(pattern, output):
            raise ToolMissing(f"{tool.name} cannot work here: {advice.format(**match.groupdict())}")


@functools.cache
def program(name: str) -> str | None:
    """Find a program on PATH, in CUDA's packages and toolkit, or in an installation of Nsight."""
    if path := shutil.which(name):
        return path
    if name != "perf" and (path := find_in_packages(name)):
        return path
    ncu = shutil.which("ncu")
    homes = [*(Path(ncu).resolve().parents[:3] if ncu else ()), Path("/opt/nvidia")]
    for home in homes:
        for layout in ("bin", "target-linux-*", "host/target-linux-*"):
            for nsight in ("nsight-*/*", "nsight-*", "."):
                for file in sorted(home.glob(f"{nsight}/{layout}/{name}"), reverse=True):
                    return str(file)
    return None
