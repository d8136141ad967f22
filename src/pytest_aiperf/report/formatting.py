"""Figures, verdict and notes of a result as text for all reports."""

import html
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pytest_aiperf.model import (
    Against,
    Evidence,
    EvidenceKind,
    Finding,
    Outcome,
    Result,
    Round,
    Timing,
    Verdict,
)
from pytest_aiperf.records.results import block_times
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.evidence import NO_BASELINE
from pytest_aiperf.rules.validity import POWER_CAP
from pytest_aiperf.text import percent, si

from .aggregate import verdict

COLUMNS: Final = {
    "claim": "<", "baseline": ">", "optimized": ">", "ratio [99 % interval]": ">",
    "over first": ">", "library": ">", "rate": ">", "of limit": ">", "verdict": "<",
    "expected": "<",
}  # fmt: skip
"""Columns of the table of results, with the alignment of each."""
_UNITS: Final = {
    EvidenceKind.SPILLS: "B", EvidenceKind.COPIED_BYTES: "B", EvidenceKind.PEAK_MEMORY: "B",
    EvidenceKind.BUSY_SHARE: "share",
}  # fmt: skip
"""Units of the kinds of evidence that are not counts."""
_COUNTER_UNITS: Final = {"pct": " %", "per_second": "/s", "bytes": "B"}
"""Units of ncu's metrics by a part of their names; the first that fits counts."""
RIDGE_FLOP_PER_BYTE: Final = 16.0
"""Arithmetic intensity above which rates are shown in FLOP/s: about the ridge point of fp32."""


def clean(text: object) -> str:
    """Make text safe to print: one line, no terminal escapes, no GitHub workflow commands.

    GitHub reads ``::`` as a command at the start of a line, where wrapping may move any word, and
    ``##[`` anywhere. Inside a word, as in ``aten::mm`` or a test's id, colons stay together.
    """
    text = re.sub(r"(?<!\S):{2,}", lambda colons: " ".join(colons[0]), printable(text))
    return re.sub(r"#(?=[#\[])", r"\g<0> ", text)


def printable(text: object) -> str:
    """Replace characters that are not printable; the text may still be a workflow command."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in str(text))


def escape(text: str) -> str:
    """Escape the characters that have a meaning in Markdown or HTML."""
    safe = html.escape(clean(text), quote=False)
    return re.sub(r"[\\`*_\[\]|~$!]|^[-+#=](?=.)", r"\\\g<0>", safe)


def cells(result: Result) -> list[str]:
    """Return the cells that follow the claim's name in its table row."""
    timing = result.timing if block_times(result) else None
    per_second, unit = rate(result)
    limit = result.limits.get("optimized")
    return [
        _figure(timing, "baseline") if timing else "-",
        _figure(timing, "optimized") if timing else "-",
        str(result.speedup or "-"),
        f"{result.first.value:.2f}x" if result.first else "-",
        f"{result.library.value:.2f}x" if result.library else "-",
        si(per_second, unit) if per_second else "-",
        f"{percent(limit.share)} {limit.ceiling}" if limit else "-",
        verdict(result),
        _expected(result),
    ]


def _figure(timing: Timing, arm: str) -> str:
    return si(stats.mean_call_s(timing.replicates, arm), timing.unit)


def rate(result: Result) -> tuple[float, str]:
    """Return the optimized arm's rate and its unit, FLOP/s or B/s; 0 and "" if unknown."""
    work, timing = result.work, result.timing
    if work is None or timing is None or timing.unit != "s" or not block_times(result):
        return 0.0, ""
    computes = work.flops > RIDGE_FLOP_PER_BYTE * work.bytes
    amount, unit = (work.flops, "FLOP/s") if computes else (work.bytes, "B/s")
    return amount / stats.mean_call_s(timing.replicates, "optimized"), unit


def measured_on(result: Result) -> str:
    """Return the name of the GPU, or the processor of a claim without one."""
    return result.gpu.name if result.gpu else result.stack.get("processor", result.key)


def hosts(results: Sequence[Result]) -> list[str]:
    """Return a line that says which hosts the key "cpu" stands for; none if no record names one."""
    names = sorted({measured_on(r) for r in results if r.host} - {"cpu"})
    return [f"cpu: {'; '.join(names)}"] if names else []


def reasons(result: Result) -> list[str]:
    """Return a line for each arm's diagnosis and for each piece of evidence."""
    lines = [f"{arm}: {diagnosis}" for arm, diagnosis in result.diagnosis.items()]
    lines += [f"evidence: {finding(each)}" for each in result.evidence]
    return [clean(f"{result.claim}: {line}") for line in lines]


def finding(each: Finding) -> str:
    """Format a finding: the evidence, its figures and its state."""
    why = f" ({each.where})" if each.held is None and each.where else ""
    return f"{stated(each.evidence)}: {', '.join(filter(None, (figures(each), state(each))))}{why}"


