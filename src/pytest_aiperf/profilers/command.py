"""Profile a command as it is, with one tool after another, and read what the tools wrote."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from pytest_aiperf.errors import AiperfError, CaptureFailed, UsageError
from pytest_aiperf.machine.nvml import visible
from pytest_aiperf.machine.process_group import run_in_group
from pytest_aiperf.model import Profile
from pytest_aiperf.records.results import atomic_write, dumps, read_json
from pytest_aiperf.rules import roofline
from pytest_aiperf.schema import from_json, to_json

from . import injected, ncu, parsers, skew, timeline, tools
from .ranges import RangeTime
from .timeline import Reading, Selection
from .tools import Invocation, Tool

WHOLE: Final = "command"  #: Name of the profile of a command with one process on one GPU.
RECORD: Final = "capture.json"  #: Name of the file with everything that was read.
INTERRUPTED: Final = 130  #: Exit status of a command that Ctrl-C ended, as shells report it.
EXPIRED: Final = 124  #: Exit status of a command that its deadline ended, as timeout reports it.
CRASHES: Final = {
    128 + number: number.name
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
}
"""Exit status of a command that crashed, and the signal's name. A tool may crash a command, because
it loads libraries into it."""
GRACE_S: Final = 120.0
"""Seconds that a tool has to write its report after its command was interrupted: nsys needs about a
minute for a long timeline."""
_SHIM: Final = '"$@"; status=$?; echo $status > "$PYTEST_AIPERF_STATUS"; exit $status'
"""Shell script that keeps the command's exit status, because a tool may return one of its own."""
_FUNCTIONS_ONLY: Final = ("proton",)  #: Tools that need a range that only a function gives them.
_LISTED: Final = 40  #: Last lines of a command's output that are searched for an error message.


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """A command to profile with one tool."""

    tool: Tool
    preset: str  #: One of the tool's presets.
    folder: Path  #: Where artifacts and logs are written.
    command: tuple[str, ...]
    selection: Selection = timeline.ALL  #: Range and kernels that count.
    launch_skip: int = 0  #: Kernel launches that ncu skips, of those that the selection contains.
    launch_count: int | None = None  #: Kernel launches that ncu profiles; None is the preset's.
    metrics: tuple[str, ...] = ()  #: Further metrics that ncu collects.
    arguments: tuple[str, ...] = ()  #: Further arguments of the tool.
    deadline_s: float = math.inf  #: Seconds after which the command is interrupted.
    steps: tuple[int, int] | tuple[()] = ()
    """First step of the optimizer that PyTorch's profiler records, from 0, and the one after the
    last; empty for the whole run."""


@dataclass(frozen=True, slots=True)
class Part:
    """Figures of a tool about one process or GPU of a command."""

    profile: Profile
    ranges: tuple[RangeTime, ...] = ()  #: Time per range of the program.
    diagnosis: str = ""  #: What limits its speed.


@dataclass(frozen=True, slots=True)
class ToolCapture:
    """One run of a command under one tool."""

    tool: str
    preset: str
    log: str  #: Path of the file with the output of the command and of the tool.
    seconds: float  #: Duration of the run, which the tool slows down.
    status: int | None = None
    """Exit status of the command, 128 and the signal's number if one killed it; None if it did not
    run."""
    parts: tuple[Part, ...] = ()
    error: str = ""  #: Why there are no parts.


@dataclass(frozen=True, slots=True)
class CommandRecord:
    """A command under one or more tools."""

    command: tuple[str, ...]
    started: str  #: Time of the start, ISO 8601.
    gpus: tuple[str, ...]  #: Names of the GPUs of the machine.
    captures: tuple[ToolCapture, ...]


