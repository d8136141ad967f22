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
from pytest_aiperf.model import Result
from pytest_aiperf.records.results import atomic_write, read_results
from pytest_aiperf.report import formatting

from . import history, page

OK: Final = 0
"""Exit status if `gate` confirmed nothing, or `drift` found no lasting change."""

FAILED: Final = 1
"""Exit status if `gate` confirmed a flag, or a night is void; if `drift` found a lasting change."""


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

    A claim is flagged if its speedup falls below the band of its past speedups, or if it passed in
    the last valid night and did not pass tonight. The exit status is 1 if none of the further runs
    (`--again`) clears a flag, if many claims dropped at once, or if the night is void: a sentinel
    claim has no figure or has left its band, so the machine is not healthy, and nothing is flagged.
    """
    results = [r for r in read_results(arguments.measured) if not r.host]
    again = _further_runs(arguments.again, results)
    sentinels = _lines_of(arguments.sentinels) if arguments.sentinels else ()
    nights = history.nights_of(results, sentinels)
    if not nights:
        raise UsageError(
            f"{arguments.measured} has no speedup on a GPU: there is nothing to compare"
        )
    text: list[str] = []
    flagged: set[tuple[str, str]] = set()
    judged: list[tuple[Path, history.Night]] = []
    is_failed = False
    for night in nights:
        path = arguments.history / f"{night.key}.jsonl"
        past = history.read_history(path)
        if any(n.run == night.run for n in past):
            raise UsageError(
                f"{path} has the run {night.run} already: measure again, or remove its line"
            )
        judgement = history.judge(past, night)
        confirmed = history.confirmed(judgement.all_flags, again, night.key)
        text += _lines(judgement, confirmed, again)
        claims = {flag.claim for flag in judgement.all_flags}
        count = len({flag.claim for flag in confirmed})
        counts = f"{len(judgement.provisional)} provisional, {len(claims)} flagged"
        text.append(f"{night.key}: {len(night.claims)} claims, {counts}, {count} confirmed")
        flagged |= {(claim, night.key) for claim in claims}
        is_failed |= bool(judgement.void or judgement.shift or count)
        # a failure that a further run cleared is flagged again if it comes back the next night
        cleared = {failure.claim for failure in judgement.failures if failure not in confirmed}
        failed = {claim: how for claim, how in night.failed.items() if claim not in cleared}
        judged.append((path, replace(night, void=judgement.void, failed=failed)))
    # while flagged claims have to be measured again, nothing is final, also of other kinds of GPU
    is_final = bool(again) or not flagged
    if arguments.flagged:
        ids = sorted({r.nodeid for r in results if (r.claim, r.key) in flagged})
        atomic_write(arguments.flagged, "".join(f"{nodeid}\n" for nodeid in ids))
    if is_final:  # after all that may fail, because a night is added only once
        for path, night in judged:
            history.append(path, night)
    _print(text)
    return FAILED if is_final and is_failed else OK


def _further_runs(paths: Iterable[Path], results: Iterable[Result]) -> list[list[Result]]:
    """Read the results of further runs; refuse a file that is a copy of another run's."""
    again = []
    known = {r.run for r in results}
    for path in paths:
        again.append(read_results(path))
        ids = {r.run for r in again[-1]}
        if ids & known:
            raise UsageError(f"{path} is no further run: its run {min(ids & known)} counts already")
        known |= ids
    return again


def _lines_of(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    return [line.strip() for line in lines if line.strip()]


def _lines(
    judgement: history.Gate, confirmed: Sequence[history.AnyFlag], again: object
) -> list[str]:
    text = [f"void: {judgement.void}"] if judgement.void else []
    text += [f"shift: {judgement.shift}"] if judgement.shift else []
    for flag in judgement.failures if judgement.shift else judgement.all_flags:
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
