"""Evidence of why an arm is faster: a claim's author states it, and each run checks it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, NoReturn, get_args

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import (
    Evidence,
    EvidenceKind,
    Finding,
    KernelRecord,
    Trace,
    Work,
)
from pytest_aiperf.text import no_attribute

from .stats import as_float

Bound = float | None
Per = Literal["", "baseline", "work"]
Direction = Literal["host to device", "device to host", "device to device", "peer to peer"]
HostMemory = Literal["", "pageable", "pinned"]
DIRECTIONS: Final = get_args(Direction)
LOAD_DEPENDENT: Final = (EvidenceKind.BUSY_CORES, EvidenceKind.CONTEXT_SWITCHES)
"""Kinds of evidence whose figures change with the other load of the host."""


def opcode(name: str, kernel: str = "", *, min: Bound = None, max: Bound = None) -> Evidence:
    """Require a SASS instruction: ``opcode("LDG.E.128", kernel="copy_vectors")``.

    ``name`` may omit the last modifiers: ``HGMMA`` matches ``HGMMA.64x128x16.F32.BF16``. ``*``
    matches any text. ``min`` and ``max`` bound how often the instruction occurs in each kernel with
    ``kernel`` in its name or, without ``kernel``, in all kernels of a file; default: at least once.
    The claim raises UsageError if no kernel has this name.
    """
    min = 1 if min is None and max is None else min
    return _evidence(EvidenceKind.OPCODE, name, kernel, min=min, max=max)


def registers(*, min: Bound = None, max: Bound = None, kernel: str = "") -> Evidence:
    """Bound the registers per thread of each kernel with ``kernel`` in its name."""
    return _evidence(EvidenceKind.REGISTERS, kernel=kernel, min=min, max=max)


def spills(*, min: Bound = None, max: Bound = None, kernel: str = "") -> Evidence:
    """Bound the bytes of spill stores and loads per thread; default: max=0.

    Only kernels with ``kernel`` in their name count.
    """
    max = 0 if min is None and max is None else max
    return _evidence(EvidenceKind.SPILLS, kernel=kernel, min=min, max=max)


def launches(*, min: Bound = None, max: Bound = None, per: Per = "") -> Evidence:
    """Bound how many kernels, graphs, copies and memsets the host launches per call."""
    return _evidence(EvidenceKind.LAUNCHES, min=min, max=max, per=per)


def kernels(*, min: Bound = None, max: Bound = None, per: Per = "") -> Evidence:
    """Bound how many kernels run per call, including those of a CUDA graph."""
    return _evidence(EvidenceKind.KERNELS, min=min, max=max, per=per)


def graph_breaks(*, min: Bound = None, max: Bound = None) -> Evidence:
    """Bound how often torch.compile falls back to Python in the optimized arm; default: max=0."""
    max = 0 if min is None and max is None else max
    return _evidence(EvidenceKind.GRAPH_BREAKS, min=min, max=max)


def kernel_name(text: str, *, min: Bound = None, max: Bound = None, per: Per = "") -> Evidence:
    """Bound how many kernels with ``text`` in their name run per call; default: at least one."""
    min = 1 if min is None and max is None else min
    return _evidence(EvidenceKind.KERNEL_NAME, text, min=min, max=max, per=per)


def grid_size(kernel: str = "", *, min: Bound = None, max: Bound = None, per: Per = "") -> Evidence:
    """Bound the thread blocks of the largest launch of a kernel with ``kernel`` in its name."""
    return _evidence(EvidenceKind.GRID_SIZE, kernel=kernel, min=min, max=max, per=per)


def overlap(*, min: Bound = None, max: Bound = None, of: Literal["", "copies"] = "") -> Evidence:
    """Bound how much the GPU does at the same time.

    The figure is the summed duration of all kernels, copies and memsets, divided by the time in
    which at least one of them runs: 1 if they run one after the other. With ``of="copies"``, it is
    the fraction of the copies' time in which a kernel runs as well, from 0 to 1.
    """
    if of not in ("", "copies"):
        raise UsageError(f"evidence.overlap(of={of!r}): use 'copies', or leave it out")
    return _evidence(EvidenceKind.OVERLAP, of, min=min, max=max)


def copied_bytes(
    direction: Direction,
    *,
    memory: HostMemory = "",
    min: Bound = None,
    max: Bound = None,
    per: Per = "",
) -> Evidence:
    """Bound the bytes that one call copies in a direction, such as "host to device".

    With ``memory``, only copies from or to this kind of host memory count. Copies that a kernel
    makes itself do not count, only those of the CUDA API.
    """
    if direction not in DIRECTIONS:
        raise UsageError(
            f"evidence.copied_bytes({direction!r}): use one of {', '.join(DIRECTIONS)}"
        )
    if memory not in get_args(HostMemory):
        raise UsageError(f"evidence.copied_bytes(memory={memory!r}): use 'pageable' or 'pinned'")
    of = f"{direction} ({memory})" if memory else direction
    return _evidence(EvidenceKind.COPIED_BYTES, of, min=min, max=max, per=per)


def api_calls(*, min: Bound = None, max: Bound = None, per: Per = "") -> Evidence:
    """Bound the calls of the CUDA API per call, without those that only query or make events."""
    return _evidence(EvidenceKind.API_CALLS, min=min, max=max, per=per)


def busy_share(*, min: Bound = None, max: Bound = None) -> Evidence:
    """Bound the share of a call's time on the GPU in which work runs, from 0 to 1.

    The time on the GPU is from the start of the first kernel, copy or memset to the last end.
    """
    return _evidence(EvidenceKind.BUSY_SHARE, min=min, max=max)


def page_faults(*, min: Bound = None, max: Bound = None, per: Per = "") -> Evidence:
    """Bound the page faults per call, of this process and of processes that it has started."""
    return _evidence(EvidenceKind.PAGE_FAULTS, min=min, max=max, per=per)


def context_switches(*, min: Bound = None, max: Bound = None, per: Per = "") -> Evidence:
    """Bound the context switches of this process per call, voluntary and involuntary."""
    return _evidence(EvidenceKind.CONTEXT_SWITCHES, min=min, max=max, per=per)


def busy_cores(*, min: Bound = None, max: Bound = None, per: Per = "") -> Evidence:
    """Bound how many CPU cores this process keeps busy: its CPU seconds per second of a call.

    Less than 1 means that the call waits. More than 1 means that threads run at the same time.
    Child processes do not count.
    """
    return _evidence(EvidenceKind.BUSY_CORES, min=min, max=max, per=per)


def peak_memory(*, min: Bound = None, max: Bound = None, per: Per = "") -> Evidence:
    """Bound the peak bytes that one call allocates; on a GPU, those of torch's allocator."""
    return _evidence(EvidenceKind.PEAK_MEMORY, min=min, max=max, per=per)


