"""The commands of `python -m pytest_aiperf`."""

import argparse
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from .build import nvcc
from .doctor import bundle
from .doctor import clean as artifacts
from .doctor import doctor as diagnosis
from .errors import AiperfError, InvalidMeasurement, UsageError
from .limits import ceilings as limits
from .machine.gpu_lock import GpuLock
from .model import Outcome, Result
from .profilers import capture as profiler
from .profilers import target, tools
from .records import comparison, expectations, journal, shards
from .records.results import atomic_write, document, document_text, dumps, read_json, read_results
from .report import formatting, markdown, page, terminal
from .session.cuda_machine import CudaMachine, measurable_gpus
from .session.session import RUNS
from .text import si

DONE = 0  #: Exit status of a command that found no problem.
FAILED = 1  #: Exit status of a command that found a problem, such as a regression.
WRONG = 2  #: Exit status if an argument, a file or this machine is not usable.

DISTRIBUTIONS = {"prove": "selfcheck", "gate": "nightly", "drift": "nightly"}
"""Commands of other distributions, and the folder of each distribution in the repository."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status. An AiperfError is printed without a traceback."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    command = words[0] if words else ""
    parser, problems = _parser(command)
    try:
        if command in problems:
            raise UsageError(problems[command])
        given = parser.parse_args(words)
        return int(given.run(given))
    except AiperfError as error:
        sys.stderr.write(f"{command}: {error}\n")
        return WRONG


def _parser(command: str) -> tuple[argparse.ArgumentParser, Mapping[str, str]]:
    """Return the parser, and the reason why each unavailable command cannot run.

    Commands of other distributions are loaded only if ``command`` is not defined in this file.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pytest_aiperf",
        description="Inspect this machine and work with results. `pytest` measures claims.",
        epilog="Exit status: 0 done; 1 the command found a problem, such as a regression (see the "
        "help of each command); 2 an argument, a file or this machine is not usable.",
    )
    subcommands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    add = _command(subcommands, doctor)
    add("--bundle", metavar="FILE.tar.gz", type=Path, help="also write an archive for bug reports")
    text = "with --bundle: also try each profiler on a matrix product"
    add("--capture", action="store_true", help=text)
    add = _command(subcommands, ceilings)
    add("--fresh", action="store_true", help="measure again, even if a measurement is cached")
    text = "also write the ceilings as JSON, with the GPU's model but not its UUID"
    add("--json", metavar="FILE", type=Path, help=text)
    add = _command(subcommands, capture)
    add("tool", metavar="TOOL[:PRESET]", help=", ".join(tools.TOOLS))
    add("function", metavar="FILE.py::FUNCTION", help="a function without parameters")
    add("--calls", metavar="N", type=int, default=1, help="calls to profile (default: %(default)s)")
    text = "time limit of a process under the profiler (default: %(default)s)"
    add("--deadline", metavar="SECONDS", type=float, default=300, help=text)
    add = _command(subcommands, report)
    add("results", metavar="RESULTS.json", type=Path, nargs="+", help="the results of a run")
    add("--format", choices=("html", "md"), default="html", help="(default: %(default)s)")
    text = "file to write (default: report.html, or stdout for Markdown)"
    add("-o", "--output", metavar="FILE", type=Path, help=text)
    add("--title", default="pytest-aiperf report", help="title of the page (default: %(default)s)")
    add("--readme", metavar="FILE", type=Path, help="instead, update the tables in this file")
    add = _command(subcommands, compare)
    add("old", metavar="OLD", type=Path, help="a results.json, or a folder of them")
    add("new", metavar="NEW", type=Path, help="likewise, of a later run")
    add = _command(subcommands, accept)
    add("measured", metavar="RESULTS.json", type=Path, help="the results of a run")
    text, default = "the file to update (default: %(default)s)", Path("expectations.yaml")
    add("--expectations", metavar="PATH", type=Path, default=default, help=text)
    text = "the folder of accepted results, one file per GPU (default: %(default)s)"
    add("--results", metavar="DIR", type=Path, default=Path("results"), help=text)
    add("--dry-run", action="store_true", help="show what would change, and write nothing")
    add = _command(subcommands, merge)
    add("parts", metavar="RESULTS.json", type=Path, nargs="+", help="the results of each shard")
    add("-o", "--output", metavar="FILE", type=Path, required=True, help="file to write")
    add = _command(subcommands, complete)
    add("runs", metavar="DIR", type=Path, nargs="+", help="folders with the runs of all shards")
    add = _command(subcommands, clean)
    add("--dry-run", action="store_true", help="list what would be removed, and remove nothing")
    commands, broken = subcommands.choices, {}
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
    environment.
    """
    if given.capture and not given.bundle:
        raise UsageError("--capture adds to an archive: name one with --bundle FILE.tar.gz")
    host = diagnosis.Host()
    checks = diagnosis.checks(host)
    _print(checks)
    if given.bundle:
        bundle.write(given.bundle, bundle.contents(host, checks, capture=given.capture))
        sys.stdout.write(f"written: {given.bundle}\n")
    return FAILED if any(c.state == diagnosis.State.BROKEN for c in checks) else DONE


def ceilings(given: argparse.Namespace) -> int:
    """Measure the limits of this machine's GPU and print them beside its datasheet.

    Each limit is measured once per GPU, driver and torch version, on random data; the fastest
    block counts. A matrix rate is the higher of two: in short bursts at full clocks, and in
    sustained work under the power cap. With several GPUs, the first GPU and all links are measured.
    """
    gpus = measurable_gpus(CudaMachine())
    with GpuLock([g.uuid for g in gpus], on_wait=_progress).exclusive_host():
        device = CudaMachine().open_device(gpus[0])
        names = (*limits.DEVICE, *limits.HOST)
        figures = limits.get(device, names, _progress, fresh=given.fresh)
        if len(gpus) > 1:
            try:
                figures |= limits.get_links(gpus, _progress, fresh=given.fresh)
            except InvalidMeasurement as error:
                _progress(str(error))
    assert device.gpu is not None
    _print([device.gpu.name, *limits.table(figures, device.gpu.key)])
    if given.json:
        text = dumps(limits.record(device.gpu, figures), "ceilings", indent=1)
        atomic_write(given.json, f"{text}\n")
    return DONE


def _progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def capture(given: argparse.Namespace) -> int:
    """Profile one function of your own, as `pytest --profile` profiles an arm.

    The function runs in a process under the profiler: first to warm up, then inside a range named
    "aiperf". The range's figures are printed. Artefacts and the tool's output go to artifacts/.
    """
    tool, preset = tools.parse(given.tool)
    path, _, name = given.function.partition("::")
    job = target.job_from(os.environ)
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
    folder = profiler.run_folder(Path.cwd(), run) / profiler.folder_name(name)
    command = (sys.executable, "-m", "pytest_aiperf", "capture", given.tool, given.function)
    request = profiler.CaptureRequest(tool, preset, folder, command, given.deadline, given.calls)
    profile, _ = profiler.capture(request, "call")
    sys.stdout.write("".join(f"{line}\n" for line in terminal.profile(name, [profile])))
    return DONE


def _function(path: Path, name: str) -> Callable[[], object]:
    spec = spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file: name FILE.py::FUNCTION")
    sys.path.insert(0, str(path.parent))  # the file can import its neighbours
    sys.modules[path.stem] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[], object] | None = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{path} has no function {name!r}")
    return function


def report(given: argparse.Namespace) -> int:
    """Write the results of one or more runs as an HTML page, as Markdown, or into a README.

    Explanations and code are read from the tests and kernels below the current folder. `--readme`
    replaces the text between `<!-- results -->` and `<!-- /results -->`.
    """
    results = [result for path in given.results for result in read_results(path)]
    if given.readme:
        terminal.embed(given.readme, "results", markdown.tables(results))
        return DONE
    output = given.output
    if given.format == "md":
        text = markdown.markdown(results, Path.cwd())
    else:
        output = output or Path("report.html")
        content = read_json(given.results[0])
        machine = {"commit": content.get("commit_info")}
        if isinstance(info := content.get("machine_info"), dict):
            machine |= info
        text = page.page(results, machine, given.title, root=Path.cwd(), folder=output.parent)
    if output:
        atomic_write(output, text)
        sys.stdout.write(f"written: {output}\n")
    else:
        sys.stdout.write(text)
    return DONE


def compare(given: argparse.Namespace) -> int:
    """Compare two runs claim by claim, within the same kind of GPU.

    Exit status 1 if a claim has regressed.
    """
    old, new = _results_in(given.old), _results_in(given.new)
    changes = comparison.changes(old, new)
    text = [f"differs: {line}" for line in comparison.stack_changes(old, new)]
    for change in changes:
        ratio = f"  {change.ratio}" if change.ratio else ""
        why = f"  ({change.why})" if change.why else ""
        text.append(f"{change.state:<9}  {change.key}  {change.claim}{ratio}{why}")
    count = Counter(change.state.value for change in changes)
    _print([*text, ", ".join(f"{n} {state}" for state, n in count.items()) or "no claims"])
    return FAILED if count[comparison.State.REGRESSED] else DONE


def _results_in(path: Path) -> list[Result]:
    """Read one results file, or all results files of a folder."""
    other = ("ceilings-", "proof-")  # files in the results folder that are not results
    folder = sorted(file for file in path.glob("*.json") if not file.name.startswith(other))
    files = folder if path.is_dir() else [path]
    return [result for file in files for result in read_results(file)]


def accept(given: argparse.Namespace) -> int:
    """Write a run's figures into expectations.yaml and results/; works on any machine.

    A result is accepted if a full run on a GPU measured it, its verdict is conclusive and it meets
    its requirements; refused results are listed with the reason. `require` is never changed. Exit
    status 1 if all results are refused.
    """
    results = read_results(given.measured)
    machine = read_json(given.measured).get("machine_info", {})
    update = expectations.propose_update(given.expectations, results, datetime.now(UTC).date())
    if not given.dry_run:
        update = update.write(given.results, machine)
    state = "unchanged" if given.dry_run or not update.accepted else "written"
    counts = f"{len(update.accepted)} accepted, {len(update.refused)} refused"
    text = [*update.lines(), update.diff(), f"{counts}; {given.expectations} {state}"]
    sys.stdout.write("".join(f"{line}\n" for line in text if line))
    return FAILED if update.refused and not update.accepted else DONE


def merge(given: argparse.Namespace) -> int:
    """Merge the results of the shards of a run; the last result of a claim counts.

    Every record is validated, so files of unknown origin may be merged.
    """
    merged = {(r.claim, r.key): r for path in given.parts for r in read_results(path)}
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
    _print([*text, f"{len(outcomes)} claims: {counts or 'none'}"])
    return FAILED if text else DONE


def clean(given: argparse.Namespace) -> int:
    """Remove the plugin's builds, ceilings, runs and profiles.

    Runs and profiles are removed below the current folder only. Accepted results and symbolic
    links stay. Do not run it while a session measures.
    """
    paths = artifacts.find_artifacts(Path.cwd(), nvcc.default_cache(), RUNS, profiler.ARTIFACTS)
    size = sum(artifacts.size(path) for path in paths)
    _print(paths)
    if not given.dry_run:
        artifacts.remove(paths, RUNS)
    state = "would be removed" if given.dry_run else "removed"
    sys.stdout.write(f"{state}: {len(paths)}, {si(float(size), 'B')}\n")
    return DONE


def _print(text: Iterable[object]) -> None:
    """Print lines without the control characters that a record may contain."""
    sys.stdout.write("".join(f"{formatting.clean(line)}\n" for line in text))
