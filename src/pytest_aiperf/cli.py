"""The commands of `python -m pytest_aiperf`."""

import argparse
import inspect
import itertools
import math
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, get_args

from . import __version__
from .build import nvcc
from .doctor import bundle, triage
from .doctor import clean as artifacts
from .doctor import doctor as diagnosis
from .errors import AiperfError, InvalidMeasurement, UsageError
from .judge import judging
from .limits import ceilings as limits
from .limits import link_survey
from .machine import environment
from .machine.gpu_lock import GpuLock
from .machine.nvml import visible
from .model import Outcome, PrecisionName
from .profilers import capture as profiler
from .profilers import command as command_profiler
from .profilers import ncu, summary, target, tools
from .profilers.timeline import Selection
from .records import comparison, expectations, journal, shards
from .records.results import atomic_write, document, document_text, dumps, read_json, read_results
from .report import formatting, markdown, page, side_by_side, spreadsheet, terminal
from .schema import to_json
from .session.cuda_machine import CudaMachine, measurable_gpus
from .session.session import RUNS
from .text import si

DONE = 0  #: Exit status of a command that found no problem.
FAILED = 1  #: Exit status of a command that found a problem, such as a regression.
WRONG = 2  #: Exit status if an argument, a file or this machine is not usable.
UNREAD = 128 + signal.SIGPIPE
"""Exit status if nobody reads what is printed, as shells report programs that SIGPIPE ends."""

GITHUB_ACTION = "github-action-benchmark"  #: A format of `report`.
FUNCTION_DEADLINE_S = 300.0
"""Time limit of `capture` for a function: warm-up and a few calls take seconds, and a function that
hangs under a profiler is not noticed otherwise."""
MODULE = "python -m pytest_aiperf"  #: What messages and help call this command line.
DISTRIBUTIONS = {"prove": "selfcheck", **dict.fromkeys(("gate", "drift", "history"), "nightly")}
"""Commands of other distributions, and the folder of each distribution in the repository."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status.

    An AiperfError is printed without a traceback. SIGTERM, which batch systems and `timeout` send,
    ends a command as Ctrl-C does, and with it the programs that it has started. A command whose
    output goes to a program that has ended, such as `head`, ends without a message.
    """
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout:  # None if the file descriptor is closed
                sys.stdout.flush()  # Python's own flush at exit would only print its error
    except BrokenPipeError:
        # what is still buffered is written at exit, and would fail again
        with Path(os.devnull).open("wb") as nowhere:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                os.dup2(nowhere.fileno(), stream.fileno())
        return UNREAD