def counter(
    metric: str, kernel: str = "", *, min: Bound = None, max: Bound = None, per: Per = ""
) -> Evidence:
    """Bound an ncu metric, such as "dram__bytes.sum", summed over the kernels of one call.

    The metric is read after the timing, and under ``--profile=ncu``. With ``kernel``, only kernels
    with this text in their name count; after the timing, this needs a call without other kernels.
    """
    return _evidence(EvidenceKind.COUNTER, metric, kernel, min=min, max=max, per=per)


def _evidence(
    kind: EvidenceKind, of: str = "", kernel: str = "", *, min: Bound, max: Bound, per: Per = ""
) -> Evidence:
    if min is None and max is None:
        given = repr(of) if of else ""
        raise UsageError(f"evidence.{kind.name.lower()}({given}) needs a bound: min= or max=")
    if per not in ("", "baseline", "work"):
        raise UsageError(f"evidence.{kind.name.lower()}(per={per!r}): use 'baseline' or 'work'")
    return Evidence(kind, of, kernel, _bound(kind, "min", min), _bound(kind, "max", max), per)


def _bound(kind: EvidenceKind, side: str, bound: Bound) -> Bound:
    """Return a bound that a record can hold, which a number of numpy is not."""
    if bound is None or isinstance(bound, int):
        return bound
    figure = as_float(bound)
    if figure is not None and math.isfinite(figure):
        return figure
    raise UsageError(f"evidence.{kind.name.lower()}({side}={bound!r}): give a finite number")


