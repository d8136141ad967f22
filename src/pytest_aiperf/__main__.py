"""What works on files rather than on a session: `python -m pytest_aiperf`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from . import expectations, journal
from .errors import AiperfError

DONE, REFUSED, MISUSE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a refusal is one sentence on stderr and exit status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_aiperf",
        description="Work on the files of pytest-aiperf. Claims are measured with `pytest`.",
        epilog="Exit status: 0 done, 1 everything was refused, 2 a wrong argument or file.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command, options in COMMANDS.items():
        duty = (command.__doc__ or "").replace("\n    ", "\n").rstrip()
        made = commands.add_parser(
            command.__name__,
            help=duty.partition("\n")[0],
            description=duty,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        options(made)
        made.set_defaults(command=command)
    chosen = parser.parse_args(arguments)
    try:
        return int(chosen.command(chosen))
    except AiperfError as error:
        sys.stderr.write(f"{chosen.command.__name__}: {error}\n")
        return MISUSE


def accept(chosen: argparse.Namespace) -> int:
    """Write a run's figures into expectations.yaml and results/, on any machine.

    A result is accepted when a full run measured it on a GPU, it is conclusive and it holds what
    is required today; the others are listed with their reasons. `require` is never written, and
    expectations.yaml changes last and as a whole.
    """
    results = journal.read_results(chosen.measured)
    machine = _machine_info(chosen.measured)

    def merge(update: expectations.Update) -> None:
        for key in sorted({result.key for result in update.accepted}):
            mine = [result for result in update.accepted if result.key == key]
            journal.merge_results(chosen.results / f"{key}.json", mine, machine)

    update = expectations.plan(chosen.expectations, results, datetime.now(UTC).date())
    if not chosen.dry_run:
        update = update.write(merge)
    ends = "unchanged" if chosen.dry_run or not update.accepted else "written"
    counts = f"{len(update.accepted)} accepted, {len(update.refused)} refused"
    said = [*update.lines(), update.diff(), f"{counts}; {chosen.expectations} {ends}"]
    sys.stdout.write("".join(f"{line}\n" for line in said if line))
    return REFUSED if update.refused and not update.accepted else DONE


def _accept_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("measured", metavar="RESULTS.json", type=Path, help="the results.json of a run")
    add(
        "--expectations",
        metavar="PATH",
        type=Path,
        default=Path("expectations.yaml"),
        help="the file to update (default: %(default)s)",
    )
    add(
        "--results",
        metavar="DIR",
        type=Path,
        default=Path("results"),
        help="the folder of the last accepted runs, one file a GPU (default: %(default)s)",
    )
    add("--dry-run", action="store_true", help="show what would change, and write nothing")


def _machine_info(path: Path) -> Mapping[str, Any]:
    """Say where a results file was measured; `read_results` has found it to be strict JSON."""
    machine = journal.loads(path.read_text(encoding="utf-8"), str(path)).get("machine_info")
    return machine if isinstance(machine, Mapping) else {}


Command = Callable[[argparse.Namespace], int]
COMMANDS: Final[Mapping[Command, Callable[[argparse.ArgumentParser], None]]] = {
    accept: _accept_options,
}
"""Each command and what declares its arguments; its docstring is its help."""

if __name__ == "__main__":
    sys.exit(main())