def _run(arguments: Sequence[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    command = words[0] if words else ""
    words, profiled = _split(words)
    parser, problems = _parser(command)
    try:
        if command in problems:
            raise UsageError(problems[command])
        given, unknown = parser.parse_known_args(words, argparse.Namespace(profiled=profiled))
        if unknown:
            follows = command == "capture" and "; a command to profile follows --: capture TOOL -- "
            parser.error(f"unrecognized arguments: {shlex.join(unknown)}{follows or ''}")
        with _sigterm_as_ctrl_c():
            return int(given.run(given))
    except AiperfError as error:
        sys.stderr.write(f"{command}: {error}\n")
        return WRONG
    except KeyboardInterrupt:
        sys.stderr.write(f"{command}: interrupted\n")
        return command_profiler.INTERRUPTED


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Have SIGTERM raise KeyboardInterrupt."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Command(argparse.ArgumentParser):
    """Parser of a command, whose options may stand before, between and after other arguments.

    argparse itself would take an optional argument as left out once it meets an option before it.
    """

    _is_nested = False

    def parse_known_args(  # type: ignore[override]  # argparse's own types are overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if self._is_nested:
            return super().parse_known_args(args, namespace)
        self._is_nested = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_nested = False


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split off the command that `capture` or `doctor` runs: what follows the first "--"."""
    if words[:1] not in (["capture"], ["doctor"]) or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _parser(command: str) -> tuple[argparse.ArgumentParser, Mapping[str, str]]:
    """Return the parser, and the reason why each unavailable command cannot run.

    Commands of other distributions are loaded only if ``command`` is not defined in this file.
    """
    parser = argparse.ArgumentParser(
        prog="pytest-aiperf" if Path(sys.argv[0]).stem == "pytest-aiperf" else MODULE,
        description="Inspect this machine and work with results. `pytest` measures claims.",
        epilog="Exit status: 0 done; 1 the command found a problem, such as a regression (see the "
        "help of each command); 2 an argument, a file or this machine is not usable.",
    )
    parser.add_argument("--version", action="version", version=f"pytest-aiperf {__version__}")
    subcommands = parser.add_subparsers(
        dest="name", metavar="COMMAND", required=True, parser_class=_Command
    )
    add = _command(subcommands, doctor)
    add("--bundle", metavar="FILE.tar.gz", type=Path, help="also write an archive for bug reports")
    add("--links", action="store_true", help="also try an all-reduce over all GPUs with NCCL")
    text = "with --bundle: also try each profiler on a matrix product"
    add("--capture", action="store_true", help=text)
    text = "with --bundle: also run the command after `--`; add its exit status and last output"
    add("--run", action="store_true", dest="runs_command", help=text)
    text = "interrupt the command after this time (default: never)"
    add("--deadline", metavar="SECONDS", type=_seconds, default=math.inf, help=text)
    add = _command(subcommands, ceilings)
    add("--fresh", action="store_true", help="measure again, even if a measurement is cached")
    add("--links", action="store_true", help="also survey the links: each pair of GPUs, all sizes")
    text = "also write the limits as JSON, with the GPU's model but not its UUID"
    add("--json", metavar="FILE", type=Path, help=text)
    _add_capture(subcommands)
    _add_views(subcommands)
    add = _command(subcommands, accept)
    add("measured", metavar="RESULTS.json", type=Path, help="the results of a run, or its folder")
    text, default = "the file to update (default: %(default)s)", Path("expectations.yaml")
    add("--expectations", metavar="PATH", type=Path, default=default, help=text)
    text = "the folder of accepted results, one file per kind of machine (default: %(default)s)"
    add("--results", metavar="DIR", type=Path, default=Path("results"), help=text)
    add("--dry-run", action="store_true", help="show what would change, and write nothing")
    add = _command(subcommands, merge)
    text = "the results of each shard, or the folder of its run"
    add("parts", metavar="RESULTS.json", type=Path, nargs="+", help=text)
    add("-o", "--output", metavar="FILE", type=Path, required=True, help="file to write")
    add = _command(subcommands, complete)
    add("runs", metavar="DIR", type=Path, nargs="+", help="folders with the runs of all shards")
    add = _command(subcommands, clean)
    add("--dry-run", action="store_true", help="list what would be removed, and remove nothing")
    _add_judge(subcommands)
    commands, broken = subcommands.choices, {}
    for name in ("doctor", "capture"):  # argparse never sees what _split takes off
        usage = re.sub(r"\x1b\[[\d;]*m", "", commands[name].format_usage())  # Python 3.14 colors it
        usage = usage.removeprefix("usage: ").rstrip()
        commands[name].usage = f"{usage} [-- COMMAND ...]".replace("%", "%%")
    if command not in commands:
        for entry in entry_points(group="pytest_aiperf.commands"):
            try:
                entry.load()(subcommands)
            except Exception as error:  # noqa: BLE001  a broken command must not stop the others
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
                broken[entry.name] = f"{entry.value} cannot be loaded ({why}); install it again"
    text = "not installed; install it from a clone: pip install ./"
    absent = {name: f"{text}{at}" for name, at in DISTRIBUTIONS.items() if name not in commands}
    return parser, absent | broken


def _add_capture(subcommands: Any) -> None:
    add = _command(subcommands, capture)
    text = f"{', '.join(tools.TOOLS)} (proton: functions only); several (nsys,ncu) run in turn"
    add("tool", metavar="TOOL[:PRESET]", nargs="?", default="", help=text)
    text = "a function without parameters, instead of `-- COMMAND ...`"
    add("function", metavar="FILE.py::FUNCTION", nargs="?", default="", help=text)
    text = "number of calls of the function to profile (default: %(default)s)"
    add("--calls", metavar="N", type=_count, default=1, help=text)
    text = "time limit per tool (default: 300 for a function, none for a command)"
    add("--deadline", metavar="SECONDS", type=_seconds, help=text)
    text = (
        "record only launches in the command's NVTX ranges or record_function blocks of this name"
    )
    add("--nvtx", metavar="RANGE", default="", help=text)
    text = "record only kernels of a command whose names contain a match of this regular expression"
    add("--kernel", metavar="REGEX", default="", help=text)
    text = "torch: record only the optimizer steps A to B-1 of a command, counted from 0"
    add("--steps", metavar="A:B", type=_steps, default=(), help=text)
    text = "ncu: skip the first N kernels that --nvtx and --kernel select"
    add("--launch-skip", metavar="N", type=int, default=0, help=text)
    text = "ncu: number of kernels of a command to profile (default: that of the preset)"
    add("--launch-count", metavar="N", type=int, help=text)
    text = "ncu: further metrics, separated by commas"
    add("--metrics", metavar="A,B", default="", help=text)
    text = "the folder for the files of the tools (default: %(default)s)"
    add("--artifacts", metavar="DIR", type=Path, default=Path(profiler.ARTIFACTS), help=text)
    text = "further arguments of the tool, for a command, as in --tool-args='--delay=30'"
    add("--tool-args", metavar="ARGS", default="", help=text)
    text = "compare two existing captures: their folders, or files that profilers wrote"
    add("--compare", metavar=("BEFORE", "AFTER"), nargs=2, type=Path, help=text)
    text = "show an existing capture: its folder, or a file that a profiler wrote"
    add("--read", metavar="CAPTURE", type=Path, help=text)
    text = "with --compare or --read: also write a Markdown file"
    add("-o", "--output", metavar="FILE.md", type=Path, help=text)


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B with A < B, such as 3:6")
    return int(found[1]), int(found[2])


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise argparse.ArgumentTypeError(f"{text} is not a time above 0")


def _count(text: str) -> int:
    with suppress(ValueError):
        if (count := int(text)) > 0:
            return count
    raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")


def _seed(text: str) -> int:
    with suppress(ValueError):
        if 0 <= (seed := int(text)) < 1 << 63:  # torch takes no more bits, numpy nothing negative
            return seed
    raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 2**63 - 1")


def _add_views(subcommands: Any) -> None:
    """Add the commands that show results."""
    add = _command(subcommands, report)
    text = "a results.json, or the folder of a run or of runs"
    add("results", metavar="RESULTS", type=Path, nargs="+", help=text)
    text = f"{GITHUB_ACTION}: for that action's tool customBiggerIsBetter (default: %(default)s)"
    add("--format", choices=("html", "md", "csv", GITHUB_ACTION), default="html", help=text)
    text = "file to write (default: report.html; other formats: stdout)"
    add("-o", "--output", metavar="FILE", type=Path, help=text)
    add("--title", default="pytest-aiperf report", help="title of the page (default: %(default)s)")
    add = _command(subcommands, compare)
    add("old", metavar="OLD", type=Path, help="a results.json, or the folder of a run or of runs")
    add("new", metavar="NEW", type=Path, help="the same for a later run")
    text = "md for the comment of a pull request (default: %(default)s)"
    add("--format", choices=("text", "md", "csv"), default="text", help=text)
    add("--html", metavar="FILE", type=Path, help="also write both runs side by side")


def _add_judge(subcommands: Any) -> None:
    add = _command(subcommands, judge)
    add("problem", metavar="PROBLEM", type=Path, help="a problem's file, or a folder of pairs")
    text = "the solution to judge; with a folder of problems, the folder of their solutions"
    add("solution", metavar="SOLUTION", type=Path, nargs="?", help=text)
    add("--cpu", action="store_true", help="measure on the host, even if there is a GPU")
    add("--gpu", action="store_true", help="measure on the GPU, and fail without one")
    text = "device: GPU time; wall: what a caller waits (default: device; wall on the host)"
    add("--metric", choices=("device", "wall"), help=text)
    add("--quick", action="store_true", help="fewer replicates, wider intervals")
    text = "precision in which a solution may compute, if the problem states no tolerance"
    add("--tolerance", choices=get_args(PrecisionName), help=text)
    text = "the widest tolerance that counts, whatever a problem states (default: %(default)s)"
    add("--cap", choices=get_args(PrecisionName), default="bf16", help=text)
    text = "time limit of a pair (default: %(default)s)"
    add("--deadline", metavar="SECONDS", type=_seconds, default=600, help=text)
    add("--seed", metavar="N", type=_seed, help="seed of inputs and weights (default: random)")
    text = "number of pairs to load and check at the same time (default: %(default)s)"
    add("-n", metavar="N", type=_count, default=1, dest="processes", help=text)
    add("--json", action="store_true", help="print JSON: an object, or a list for a folder")


def _command(
    subcommands: Any, run: Callable[[argparse.Namespace], int]
) -> Callable[..., argparse.Action]:
    """Add a command that calls ``run`` and shows its docstring as help; return ``add_argument``."""
    text = inspect.getdoc(run) or ""
    parser = subcommands.add_parser(
        run.__name__, help=text.partition("\n")[0].rstrip("."), description=text
    )
    parser.set_defaults(run=run)
    add: Callable[..., argparse.Action] = parser.add_argument
    return add


def doctor(given: argparse.Namespace) -> int:
    """Show what works on this machine, and how to fix the rest.

    Exit status 1 if something is broken; a missing optional tool does not count. The archive of
    `--bundle` contains neither the machine's nor the user's name, and no secrets from the
    environment. `doctor --bundle FILE.tar.gz --run -- COMMAND ...` adds the exit status of a
    command and the last lines of each rank, without what looks like a secret: read them before
    you send the archive. The exit status is then that of the command, unless that is 0.
    """
    for option, is_given in (("capture", given.capture), ("run", given.runs_command)):
        if is_given and not given.bundle:
            raise UsageError(f"--{option} adds to an archive: name one with --bundle FILE.tar.gz")
    if given.runs_command != bool(given.profiled):
        raise UsageError("name a command: doctor --bundle FILE.tar.gz --run -- COMMAND ...")
    if given.deadline != math.inf and not given.runs_command:
        raise UsageError("--deadline is for the command of --run")
    if given.runs_command:
        command_profiler.require_program(given.profiled[0])
    host = diagnosis.Host()
    checks = diagnosis.checks(host, links=given.links)
    _print(checks)
    status = DONE
    if given.bundle:
        files = bundle.contents(host, checks, capture=given.capture)
        if given.runs_command:
            bundle.write(given.bundle, files)  # a place that cannot be written is an error now
            uuids: list[str] = []
            with suppress(AiperfError):  # the checks have shown it
                uuids = [gpu.uuid for gpu in host.gpus()]
            ended, status = triage.run(
                given.profiled,
                host.environ,
                environment.private(host.environ),
                given.deadline,
                sys.stderr.buffer,
                uuids=uuids,
            )
            files |= ended
            sys.stdout.write(f"the command ended with exit status {status}\n")
        bundle.write(given.bundle, files)
        sys.stdout.write(f"written: {given.bundle}\n")
    if status:
        return status
    return FAILED if any(c.state == diagnosis.State.BROKEN for c in checks) else DONE


def ceilings(given: argparse.Namespace) -> int:
    """Measure the limits of this machine's GPU and print them beside its datasheet.

    Each limit is measured once per GPU, driver and torch version, on random data; the fastest
    block counts. A matrix rate is the higher of two: in short bursts at full clocks, and in
    sustained work under the power cap. With several GPUs, the first GPU and all links are measured.
    `--links` adds the rate and the latency of copies between each two GPUs, and the time of
    collectives from 1 KiB to 1 GiB.
    """
    gpus = measurable_gpus(CudaMachine())
    if given.links and len(gpus) < 2:
        raise UsageError("--links is for machines with several GPUs")
    survey = None
    with GpuLock([g.uuid for g in gpus], on_wait=_progress).exclusive_host():
        device = CudaMachine().open_device(gpus[0])
        names = (*limits.DEVICE, *limits.HOST)
        figures = limits.get(device, names, _progress, fresh=given.fresh)
        if len(gpus) > 1:
            try:
                figures |= limits.get_links(gpus, _progress, fresh=given.fresh)
            except InvalidMeasurement as error:
                _progress(str(error))
        if given.links:
            _progress(f"surveying the links of {len(gpus)} GPUs")
            survey = link_survey.survey(len(gpus))
    assert device.gpu is not None
    _print([device.gpu.name, *limits.table(figures, device.gpu.key)])
    if survey:
        _print(link_survey.lines(survey))
    if given.json:
        record = limits.record(device.gpu, figures)
        record |= {"links": to_json(survey)} if survey else {}
        text = dumps(record, "ceilings", indent=1)
        atomic_write(given.json, f"{text}\n")
    return DONE


def _progress(line: str) -> None:
    with suppress(OSError):  # a pipe whose reader has ended is no reason to lose what is captured
        sys.stderr.write(f"{line}\n")


def capture(given: argparse.Namespace) -> int:
    """Profile a command as it is, or a function of your own.

    `capture TOOL -- COMMAND ...` runs a command, such as `python train.py`, `torchrun
    --nproc-per-node=2 train.py` or `./binary`, from its start to its end under the tool, with all
    of its processes. The exit status is that of the command; what was recorded before a failure is
    shown. `capture TOOL FILE.py::FUNCTION` calls a function, first to warm up, then inside a range
    named "aiperf", whose figures are shown. Artifacts, the output of the tools and a summary in
    Markdown go to artifacts/, or to the folder of --artifacts.
    """
    if given.compare or given.read:
        return _show_captures(given)
    chosen = [tools.parse(spec) for spec in given.tool.split(",") if spec]
    if not chosen or bool(given.function) == bool(given.profiled):
        usage = "capture TOOL -- COMMAND ..., capture TOOL FILE.py::FUNCTION or capture --compare"
        raise UsageError(f"name what to profile: {usage} BEFORE AFTER (capture --help)")
    if len({tool.name for tool, _ in chosen}) < len(chosen):
        raise UsageError(f"{given.tool} names a tool twice: run `capture` once per preset")
    of_ncu = _given(given, "launch_skip", "launch_count", "metrics")
    if of_ncu and all(tool.name != "ncu" for tool, _ in chosen):
        raise UsageError(f"{of_ncu} is for ncu, not for {given.tool}")
    if given.profiled:
        return _capture_command(given, chosen)
    return _capture_function(given, chosen)


def _capture_function(given: argparse.Namespace, chosen: Sequence[tuple[tools.Tool, str]]) -> int:
    """Profile a function under one tool after another."""
    if unused := _given(given, "nvtx", "kernel", "launch_skip", "launch_count",
                        "tool_args", "steps"):  # fmt: skip
        raise UsageError(f"{unused} is for a command: capture {given.tool} -- python FILE.py")
    job = target.job_from(os.environ)
    path, _, name = given.function.partition("::")
    if not name:
        raise UsageError(
            f"{path} names no function: write FILE.py::FUNCTION, or a command after --, such as "
            f"capture {given.tool} -- python FILE.py"
        )
    if job is not None:  # only the process under the profiler has a job
        gpus = CudaMachine().gpus()[:1]
        device = CudaMachine().open_device(gpus[0] if gpus else None)
        send = target.sender(job)
        lock = GpuLock(
            [g.uuid for g in gpus],
            on_wait=lambda _: send("waiting"),
            on_acquired=lambda: send("working"),
        )
        target.perform(job, device, lock, lambda: (_function(Path(path), name), None))
        return DONE
    run = journal.new_run_id(datetime.now(UTC), os.getpid())
    folder = profiler.run_folder(given.artifacts.absolute(), run) / profiler.folder_name(name)
    deadline_s = given.deadline or FUNCTION_DEADLINE_S
    metrics = _metrics(given)
    kernels = profiler.ExpectedKernels(counters=tuple((metric, "") for metric in metrics))
    status = DONE
    for tool, preset in chosen:
        spec = f"{tool.name}:{preset}"
        command = (sys.executable, "-m", "pytest_aiperf", "capture", spec, given.function)
        request = profiler.CaptureRequest(
            tool, preset, folder, command, deadline_s, given.calls, setting="--deadline"
        )
        try:
            profile, _ = profiler.capture(request, "call", kernels)
        except AiperfError as error:  # the next tool may work
            _progress(f"capture: {error}")
            status = WRONG
        else:
            if tool.name == "ncu":
                notes = (*profile.notes, *ncu.lacking(metrics, profile.figures))
                profile = replace(profile, notes=notes)
            _print(terminal.profile(name, [profile]))
    return status


def _metrics(given: argparse.Namespace) -> tuple[str, ...]:
    return tuple(filter(None, given.metrics.split(",")))


def _given(given: argparse.Namespace, *names: str) -> str:
    """Return the first of these options that the user has given; "" if none."""
    return next((f"--{name.replace('_', '-')}" for name in names if getattr(given, name)), "")


def _capture_command(given: argparse.Namespace, chosen: Sequence[tuple[tools.Tool, str]]) -> int:
    """Profile a command under one tool after another; return the command's exit status."""
    if given.tool_args and len(chosen) > 1:
        raise UsageError(f"--tool-args is for one tool, and {given.tool} are {len(chosen)}")
    if given.calls != 1:
        raise UsageError("--calls is for a function: capture TOOL FILE.py::FUNCTION")
    if given.launch_skip < 0 or (given.launch_count is not None and given.launch_count < 1):
        raise UsageError("--launch-skip takes a number from 0 on, --launch-count one from 1 on")
    started = datetime.now(UTC)
    name = command_profiler.name_of(given.profiled)
    root = given.artifacts.absolute() / journal.new_run_id(started, os.getpid())
    requests = [
        command_profiler.CommandRequest(
            tool,
            preset,
            root / profiler.folder_name(name),
            tuple(given.profiled),
            Selection(given.nvtx, given.kernel),
            given.launch_skip,
            given.launch_count,
            _metrics(given),
            tuple(shlex.split(given.tool_args)),
            given.deadline or math.inf,
            given.steps,
        )
        for tool, preset in chosen
    ]
    for request in requests:
        command_profiler.check(request)
    folder = profiler.run_folder(root.parent, root.name) / profiler.folder_name(name)
    gpus = tuple(gpu.name for gpu in visible())
    captures: list[command_profiler.ToolCapture] = []
    for request in requests:
        captures.append(command_profiler.run(request, _progress, sys.stderr.buffer))
        record = command_profiler.CommandRecord(
            tuple(given.profiled), started.isoformat(timespec="seconds"), gpus, tuple(captures)
        )
        command_profiler.save(record, folder)  # after each tool: a later one may be killed
        sections = list(summary.capture(record))
        atomic_write(folder / "summary.md", summary.markdown(summary.heading(record), sections))
        if captures[-1].status == command_profiler.INTERRUPTED:
            break
    _print(["", *summary.text(sections), f"written: {os.path.relpath(folder / 'summary.md')}"])
    if failed := next((each.status for each in captures if each.status), 0):
        return failed
    if any(each.error for each in captures):
        return WRONG
    found = [part.profile.figures.get("findings", 0) for each in captures for part in each.parts]
    return FAILED if any(found) else DONE


def _show_captures(given: argparse.Namespace) -> int:
    """Show a capture, or two side by side."""
    option = "--compare" if given.compare else "--read"
    if given.tool or given.profiled:
        raise UsageError(f"{option} shows what was captured and runs nothing: leave out the tool")
    if given.compare and given.read:
        raise UsageError("--read shows one capture, --compare two: leave one of them out")
    paths = dict(zip(("before", "after"), given.compare or (), strict=False))
    paths = paths or {"capture": given.read}
    records = [command_profiler.load(path) for path in paths.values()]
    sections = list((summary.comparison if given.compare else summary.capture)(*records))
    heads = [
        f"{label}: {path}" + (f" ({line})" if (line := summary.heading(record)) else "")
        for (label, path), record in zip(paths.items(), records, strict=True)
    ]
    _print([*heads, "", *summary.text(sections)])
    if given.output:
        atomic_write(given.output, summary.markdown(", ".join(heads), sections))
        sys.stdout.write(f"written: {given.output}\n")
    return DONE


def _function(path: Path, name: str) -> Callable[[], object]:
    spec = spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        problem = "is not a Python file" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}: name FILE.py::FUNCTION")
    sys.path.insert(0, str(path.parent))  # the file can import its neighbors
    sys.modules[path.stem] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[], object] | None = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{path} has no function {name!r}: name FILE.py::FUNCTION")
    return function


def report(given: argparse.Namespace) -> int:
    """Write the results of one or more runs as an HTML page, Markdown, CSV or for another tool.

    RESULTS is a results file, the folder of one run or of many (the latest counts), or a folder of
    accepted results.

    Explanations and code are read from the tests and kernels below the current folder.
    """
    files = [file for path in given.results for file in _results_files(path)]
    results = [result for file in files for result in read_results(file)]
    output = given.output
    if given.format == "md":
        text = markdown.markdown(results, Path.cwd())
    elif given.format == "csv":
        text = spreadsheet.results(results)
    elif given.format == GITHUB_ACTION:
        text = terminal.github_action_benchmark(results)
    else:
        output = output or Path("report.html")
        content = read_json(files[0])
        machine = {"commit": content.get("commit_info")}
        if isinstance(info := content.get("machine_info"), dict):
            machine |= info
        text = page.page(
            results,
            machine,
            given.title,
            root=Path.cwd(),
            folder=output.parent,
            data=files,
            address=page.source_address(Path.cwd(), machine),
        )
    if output:
        atomic_write(output, text)
        sys.stdout.write(f"written: {output}\n")
    else:
        sys.stdout.write(text)
    return DONE


def compare(given: argparse.Namespace) -> int:
    """Compare two runs claim by claim, within the same kind of GPU.

    OLD and NEW are results files, folders of one run or of many (the latest counts), or a folder of
    accepted results. Exit status 1 if a claim has regressed, or if the runs share no claim.
    """
    old, new = (
        [result for file in _results_files(path) for result in read_results(file)]
        for path in (given.old, given.new)
    )
    changes = comparison.changes(old, new)
    if given.html:
        atomic_write(given.html, side_by_side.page(old, new))
    stack = [f"differs: {line}" for line in comparison.stack_changes(old, new)]
    count = Counter(change.state.value for change in changes)
    counts = ", ".join(f"{n} {state}" for state, n in count.items()) or "no claims"
    if is_apart := not {(r.claim, r.key) for r in old} & {(r.claim, r.key) for r in new}:
        counts += "; the two runs have no claim on the same kind of GPU in common"
    if given.format == "md":
        sys.stdout.write(markdown.comparison(changes, stack, counts))
    elif given.format == "csv":
        sys.stdout.write(spreadsheet.changes(changes))
    else:
        rows = []
        for change in changes:
            ratio = f"  {change.ratio}" if change.ratio else ""
            why = f"  ({change.why})" if change.why else ""
            rows.append(f"{change.state:<12}  {change.key}  {change.claim}{ratio}{why}")
        _print([*stack, *rows, counts])
    return FAILED if count[comparison.State.REGRESSED] or is_apart else DONE


def _results_files(path: Path) -> list[Path]:
    """Find a results file, that of the latest run in a folder, or the accepted ones of a folder."""
    latest = Path("latest", "results.json")
    for file in (path, path / "results.json", path / latest, path / RUNS / latest):
        if file.is_file():
            return [file]
    if runs := sorted(path.glob("*/results.json")):  # the names of runs sort by time
        return runs[-1:]
    other = ("ceilings-", "proof-")  # files in the results folder that are not results
    files = sorted(file for file in path.glob("*.json") if not file.name.startswith(other))
    if not files and RUNS in path.parts and not path.exists():
        raise UsageError(f"{path}: there is no run yet: pytest --gpu or pytest --cpu writes one")
    if not files:
        raise UsageError(f"{path} is not a results file, nor a folder with results of a run")
    return files


def accept(given: argparse.Namespace) -> int:
    """Write a run's figures into expectations.yaml and results/; works on any machine.

    A result is accepted if a full run measured it, its verdict is conclusive and it meets its
    requirements; refused results are listed with the reason. A result that was accepted before is
    skipped. `require` is never changed. Exit status 1 if all results are refused.
    """
    results = read_results(given.measured)
    machine = read_json(given.measured).get("machine_info", {})
    today = datetime.now(UTC).date()
    update = expectations.propose_update(given.expectations, results, today, given.results)
    if not given.dry_run:
        update = update.write(given.results, machine)
    state = "unchanged" if given.dry_run or not update.accepted else "written"
    counts = f"{len(update.accepted)} accepted, {len(update.refused)} refused"
    if update.repeated:
        counts += f", {len(update.repeated)} already accepted"
    text = [*update.lines(), update.diff(), f"{counts}; {given.expectations} {state}"]
    sys.stdout.write("".join(f"{line}\n" for line in text if line))
    return FAILED if update.refused and not (update.accepted or update.repeated) else DONE


def merge(given: argparse.Namespace) -> int:
    """Merge the results of the shards of a run; the last result of a claim counts.

    A claim that one part did not run and another did has the other's result only. Every record is
    validated, so files of unknown origin may be merged.
    """
    records = [result for path in given.parts for result in read_results(path)]
    ended = [r for r in records if r.outcome is not Outcome.NOT_RUN]
    # a claim that an interrupted run did not reach has no key
    known = {(journal.id_in_run(r), key) for r in ended for key in (r.key, "")}
    lost = [
        r
        for r in records
        if r.outcome is Outcome.NOT_RUN and (journal.id_in_run(r), r.key) not in known
    ]
    merged = {(r.claim, r.key): r for r in [*lost, *ended]}
    for claim, key in merged:
        if not claim.isprintable():
            raise UsageError(f"{claim!r} is not a claim's name: it contains a control character")
        if not re.fullmatch(r"[a-z0-9]*", key):  # `accept` uses the key in file names
            raise UsageError(f"{key!r} is not a kind of GPU, such as h200 or 2xh200")
    machine = read_json(given.parts[0]).get("machine_info", {})
    content = document([merged[k] for k in sorted(merged)], machine, datetime.now(UTC))
    atomic_write(given.output, document_text(content))
    sys.stdout.write(f"{len(merged)} claims written: {given.output}\n")
    return DONE


def complete(given: argparse.Namespace) -> int:
    """Check that every claim of a run, or of all its shards, has an outcome.

    Exit status 1 if a claim has no outcome, ended in an error or failed before it was measured.
    """
    outcomes = shards.collect(given.runs)
    text = []
    for claim, result in sorted(outcomes.items()):
        if result is None:
            text.append(f"no outcome: {claim}")
        elif shards.is_broken(result):
            text.append(f"{result.outcome}: {claim}: {result.message.partition(chr(10))[0]}")
    count = Counter(str(r.outcome if r else Outcome.NOT_RUN) for r in outcomes.values())
    counts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(count.items()))
    _print([*text, f"{len(outcomes)} claim{'s' * (len(outcomes) != 1)}: {counts or 'none'}"])
    return FAILED if text else DONE


