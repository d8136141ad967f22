"""What works on files rather than on a session: `python -m pytest_aiperf`."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from . import expectations
from .errors import AiperfError
from .results import read_json, read_results

DONE, REFUSED, MISUSE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a refusal is one sentence on stderr and exit status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_aiperf",
        description="Work on the files of pytest-aiperf. Claims are measured with `pytest`.",
        epilog="Exit status: 0 done, 1 everything was refused, 2 a wrong argument or file.",
    )
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    duty = inspect.getdoc(accept) or ""
    add = commands.add_parser("accept", help=duty.partition("\n")[0], description=duty).add_argument
    add("measured", metavar="RESULTS.json", type=Path, help="the results.json of a run")
    for option, metavar, path, about in (
        ("--expectations", "PATH", "expectations.yaml", "the file to update"),
        ("--results", "DIR", "results", "the folder of the last accepted runs, one file a GPU"),
    ):
        told = f"{about} (default: %(default)s)"
        add(option, metavar=metavar, type=Path, default=Path(path), help=told)
    add("--dry-run", action="store_true", help="show what would change, and write nothing")
    chosen = parser.parse_args(arguments)
    try:
        return accept(chosen)
    except AiperfError as error:
        sys.stderr.write(f"{chosen.name}: {error}\n")
        return MISUSE


def accept(chosen: argparse.Namespace) -> int:
    """Write a run's figures into expectations.yaml and results/, on any machine.

    A result is accepted when a full run measured it on a GPU, it is conclusive and it holds what
    is required today; the others are listed with their reasons. `require` is never written, and
    expectations.yaml changes last and as a whole.
    """
    results = read_results(chosen.measured)
    machine = read_json(chosen.measured).get("machine_info", {})
    update = expectations.plan(chosen.expectations, results, datetime.now(UTC).date())
    if not chosen.dry_run:
        update = update.write(chosen.results, machine)
    ends = "unchanged" if chosen.dry_run or not update.accepted else "written"
    counts = f"{len(update.accepted)} accepted, {len(update.refused)} refused"
    said = [*update.lines(), update.diff(), f"{counts}; {chosen.expectations} {ends}"]
    sys.stdout.write("".join(f"{line}\n" for line in said if line))
    return REFUSED if update.refused and not update.accepted else DONE


if __name__ == "__main__":
    sys.exit(main())
