"""Results as people and other tools read them: pure views of one list."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import journal, stats
from .model import Against, Expectation, Interval, Metric, Outcome, Result, Timing, Verdict

COLUMNS = (
    "claim",
    "baseline",
    "optimized",
    "ratio [99 % interval]",
    "library",
    "rate",
    "verdict",
    "expected",
)
LEFT = frozenset({"claim", "verdict", "expected"})
POWER_CAP = 0x4
"""NVML's clock event reason: the software power cap holds the clock down."""
RIDGE = 16.0
"""Operations a byte above which a call is said to compute rather than to move (fp32's ridge)."""
WHOLE = 1000
"""A figure from here on needs no decimals to show four digits."""
SHORTEST = 24
"""A claim's name is not clipped below this many characters."""
TIME_UNITS = ((1e-6, 1e-3, "us"), (1e-3, 1.0, "ms"), (1.0, math.inf, "s"))


def clean(text: object) -> str:
    """Make a name or message safe to print: one line, no terminal escape, no workflow command."""
    flat = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in str(text))
    return re.sub(r":(?=:)|#(?=[#\[])", r"\g<0> ", flat)


def table(results: Sequence[Result], width: int = 120) -> list[str]:
    """Lay out the summary, a line each: claims by chapter, notes, totals."""
    shown = [r for r in results if _has_row(r)]
    groups: dict[tuple[str, str], list[list[str]]] = {}
    for result in shown:
        chapter, _, name = result.claim.rpartition("/")
        mark = " *" if result.against is Against.NAIVE else ""
        cells = [f"  {name}{mark}", *_cells(result)]
        groups.setdefault((result.key, chapter), []).append([clean(c) for c in cells])
    rows = [row for group in groups.values() for row in group]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    spare = width - sum(widths) - 2 * (len(widths) - 1)
    if spare < 0:  # only the names give way: a clipped figure would be another figure
        widths[0] = max(widths[0] + spare, min(SHORTEST, widths[0]))
    lines: list[str] = []
    if rows:
        lines += [_line(COLUMNS, widths)]
    for key, chapter in sorted(groups):
        lines += [clean(f"{chapter or '.'} ({key})")]
        lines += [_line(row, widths) for row in groups[key, chapter]]
    lines += [_clip(note, width) for note in _notes(shown)]
    lines += _not_run(results, width)
    return [*lines, totals(results)] if results else lines


def _has_row(result: Result) -> bool:
    broken = (Outcome.FAILED, Outcome.INVALID, Outcome.ERROR)
    return bool(journal.figures(result)) or result.outcome in broken


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    laid = [
        cell.ljust(room) if column in LEFT else cell.rjust(room)
        for column, cell, room in zip(
            COLUMNS, [_middle(cells[0], widths[0]), *cells[1:]], widths, strict=True
        )
    ]
    return "  ".join(laid).rstrip()


def _middle(text: str, width: int) -> str:
    """Clip in the middle: both the function and its parameter tell claims apart."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return f"{text[: width - 3 - tail]}...{text[len(text) - tail :]}"


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _cells(result: Result) -> list[str]:
    """Every column after the claim's name."""
    timing = result.timing if journal.figures(result) else None
    return [
        _figure(timing, "baseline"),
        _figure(timing, "optimized"),
        _ratio(result.speedup),
        f"{result.library.value:.2f}x" if result.library else "-",
        _rate(result),
        _verdict(result),
        _expected(result.expectation),
    ]


def _typical(timing: Timing | None, arm: str) -> float | None:
    rounds = [r for rep in timing.replicates for r in rep.rounds] if timing else []
    if timing is None or not any(r.seconds.get(arm) for r in rounds):
        return None
    return stats.typical(timing.replicates, arm)


def _figure(timing: Timing | None, arm: str) -> str:
    value = _typical(timing, arm)
    return "-" if timing is None or value is None else amount(value, timing.unit)