def check(request: CommandRequest) -> None:
    """Raise a UsageError if a request cannot be carried out, before anything runs."""
    tool = request.tool.name
    require_program(request.command[0])
    if tool in _FUNCTIONS_ONLY:
        raise UsageError(f"{tool} profiles functions only: name FILE.py::FUNCTION, or use nsys")
    if request.steps and tool != "torch":
        raise UsageError(f"--steps is for torch, not for {tool}")
    if (request.selection.nvtx or request.selection.kernel) and tool not in (
        "nsys", "ncu", "torch",
    ):  # fmt: skip
        raise UsageError(f"--nvtx and --kernel are for nsys, ncu and torch, not for {tool}")
    try:
        re.compile(request.selection.kernel)
    except re.error as error:
        raise UsageError(
            f"--kernel: {request.selection.kernel!r} is not a regular expression ({error})"
        ) from None


def require_program(name: str) -> None:
    """Raise a UsageError if a program cannot be run."""
    if shutil.which(name) is None:
        raise UsageError(f"{name} is not a program on PATH, nor the path of an executable file")


def run(
    request: CommandRequest,
    progress: Callable[[str], object],
    output: BinaryIO | None = None,
) -> ToolCapture:
    """Run a command under a tool and read what the tool wrote, also if the command fails.

    The output of the command goes to a log and, while it runs, to ``output``. If the tool cannot
    work or wrote nothing, the result has an error instead of parts.
    """
    started = time.monotonic()
    log = request.folder / f"{request.tool.name}.log"
    state = ToolCapture(request.tool.name, request.preset, os.path.relpath(log), 0.0)
    try:
        hooked = request.tool.hook in ("torch", "memory") and not request.tool.steps
        binary = None if hooked else tools.require_tool(request.tool.name)
        progress(f"{request.tool.name}: {shlex.join(request.command)}")
        *earlier, last = request.tool.presets[request.preset]
        note = ""
        for invocation in [*earlier, last]:
            status, error = _run_steps(request, invocation, binary, log, output)
            state = replace(state, status=status)
            # a tool that refuses to work ends before it starts the command
            if status is None and error and invocation is not last:
                continue
            if status is not None:
                progress(f"{request.tool.name}: reading its report")
            tried = replace(invocation, note=note or invocation.note)
            try:
                state = replace(state, parts=tuple(_parts(request, tried, binary, log, error)))
                break
            except CaptureFailed as failure:
                if status not in CRASHES:
                    raise
                crash = f"the command crashed ({CRASHES[status]})"
                if invocation is last:
                    raise CaptureFailed(
                        f"{crash} under {request.tool.name}, which recorded nothing: see whether "
                        f"it runs without a tool, then try another one ({failure})"
                    ) from None
                note = f"with fewer options of {request.preset}: {crash} with all of them"
                progress(f"{request.tool.name}: {crash} with these options; trying fewer")
    except AiperfError as failure:
        state = replace(state, error=str(failure))
    return replace(state, seconds=time.monotonic() - started)


def save(record: CommandRecord, folder: Path) -> Path:
    """Write a record into its folder, and return the file."""
    file = folder / RECORD
    atomic_write(file, f"{dumps(to_json(record), 'capture', indent=1)}\n")
    return file


def load(path: Path) -> CommandRecord:
    """Read a record, or the file of a profiler as the record of an unknown command.

    ``path`` is a folder with a capture or with runs of which the latest counts, its capture.json,
    or a file such as a.nsys-rep, b.sqlite, c.ncu-rep, d.json (a torch trace) or e.hatchet.
    """
    if path.is_dir():
        files = sorted(path.glob(RECORD)) or sorted(path.glob(f"*/{RECORD}"))
        if not (files := files or sorted(path.glob(f"*/*/{RECORD}"))):
            raise UsageError(f"{path} has no {RECORD}: name a folder that `capture` has printed")
        return load(files[-1])
    if path.name == RECORD:
        try:
            return from_json(CommandRecord, read_json(path))
        except ValueError as error:
            raise UsageError(f"{path} is not a record of `capture` ({error})") from None
    suffixes = {
        ".nsys-rep": "nsys", ".sqlite": "nsys", ".ncu-rep": "ncu", ".json": "torch",
        ".json.gz": "torch", ".hatchet": "proton",
    }  # fmt: skip
    tool = next((tool for end, tool in suffixes.items() if path.name.endswith(end)), None)
    if tool is None or not path.is_file():
        raise UsageError(
            f"{path} is neither a folder of a capture nor a profiler's file ({', '.join(suffixes)})"
        )
    binary = tools.find_program(tool) if path.suffix in (".nsys-rep", ".ncu-rep") else None
    request = CommandRequest(tools.TOOLS[tool], "minimal", path.parent, ())
    parts = tuple(
        _part(request, name, file, reading)
        for name, file, reading in _readings(request, path, binary)
    )
    return CommandRecord((), "", (), (ToolCapture(tool, "", "", 0.0, None, parts),))


