"""Evidence of why an arm is faster: a claim's author states it, and each run checks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, Literal

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Evidence, EvidenceKind, Finding, KernelRecord, Work

Bound = float | None
Per = Literal["", "baseline", "work"]


def opcode(name: str, kernel: str = "", *, min: Bound = None, max: Bound = None) -> Evidence:
    """Require a SASS instruction: ``opcode("LDG.E.128", kernel="copy_vectors")``.

    ``name`` is the beginning of the opcode (``HGMMA`` matches ``HGMMA.64x128x16.F32.BF16``; ``*``
    matches anything). Only kernels whose name contains ``kernel`` are checked. ``min`` and ``max``
    bound how often the instruction occurs in the code: without them, at least once.
    """
    min = 1 if min is None and max is None else min
    return _evidence(EvidenceKind.OPCODE, name, kernel, min=min, max=max)


def registers(*, min: Bound = None, max: Bound = None, kernel: str = "") -> Evidence:
    """Bound the registers per thread of the kernels whose names contain ``kernel``."""
    return _evidence(EvidenceKind.REGISTERS, kernel=kernel, min=min, max=max)


def spills(*, min: Bound = None, max: Bound = None, kernel: str = "") -> Evidence:
    """Bound the bytes of spill stores and loads per thread; without bounds, max is 0."""
    max = 0 if min is None and max is None else max
    return _evidence(EvidenceKind.SPILLS, kernel=kernel, min=min, max=max)


def launches(*, min: Bound = None, max: Bound = None, per: Per = "") -> Evidence:
    """Bound the host's launches per call: kernels, graphs and copies."""
    return _evidence(EvidenceKind.LAUNCHES, min=min, max=max, per=per)


def kernels(*, min: Bound = None, max: Bound = None, per: Per = "") -> Evidence:
    """Bound the kernels that run per call, including those inside a graph."""
    return _evidence(EvidenceKind.KERNELS, min=min, max=max, per=per)


def graph_breaks(*, min: Bound = None, max: Bound = None) -> Evidence:
    """Bound how often torch.compile falls back to Python in the optimized arm; default: max=0."""
    max = 0 if min is None and max is None else max
    return _evidence(EvidenceKind.GRAPH_BREAKS, min=min, max=max)


def peak_memory(*, min: Bound = None, max: Bound = None, per: Per = "") -> Evidence:
    """Bound the peak of the bytes that one call allocates."""
    return _evidence(EvidenceKind.PEAK_MEMORY, min=min, max=max, per=per)


def counter(
    metric: str, kernel: str = "", *, min: Bound = None, max: Bound = None, per: Per = ""
) -> Evidence:
    """Bound an ncu metric of the optimized arm, summed over the kernels of one call.

    ``per="baseline"`` takes the ratio to the baseline's figure, ``per="work"`` the ratio to the
    bytes of ``work``. It is read under ``--profile=ncu``.
    """
    return _evidence(EvidenceKind.COUNTER, metric, kernel, min=min, max=max, per=per)


def _evidence(
    kind: EvidenceKind, of: str = "", kernel: str = "", *, min: Bound, max: Bound, per: Per = ""
) -> Evidence:
    if min is None and max is None:
        raise UsageError(f"evidence.{kind.name.lower()}({of!r}) needs a bound: min= or max=")
    if per not in ("", "baseline", "work"):
        raise UsageError(f"evidence.{kind.name.lower()}(per={per!r}): use 'baseline' or 'work'")
    return Evidence(kind, of, kernel, min, max, per)


STATIC: Final = (EvidenceKind.OPCODE, EvidenceKind.REGISTERS, EvidenceKind.SPILLS)
"""Kinds of evidence that are checked in the compiled code, without a GPU."""

_NOUNS: Final = {
    EvidenceKind.REGISTERS: "registers per thread",
    EvidenceKind.SPILLS: "bytes of spills per thread",
    EvidenceKind.LAUNCHES: "launches per call",
    EvidenceKind.KERNELS: "kernels per call",
    EvidenceKind.GRAPH_BREAKS: "graph breaks",
    EvidenceKind.PEAK_MEMORY: "bytes of peak memory",
}
_NO_BASELINE: Final = "the baseline has 0, and "
"""Begins the ``where`` of a finding without a ratio, because the baseline's figure is 0."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel."""

    kernel: KernelRecord
    opcodes: Mapping[str, int] | None = None
    """Number of instructions by SASS opcode; None if the code was not disassembled."""

    def __str__(self) -> str:
        return f"{self.kernel.function} ({self.kernel.source}, {self.kernel.arch})"


