"""The commands `gate`, `drift` and `history` of `python -m pytest_aiperf`."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.errors import UsageError
from pytest_aiperf.records.results import atomic_write, read_results
from pytest_aiperf.report import formatting

from . import history, page

OK: Final = 0
"""Exit status if `gate` confirmed no drop, or `drift` found no lasting change."""

FAILED: Final = 1
"""Exit status if `gate` confirmed a drop or `drift` found a lasting change."""


def add_gate(subcommands: Any) -> None:
    """Add ``gate`` to the subcommands of `python -m pytest_aiperf`; an entry point."""
    add = _add_command(subcommands, "gate", gate)
    add("measured", metavar="RESULTS.json", type=Path, help="the results of the night")
    text = "the folder of histories, one file per kind of GPU (default: %(default)s)"
    add("--history", metavar="DIR", type=Path, default=Path("history"), help=text)
    text = "results of further runs of the flagged claims"
    add("--again", metavar="RESULTS.json", type=Path, nargs="*", default=[], help=text)
    add("--flagged", metavar="FILE", type=Path, help="write the test ids of flagged claims to FILE")
    add(
        "--sentinels",
        metavar="FILE",
        type=Path,
        help="the file with the ids of the sentinel claims, one per line",
    )


def add_drift(subcommands: Any) -> None:
    """Add ``drift`` to the subcommands of `python -m pytest_aiperf`; an entry point."""
    add = _add_command(subcommands, "drift", drift)
    add("history", metavar="HISTORY.jsonl", type=Path, help="the history of one kind of GPU")


def add_history(subcommands: Any) -> None:
    """Add ``history`` to the subcommands of `python -m pytest_aiperf`; an entry point."""
    add = _add_command(subcommands, "history", draw)
    text = "the history of one kind of GPU each"
    add("histories", metavar="HISTORY.jsonl", type=Path, nargs="+", help=text)
    text, default = "file to write (default: %(default)s)", Path("history.html")
    add("-o", "--output", metavar="FILE", type=Path, default=default, help=text)


def _add_command(
    subcommands: Any, name: str, run: Callable[[argparse.Namespace], int]
) -> Callable[..., argparse.Action]:
    """Add a subcommand that calls ``run``, with its docstring as help; return ``add_argument``."""
    description = inspect.getdoc(run) or ""
    summary = description.partition("\n")[0].rstrip(".")
    parser = subcommands.add_parser(name, help=summary, description=description)
    parser.set_defaults(run=run)
    add: Callable[..., argparse.Action] = parser.add_argument
    return add


def gate(arguments: argparse.Namespace) -> int:
    """Compare a nightly run with the history of its GPU, and add it to the history.

    A claim is flagged if its speedup falls below the band of its past speedups. The exit status is
    1 if all further runs (`--again`) confirm a flag, or if many claims dropped at once. A night in
    which a sentinel claim leaves its band is void: the machine is not healthy, and nothing is
    flagged.
    """
    results = [r for r in read_results(arguments.measured) if not r.host]
    again = [read_results(path) for path in arguments.again]
    sentinels = _lines_of(arguments.sentinels) if arguments.sentinels else ()
    keys = sorted({r.key for r in results if r.speedup})
    if not keys:
        raise UsageError(
            f"{arguments.measured} has no speedup on a GPU: there is nothing to compare"
        )
    text: list[str] = []
    flagged: set[str] = set()
    is_failed = False
    for key in keys:
        night = history.night_of([r for r in results if r.key == key], sentinels)
        path = arguments.history / f"{key}.jsonl"
        judgement = history.judge(history.read_history(path), night)
        confirmed = history.confirmed(judgement.flags, again)
        text += _lines(judgement, confirmed, again)
        counts = f"{len(judgement.provisional)} provisional, {len(judgement.flags)} flagged"
        text.append(f"{key}: {len(night.claims)} claims, {counts}, {len(confirmed)} confirmed")
        flagged |= {flag.claim for flag in judgement.flags}
        is_failed |= bool(confirmed or (judgement.shift and again))
        # if claims are flagged, add the night only after they were measured again
        if again or not judgement.flags:
            history.append(path, replace(night, void=judgement.void))
    if arguments.flagged:
        ids = sorted({r.nodeid for r in results if r.claim in flagged})
        atomic_write(arguments.flagged, "".join(f"{nodeid}\n" for nodeid in ids))
    _print(text)
    return FAILED if is_failed else OK


def _lines_of(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _lines(judgement: history.Gate, confirmed: Sequence[history.Flag], again: object) -> list[str]:
    text = [f"void: {judgement.void}"] if judgement.void else []
    text += [f"shift: {judgement.shift}"] if judgement.shift else []
    for flag in judgement.flags if not judgement.shift else ():
        state = "confirmed" if flag in confirmed else "not confirmed"
        text.append(f"{state if again else 'flagged, to be measured again'}: {flag}")
    return text


def drift(arguments: argparse.Namespace) -> int:
    """Find lasting changes that are too small to show in a single night.

    PELT looks for change points in the nights of the latest epoch: one GPU model, driver and
    software stack. The exit status is 1 if it finds any.
    """
    steps = history.change_points(_nights(arguments.history))
    _print(f"{step.claim}: {step.ratio:.3f}x since {step.night.started}" for step in steps)
    return FAILED if steps else OK


def _nights(path: Path) -> list[history.Night]:
    nights = history.read_history(path)
    if not nights:
        problem = "holds no night" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}; `gate` adds nights to a history")
    return nights


def draw(arguments: argparse.Namespace) -> int:
    """Draw every claim over the nights of one or more histories, as an HTML page.

    A chart shows a claim's speedup in each night, the band of the nights before, nights below it,
    void nights, changes of driver or software, and lasting changes as `drift` finds them.
    """
    histories = [_nights(path) for path in arguments.histories]
    atomic_write(arguments.output, page.page(histories))
    _print([f"written: {arguments.output}"])
    return OK


def _print(lines: Iterable[object]) -> None:
    """Print lines without control characters, which a claim's record may contain."""
    sys.stdout.write("".join(f"{formatting.clean(line)}\n" for line in lines))