def _run_steps(
    request: CommandRequest,
    invocation: Invocation,
    binary: str | None,
    log: Path,
    output: BinaryIO | None,
) -> tuple[int | None, str]:
    """Run the command once per step of the tool; return its status, and why it did not run."""
    request.folder.mkdir(parents=True, exist_ok=True)
    logs, statuses, why = [], [], ""
    for step in request.tool.steps or ("",) if binary else ("",):
        step_log = log.with_name(f"{log.stem}.{step}.log") if step else log
        status, why = _run_step(request, invocation, binary, step=step, log=step_log, output=output)
        statuses.append(status)
        logs.append(step_log)
        if status in (None, EXPIRED, INTERRUPTED):
            break
    if logs != [log]:
        log.write_bytes(b"".join(each.read_bytes() for each in logs))
    # the first step that fails counts, as it does for a sequence of commands
    return next((status for status in statuses if status), statuses[-1]), why


def _run_step(
    request: CommandRequest,
    invocation: Invocation,
    binary: str | None,
    *,
    step: str,
    log: Path,
    output: BinaryIO | None,
) -> tuple[int | None, str]:
    tool = request.tool
    stem = request.folder / tool.name / step if tool.steps and binary else _stem(request)
    stem.parent.mkdir(parents=True, exist_ok=True)
    for old in stem.parent.glob(f"{stem.name}.*"):
        if old != log and not tool.hook:
            old.unlink()
    with tempfile.TemporaryDirectory(prefix="pytest-aiperf-") as scratch:
        names = {"stem": str(stem), "step": step, "scratch": scratch}
        kept = Path(scratch, "status")
        environ = {**tools.AUTOTUNING, **os.environ, **invocation.environ}
        environ["PYTEST_AIPERF_STATUS"] = str(kept)
        words = [word.format_map(names) for word in (*tool.whole, *tool.steps.get(step, ()))]
        command = ["/bin/sh", "-c", _SHIM, "sh", *request.command]
        if binary:
            command = [binary, *words, *_arguments(request, invocation), *command]
        else:
            environ |= _injection(request, Path(scratch))
        echo = Echo(log, output)
        ended: int | None = INTERRUPTED
        with suppress(KeyboardInterrupt):
            ended = run_in_group(
                command, log, request.deadline_s, env=environ, on_poll=echo, grace_s=GRACE_S
            )
            ended = EXPIRED if ended is None else ended
        echo()
        if tool.report and binary:
            tools.write_reports(tool, binary, stem)
        text = kept.read_text().strip() if kept.exists() else ""
    if ended in (EXPIRED, INTERRUPTED):
        return ended, ""
    if text:
        return int(text), ""
    return None, f"it ended with exit status {ended} before it started the command"


class Echo:
    """Copies what is appended to a log to an output, at every call until its reader has ended."""

    def __init__(self, log: Path, output: BinaryIO | None) -> None:
        self._log = log
        self._output = output
        self._offset = 0

    def __call__(self) -> None:
        if self._output is None or not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._offset)
            if text := file.read():
                self._offset += len(text)
                try:
                    self._output.write(text)
                    self._output.flush()
                except OSError:  # its reader, such as head, has ended
                    self._output = None


