"""The profilers: how each is found, what stands in front of a call, and why it may refuse."""

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
from pytest_aiperf.machine.nvml import visible

from .ncu import NCU_SECTIONS, ncu_metrics
from .timeline import RANGE


@dataclass(frozen=True, slots=True)
class Fallback:
    """One way to run a preset; ``note`` says what it leaves out."""

    words: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A profiler.

    ``command`` stands in front of the captured process, and ``report`` prints what is read where
    the artefact itself cannot be. Each of ``steps`` is a run of its own, with words of its own.
    ``{stem}`` is the artefact's path without suffix, ``{step}`` the step, ``{scratch}`` a folder
    that lasts as long as it. ``inside`` names what works inside that process. A preset is a row of
    attempts: the next is made where the one before fails. What a tool that ``checks`` finds fails
    the claim. ``nothing`` is what it prints where no kernel ran, and leaves no artefact. One that
    knows ``ranks`` captures all processes of a claim of several GPUs.
    """

    name: str
    install: str
    suffix: str
    presets: Mapping[str, tuple[Fallback, ...]]
    program: str = ""
    least: tuple[int, int] = (0, 0)
    module: str = ""
    command: tuple[str, ...] = ()
    report: tuple[str, ...] = ()
    steps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    inside: Literal["", "torch", "proton", "memory", "perf"] = ""
    host: bool = False
    checks: bool = False
    nothing: str = ""
    ranks: bool = False


def _once(*words: str, **environ: str) -> tuple[Fallback, ...]:
    return (Fallback(words, environ),)


_LIBRARIES: Final = "--trace=cuda,nvtx,osrt,cublas,cudnn"
_NSYS: Final = (_LIBRARIES, "--cudabacktrace=all")
_UNSAMPLED: Final = ("--sample=none", "--cpuctxsw=none")
_PYTHON: Final = ("--sample=process-tree", "--python-sampling=true", "--python-backtrace=cuda")

TOOLS: Final = {
    tool.name: tool
    for tool in (
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
            least=(2023, 1),
            command=(
                "profile",
                "--capture-range=cudaProfilerApi",
                "--capture-range-end=stop",
                "--cuda-graph-trace=node",
                "--force-overwrite=true",
                "--output={stem}",
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
            least=(2022, 3),
            command=(
                *("--clock-control", "none"),
                *("--nvtx", "--nvtx-include", f"{RANGE}/"),
                *("--force-overwrite", "--export", "{stem}"),
            ),
            nothing="No kernels were profiled",
        ),
        Tool(
            "torch",
            "pip install torch",
            ".json",
            {"minimal": _once(), "deep_dive": _once()},
            module="torch",
            inside="torch",
            host=True,
            ranks=True,
        ),
        Tool(
            "proton",
            "pip install triton",
            ".hatchet",
            {"minimal": _once(), "deep_dive": _once()},
            module="triton",
            inside="proton",
        ),
        Tool(
            "memory",
            "pip install torch",
            ".json",
            {"minimal": _once(), "deep_dive": _once()},
            module="torch",
            inside="memory",
        ),
        Tool(
            "sanitizer",
            "install compute-sanitizer, a part of the CUDA toolkit",
            ".xml",
            {
                "minimal": (
                    # one allocation a tensor: else a tensor's end is its neighbour's beginning,
                    # and memory that is used a second time counts as initialised
                    Fallback((), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
                    Fallback(
                        note="with torch's caching allocator, which hides accesses beyond a tensor "
                        "(without it this arm does not run: it captures a graph, say)"
                    ),
                )
            },
            program="compute-sanitizer",
            least=(2022, 1),
            command=(
                *("--tool", "{step}", "--xml", "--save", "{stem}.xml"),
                *("--destroy-on-device-error", "kernel"),  # the first finding need not be the last
            ),
            steps={
                # libraries try what the driver may refuse; a launch that fails says so itself
                "memcheck": ("--report-api-errors", "no"),
                "racecheck": (),
                "initcheck": (),
                "synccheck": (),
            },
            checks=True,
        ),
        Tool(
            "hta",
            "pip install HolisticTraceAnalysis",
            ".json",
            {"minimal": _once()},
            module="hta",
            steps={"0": ()},  # the rank: HTA reads a folder of traces
            inside="torch",
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
            least=(5, 10),
            command=(
                *("record", "--freq", "999", "--delay", "-1"),
                *("--control", "fifo:{scratch}/control,{scratch}/answered"),
                *("--output", "{stem}.perf"),
            ),
            report=("report", "--stdio", "--no-children", "--input", "{stem}.perf"),
            inside="perf",
            host=True,
        ),
    )
}

# What a tool's own output says where it is not permitted, in the order in which it is looked for.
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


def chosen(text: str) -> tuple[Tool, str]:
    """Read TOOL[:preset]; Misuse names the known ones."""
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
    """Find a tool's program, None where it has none; ToolMissing says in a sentence what to do."""
    tool = TOOLS[name]
    if tool.module and importlib.util.find_spec(tool.module) is None:
        raise ToolMissing(f"--profile={name} needs {tool.module}: {tool.install}")
    if not tool.program:
        return None
    path = program(tool.program)
    if path is None:
        raise ToolMissing(f"{tool.program} is not here: {tool.install}")
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as why:
        raise ToolMissing(f"{path} does not start ({why}): {tool.install}") from None
    said = done.stdout + done.stderr
    version = re.search(r"(\d+)\.(\d+)", said)
    if done.returncode or version is None:
        refuse(tool, said)
        raise ToolMissing(f"{path} --version does not answer: {tool.install}")
    if tuple(map(int, version.groups())) < tool.least:
        least = ".".join(map(str, tool.least))
        raise ToolMissing(
            f"{tool.program} {version[0]} is too old, {least} is needed: {tool.install}"
        )
    return path


def refuse(tool: Tool, said: str) -> None:
    """Raise ToolMissing where a tool printed that it is not permitted, or cannot work here."""
    for pattern, sentence in _REFUSALS.items():
        if found := re.search(pattern, said):
            raise ToolMissing(
                f"{tool.name} cannot work here: {sentence.format(**found.groupdict())}"
            )


@functools.cache
def program(name: str) -> str | None:
    """Find a program: on PATH, in CUDA's packages and toolkit, in Nsight's own installations."""
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


def metrics(asked: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words that have ncu collect its usual metrics and those asked for."""
    arch = next((gpu.arch for gpu in visible()), "")  # a child runs on the first
    return ("--metrics", ",".join(ncu_metrics(arch, asked)))
