"""The profilers: how to find and start each, and what its error messages mean."""

import functools
import importlib.util
import itertools
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pytest_aiperf.build.sass import find_in_packages
from pytest_aiperf.errors import ToolMissing, UsageError

from . import injected
from .ncu import MAX_LAUNCHES
from .timeline import RANGE


@dataclass(frozen=True, slots=True)
class Invocation:
    """One way to run a preset."""

    arguments: tuple[str, ...] = ()  #: Arguments of the program.
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the profiled process."""
    note: str = ""  #: What this invocation cannot show; printed in reports.


@dataclass(frozen=True, slots=True)
class Tool:
    """A profiler.

    In ``command``, ``steps`` and ``report``, ``{stem}`` is the artifact's path without its suffix,
    ``{step}`` the name of the step, and ``{scratch}`` a folder that is deleted after the run.
    """

    name: str  #: Name in ``--profile=NAME``.
    install: str  #: How to install it.
    suffix: str  #: Suffix of the file that it writes (the artifact).
    presets: Mapping[str, tuple[Invocation, ...]]
    """Name of a preset to its invocations: if one fails, the next one is tried."""
    program: str = ""  #: Program to run; empty for a Python module.
    min_version: tuple[int, int] = (0, 0)  #: Oldest version of the program that works.
    module: str = ""  #: Python module that it needs, if any.
    command: tuple[str, ...] = ()  #: Arguments between the program and the profiled command.
    whole: tuple[str, ...] = ()
    """The same for a command that is profiled as it is, from its start to its end."""
    report: tuple[str, ...] = ()
    """Arguments with which the program prints its file as text, for files in its own format."""
    stacks: tuple[str, ...] = ()
    """Arguments with which the program prints the call stack of each sample, as `perf script` does;
    they are folded into a file with the suffix FOLDED."""
    further: Mapping[str, str] = field(default_factory=dict)
    """Further files of an arm: their suffix, and what they hold."""
    steps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Runs, by name, with their additional arguments; each writes a file to the same folder."""
    hook: Literal["", "torch", "proton", "memory", "perf"] = ""
    """The context manager of target.py in which the profiled process makes its calls."""
    host: bool = False  #: Whether it can profile claims that run on the host.
    is_checker: bool = False  #: Whether its findings fail the claim; a checker measures no time.
    no_kernels_message: str = ""
    """Message that it prints if no kernel ran; it then writes no file."""
    ranks: bool = False  #: Whether it can profile all ranks of a multi-GPU claim.


FOLDED: Final = (
    ".folded"  #: Suffix of a file with stacks in the form that flame graphs are made of.
)


def _single_invocation(*arguments: str, **environ: str) -> tuple[Invocation, ...]:
    return (Invocation(arguments, environ),)


_IN_PROCESS: Final = {"minimal": _single_invocation(), "deep_dive": _single_invocation()}
"""Presets without arguments, of profilers that a hook starts inside the profiled process."""
_LIBRARIES: Final = "--trace=cuda,nvtx,osrt,cublas,cudnn"
_NSYS: Final = (_LIBRARIES, "--cudabacktrace=all")
_NO_CPU_SAMPLING: Final = ("--sample=none", "--cpuctxsw=none")
_PYTHON_SAMPLING: Final = (
    "--sample=process-tree",
    "--python-sampling=true",
    "--python-backtrace=cuda",
)