def amount(value: float, unit: str) -> str:
    """Write a figure with four significant digits in a unit that suits its size."""
    if unit == "s":
        scale, name = next(((s, n) for s, below, n in TIME_UNITS if value < below), (1.0, "s"))
        return f"{_digits(value / scale)} {name}"
    if unit in ("B", "bytes"):
        power = min(int(math.log2(value)) // 10, 4) if value >= 1 else 0
        return f"{_digits(value / 1024**power)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    return f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= WHOLE else f"{value:#.4g}".rstrip(".")


def _ratio(ratio: Interval | None) -> str:
    return str(ratio) if ratio else "-"


def _rate(result: Result) -> str:
    seconds = _typical(result.timing, "optimized")
    timed = result.timing is not None and result.timing.unit == "s"
    if result.work is None or not timed or not seconds:
        return "-"
    work = result.work
    if not (work.bytes or work.flops):
        return "-"
    computes = work.flops > RIDGE * work.bytes
    rate = (work.flops if computes else work.bytes) / seconds
    power = min(max(int(math.log10(rate)) // 3, 2), 4) if rate >= 1 else 2
    return f"{_digits(rate / 1000**power)} {' KMGT'[power]}{'FLOP' if computes else 'B'}/s"


def _verdict(result: Result) -> str:
    if result.outcome in (Outcome.PASSED, Outcome.FAILED) and result.verdict:
        lost = result.outcome is Outcome.FAILED
        holds = result.verdict in (Verdict.FASTER, Verdict.SAME)
        return f"{result.verdict}, lost" if lost and holds else result.verdict.value
    return result.outcome.value


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


def _notes(results: Iterable[Result]) -> list[str]:
    results = list(results)
    notes: list[str] = []
    if any(r.against is Against.NAIVE for r in results):
        notes.append("* naive baseline: left out of the geometric mean")
    for result in results:
        said = list(result.timing.notes) if result.timing else []
        replicates = result.timing.replicates if result.timing else ()
        redone = sum(r.redone for r in replicates)
        if redone:
            said.append(f"{redone} {'round' if redone == 1 else 'rounds'} redone")
        rounds = [r for replicate in replicates for r in replicate.rounds]
        capped = sum(bool((r.event_reasons or 0) & POWER_CAP) for r in rounds)
        if capped:
            said.append(f"power cap in {capped} of {len(rounds)} rounds")
        for also in result.also:
            arms = (_figure(also, "baseline"), _figure(also, "optimized"))
            said.append(f"{also.metric}: {arms[0]} -> {arms[1]}")
        if result.attempts > 1:
            said.append(f"attempt {result.attempts}")
        if result.quick:
            said.append("quick")
        if result.outcome is not Outcome.PASSED and result.message:
            said.insert(0, result.message.strip().split("\n")[0])
        if said:
            notes.append(clean(f"{result.claim}: {'; '.join(said)}"))
    return notes


def _not_run(results: Iterable[Result], width: int) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.outcome is Outcome.NOT_RUN:
            reasons.setdefault(clean(result.message), []).append(clean(result.claim))
    lines: list[str] = []
    for reason, claims in reasons.items():
        text = f"not run: {', '.join(claims)}" + (f" ({reason})" if reason else "")
        lines += textwrap.wrap(text, max(width, 40), subsequent_indent="  ", break_long_words=False)
    return lines


def totals(results: Sequence[Result]) -> str:
    """Say how the claims ended, in one line; what did not run is counted, never averaged."""
    apart = (Outcome.SKIPPED, Outcome.NOT_RUN)
    ended = [r for r in results if r.outcome not in apart]
    kinds = Counter(
        "checked" if r.outcome is Outcome.PASSED and r.verdict is None else _verdict(r)
        for r in ended
    )
    noun = "claim" if len(ended) == 1 else "claims"
    head = f"{len(ended)} {noun}"
    if kinds:
        head += ": " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
    parts = [head]
    skips = Counter(r.message or "no reason given" for r in results if r.outcome is Outcome.SKIPPED)
    if skips:
        why = ", ".join(f"{reason}: {n}" for reason, n in skips.most_common())
        parts.append(f"{sum(skips.values())} skipped ({why})")
    not_run = sum(r.outcome is Outcome.NOT_RUN for r in results)
    if not_run:
        parts.append(f"{not_run} not run")
    counted = [r.speedup.value for r in ended if _headline(r) and r.speedup]
    if counted:
        mean = stats.geometric_mean(counted)
        parts.append(
            f"geometric mean {mean:.2f}x against non-naive baselines ({len(counted)}/{len(ended)})"
        )
    return clean("; ".join(parts))


def _headline(result: Result) -> bool:
    """Losers count, or the mean would flatter; bytes and scores are no speedups."""
    return (
        result.outcome in (Outcome.PASSED, Outcome.FAILED)
        and result.verdict is not None
        and result.against is not Against.NAIVE
        and result.timing is not None
        and result.timing.metric in (Metric.DEVICE, Metric.WALL)
    )


def live_line(progress: Mapping[str, Any], width: int = 120) -> str:
    """Say in one line what is going on.

    ``progress`` may hold claim, phase, done, total, replicate, most, ratio, half_width (a
    fraction), sm_mhz, temperature_c; what is absent or no number is left out.
    """
    number = {k: v for k, v in progress.items() if isinstance(v, (int, float)) and math.isfinite(v)}
    phase = str(progress.get("phase") or "")
    for count, limit in (("done", "total"), ("replicate", "most")):
        if count in number:
            phase = "replicate" if count == "replicate" else phase
            phase += f" {number[count]}" + (f"/{number[limit]}" if limit in number else "")
    ratio = f"{number['ratio']:.2f}x" if "ratio" in number else ""
    if ratio and "half_width" in number:
        ratio += f" +-{100 * number['half_width']:.2f} %"
    parts = [str(progress.get("claim") or ""), phase.strip(), ratio]
    parts += [
        f"{number[k]:g} {u}" for k, u in (("sm_mhz", "MHz"), ("temperature_c", "C")) if k in number
    ]
    return _clip(clean("  ".join(p for p in parts if p)), width)


def markdown(results: Sequence[Result]) -> str:
    """Write the summary as GitHub Markdown: a table for each kind of GPU, notes, totals."""
    shown = [r for r in results if _has_row(r)]
    blocks: list[str] = []
    for key in sorted({r.key for r in shown}):
        lines = [f"**{_escape(key)}**", "", f"| {' | '.join(COLUMNS)} |"]
        lines.append("|" + "|".join(" :-- " if c in LEFT else " --: " for c in COLUMNS) + "|")
        for result in sorted((r for r in shown if r.key == key), key=lambda r: r.claim):
            mark = r" \*" if result.against is Against.NAIVE else ""
            cells = [_code(result.claim) + mark, *map(_escape, _cells(result))]
            lines.append(f"| {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    asides = [*_notes(shown), *_not_run(results, 10**6)]
    if asides:
        blocks.append("\n".join(f"- {_escape(note)}" for note in asides))
    blocks.append(_escape(totals(results)))
    return "\n\n".join(blocks) + "\n"


def _escape(text: str) -> str:
    """Leave nothing that Markdown or HTML would read as structure."""
    safe = html.escape(clean(text), quote=False)
    return re.sub(r"[\\`*_\[\]|~$!]|^[-+#=](?=.)", r"\\\g<0>", safe)


def _code(text: str) -> str:
    """Show an id in a code span, where only a back-tick and a table's bar mean anything."""
    safe = clean(text).replace("`", "'").replace("|", r"\|")
    return f"`{safe}`"


def benchmark_session_add(session: Any, results: Iterable[Result]) -> None:
    """Put valid, conclusive results into pytest-benchmark's session, before that finishes.

    ``session`` is what its plugin registers as "pytest-benchmark", None where it is off. Called on
    the controller it serves --benchmark-json, -save, -autosave, -compare and -histogram, with
    workers too. Its table is left out where it would only repeat ours.
    """
    if session is None:
        return
    asked = session.compare or session.compare_fail or session.histogram or session.verbose
    if not session.benchmarks and not asked:
        session.quiet = True
    session.benchmarks.extend(journal.benchmark(r) for r in results if _conclusive(r))


def _conclusive(result: Result) -> bool:
    return (
        result.outcome in (Outcome.PASSED, Outcome.FAILED)
        and result.verdict not in (None, Verdict.INCONCLUSIVE)
        and bool(journal.figures(result))
    )