def not_looked_at(result: Result) -> str:
    """List the evidence that a run could not look at, and why; empty if it looked at all of it."""
    pieces: dict[str, list[str]] = {}  # by reason: pieces of one kind often have the same
    for each in result.evidence:
        if each.held is None:
            pieces.setdefault(each.where, []).append(stated(each.evidence))
    return "; ".join(
        ", ".join(texts) + (f" ({why})" if why else "") for why, texts in pieces.items()
    )


def figures(each: Finding) -> str:
    """Format a finding's figure and the baseline's; empty if this run could not look."""
    if each.value is None:
        return ""
    piece, baseline = each.evidence, ""
    if each.where.startswith(NO_BASELINE):  # the figure is no ratio
        return f"{amount(each.value, replace(piece, per=''))} (baseline 0)"
    if each.baseline_value is not None:
        baseline = f" (baseline {amount(each.baseline_value, piece)})"
    return f"{amount(each.value, piece)}{baseline}"


def amount(value: float, piece: Evidence) -> str:
    """Format a figure of a piece of evidence with its unit; counts have none."""
    unit = _UNITS.get(piece.kind, "")
    if piece.kind is EvidenceKind.COUNTER:
        unit = next((unit for part, unit in _COUNTER_UNITS.items() if part in piece.of), "")
    elif piece.kind is EvidenceKind.OVERLAP:
        unit = "share" if piece.of else "x"
    if piece.per:
        unit = " per byte" if piece.per == "work" and unit != "B" else "x"
    if unit == "share":
        return percent(value, 1)
    if unit == "B":
        return si(value, "B") if abs(value) >= 1024 else f"{value:.4g} B"
    return f"{value:.4g}{unit}"


def state(each: Finding) -> str:
    """Return one of the states of evidence, of which one is that this run could not look."""
    if each.held is None:
        return "not looked at"
    if not each.held:
        return "does not hold"
    return "condition (the baseline meets it, too)" if each.baseline_held else "holds"


def stated(piece: Evidence) -> str:
    """Format a piece of evidence: its kind, metric, kernel and bounds."""
    pairs = [("=", piece.min)] if piece.min == piece.max else [(">=", piece.min), ("<=", piece.max)]
    bounds = [
        f"{sign} {f'{bound:.4g}' if piece.per else amount(bound, piece)}"
        for sign, bound in pairs
        if bound is not None
    ]
    kernel = f"in {piece.kernel}" if piece.kernel else ""
    per = {"": "", "baseline": "of the baseline", "work": "of the bytes of work"}[piece.per]
    return " ".join(filter(None, (piece.kind.value, piece.of, kernel, " and ".join(bounds), per)))


def _expected(result: Result) -> str:
    if (expectation := result.expectation) is None:
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
    """Format the number of rounds in which the power cap was active; empty if it is 0."""
    count = sum(bool((r.event_reasons or 0) & POWER_CAP) for r in rounds)
    return f"in {count} of {len(rounds)} rounds" if count else ""


def reason(result: Result) -> str:
    """Return why a claim did not pass or has no conclusive verdict; empty if it has one."""
    clear = result.outcome is Outcome.PASSED and result.verdict is not Verdict.INCONCLUSIVE
    return "" if clear else result.message.strip()


def _remarks(timing: Timing) -> list[str]:
    remarks = list(timing.notes)
    if redone := sum(replicate.redone for replicate in timing.replicates):
        remarks.append(f"{redone} {'round' if redone == 1 else 'rounds'} redone")
    if rounds_capped := capped([r for replicate in timing.replicates for r in replicate.rounds]):
        remarks.append(f"power cap {rounds_capped}")
    return remarks


def _not_repeating(note: str, reason: str) -> str:
    """Cut off the end of a note that gives the same reason, or the same advice, as the claim's."""
    for repeated in (reason, reason.rpartition(": ")[2]):
        if repeated and note.endswith(f": {repeated}"):
            return note.removesuffix(f": {repeated}")
    return note


def notes(results: Sequence[Result]) -> list[str]:
    """Return lines that explain figures: those of many results, then each result's own.

    Rungs of a ladder that need the same one share a line.
    """
    claims: dict[tuple[str, str], list[str]] = {}
    for result in results:
        remarks = reason(result).split("\n")[:1]
        if result.timing:
            remarks += _remarks(result.timing)
        for also in result.also:
            arms = f"{_figure(also, 'baseline')} -> {_figure(also, 'optimized')}"
            remarks.append(f"{also.metric}: {arms}")
        remarks += [_not_repeating(note, remarks[0]) for note in result.notes]
        if pieces := not_looked_at(result):
            remarks.append(f"evidence not looked at: {pieces}")
        if text := "; ".join(filter(None, remarks)):
            claims.setdefault((result.ladder or result.claim, text), []).append(result.claim)
    lines = [clean(f"{', '.join(names)}: {text}") for (_, text), names in claims.items()]
    if quick := [r.claim for r in results if r.quick]:
        some = f"{', '.join(quick)}: " if len(quick) < len(results) else ""
        lines.insert(0, clean(f"{some}measured with --quick: not accepted into expectations"))
    if any(r.against is Against.NAIVE for r in results):
        lines.insert(0, "* naive baseline: left out of the geometric mean")
    return lines