STATIC: Final = (EvidenceKind.OPCODE, EvidenceKind.REGISTERS, EvidenceKind.SPILLS)
"""Kinds of evidence that are checked in the compiled code, without a GPU."""


class _Kind(NamedTuple):
    noun: str  #: What the figure counts, after the figure; may contain ``{of}``.
    read: Callable[[Evidence, Trace], float | None] | None = None
    """Reads the figure from an arm's trace; None if the figure comes from elsewhere."""


def _named(trace: Trace, text: str) -> list[tuple[int, int]] | None:
    """Return (count, grid) of each kernel name with ``text``; None if the trace lacks names."""
    if sum(trace.counts) < trace.kernels:
        return None
    rows = zip(trace.names, trace.counts, trace.grids, strict=True)
    return [(count, grid) for name, count, grid in rows if text in name]


def _count(piece: Evidence, trace: Trace) -> float | None:
    named = _named(trace, piece.of)
    return None if named is None else sum(count for count, _ in named)


def _grid(piece: Evidence, trace: Trace) -> float | None:
    # 0 blocks: the event of a kernel in a graph has no grid
    return max((grid for _, grid in _named(trace, piece.kernel) or ()), default=0) or None


def _overlap(piece: Evidence, trace: Trace) -> float | None:
    if piece.of:
        return trace.hidden / trace.copying if trace.copying else None
    return trace.total / trace.busy if trace.busy else None


def _copied(piece: Evidence, trace: Trace) -> float:
    return sum(size for kind, size in trace.copied.items() if kind.startswith(piece.of))


_KINDS: Final = {
    EvidenceKind.OPCODE: _Kind("{of}"),
    EvidenceKind.REGISTERS: _Kind("registers per thread"),
    EvidenceKind.SPILLS: _Kind("bytes of spills per thread"),
    EvidenceKind.LAUNCHES: _Kind("launches per call", lambda _, trace: trace.launches),
    EvidenceKind.KERNELS: _Kind("kernels per call", lambda _, trace: trace.kernels),
    EvidenceKind.GRAPH_BREAKS: _Kind("graph breaks"),
    EvidenceKind.KERNEL_NAME: _Kind("kernels named {of} per call", _count),
    EvidenceKind.GRID_SIZE: _Kind("blocks in the largest launch", _grid),
    EvidenceKind.OVERLAP: _Kind("overlap of {of}", _overlap),
    EvidenceKind.COPIED_BYTES: _Kind("bytes copied {of} per call", _copied),
    EvidenceKind.API_CALLS: _Kind("API calls per call", lambda _, trace: trace.api_calls),
    EvidenceKind.BUSY_SHARE: _Kind(
        "of its time busy", lambda _, trace: trace.busy / trace.span if trace.span else None
    ),
    EvidenceKind.PEAK_MEMORY: _Kind("bytes of peak memory"),
    EvidenceKind.PAGE_FAULTS: _Kind("page faults per call"),
    EvidenceKind.CONTEXT_SWITCHES: _Kind("context switches per call"),
    EvidenceKind.BUSY_CORES: _Kind("busy cores"),
    EvidenceKind.COUNTER: _Kind("{of}"),
}
"""How each kind of evidence is read and named."""

TRACED: Final = tuple(kind for kind, how in _KINDS.items() if how.read)
"""Kinds of evidence that are read from the trace of a call on the GPU."""
ON_HOST: Final = (
    EvidenceKind.PAGE_FAULTS,
    EvidenceKind.CONTEXT_SWITCHES,
    EvidenceKind.BUSY_CORES,
    EvidenceKind.PEAK_MEMORY,
    EvidenceKind.GRAPH_BREAKS,
)
"""Kinds of evidence that a claim on the host can have."""
NO_BASELINE: Final = "the baseline has 0, and "
"""Begins the ``where`` of a finding without a ratio, because the baseline's figure is 0."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel."""

    kernel: KernelRecord
    opcodes: Mapping[str, int] | None = None
    """Number of instructions by SASS opcode; None if the code was not disassembled."""
    note: str = ""  #: For which arguments it was compiled, if the code depends on them.

    def __str__(self) -> str:
        note = self.note and f", {self.note}"
        return f"{self.kernel.function} ({self.kernel.source}, {self.kernel.arch}{note})"


