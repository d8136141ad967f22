"""What proves why an arm is faster: what a claim's author says, and whether it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, Literal

from pytest_aiperf.errors import Misuse
from pytest_aiperf.model import Evidence, Finding, KernelRecord, Proof, Work

Per = Literal["", "baseline", "work"]


def opcode(
    name: str, kernel: str = "", *, least: float | None = None, most: float | None = None
) -> Evidence:
    """Hold that kernels have an instruction: ``opcode("LDG.E.128", kernel="copy_vectors")``.

    ``name`` is the SASS opcode, as far as it is to be matched (``HGMMA`` matches
    ``HGMMA.64x128x16.F32.BF16``; ``*`` stands for anything). Without bounds there is at least
    one; ``most=0`` holds that there is none.
    """
    if least is None and most is None:
        least = 1
    return _evidence(Proof.OPCODE, name, kernel, least, most)


def registers(most: float, kernel: str = "") -> Evidence:
    """Hold that kernels use at most so many registers a thread."""
    return _evidence(Proof.REGISTERS, "", kernel, None, most)


def spills(most: float = 0, kernel: str = "") -> Evidence:
    """Hold that kernels spill at most so many bytes a thread (stores and loads)."""
    return _evidence(Proof.SPILLS, "", kernel, None, most)


def launches(most: float, per: Per = "") -> Evidence:
    """Hold how many times the host launches in one call: kernels, graphs, copies."""
    return _evidence(Proof.LAUNCHES, "", "", None, most, per)


def kernels(most: float, per: Per = "") -> Evidence:
    """Hold how many kernels run in one call, those of a graph included."""
    return _evidence(Proof.KERNELS, "", "", None, most, per)


def graph_breaks(most: float = 0) -> Evidence:
    """Hold how often torch.compile falls back to Python in the optimized arm."""
    return _evidence(Proof.GRAPH_BREAKS, "", "", None, most)


def peak_memory(most: float, per: Per = "") -> Evidence:
    """Hold the peak bytes that one call allocates."""
    return _evidence(Proof.PEAK_MEMORY, "", "", None, most, per)


def counter(
    metric: str,
    kernel: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
    per: Per = "",
) -> Evidence:
    """Hold an ncu metric of the optimized arm, summed over the kernels of one call.

    ``per="baseline"`` gives the ratio to the baseline's, ``per="work"`` to the bytes of ``work``.
    Looked at under ``--profile=ncu``.
    """
    return _evidence(Proof.COUNTER, metric, kernel, least, most, per)


def _evidence(  # noqa: PLR0917  private: the constructors above name them all
    proof: Proof, of: str, kernel: str, least: float | None, most: float | None, per: Per = ""
) -> Evidence:
    if least is None and most is None:
        raise Misuse(f"{proof} {of}: give a bound, least= or most=")
    if per not in ("", "baseline", "work"):
        raise Misuse(f"{proof}(per={per!r}): known are baseline, work")
    return Evidence(proof, of, kernel, least, most, per)


STATIC: Final = (Proof.OPCODE, Proof.REGISTERS, Proof.SPILLS)
"""Proofs that compiled code gives, without a GPU."""

_NOUNS: Final = {
    Proof.REGISTERS: "registers a thread",
    Proof.SPILLS: "bytes of spills a thread",
    Proof.LAUNCHES: "launches a call",
    Proof.KERNELS: "kernels a call",
    Proof.GRAPH_BREAKS: "graph breaks",
    Proof.PEAK_MEMORY: "bytes at its peak",
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

    A figure's name is a Proof or an ncu metric. ``every`` says that the claim has no other kernels
    than ``code``; ``at_least`` that launches and kernels may well be more than were counted.
    """

    code: Sequence[Compiled] = ()
    every: bool = False
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    at_least: bool = False
    work: Work | None = None


def hold(evidence: Sequence[Evidence], facts: Facts) -> tuple[Finding, ...]:
    """Say of each piece of evidence what was found, and whether it lies within its bounds."""
    return tuple(
        _of_code(piece, facts) if piece.proof in STATIC else _of_arm(piece, facts)
        for piece in evidence
    )


def broken(findings: Sequence[Finding]) -> str:
    """Say in a sentence each what does not hold; nothing when all does."""
    return "; ".join(_sentence(found) for found in findings if not found.held)


def _of_code(piece: Evidence, facts: Facts) -> Finding:
    """Hold each kernel that is named; where none is, each architecture as a whole."""
    looked = [c for c in facts.code if piece.proof is not Proof.OPCODE or c.opcodes is not None]
    named = [c for c in looked if piece.kernel in c.kernel.function]
    sources = {c.kernel.source for c in named}
    builds = {(c.kernel.source, c.kernel.arch) for c in looked if c.kernel.source in sources}
    lacking = sorted(builds - {(c.kernel.source, c.kernel.arch) for c in named})
    if lacking or (facts.every and not named):
        where = "{} for {}".format(*lacking[0]) if lacking else "this claim"
        known = ", ".join(dict.fromkeys(c.kernel.function for c in facts.code)) or "none"
        raise Misuse(
            f"{piece.proof} {piece.of} of {piece.kernel!r}: no kernel of {where} is called that; "
            f"known are {known}"
        )
    found = [(_in_code(piece, code), str(code)) for code in named]
    if piece.proof is Proof.OPCODE and not piece.kernel:
        sums: dict[str, float] = {}
        for (count, _), code in zip(found, named, strict=True):
            where = f"{code.kernel.source} for {code.kernel.arch}"
            sums[where] = sums.get(where, 0) + count
        found = [(count, where) for where, count in sums.items()]
    judged = [Finding(piece, value, _within(piece, value), where) for value, where in found]
    return min(judged, key=lambda finding: finding.held, default=Finding(piece))


def _in_code(piece: Evidence, code: Compiled) -> float:
    if piece.proof is Proof.REGISTERS:
        return code.kernel.registers
    if piece.proof is Proof.SPILLS:
        return code.kernel.spill_bytes
    counts = (code.opcodes or {}).items()
    return sum(n for name, n in counts if matches(piece.of, name))


def matches(wanted: str, opcode: str) -> bool:
    """Whether an opcode is the wanted one, or the wanted one with more modifiers."""
    return fnmatchcase(opcode, wanted) or fnmatchcase(opcode, f"{wanted}.*")


def _of_arm(piece: Evidence, facts: Facts) -> Finding:
    name = piece.of or piece.proof.value
    arm = facts.figures.get("optimized", {})
    value, where = arm.get(name), "the optimized arm"
    if value is None:
        return Finding(piece)
    if facts.at_least and piece.proof in (Proof.LAUNCHES, Proof.KERNELS):
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
        raise Misuse('evidence with per="work" needs work= with bytes')
    return work.bytes


def _within(piece: Evidence, value: float) -> bool:
    least = piece.least is None or value >= piece.least
    return least and (piece.most is None or value <= piece.most)


def _sentence(found: Finding) -> str:
    piece = found.evidence
    noun = _NOUNS.get(piece.proof, piece.of) + _RELATIVE[piece.per]
    bounds = [f"at least {piece.least:g}"] if piece.least is not None else []
    bounds += [f"at most {piece.most:g}"] if piece.most is not None else []
    return f"{found.where} has {found.value:g} {noun}, and {' and '.join(bounds)} is claimed"