_TOOLS: Final = (
    Tool(
        "nsys",
        "install NVIDIA Nsight Systems (it also comes with Nsight Compute)",
        ".nsys-rep",
        {
            "minimal": _single_invocation("--trace=cuda,nvtx", *_NO_CPU_SAMPLING),
            "deep_dive": (
                Invocation((*_NSYS, *_PYTHON_SAMPLING, "--gpu-metrics-devices=cuda-visible")),
                Invocation(
                    (*_NSYS, *_PYTHON_SAMPLING), note="without GPU metrics: not permitted here"
                ),
                Invocation(
                    (_LIBRARIES, *_NO_CPU_SAMPLING),
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
        whole=("profile", "--cuda-graph-trace=node", "--force-overwrite=true", "--output={stem}"),
        ranks=True,
    ),
    Tool(
        "ncu",
        "install NVIDIA Nsight Compute",
        ".ncu-rep",
        {
            "minimal": _single_invocation("--launch-count", f"{MAX_LAUNCHES}"),
            "deep_dive": _single_invocation("--set", "full", "--import-source", "yes"),
            "roofline": _single_invocation("--set", "roofline"),
        },
        program="ncu",
        min_version=(2022, 3),
        command=(
            *("--clock-control", "none"),
            # without a slash at its end, the name is that of a start/end range
            *("--nvtx", "--nvtx-include", RANGE),
            *("--force-overwrite", "--export", "{stem}"),
        ),
        whole=(
            *("--clock-control", "none", "--target-processes", "all"),
            *("--force-overwrite", "--export", "{stem}"),
        ),
        no_kernels_message="No kernels were profiled",
    ),
    Tool(
        "torch",
        "pip install torch",
        ".pt.trace.json",  # TensorBoard's profiler plugin looks for this suffix
        {**_IN_PROCESS, "operators": _single_invocation()},
        module="torch",
        hook="torch",
        host=True,
        ranks=True,
        further={injected.OPERATORS: "all operators"},
    ),
    Tool("proton", "pip install triton", ".hatchet", _IN_PROCESS, module="triton", hook="proton"),
    Tool("memory", "pip install torch", ".json", _IN_PROCESS, module="torch", hook="memory"),
    Tool(
        "sanitizer",
        "install compute-sanitizer, a part of the CUDA toolkit",
        ".xml",
        {
            "minimal": (
                # without the caching allocator, each tensor has an allocation of its own, so that
                # accesses beyond a tensor, and reads before the first write, are found
                Invocation((), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
                Invocation(
                    note="with torch's caching allocator, which hides accesses beyond a tensor "
                    "(without it this arm fails, for example because it captures a CUDA graph)"
                ),
            )
        },
        program="compute-sanitizer",
        min_version=(2022, 1),
        command=(
            *("--tool", "{step}", "--xml", "--save", "{stem}.xml"),
            *("--destroy-on-device-error", "kernel"),  # continue after the first finding
        ),
        whole=(
            *("--tool", "{step}", "--xml", "--save", "{stem}.xml"),
            *("--target-processes", "all", "--destroy-on-device-error", "kernel"),
        ),
        steps={
            # no API errors: libraries expect some, and a failed launch raises an exception anyway
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
        {"minimal": _single_invocation()},
        module="hta",
        steps={"0": ()},  # rank 0: HTA reads a folder with one trace per rank
        hook="torch",
        ranks=True,
    ),
    Tool(
        "perf",
        "install your distribution's linux-perf (linux-tools)",
        ".txt",
        {
            "minimal": _single_invocation("--call-graph", "fp", PYTHONPERFSUPPORT="1"),
            "deep_dive": _single_invocation("--call-graph", "dwarf", PYTHONPERFSUPPORT="1"),
        },
        program="perf",
        min_version=(5, 10),
        command=(
            *("record", "--freq", "999", "--delay", "-1"),
            *("--control", "fifo:{scratch}/control,{scratch}/ack"),
            *("--output", "{stem}.perf"),
        ),
        whole=("record", "--freq", "999", "--output", "{stem}.perf"),
        report=("report", "--stdio", "--no-children", "--input", "{stem}.perf"),
        # resolving inlined functions takes minutes
        stacks=("script", "--no-inline", "--fields", "comm,ip,sym", "--input", "{stem}.perf"),
        further={FOLDED: "stacks for a flame graph"},
        hook="perf",
        host=True,
    ),
)
TOOLS: Final = {tool.name: tool for tool in _TOOLS}

_REFUSALS: Final = {
    r"ERR_NVGPUCTRPERM|[Ii]nsufficient privilege": (
        "the driver reserves GPU counters for administrators (ERR_NVGPUCTRPERM): load the nvidia "
        "module with NVreg_RestrictProfilingToAdminUsers=0, or give the container CAP_SYS_ADMIN"
    ),
    r"driver resource was unavailable": (
        "another tool holds the GPU's counters: stop it (DCGM: dcgmi profile --pause)"
    ),
    r"error while loading shared libraries: (?P<what>[\w.+-]+)": (
        "it needs {what}: install the package that contains it (libdw1 and libelf1 for nsys)"
    ),
    r"perf_event_paranoid|No permission to enable": (
        "the kernel reserves perf events for administrators: set kernel.perf_event_paranoid to 2 "
        "or less, or give the container CAP_PERFMON"
    ),
    r"not supported on (this|the) (GPU|device)|Unsupported GPU|unsupported.*driver": (
        "this version does not support this GPU or driver: install a newer one"
    ),
}
"""Pattern of a failed tool's output to its cause and remedy; the first match counts."""


AUTOTUNING: Final = {"TRITON_PRINT_AUTOTUNING": "1"}
"""Variable of profiled processes with which Triton prints what its autotuner chooses."""
_AUTOTUNED: Final = re.compile(
    r"Triton autotuning for function (\S+),\n.*with key as (.*),\n.*finished after .*\n"
    r".*best config selected: (.*);"
)
"""What Triton prints; a launcher such as torchrun may put the name of a rank before each line."""
_CHOICES: Final = 20  #: Maximum number of choices that are listed: a model has some per kernel.


def autotuned(output: str) -> list[str]:
    """Describe what Triton's autotuner chose, for each kernel and key, from a process's output."""
    chosen = {
        f"autotuned {kernel} for {key}: {config}": None
        for kernel, key, config in _AUTOTUNED.findall(output)
    }
    return list(chosen)[:_CHOICES]


def parse(text: str) -> tuple[Tool, str]:
    """Parse TOOL[:PRESET]; an unknown name raises a UsageError that lists the known names."""
    name, _, preset = text.partition(":")
    tool = TOOLS.get(name)
    if tool is None:
        raise UsageError(f"unknown profiler {name!r}: choose one of {', '.join(TOOLS)}")
    preset = preset or "minimal"
    if preset not in tool.presets:
        raise UsageError(
            f"{name} has no preset {preset!r}: choose one of {', '.join(tool.presets)}"
        )
    return tool, preset


@functools.cache
def require_tool(name: str) -> str | None:
    """Return the path of a tool's program, or None if the tool is a Python module.

    Raise ToolMissing if the tool is not installed, does not start or is too old.
    """
    tool = TOOLS[name]
    if tool.module and importlib.util.find_spec(tool.module) is None:
        raise ToolMissing(f"--profile={name} needs {tool.module}: {tool.install}")
    if not tool.program:
        return None
    path = find_program(tool.program)
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
    """Raise ToolMissing if a tool's output says that it cannot work on this machine."""
    for pattern, advice in _REFUSALS.items():
        if match := re.search(pattern, output):
            raise ToolMissing(f"{tool.name} cannot work here: {advice.format(**match.groupdict())}")


def write_reports(tool: Tool, binary: str, stem: Path) -> None:
    """Have a program print the file that it wrote: as its report, and as folded stacks."""

    def command(arguments: Sequence[str]) -> list[str]:
        return [binary, *(word.format(stem=stem) for word in arguments)]

    quiet = subprocess.DEVNULL
    if tool.report:
        with Path(f"{stem}{tool.suffix}").open("wb") as report:
            subprocess.run(command(tool.report), stdout=report, stderr=quiet, check=False)
    if tool.stacks:
        # line by line: the samples of some minutes are gigabytes
        with subprocess.Popen(
            command(tool.stacks),
            stdout=subprocess.PIPE,
            stderr=quiet,
            encoding="utf-8",
            errors="replace",
        ) as samples:
            text = fold(samples.stdout or ())
        Path(f"{stem}{FOLDED}").write_text(text, encoding="utf-8")


def fold(lines: Iterable[str]) -> str:
    """Fold the samples that `perf script` prints: per stack, its frames from the root and a count.

    Each sample is a line with the name of the thread, then a line per frame from the innermost on,
    with an address and a symbol; an empty line ends it. The form is that of Brendan Gregg's
    stackcollapse-perf.pl.
    """
    stacks: Counter[str] = Counter()
    sample: list[str] = []
    for line in itertools.chain(lines, [""]):
        if line := line.strip().replace(";", ":"):
            sample.append(line)
            continue
        thread, *frames = sample or [""]
        if frames:
            symbols = (frame.split(maxsplit=1)[-1] for frame in reversed(frames))
            stacks[";".join([thread, *symbols])] += 1
        sample = []
    return "".join(f"{stack} {count}\n" for stack, count in sorted(stacks.items()))


@functools.cache
def find_program(name: str) -> str | None:
    """Find a program on PATH, in CUDA's pip packages or toolkit, or in an Nsight installation."""
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