@dataclass(frozen=True, slots=True)
class Facts:
    """The figures of one run of a claim, against which its evidence is checked."""

    code: Sequence[Compiled] = ()  #: The compiled kernels that the optimized arm may launch.
    baseline_code: Sequence[Compiled] = ()  #: The compiled kernels that the baseline may launch.
    complete: bool = False  #: Whether ``code`` has all kernels of the claim.
    traces: Mapping[str, Trace] = field(default_factory=dict)  #: The trace of each arm.
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Further figures of each arm by name: an EvidenceKind or an ncu metric."""
    reasons: Mapping[EvidenceKind, str] = field(default_factory=dict)
    """Why figures of a kind are missing."""
    at_least: bool = False  #: Whether the counts of launches and kernels are lower bounds.
    work: Work | None = None  #: The work of one call.


def hold(evidence: Sequence[Evidence], facts: Facts) -> tuple[Finding, ...]:
    """Return each piece's figure in the optimized arm and in the baseline, and whether it holds.

    A piece without a figure neither holds nor fails: its ``held`` is None, and ``where`` gives the
    reason.
    """
    return tuple(
        _check_code(piece, facts) if piece.kind in STATIC else _check_arm(piece, facts)
        for piece in evidence
    )


def broken(findings: Sequence[Finding]) -> str:
    """Describe each finding that does not hold in one sentence; return "" if there is none."""
    return "; ".join(_sentence(finding) for finding in findings if finding.held is False)


def depends_on_load(findings: Sequence[Finding]) -> bool:
    """Whether other programs on the host could explain every finding that does not hold."""
    return all(f.evidence.kind in LOAD_DEPENDENT for f in findings if f.held is False)


def not_looked_at(findings: Sequence[Finding]) -> str:
    """Describe the findings that have no figure, with the reason; return "" if all have one."""
    nulls = [f for f in findings if f.held is None]
    return "; ".join(
        f"evidence was not looked at: {' '.join(filter(None, (f.evidence.kind, f.evidence.of)))}"
        + (f" ({f.where})" if f.where else "")
        for f in nulls
    )


def _check_code(piece: Evidence, facts: Facts) -> Finding:
    """Check each kernel whose name matches; opcodes without a kernel name are counted per build.

    Return a finding that fails or, if none fails, one that holds.
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
    if not named:
        return Finding(piece, where="the code of this kernel is not known")
    value, where = _worst(piece, _launched(named, facts.traces.get("optimized")) or named)
    finding = Finding(piece, value, within(piece, value), where)
    # the baseline may do the same with a kernel of another name
    kernels_of_baseline = _launched(facts.baseline_code, facts.traces.get("baseline"))
    same_name = [c for c in kernels_of_baseline if piece.kernel in c.kernel.function]
    if not kernels_of_baseline:
        return finding
    return _with_baseline(finding, _worst(piece, same_name or kernels_of_baseline)[0])


def _launched(code: Sequence[Compiled], trace: Trace | None) -> list[Compiled]:
    """Return the kernels that an arm launches according to its trace."""
    # demanglers differ in the spaces that they print
    names = {name.replace(" ", "") for name in trace.names} if trace else ()
    return [c for c in code if c.kernel.function.replace(" ", "") in names]


def _worst(piece: Evidence, code: Sequence[Compiled]) -> tuple[float, str]:
    """Return a figure outside the bounds, or else the first figure, and the kernel it is about."""
    figures = [(_in_code(piece, compiled), str(compiled)) for compiled in code]
    if piece.kind is EvidenceKind.OPCODE and not piece.kernel:
        sums: dict[str, float] = {}
        notes: dict[str, dict[str, None]] = {}
        for (count, _), compiled in zip(figures, code, strict=True):
            where = f"{compiled.kernel.source} for {compiled.kernel.arch}"
            sums[where] = sums.get(where, 0) + count
            if compiled.note:
                note = f"{compiled.kernel.function} {compiled.note}"
                notes.setdefault(where, {})[note] = None
        figures = [
            (count, f"{where} ({'; '.join(notes[where])})" if where in notes else where)
            for where, count in sums.items()
        ]
    return min(figures, key=lambda figure: within(piece, figure[0]))


