"""How a result's figures, verdict and notes are written, wherever they are shown."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Final

from pytest_aiperf.model import (
    Against,
    Evidence,
    Expectation,
    Outcome,
    Result,
    Round,
    Timing,
    Verdict,
)
from pytest_aiperf.records.results import block_times
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.validity import POWER_CAP
from pytest_aiperf.text import percent, si

from .aggregate import JUDGED

COLUMNS: Final = {
    "claim": "<",
    "baseline": ">",
    "optimized": ">",
    "ratio [99 % interval]": ">",
    "library": ">",
    "rate": ">",
    "of limit": ">",
    "verdict": "<",
    "expected": "<",
}
"""The table's columns and how each is aligned."""

RIDGE: Final = 16.0
"""Operations a byte above which a call is said to compute rather than to move (fp32's ridge)."""


def clean(text: object) -> str:
    """Make a name or message safe to print: one line, no terminal escape, no workflow command."""
    flat = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in str(text))
    return re.sub(r":(?=:)|#(?=[#\[])", r"\g<0> ", flat)


def escape(text: str) -> str:
    """Leave nothing that Markdown or HTML would read as structure."""
    safe = html.escape(clean(text), quote=False)
    return re.sub(r"[\\`*_\[\]|~$!]|^[-+#=](?=.)", r"\\\g<0>", safe)


def cells(result: Result) -> list[str]:
    """Every column after the claim's name."""
    timing = result.timing if block_times(result) else None
    per_second, unit = rate(result)
    return [
        _figure(timing, "baseline") if timing else "-",
        _figure(timing, "optimized") if timing else "-",
        str(result.speedup or "-"),
        f"{result.library.value:.2f}x" if result.library else "-",
        si(per_second, unit) if per_second else "-",
        _of_limit(result),
        verdict(result),
        _expected(result.expectation),
    ]


def _figure(timing: Timing, arm: str) -> str:
    return si(stats.typical(timing.replicates, arm), timing.unit)


def rate(result: Result) -> tuple[float, str]:
    """Return what the optimized arm moves or computes in a second, whichever limits it; or 0."""
    work, timing = result.work, result.timing
    if work is None or timing is None or timing.unit != "s" or not block_times(result):
        return 0.0, ""
    computes = work.flops > RIDGE * work.bytes
    done, unit = (work.flops, "FLOP/s") if computes else (work.bytes, "B/s")
    return done / stats.typical(timing.replicates, "optimized"), unit


def _of_limit(result: Result) -> str:
    limit = result.limits.get("optimized")
    return f"{percent(limit.share)} {limit.ceiling}" if limit else "-"


def reasons(result: Result) -> list[str]:
    """Say why a claim is as fast as it is, a line each: what binds its arms, its evidence."""
    lines = [f"{arm}: {said}" for arm, said in result.diagnosis.items()]
    for found in result.evidence:
        kept = "holds" if found.held else "does not hold"
        told = "not looked at" if found.value is None else f"{found.value:.4g}, {kept}"
        lines.append(f"evidence: {claimed(found.evidence)}: {told}")
    return [clean(f"{result.claim}: {line}") for line in lines]


def claimed(piece: Evidence) -> str:
    """Write a piece of evidence as it is claimed: what, of what, within which bounds."""
    bounds = [
        f"{sign} {bound:.4g}"
        for sign, bound in ((">=", piece.min), ("<=", piece.max))
        if bound is not None
    ]
    if piece.min is not None and piece.min == piece.max:
        bounds = [f"= {piece.min:.4g}"]
    of = f"in {piece.kernel}" if piece.kernel else ""
    per = {"": "", "baseline": "of the baseline", "work": "of the bytes of work"}[piece.per]
    return " ".join(filter(None, (piece.kind.value, piece.of, of, " and ".join(bounds), per)))


def verdict(result: Result) -> str:
    if result.outcome not in JUDGED or result.verdict is None:
        return result.outcome.value
    holds = result.verdict in (Verdict.FASTER, Verdict.SAME)
    lost = ", lost" if holds and result.outcome is Outcome.FAILED else ""
    return f"{result.verdict}{lost}"


def _expected(expectation: Expectation | None) -> str:
    if expectation is None:
        return "-"
    if expectation.recorded:
        return "stale" if expectation.stale else f"{expectation.recorded.speedup[1]:.2f}x"
    require = expectation.require
    if require.speedup is not None:
        return f">={require.speedup:g}x"
    if require.library is not None:
        return f">={require.library:g}x lib"
    return "-" if require.share is None else f">={require.share:.0%}"


def capped(rounds: Sequence[Round]) -> str:
    """Say in how many rounds the power cap held the clock down; nothing where in none."""
    count = sum(bool((r.event_reasons or 0) & POWER_CAP) for r in rounds)
    return f"in {count} of {len(rounds)} rounds" if count else ""


def _remarks(timing: Timing) -> list[str]:
    said = list(timing.notes)
    redone = sum(replicate.redone for replicate in timing.replicates)
    if redone:
        said.append(f"{redone} {'round' if redone == 1 else 'rounds'} redone")
    rounds = [r for replicate in timing.replicates for r in replicate.rounds]
    if held := capped(rounds):
        said.append(f"power cap {held}")
    return said


def notes(results: Sequence[Result]) -> list[str]:
    notes: list[str] = []
    if any(r.against is Against.NAIVE for r in results):
        notes.append("* naive baseline: left out of the geometric mean")
    for result in results:
        said: list[str] = []
        if result.outcome is not Outcome.PASSED and result.message:
            said.append(result.message.strip().split("\n")[0])
        if result.timing:
            said += _remarks(result.timing)
        for also in result.also:
            arms = f"{_figure(also, 'baseline')} -> {_figure(also, 'optimized')}"
            said.append(f"{also.metric}: {arms}")
        said += result.notes
        if result.attempts > 1:
            said.append(f"attempt {result.attempts}")
        if result.quick:
            said.append("quick")
        if said:
            notes.append(clean(f"{result.claim}: {'; '.join(said)}"))
    return notes