def _stem(request: CommandRequest) -> Path:
    """Return the path of the tool's file without its suffix; for PyTorch it is a folder."""
    return request.folder / request.tool.name


def _injection(request: CommandRequest, scratch: Path) -> dict[str, str]:
    """Return the environment in which Python processes record themselves; see injected.py."""
    folder = _stem(request)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(injected.__file__, scratch / "sitecustomize.py")
    settings = {
        "hook": request.tool.hook,
        "folder": str(folder.absolute()),
        "preset": request.preset,
        "range": request.selection.nvtx,
        "steps": request.steps,
    }
    paths = [str(scratch), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), injected.VARIABLE: json.dumps(settings)}


def _arguments(request: CommandRequest, invocation: Invocation) -> list[str]:
    words = list(invocation.arguments)
    if request.tool.name == "ncu":
        if request.launch_count is not None and "--launch-count" in words:
            at = words.index("--launch-count")
            del words[at : at + 2]
        if request.launch_count is not None:
            words += ["--launch-count", str(request.launch_count)]
        if request.launch_skip:
            words += ["--launch-skip", str(request.launch_skip)]
        if name := request.selection.nvtx:
            # with a slash the name is that of a push/pop range, without one of a start/end range
            words += ["--nvtx", "--nvtx-include", name, "--nvtx-include", f"{name}/"]
        if kernel := request.selection.kernel:
            words += ["--kernel-name-base", "demangled", "--kernel-name", f"regex:{kernel}"]
        arch = next((gpu.arch for gpu in visible()), "")
        words += ["--metrics", ",".join(ncu.ncu_metrics(arch, request.metrics))]
    return [*words, *request.arguments]


def _parts(
    request: CommandRequest, invocation: Invocation, binary: str | None, log: Path, why: str
) -> Iterator[Part]:
    tool, output = request.tool, log.read_text(errors="replace")
    artifact = _stem(request)
    if not artifact.is_dir():
        artifact = Path(f"{artifact}{tool.suffix}")
    wrote = any(artifact.iterdir()) if artifact.is_dir() else artifact.is_file()
    if not wrote or (artifact.is_file() and not artifact.stat().st_size):
        shown = os.path.relpath(log)
        if tool.no_kernels_message and tool.no_kernels_message in output:
            raise CaptureFailed(
                f"{tool.name} profiled no kernel: the command runs none on the GPU, or none that "
                f"--nvtx, --kernel and --launch-skip select; see {shown}"
            )
        if not binary:
            on_gpu = " on the GPU" if tool.hook == "memory" or injected.has_gpu() else ""
            hint = f" for more than {request.steps[0]} steps" if request.steps else ""
            if on_gpu and tool.hook == "torch":
                hint = " (CUDA_VISIBLE_DEVICES= records a program that uses the CPU only)"
            raise CaptureFailed(
                f"{tool.name} captured nothing: no Python process of the command used PyTorch"
                f"{on_gpu}{hint}, or it ended without Python's exit handlers (os._exit, a signal, "
                f"python -I); see {shown}"
            )
        tools.raise_if_refused(tool, output)
        lines = [line.strip() for line in output.splitlines() if line.strip()][-_LISTED:]
        reason = next((line for line in lines if "error" in line.lower()), why or "no report")
        raise CaptureFailed(f"{tool.name} captured nothing ({reason[:300]}); see {shown}")
    notes = [*filter(None, [invocation.note]), *tools.autotuned(output)]
    for name, file, reading in _readings(request, Path(os.path.relpath(artifact)), binary):
        is_limited = "--launch-count" in invocation.arguments and request.launch_count is None
        if is_limited and reading.figures["kernels"][0] >= ncu.MAX_LAUNCHES:
            notes.append(
                f"only the first {ncu.MAX_LAUNCHES} kernels: select others with --kernel, "
                "--nvtx, --launch-skip and --launch-count"
            )
        stem = str(file).removesuffix(tool.suffix)
        files = {Path(f"{stem}{suffix}"): what for suffix, what in tool.further.items()}
        further = [f"{what}: {each}" for each, what in files.items() if each.exists()]
        read = reading._replace(notes=[*reading.notes, *notes, *further])
        yield _part(request, name, file, read)