def judge(given: argparse.Namespace) -> int:
    """Judge whether a kernel of unknown origin is right, honest and faster than its problem.

    A problem and its solution have the form of KernelBench, of GPU MODE, or a plain one. Exit
    status 0 FASTER; 1 SAME, SLOWER or INCONCLUSIVE; 2 UNUSABLE, the problem cannot be judged;
    3 WRONG; 4 SHORTCUT; 5 BROKEN, the solution cannot be run; 6 INVALID, measure again. For a
    folder, it is the highest status of its pairs. If Ctrl-C or SIGTERM ends the command, the
    judgements so far are shown, and the status is 130.
    """
    if given.cpu and given.gpu:
        raise UsageError("--cpu and --gpu exclude each other: leave one of them out")
    options = judging.Options(
        device="cpu" if given.cpu else "cuda" if given.gpu else None,
        metric=given.metric,
        quick=given.quick,
        tolerance=given.tolerance,
        cap=given.cap,
        deadline_s=given.deadline,
        seed=given.seed,
    )

    is_folder = given.solution is None or given.solution.is_dir()
    pairs = [(given.problem, given.solution)]
    if is_folder:
        pairs = judging.pairs(given.problem, given.solution)
    shown = itertools.count(1)

    def show(judgement: judging.Judgement) -> None:
        if not given.json:
            _print(judging.lines(judgement))
            sys.stdout.flush()
        elif is_folder:
            j, progress = judgement, f"{next(shown)} of {len(pairs)}"
            sys.stderr.write(f"{progress}: {j.status} {j.solution}, {j.seconds:.1f} s\n")

    found: list[judging.Judgement] = []
    with suppress(KeyboardInterrupt):
        if is_folder:
            found = judging.judge_all(pairs, options, given.processes, show)
        else:
            found = [judging.judge(given.problem, given.solution, options)]
            show(found[0])
    if is_folder and not given.json:
        count = Counter(judgement.status for judgement in found)
        counts = ", ".join(f"{n} {status}" for status, n in count.items())
        sys.stdout.write(f"{len(found)} judged: {counts}\n")
    if given.json and (is_folder or found):
        data = [judging.data(judgement) for judgement in found]
        text = dumps(data if is_folder else data[0], "judgement", indent=1)
        sys.stdout.write(f"{text}\n")
    if len(found) < len(pairs):
        sys.stderr.write(f"interrupted: {len(found)} of {len(pairs)} judged\n")
        return command_profiler.INTERRUPTED
    return max(judgement.exit_status for judgement in found)


def clean(given: argparse.Namespace) -> int:
    """Remove the plugin's builds, measured limits, runs and profiles.

    Runs and profiles are removed below the current folder only. Accepted results, expectations,
    symbolic links and files of other programs stay. Do not run it while a session measures.
    """
    paths = artifacts.find_artifacts(Path.cwd(), nvcc.default_cache(), RUNS, profiler.ARTIFACTS)
    size = sum(artifacts.size(path) for path in paths)
    _print(artifacts.lines(paths, RUNS))
    if not given.dry_run:
        artifacts.remove(paths, RUNS)
    state = "would be removed" if given.dry_run else "removed"
    others = "accepted results, expectations, symbolic links and files of other programs stay"
    total = si(float(size), "B") if paths else "nothing"
    sys.stdout.write(f"{state}: {total}; {others}\n")
    return DONE


def _print(text: Iterable[object]) -> None:
    """Print lines without the control characters that a record may contain."""
    sys.stdout.write("".join(f"{formatting.clean(line)}\n" for line in text))
