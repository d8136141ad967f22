"""What proves why an arm is faster: what a claim's author states, and whether it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, Literal

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Evidence, EvidenceKind, Finding, KernelRecord, Work

Per = Literal["", "baseline", "work"]


def opcode(
    name: str, kernel: str = "", *, min: float | None = None, max: float | None = None
) -> Evidence:
    """Require a SASS instruction: ``opcode("LDG.E.128", kernel="copy_vectors")``.

    ``name`` is the opcode's beginning (``HGMMA`` matches ``HGMMA.64x128x16.F32.BF16``; ``*``
    matches anything), ``kernel`` a part of the kernels' names. The bounds are counts of
    instructions in the code. Without bounds there must be at least one; ``max=0`` forbids it.
    """
    if min is None and max is None:
        min = 1
    return _evidence(EvidenceKind.OPCODE, name, kernel, min=min, max=max)


def registers(*, min: float | None = None, max: float | None = None, kernel: str = "") -> Evidence:
    """Bound the registers per thread of the kernels whose names contain ``kernel``."""
    return _evidence(EvidenceKind.REGISTERS, kernel=kernel, min=min, max=max)


def spills(*, min: float | None = None, max: float | None = None, kernel: str = "") -> Evidence:
    """Bound the bytes of spill stores and loads per thread; without bounds there are none."""
    if min is None and max is None:
        max = 0
    return _evidence(EvidenceKind.SPILLS, kernel=kernel, min=min, max=max)


def launches(*, min: float | None = None, max: float | None = None, per: Per = "") -> Evidence:
    """Bound the host's launches per call: kernels, graphs and copies."""
    return _evidence(EvidenceKind.LAUNCHES, min=min, max=max, per=per)


def kernels(*, min: float | None = None, max: float | None = None, per: Per = "") -> Evidence:
    """Bound the kernels that run per call, those inside a graph included."""
    return _evidence(EvidenceKind.KERNELS, min=min, max=max, per=per)


def graph_breaks(*, min: float | None = None, max: float | None = None) -> Evidence:
    """Bound how often torch.compile falls back to Python in the optimized arm; default none."""
    if min is None and max is None:
        max = 0
    return _evidence(EvidenceKind.GRAPH_BREAKS, min=min, max=max)


def peak_memory(*, min: float | None = None, max: float | None = None, per: Per = "") -> Evidence:
    """Bound the peak of the bytes that one call allocates."""
    return _evidence(EvidenceKind.PEAK_MEMORY, min=min, max=max, per=per)


def counter(
    metric: str,
    kernel: str = "",
    *,
    min: float | None = None,
    max: float | None = None,
    per: Per = "",
) -> Evidence:
    """Bound an ncu metric of the optimized arm, summed over the kernels of one call.

    ``per="baseline"`` takes the ratio to the baseline's figure, ``per="work"`` the ratio to the
    bytes of ``work``. Read under ``--profile=ncu``.
    """
    return _evidence(EvidenceKind.COUNTER, metric, kernel, min=min, max=max, per=per)


def _evidence(
    kind: EvidenceKind,
    of: str = "",
    kernel: str = "",
    *,
    min: float | None,
    max: float | None,
    per: Per = "",
) -> Evidence:
    if min is None and max is None:
        raise UsageError(f"evidence.{kind.name.lower()}({of!r}) needs a bound: min= or max=")
    if per not in ("", "baseline", "work"):
        raise UsageError(f"evidence.{kind.name.lower()}(per={per!r}): use 'baseline' or 'work'")
    return Evidence(kind, of, kernel, min, max, per)


STATIC: Final = (EvidenceKind.OPCODE, EvidenceKind.REGISTERS, EvidenceKind.SPILLS)
"""Proofs that compiled code gives, without a GPU."""