@dataclass(frozen=True, slots=True)
class Facts:
    """The figures of one run of a claim, against which its evidence is checked."""

    code: Sequence[Compiled] = ()  #: The compiled kernels that are known.
    complete: bool = False  #: Whether ``code`` has all kernels of the claim.
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The figures of each arm by name: an EvidenceKind or an ncu metric."""
    at_least: bool = False  #: Whether the counts of launches and kernels are lower bounds.
    work: Work | None = None  #: The work of one call.


def hold(evidence: Sequence[Evidence], facts: Facts) -> tuple[Finding, ...]:
    """Return the figure of each piece of evidence and whether it lies within its bounds."""
    return tuple(
        _check_code(piece, facts) if piece.kind in STATIC else _check_arm(piece, facts)
        for piece in evidence
    )


def broken(findings: Sequence[Finding]) -> str:
    """Describe each finding that does not hold in one sentence; return "" when all hold."""
    return "; ".join(_sentence(finding) for finding in findings if not finding.held)


def _check_code(piece: Evidence, facts: Facts) -> Finding:
    """Check each kernel whose name matches; opcodes without a kernel name are counted per build.

    Return a finding that fails or, if all hold, one of those.
    """
    needs_sass = piece.kind is EvidenceKind.OPCODE
    readable = [c for c in facts.code if not needs_sass or c.opcodes is not None]
    named = [c for c in readable if piece.kernel in c.kernel.function]
    sources = {c.kernel.source for c in named}
    builds = {(c.kernel.source, c.kernel.arch) for c in readable if c.kernel.source in sources}
    missing = sorted(builds - {(c.kernel.source, c.kernel.arch) for c in named})
    if missing or (facts.complete and not named):
        where = "{} for {}".format(*missing[0]) if missing else "this claim"
        kernels = ", ".join(dict.fromkeys(c.kernel.function for c in facts.code)) or "none"
        raise UsageError(
            f"evidence of {piece.of or piece.kind}: no kernel of {where} has {piece.kernel!r} in "
            f"its name; its kernels are {kernels}"
        )
    figures = [(_in_code(piece, code), str(code)) for code in named]
    if needs_sass and not piece.kernel:
        sums: dict[str, float] = {}
        for (count, _), code in zip(figures, named, strict=True):
            where = f"{code.kernel.source} for {code.kernel.arch}"
            sums[where] = sums.get(where, 0) + count
        figures = [(count, where) for where, count in sums.items()]
    findings = [Finding(piece, value, _within(piece, value), where) for value, where in figures]
    return min(findings, key=lambda finding: finding.held, default=Finding(piece))


def _in_code(piece: Evidence, code: Compiled) -> float:
    if piece.kind is EvidenceKind.REGISTERS:
        return code.kernel.registers
    if piece.kind is EvidenceKind.SPILLS:
        return code.kernel.spill_bytes
    counts = (code.opcodes or {}).items()
    return sum(n for name, n in counts if matches(piece.of, name))


def matches(pattern: str, opcode: str) -> bool:
    """Whether a pattern matches an opcode, or the opcode without its last modifiers."""
    return fnmatchcase(opcode, pattern) or fnmatchcase(opcode, f"{pattern}.*")


def _check_arm(piece: Evidence, facts: Facts) -> Finding:
    name = piece.of or piece.kind.value
    arm = facts.figures.get("optimized", {})
    value, where = arm.get(name), "the optimized arm"
    if value is None:
        return Finding(piece)
    if facts.at_least and piece.kind in (EvidenceKind.LAUNCHES, EvidenceKind.KERNELS):
        if piece.per:
            return Finding(piece)  # a ratio of two lower bounds is not a bound
        where += ", as far as the CPU can count,"
    if piece.per == "work":
        if facts.work is None or not facts.work.bytes:
            raise UsageError('evidence with per="work" needs work= with bytes')
        value /= facts.work.bytes
    elif piece.per == "baseline":
        baseline = facts.figures.get("baseline", {}).get(name)
        if baseline is None:
            return Finding(piece)
        if not baseline:  # a ratio to 0 is undefined
            return Finding(piece, value, held=False, where=f"{_NO_BASELINE}{where}")
        value /= baseline
    return Finding(piece, value, _within(piece, value), where)


def _within(piece: Evidence, value: float) -> bool:
    above = piece.min is None or value >= piece.min
    return above and (piece.max is None or value <= piece.max)


def _sentence(finding: Finding) -> str:
    piece = finding.evidence
    figure = f"{finding.value:g} {_NOUNS.get(piece.kind, piece.of)}"
    if piece.per == "work":
        figure += " per byte of work"
    elif piece.per == "baseline" and not finding.where.startswith(_NO_BASELINE):
        figure = f"{finding.value:g} times the baseline's {_NOUNS.get(piece.kind, piece.of)}"
    bounds = (("at least", piece.min), ("at most", piece.max))
    stated = " and ".join(f"{side} {bound:g}" for side, bound in bounds if bound is not None)
    return f"{finding.where} has {figure}; the claim states {stated}"