def _part(request: CommandRequest, name: str, file: Path, reading: Reading) -> Part:
    profile = parsers.profile(request.tool.name, file, name or WHOLE, reading)
    hint = ""
    if profile.kernels:
        found = re.match(r"(?:void )?([\w:~]+)", profile.kernels[0])
        pattern = shlex.quote(found[1] if found else profile.kernels[0])
        hint = f"ncu with --kernel {pattern} shows what limits the longest kernel"
    return Part(profile, reading.ranges, roofline.diagnose_profile(profile, hint=hint))


def _readings(
    request: CommandRequest, artifact: Path, binary: str | None
) -> list[tuple[str, Path, Reading]]:
    """Read a tool's file, or folder: yield the name, file and figures of each process or GPU.

    The name is empty if there is a single one, or if the tool does not tell them apart.
    """
    selection = request.selection
    match request.tool.name:
        case "nsys":
            by_gpu = timeline.nsys_by_gpu(artifact, binary, selection)
            return [(name, artifact, reading) for name, reading in by_gpu.items()]
        case "ncu":
            counters = [(metric, "") for metric in request.metrics]
            reading = Reading(*ncu.ncu(artifact, counters, binary))
            reading.notes.extend(ncu.lacking(request.metrics, reading.figures))
            return [("", artifact, reading)]
        case "torch":
            found = _by_process(artifact, lambda file: timeline.torch_trace(file, selection))
            return _with_skew(found)
        case "memory":
            return _by_process(artifact, parsers.memory)
        case other:
            others: Mapping[str, Callable[[Path], Reading]] = {
                "hta": parsers.hta, "sanitizer": parsers.sanitizer, "perf": parsers.perf,
                "proton": parsers.proton,
            }  # fmt: skip
            return [("", artifact, others[other](artifact))]


def _by_process(folder: Path, read: Callable[[Path], Reading]) -> list[tuple[str, Path, Reading]]:
    """Read the file of each process, of those that used the GPU if any did.

    A note names the ranks whose file has no figures, for example because the disk was full.
    """
    if folder.is_file():
        return [("", folder, read(folder))]
    readings, left_out = [], []
    error: CaptureFailed | None = None
    for file in sorted(folder.glob("*.json"), key=lambda file: (len(file.stem), file.stem)):
        name = file.name.partition(".")[0]
        name = f"rank {name}" if name.isdecimal() else name.replace("pid", "pid ")
        try:
            readings.append((name, file, read(file)))
        except CaptureFailed as failure:
            error = failure
            if name.startswith("rank "):
                left_out.append(f"{name} is left out: {failure}")
    if not readings and error is not None:
        raise error
    found = [each for each in readings if each[2].kernels] or readings
    if left_out:
        found[0][2].notes.extend(left_out)
        return found
    return [("", *found[0][1:])] if len(found) == 1 else found


def _with_skew(
    readings: list[tuple[str, Path, Reading]],
) -> list[tuple[str, Path, Reading]]:
    """Add how long each rank waits for the others, and for which one, to the readings of ranks."""
    ranks = {name: file for name, file, _ in readings if name.startswith("rank ")}
    if (found := skew.of(ranks)) is None:
        return readings
    for name, _, reading in readings:
        if name in found.waits:
            reading.figures["waits for ranks"] = (found.waits[name], "s")
    readings[0][2].notes.append(str(found))
    return readings


def name_of(command: Sequence[str]) -> str:
    """Return a short name for a command: its script, or else its program."""
    return Path(next((word for word in command if word.endswith(".py")), command[0])).stem