_NOUNS: Final = {
    EvidenceKind.REGISTERS: "registers a thread",
    EvidenceKind.SPILLS: "bytes of spills a thread",
    EvidenceKind.LAUNCHES: "launches a call",
    EvidenceKind.KERNELS: "kernels a call",
    EvidenceKind.GRAPH_BREAKS: "graph breaks",
    EvidenceKind.PEAK_MEMORY: "bytes at its peak",
}
_RELATIVE: Final = {"": "", "baseline": " to each of the baseline's", "work": " a byte of work"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as the compiler left it; ``opcodes`` None where nobody disassembled it."""

    kernel: KernelRecord
    opcodes: Mapping[str, int] | None = None

    def __str__(self) -> str:
        return f"{self.kernel.function} ({self.kernel.source}, {self.kernel.arch})"


@dataclass(frozen=True, slots=True)
class Facts:
    """What one run knows: of each arm figures by name, and of compiled code.

    A figure's name is an EvidenceKind or an ncu metric. ``every`` says that the claim has no
    other kernels than ``code``; ``at_least`` that more launches and kernels than the counted ones
    are possible.
    """

    code: Sequence[Compiled] = ()
    every: bool = False
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    at_least: bool = False
    work: Work | None = None


def hold(evidence: Sequence[Evidence], facts: Facts) -> tuple[Finding, ...]:
    """Say of each piece of evidence what was found, and whether it lies within its bounds."""
    return tuple(
        _of_code(piece, facts) if piece.kind in STATIC else _of_arm(piece, facts)
        for piece in evidence
    )


def broken(findings: Sequence[Finding]) -> str:
    """Say in a sentence each what does not hold; nothing when all does."""
    return "; ".join(_sentence(found) for found in findings if not found.held)


def _of_code(piece: Evidence, facts: Facts) -> Finding:
    """Hold each kernel that is named; where none is, each architecture as a whole."""
    looked = [
        c for c in facts.code if piece.kind is not EvidenceKind.OPCODE or c.opcodes is not None
    ]
    named = [c for c in looked if piece.kernel in c.kernel.function]
    sources = {c.kernel.source for c in named}
    builds = {(c.kernel.source, c.kernel.arch) for c in looked if c.kernel.source in sources}
    lacking = sorted(builds - {(c.kernel.source, c.kernel.arch) for c in named})
    if lacking or (facts.every and not named):
        where = "{} for {}".format(*lacking[0]) if lacking else "this claim"
        known = ", ".join(dict.fromkeys(c.kernel.function for c in facts.code)) or "none"
        raise UsageError(
            f"{piece.kind} {piece.of} of {piece.kernel!r}: no kernel of {where} is called that; "
            f"known are {known}"
        )
    found = [(_in_code(piece, code), str(code)) for code in named]
    if piece.kind is EvidenceKind.OPCODE and not piece.kernel:
        sums: dict[str, float] = {}
        for (count, _), code in zip(found, named, strict=True):
            where = f"{code.kernel.source} for {code.kernel.arch}"
            sums[where] = sums.get(where, 0) + count
        found = [(count, where) for where, count in sums.items()]
    judged = [Finding(piece, value, _within(piece, value), where) for value, where in found]
    return min(judged, key=lambda finding: finding.held, default=Finding(piece))


def _in_code(piece: Evidence, code: Compiled) -> float:
    if piece.kind is EvidenceKind.REGISTERS:
        return code.kernel.registers
    if piece.kind is EvidenceKind.SPILLS:
        return code.kernel.spill_bytes
    counts = (code.opcodes or {}).items()
    return sum(n for name, n in counts if matches(piece.of, name))


def matches(wanted: str, opcode: str) -> bool:
    """Whether an opcode is the wanted one, or the wanted one with more modifiers."""
    return fnmatchcase(opcode, wanted) or fnmatchcase(opcode, f"{wanted}.*")


def _of_arm(piece: Evidence, facts: Facts) -> Finding:
    name = piece.of or piece.kind.value
    arm = facts.figures.get("optimized", {})
    value, where = arm.get(name), "the optimized arm"
    if value is None:
        return Finding(piece)
    if facts.at_least and piece.kind in (EvidenceKind.LAUNCHES, EvidenceKind.KERNELS):
        if piece.per:
            return Finding(piece)  # the ratio of two lower bounds bounds nothing
        where += ", as far as the CPU can count,"
    if piece.per == "work":
        value /= _bytes(facts.work)
    elif piece.per == "baseline":
        base = facts.figures.get("baseline", {}).get(name)
        if base is None:
            return Finding(piece)
        if not base:  # nothing can be said to each of the baseline's when it has none
            return Finding(piece, value, held=False, where=f"the baseline has 0, and {where}")
        value /= base
    return Finding(piece, value, _within(piece, value), where)


def _bytes(work: Work | None) -> float:
    if work is None or not work.bytes:
        raise UsageError('evidence with per="work" needs work= with bytes')
    return work.bytes


def _within(piece: Evidence, value: float) -> bool:
    least = piece.min is None or value >= piece.min
    return least and (piece.max is None or value <= piece.max)


def _sentence(found: Finding) -> str:
    piece = found.evidence
    noun = _NOUNS.get(piece.kind, piece.of) + _RELATIVE[piece.per]
    bounds = [f"at least {piece.min:g}"] if piece.min is not None else []
    bounds += [f"at most {piece.max:g}"] if piece.max is not None else []
    return f"{found.where} has {found.value:g} {noun}, and {' and '.join(bounds)} is claimed"