def _with_baseline(finding: Finding, baseline: float) -> Finding:
    held = within(finding.evidence, baseline)
    return replace(finding, baseline_value=baseline, baseline_held=held)


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
    value, baseline = (_figure(piece, facts, arm) for arm in ("optimized", "baseline"))
    where = "the optimized arm"
    trace = facts.traces.get("optimized")
    if trace and piece.kind is EvidenceKind.COUNTER and not _is_alone(piece.kernel, trace):
        return Finding(
            piece, where=f"it is read over a call, and other kernels than {piece.kernel} ran in it"
        )
    if value is None:
        return Finding(piece, where=facts.reasons.get(piece.kind, "this run has no such figure"))
    if facts.at_least and piece.kind in (EvidenceKind.LAUNCHES, EvidenceKind.KERNELS):
        if piece.per:
            return Finding(piece, where="a ratio of two lower bounds is not a bound")
        where += ", as far as the CPU can count,"
        baseline = None
    if piece.per == "work":
        if facts.work is None or not facts.work.bytes:
            raise UsageError('evidence with per="work" needs work= with bytes')
        value /= facts.work.bytes
        baseline = None if baseline is None else baseline / facts.work.bytes
    elif piece.per == "baseline":
        if baseline is None:
            return Finding(piece, where="this run has no such figure of the baseline")
        if not baseline:  # a ratio to 0 is undefined
            return Finding(piece, value, held=False, where=f"{NO_BASELINE}{where}")
        value, baseline = value / baseline, 1.0
    finding = Finding(piece, value, within(piece, value), where)
    return finding if baseline is None else _with_baseline(finding, baseline)


def _is_alone(kernel: str, trace: Trace) -> bool:
    return all(kernel in name for name in trace.names)


def _figure(piece: Evidence, facts: Facts, arm: str) -> float | None:
    read, trace = _KINDS[piece.kind].read, facts.traces.get(arm)
    if read and trace:
        return read(piece, trace)
    return facts.figures.get(arm, {}).get(piece.of or piece.kind.value)


def within(piece: Evidence, value: float) -> bool:
    """Whether a figure lies within the bounds of a piece of evidence."""
    above = piece.min is None or value >= piece.min
    return above and (piece.max is None or value <= piece.max)


def _sentence(finding: Finding) -> str:
    piece, value = finding.evidence, finding.value
    assert value is not None
    noun = _KINDS[piece.kind].noun.format(of=piece.of or "all work")
    named = (("at least", piece.min), ("at most", piece.max))
    bounds = {side: bound for side, bound in named if bound is not None}
    # as many digits as the figure and its bounds need to differ
    enough = (
        n for n in (4, 8) if _number(value, n) not in {_number(b, n) for b in bounds.values()}
    )
    digits = next(enough, 17)
    shown = _number(value, digits)
    figure = f"{shown} {noun}"
    stated = " and ".join(f"{side} {_number(bound, digits)}" for side, bound in bounds.items())
    if piece.per == "work":
        figure += " per byte of work"
    elif piece.per == "baseline" and finding.where.startswith(NO_BASELINE):
        stated += " times the baseline's"
    elif piece.per == "baseline":
        figure = f"{shown} times the baseline's {noun}"
    return f"{finding.where} has {figure}; the claim states {stated}"


def _number(value: float, digits: int) -> str:
    return f"{value:,.0f}" if value >= 1000 and digits == 4 else f"{value:,.{digits}g}"


if not TYPE_CHECKING:  # a type checker would take every name for an attribute

    def __getattr__(name: str) -> NoReturn:
        raise no_attribute("pytest_aiperf.evidence", name, globals())
