"""What works without a pytest session: `python -m pytest_aiperf`."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from . import commands
from .errors import AiperfError
from .profilers import tools


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a refusal is one sentence on stderr and exit status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_aiperf",
        description="Work with pytest-aiperf's files. Claims are measured with `pytest`.",
        epilog="Exit status: 0 done, 1 everything was refused, 2 a wrong argument or file.",
    )
    subcommands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    add = _command(subcommands, commands.accept)
    add("measured", metavar="RESULTS.json", type=Path, help="the results.json of a run")
    for option, metavar, path, about in (
        ("--expectations", "PATH", "expectations.yaml", "the file to update"),
        ("--results", "DIR", "results", "the folder of the last accepted runs, one file a GPU"),
    ):
        told = f"{about} (default: %(default)s)"
        add(option, metavar=metavar, type=Path, default=Path(path), help=told)
    add("--dry-run", action="store_true", help="show what would change, and write nothing")
    add = _command(subcommands, commands.ceilings)
    add("--fresh", action="store_true", help="measure anew what is subcommands already")
    add("--json", metavar="FILE", type=Path, help="write them; of the GPU only what it is")
    for entry in entry_points(group="pytest_aiperf.commands"):
        entry.load()(subcommands)
    add = _command(subcommands, commands.capture)
    add("tool", metavar="TOOL[:PRESET]", help=", ".join(tools.TOOLS))
    add("function", metavar="FILE.py::FUNCTION", help="a function without arguments")
    add("--calls", metavar="N", type=int, default=1, help="how many calls (default: %(default)s)")
    add("--deadline", metavar="SECONDS", type=float, default=300, help="(default: %(default)s)")
    add = _command(subcommands, commands.report)
    add("measured", metavar="RESULTS.json", type=Path, nargs="+", help="results.json of a run")
    add("--format", choices=("html", "md"), default="html", help="(default: %(default)s)")
    add("-o", "--output", metavar="FILE", type=Path, help="(default: report.html; md: stdout)")
    add("--title", default="pytest-aiperf report", help="of the page (default: %(default)s)")
    add("--readme", metavar="FILE", type=Path, help="put chapter tables between FILE's marks")
    add = _command(subcommands, commands.compare)
    add("old", metavar="OLD", type=Path, help="a results.json, or a folder of them")
    add("new", metavar="NEW", type=Path, help="the same, of a later run")
    add = _command(subcommands, commands.merge)
    add("parts", metavar="RESULTS.json", type=Path, nargs="+", help="the shards of one run")
    add("-o", "--output", metavar="FILE", type=Path, required=True, help="the whole run")
    add = _command(subcommands, commands.gate)
    add("measured", metavar="RESULTS.json", type=Path, help="the results.json of the night")
    add("--history", metavar="DIR", type=Path, default=Path("history"), help="(default: history)")
    add("--again", metavar="RESULTS.json", type=Path, nargs="*", default=[],
        help="what fresh processes measured of the flagged claims")  # fmt: skip
    add("--flagged", metavar="FILE", type=Path, help="write the flagged claims' test ids there")
    add = _command(subcommands, commands.drift)
    add("history", metavar="HISTORY.jsonl", type=Path, help="the history of one kind of GPU")
    add = _command(subcommands, commands.complete)
    add("runs", metavar="DIR", type=Path, nargs="+", help="folders with the runs of all shards")
    add = _command(subcommands, commands.examine, "doctor")
    add("--bundle", metavar="FILE.tar.gz", type=Path, help="write all of it, to be shown to others")
    add("--capture", action="store_true", help="with --bundle: what the profilers say of a product")
    add = _command(subcommands, commands.tidy, "clean")
    add("--dry-run", action="store_true", help="list what would be removed, and remove nothing")
    chosen = parser.parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except AiperfError as error:
        sys.stderr.write(f"{chosen.name}: {error}\n")
        return commands.MISUSE


def _command(
    subcommands: Any, run: Callable[[argparse.Namespace], int], name: str = ""
) -> Callable[..., object]:
    """Add a command, called as its function unless named; return what adds arguments to it."""
    duty = inspect.getdoc(run) or ""
    name = name or run.__name__
    parser = subcommands.add_parser(name, help=duty.partition("\n")[0], description=duty)
    parser.set_defaults(run=run)
    add: Callable[..., object] = parser.add_argument
    return add


if __name__ == "__main__":
    sys.exit(main())
