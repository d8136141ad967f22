"""The nouns of the house: frozen dataclasses that are the JSON schema."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar, cast

SCHEMA: Final = 2
"""Version of a result record. A newer one is refused, an older one is upgraded when it is read."""

T = TypeVar("T")

# The words of compare(); a test compares them with the enums.
MetricName = Literal["device", "wall", "memory", "score"]
AgainstName = Literal["idiomatic", "library", "previous rung", "naive"]
CacheName = Literal["cold", "warm"]
PrecisionName = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8_e5m2", "fp8"]


class Metric(StrEnum):
    """What a claim claims."""

    DEVICE = "device"
    WALL = "wall"
    MEMORY = "memory"
    SCORE = "score"


class Mode(StrEnum):
    """How a block of calls is timed."""

    GRAPH = "graph"
    BACKLOG = "backlog"
    PLAIN = "plain"
    WALL = "wall"


class Against(StrEnum):
    """What the baseline is."""

    IDIOMATIC = "idiomatic"
    LIBRARY = "library"
    PREVIOUS_RUNG = "previous rung"
    NAIVE = "naive"


class Verdict(StrEnum):
    """What the interval of a comparison says."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    INCONCLUSIVE = "INCONCLUSIVE"


class Outcome(StrEnum):
    """How a claim ended; every collected claim ends in exactly one of these."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    INVALID = "INVALID"
    ERROR = "ERROR"
    SKIPPED = "SKIPPED"
    NOT_RUN = "NOT_RUN"


ARMS: Final = ("baseline", "optimized", "library")


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of one call: turns a time into a rate and a share of the limit."""

    read: float = 0.0
    """Bytes that a call must read from device memory: each input once."""
    written: float = 0.0
    """Bytes that a call must write to device memory: each output once."""
    flops: float = 0.0
    """Floating-point operations; a multiply-add counts as two."""
    dtype: str | None = None
    """Arithmetic of the flops: a ceiling's name such as "fp32", "tf32", "bf16" or "fp8"."""

    @property
    def bytes(self) -> float:
        """Compulsory traffic: bytes read and written."""
        return self.read + self.written


@dataclass(frozen=True, slots=True)
class Score:
    """A figure that an arm returns where time is not the point, with its unit."""

    value: float
    unit: str
    better: Literal["higher", "lower"] = "higher"


@dataclass(frozen=True, slots=True)
class Bench:
    """What an inputs function may know: where to allocate, which seed, full size or check size."""

    device: str
    seed: int
    full: bool

    def size(self, full: int, *, check: int) -> int:
        """Return ``full`` when the claim is timed and ``check`` when it is only checked."""
        return full if self.full else check


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU is. Readable without initialising CUDA."""

    name: str
    key: str
    uuid: str
    arch: str
    sms: int
    l2_bytes: int
    memory_bytes: int
    driver: str


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure between its confidence limits."""

    low: float
    value: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f}x [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class GpuState:
    """What the machine says of itself at one moment; a figure it cannot read is None."""

    sm_mhz: int | None = None
    temperature_c: int | None = None
    event_reasons: int | None = None
    violations: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Round:
    """One mirrored order of blocks: each arm's blocks in the order in which they ran.

    ``seconds`` maps an arm to the seconds of one call in each of its blocks (in score and
    memory metrics, to the figure of each block).
    """

    order: str
    seconds: Mapping[str, tuple[float, ...]]
    sm_mhz: int | None = None
    event_reasons: int | None = None


@dataclass(frozen=True, slots=True)
class Replicate:
    """Fresh allocations and a fresh seed: the unit of inference."""

    seed: int
    rounds: tuple[Round, ...]
    redone: int = 0


@dataclass(frozen=True, slots=True)
class Error:
    """How far one arm's result is from the oracle at its worst element."""

    arm: str
    output: str
    index: tuple[int, ...]
    got: float
    want: float
    error: float
    allowed: float


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """What the compiler said of one kernel in one build."""

    source: str
    arch: str
    function: str
    registers: int
    spill_bytes: int
    shared_bytes: int


class EvidenceKind(StrEnum):
    """What a piece of evidence is about."""

    OPCODE = "opcode"
    REGISTERS = "registers"
    SPILLS = "spills"
    LAUNCHES = "launches"
    KERNELS = "kernels"
    GRAPH_BREAKS = "graph breaks"
    PEAK_MEMORY = "peak memory"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
class Evidence:
    """A figure that the optimized arm's mechanism entails, and the bounds that it lies within.

    ``of`` names the opcode or the ncu metric; ``kernel`` is part of the names of the kernels
    that it is about (all, when empty); ``per`` makes the figure a ratio to the baseline's, or to
    the bytes of ``work``.
    """

    kind: EvidenceKind
    of: str = ""
    kernel: str = ""
    min: float | None = None
    max: float | None = None
    per: Literal["", "baseline", "work"] = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a piece of evidence; ``value`` None when this run could not look at it."""

    evidence: Evidence
    value: float | None = None
    held: bool = True
    where: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """How close an arm is to what this GPU can do: the ceiling that binds it, in its unit."""

    ceiling: str
    rate: float
    limit: float
    unit: str
    share: float


@dataclass(frozen=True, slots=True)
class Trace:
    """What one call of an arm did on the GPU: launches by the host, work items, seconds.

    ``span`` goes from the first item's start to the last one's end, ``busy`` is the part of it
    in which anything ran; ``names`` are the kernels, the longest-running first.
    """

    launches: int
    kernels: int
    copies: int
    busy: float
    span: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """One arm under one profiler: its artefact and the figures read from it."""

    tool: str
    arm: str
    artefact: str
    figures: Mapping[str, float] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Lines of a file that define an arm, or that it uses."""

    file: str
    """Path relative to the project's root folder."""
    first: int
    """First line, counted from 1."""
    last: int
    """Last line."""
    digest: str
    """Checksum of the lines, so that a report shows nothing else in their place."""

    @classmethod
    def of(cls, file: str, first: int, last: int, content: Sequence[str]) -> Source:
        """Note lines of a file with this content."""
        return cls(file, first, last, _digest(content[first - 1 : last]))

    def text(self, content: Sequence[str]) -> str | None:
        """Return the lines from the file's content; None where they have changed."""
        lines = content[self.first - 1 : self.last]
        return "\n".join(lines) if _digest(lines) == self.digest else None


def _digest(lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    return f"{zlib.crc32(text.encode()):08x}"


@dataclass(frozen=True, slots=True)
class Timing:
    """Everything measured for one comparison, raw."""

    metric: Metric
    mode: Mode
    calls: int
    cache: str
    sets: int
    replicates: tuple[Replicate, ...]
    unit: str = "s"
    better: Literal["higher", "lower"] = "lower"
    stopped: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Require:
    """What a human asks of a claim everywhere: the tool never writes it."""

    speedup: float | None = None
    library: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was measured of a claim on one kind of GPU."""

    speedup: tuple[float, float, float]
    runs: int
    code: str
    stack: str
    recorded: str
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Expectation:
    """What expectations.yaml says of a claim on this GPU; ``stale`` when the code changed since."""

    require: Require = field(default_factory=Require)
    recorded: Recorded | None = None
    key: str | None = None
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One claim's record."""

    claim: str
    nodeid: str
    title: str
    outcome: Outcome
    key: str
    run: str
    started: str
    seed: int
    message: str = ""
    host: bool = False
    against: Against = Against.IDIOMATIC
    verdict: Verdict | None = None
    speedup: Interval | None = None
    library: Interval | None = None
    floor: float = 0.0
    timing: Timing | None = None
    also: tuple[Timing, ...] = ()
    work: Work | None = None
    agreement: tuple[Error, ...] = ()
    kernels: tuple[KernelRecord, ...] = ()
    evidence: tuple[Finding, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict)
    traces: Mapping[str, Trace] = field(default_factory=dict)
    diagnosis: Mapping[str, str] = field(default_factory=dict)
    profiles: tuple[Profile, ...] = ()
    notes: tuple[str, ...] = ()
    sources: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    expectation: Expectation | None = None
    code: str = ""
    gpu: Gpu | None = None
    stack: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    attempts: int = 1
    quick: bool = False
    rung_index: int = 0
    """Position among the rungs of its ladder, in the order of the test's parameters."""
    schema: int = SCHEMA


class Prepared:
    """An arm that sets up outside the clock; made by :func:`prepared`."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Callable[..., object]]) -> None:
        self.make = make


def prepared(make: Callable[..., Callable[..., object]]) -> Prepared:
    """Wrap an arm that must set up first (capture a graph, quantise weights, fill a cache).

    ``make(*inputs)`` runs outside the clock for each input set and returns the callable that is
    timed, called with the same inputs. Afterwards every input that is not :func:`static` is
    overwritten in place with fresh values, so work done while preparing gives a wrong answer.
    Callables for many input sets stand ready at the same time: what one needs belongs to it alone.
    """
    return Prepared(make)


class Static:
    """An input that preparation may consume; made by :func:`static`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def static(value: T) -> T:
    """Mark an input (weights, tables) that an arm may consume while it prepares.

    Arms receive the bare value; the harness does not overwrite it after preparation.
    """
    return cast("T", Static(value))
