"""The data types of the package. Their fields and types define the JSON format of records."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

SCHEMA: Final = 3
"""Version of the result record. Reading upgrades older records and refuses newer ones."""

T = TypeVar("T")

# Type checkers verify compare()'s strings with these; a test keeps them equal to the enums.
MetricName = Literal["device", "wall", "memory", "score"]
AgainstName = Literal["idiomatic", "library", "previous rung", "naive"]
CacheName = Literal["cold", "warm"]
PrecisionName = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8_e5m2", "fp8", "nvfp4"]


class Metric(StrEnum):
    """Figure that is compared: GPU time, wall time (host's clock), peak bytes or a score."""

    DEVICE = "device"
    WALL = "wall"
    MEMORY = "memory"
    SCORE = "score"

    @property
    def is_time(self) -> bool:
        """Whether the figure is in seconds per call."""
        return self in (Metric.DEVICE, Metric.WALL)

    @property
    def needs_quiet_host(self) -> bool:
        """Whether other work on the CPU may change the figure; a score may contain wall time."""
        return self in (Metric.WALL, Metric.SCORE)


class Mode(StrEnum):
    """How a block of calls is timed."""

    GRAPH = "graph"  #: GPU time of a CUDA graph that contains the calls: for short calls.
    BACKLOG = "backlog"  #: GPU time; a blocking kernel holds the calls until all are queued.
    PLAIN = "plain"  #: GPU time of directly launched calls: for calls much longer than a launch.
    WALL = "wall"  #: Time by the host's clock.


class Against(StrEnum):
    """Kind of baseline."""

    IDIOMATIC = "idiomatic"  #: What a competent user writes first.
    LIBRARY = "library"  #: A library's implementation.
    PREVIOUS_RUNG = "previous rung"  #: The optimized arm of an earlier rung of the same ladder.
    NAIVE = "naive"  #: Code that no competent user would write, to isolate one effect.


class Verdict(StrEnum):
    """Conclusion drawn from a speedup's confidence interval and the noise floor."""

    FASTER = "FASTER"  #: The interval lies above 1 + the noise floor.
    SLOWER = "SLOWER"  #: The interval lies below 1 / (1 + the noise floor).
    SAME = "SAME"  #: Neither of these, and the interval lies within 2 % of 1.
    INCONCLUSIVE = "INCONCLUSIVE"  #: Anything else: this run cannot tell.


class Outcome(StrEnum):
    """How a claim ended; every collected claim ends in exactly one of these."""

    PASSED = "PASSED"  #: The claim is met or, without timing, all checks pass.
    FAILED = "FAILED"  #: A result is wrong, or the claim is not met.
    INVALID = "INVALID"  #: The times are not valid, for example because the GPU was throttled.
    ERROR = "ERROR"  #: An exception, a crash or the time limit ended the claim.
    SKIPPED = "SKIPPED"  #: The machine lacks what the claim needs.
    NOT_RUN = "NOT_RUN"  #: The session ended before the claim ran.


ARMS: Final = ("baseline", "optimized", "library")  #: The implementations that a claim compares.


@dataclass(frozen=True, slots=True)
class Work:
    """The minimum work of one call, from which its rate and its share of the limit are computed."""

    read: float = 0.0  #: Bytes that a call must read from device memory: each input once.
    written: float = 0.0  #: Bytes that a call must write to device memory: each output once.
    flops: float = 0.0  #: Floating-point operations; a multiply-add counts as two.
    dtype: str | None = None
    """Precision of the flops, required with ``flops``: "fp64", "fp32", "tf32", "bf16", "fp16",
    "fp8" (e4m3), "fp8_e5m2", "nvfp4" or "int8". For "fp8_e5m2" and "nvfp4", no compute limit is
    measured: such work is compared only with the limit of its bytes."""

    @property
    def bytes(self) -> float:
        """Bytes that a call must read or write."""
        return self.read + self.written


TIMED_UNIT: Final = re.compile(r"\b([nuµm]?s|min|h|seconds?|minutes?|hours?|Hz|m?[JW])\b")
"""Matches units that contain a time, a rate, an energy or a power, such as tokens/s: scores in such
units change with other work on the machine, and from host to host."""


@dataclass(frozen=True, slots=True)
class Score:
    """The figure that an arm returns beside its results, for ``metric="score"``.

    If the unit has time or energy in it (ms, tokens/s, J), no other claim runs during the call.
    """

    value: float  #: The figure; greater than 0.
    unit: str  #: Unit of the figure.
    better: Literal["higher", "lower"] = "higher"  #: Whether higher or lower values are better.

    def __str__(self) -> str:
        return f"{self.value:.4g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Bench:
    """Argument of an ``inputs`` function: where to allocate, the seed, and which size."""

    device: str  #: Where to allocate: "cuda" or "cpu".
    seed: int  #: Seed of the inputs; random, numpy and torch are already seeded with it.
    full: bool  #: Whether inputs have full size; False when results are only checked.

    def size(self, full: int, *, check: int) -> int:
        """Return ``full`` when the claim is timed and ``check`` when it is only checked."""
        return full if self.full else check


_NO_END: Final = 10**6
"""Stands for no end: the end of the range of a feature that all later architectures keep."""

FEATURES: Final[Mapping[str, range]] = {
    "fp8": range(89, _NO_END),
    "tma": range(90, _NO_END),
    "clusters": range(90, _NO_END),
    "dsmem": range(90, _NO_END),
    "pdl": range(90, _NO_END),
    "wgmma": range(90, 91),
    "tcgen05": range(100, 120),
    "fp4": range(100, 130),
}
"""Hardware features by name, and the compute capabilities that have them: 90 is sm90.

Sources: the CUDA Programming Guide, appendix "Compute Capabilities" (tables of feature support and
of the tensor cores' input types), and the target notes of the PTX ISA. A range without an end is a
feature of PTX's baseline, which later architectures keep. The other features are bound to their
architectures, so a GPU newer than this table is not assumed to have them. sm120 and sm121 have
clusters and distributed shared memory; they lack tcgen05 and wgmma.
"""


SHARED_MEMORY: Final[Mapping[int, int]] = {
    80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99,
}  # fmt: skip
"""Largest shared memory of one thread block in KiB, by compute capability.

Source: the CUDA Programming Guide, appendix "Compute Capabilities".
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of a GPU, readable without initializing CUDA."""

    name: str  #: Product name.
    key: str  #: Short name in results and expectations, such as "h200".
    uuid: str  #: Unique id from NVML.
    arch: str  #: Compute capability, such as "sm90".
    sms: int  #: Number of SMs.
    l2_bytes: int  #: Size of the L2 cache in bytes.
    memory_bytes: int  #: Size of the device memory in bytes.
    driver: str  #: Version of the NVIDIA driver.

    @property
    def features(self) -> tuple[str, ...]:
        """Hardware features of its architecture: names in ``pytest_aiperf.model.FEATURES``."""
        capability = int(self.arch.removeprefix("sm"))
        return tuple(name for name, range_ in FEATURES.items() if capability in range_)


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its confidence interval."""

    low: float  #: Lower end.
    value: float  #: Estimate.
    high: float  #: Upper end.

    def __str__(self) -> str:
        return f"{self.value:.3f}x [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class GpuState:
    """Telemetry of a GPU at one moment; None where it cannot be read."""

    sm_mhz: int | None = None  #: SM clock.
    temperature_c: int | None = None  #: Temperature of the GPU.
    event_reasons: int | None = None  #: NVML's bit mask of clock event reasons.
    violations: Mapping[str, int] = field(default_factory=dict)
    """Violation counters by name: they grow while the GPU is throttled."""


class GpuLoad(NamedTuple):
    """Load of a GPU at one moment; None where it cannot be read."""

    utilization_percent: float | None = None  #: Share of the time in which any kernel ran.
    sm_mhz: float | None = None  #: SM clock.
    memory_mhz: float | None = None  #: Memory clock.
    power_w: float | None = None  #: Power of the board; from Ampere on, the mean of one second.
    memory_used_bytes: float | None = None  #: Allocated device memory of all processes.


@dataclass(frozen=True, slots=True)
class Round:
    """One or more blocks of each arm, in a mirrored order such as "OBBO"."""

    order: str  #: Initials of the arms in the order of their blocks.
    seconds: Mapping[str, tuple[float, ...]]
    """By arm, one value per block: seconds per call, or the metric's figure if it is not a time."""
    sm_mhz: int | None = None  #: SM clock after the round.
    event_reasons: int | None = None  #: Clock event reasons after the round.


@dataclass(frozen=True, slots=True)
class Replicate:
    """Rounds that use the same allocations; the statistics count them as one sample.

    On a GPU, they also have the same input values. On the host, each block has new values.
    """

    seed: int  #: Seed of the inputs.
    rounds: tuple[Round, ...]  #: Rounds in which nothing disturbed the GPU.
    redone: int = 0  #: Number of disturbed rounds, which were repeated.


@dataclass(frozen=True, slots=True)
class Error:
    """An arm's largest error against the reference."""

    arm: str  #: Name of the arm.
    output: str  #: Where the output is in the arm's result.
    index: tuple[int, ...]  #: Index of the element.
    got: float  #: The arm's value.
    want: float  #: The reference's value.
    error: float  #: Relative error.
    allowed: float  #: Largest relative error that passes.
    rms: float = 0.0  #: RMS error of the whole output, relative to the RMS of the reference.
    rms_allowed: float = 0.0  #: Largest RMS error that passes; 0 for integers.


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """What the compiler reports about one kernel in one build."""

    source: str  #: Source file.
    arch: str  #: Architecture of the build.
    function: str  #: Demangled name.
    registers: int  #: Registers per thread.
    spill_bytes: int  #: Bytes of spill stores and loads per thread.
    shared_bytes: int  #: Bytes of static shared memory per block.


class EvidenceKind(StrEnum):
    """Kind of figure that a piece of evidence bounds."""

    OPCODE = "opcode"
    REGISTERS = "registers"
    SPILLS = "spills"
    LAUNCHES = "launches"
    KERNELS = "kernels"
    GRAPH_BREAKS = "graph breaks"
    KERNEL_NAME = "kernel name"
    GRID_SIZE = "grid size"
    OVERLAP = "overlap"
    COPIED_BYTES = "copied bytes"
    API_CALLS = "API calls"
    BUSY_SHARE = "busy share"
    PEAK_MEMORY = "peak memory"
    PAGE_FAULTS = "page faults"
    CONTEXT_SWITCHES = "context switches"
    BUSY_CORES = "busy cores"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Bounds on a figure that shows the optimized arm's mechanism, such as an opcode count."""

    kind: EvidenceKind  #: Kind of the figure.
    of: str = ""
    """What the figure is about: an opcode, an ncu metric, a part of a kernel's name, a direction of
    copies, or "copies" (for ``overlap``); empty for other kinds."""
    kernel: str = ""  #: Only kernels with this text in their name count; empty for all.
    min: float | None = None  #: Lower bound.
    max: float | None = None  #: Upper bound.
    per: Literal["", "baseline", "work"] = ""
    """Divisor of the figure: none, the baseline's figure, or the bytes of ``work``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of checking one piece of evidence in one run."""

    evidence: Evidence  #: The evidence that was checked.
    value: float | None = None  #: The figure; None if this run could not measure it.
    held: bool | None = None  #: Whether the figure lies within the bounds; None without a figure.
    where: str = ""  #: Kernel or arm that the figure is about; without a figure, why there is none.
    baseline_value: float | None = None  #: The same figure of the baseline; None if not measured.
    baseline_held: bool | None = None
    """Whether the baseline's figure lies within the bounds. If so, the evidence is only a condition
    and does not show why the optimized arm is faster. None without a figure."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How close an arm comes to the limit that bounds it."""

    ceiling: str  #: Name of the limit, such as "copy".
    rate: float  #: The arm's rate.
    limit: float  #: The highest rate that this GPU reached in a micro-benchmark.
    unit: str  #: Unit of the rate and of the limit.
    share: float  #: Rate divided by the limit.


@dataclass(frozen=True, slots=True)
class Trace:
    """GPU activity of one call of an arm."""

    launches: int  #: Number of API calls that launch kernels, graphs, copies or memsets.
    kernels: int  #: Number of kernels that ran.
    copies: int  #: Number of copies and memsets.
    busy: float  #: Seconds in which at least one kernel, copy or memset ran.
    span: float  #: Seconds from the first start to the last end.
    names: tuple[str, ...] = ()  #: Names of the kernels, the longest-running first.
    counts: tuple[int, ...] = ()  #: How often the kernel of each name ran.
    grids: tuple[int, ...] = ()  #: Blocks of the largest launch of each name; 0 if unknown.
    seconds: tuple[float, ...] = ()  #: Seconds of all launches of each name, added up.
    total: float = 0.0  #: Seconds of all kernels, copies and memsets, added up.
    copying: float = 0.0  #: Seconds in which at least one copy ran.
    hidden: float = 0.0  #: Seconds of ``copying`` in which a kernel ran as well.
    copied: Mapping[str, int] = field(default_factory=dict)
    """Bytes copied, by direction and kind of host memory, such as "host to device (pinned)"."""
    api_calls: int | None = None  #: Number of CUDA API calls; None if they were not traced.


@dataclass(frozen=True, slots=True)
class Profile:
    """Figures of one profiler about an arm, or about a call of the ``capture`` fixture."""

    tool: str  #: Name of the profiler.
    arm: str  #: Name of the arm or of the call, such as "call-1".
    artifact: str  #: Path of the file that the profiler wrote.
    figures: Mapping[str, float] = field(default_factory=dict)  #: Figures read from the artifact.
    units: Mapping[str, str] = field(default_factory=dict)  #: Units of the figures.
    kernels: tuple[str, ...] = ()  #: Names of the kernels.
    notes: tuple[str, ...] = ()  #: Remarks for reports, such as "ran no kernel".


@dataclass(frozen=True, slots=True)
class Source:
    """Lines of a file that define an arm, or code that the arm uses."""

    file: str  #: Path relative to the project's root folder.
    first: int  #: First line, counted from 1.
    last: int  #: Last line.
    digest: str  #: Checksum of the lines: a report omits them if they have changed.

    @classmethod
    def of(cls, file: str, first: int, last: int, content: Sequence[str]) -> Source:
        """Return a record of these lines; ``content`` holds all lines of the file."""
        return cls(file, first, last, _digest(content[first - 1 : last]))

    def found(self, content: Sequence[str]) -> tuple[int, Sequence[str]] | None:
        """Return the lines with the number of the first, or None if they have changed.

        ``content`` is as in :meth:`of`. Lines added or removed above them do not matter.
        """
        count = self.last - self.first + 1
        starts = range(1, len(content) - count + 2)
        for first in sorted(starts, key=lambda start: abs(start - self.first)):
            lines = content[first - 1 : first - 1 + count]
            if _digest(lines) == self.digest:
                return first, lines
        return None


def _digest(lines: Sequence[str]) -> str:
    return format(zlib.crc32("\n".join(lines).encode()), "08x")


@dataclass(frozen=True, slots=True)
class Timing:
    """All raw samples of one metric."""

    metric: Metric  #: Figure that was measured.
    mode: Mode  #: How blocks were timed.
    calls: Mapping[str, int]  #: Calls per block of each arm.
    cache: str  #: State of the L2 cache: "cold" or "warm".
    sets: int  #: Number of input sets that successive calls use in turn.
    replicates: tuple[Replicate, ...]  #: The samples.
    unit: str = "s"  #: Unit of the samples.
    better: Literal["higher", "lower"] = "lower"  #: Whether higher or lower values are better.
    stopped: str = ""  #: What ended sampling: the interval's "width", "seconds" or "replicates".
    notes: tuple[str, ...] = ()  #: Remarks about the timing, for reports.


@dataclass(frozen=True, slots=True)
class Require:
    """Bounds that an author sets in expectations.yaml for all GPUs; the tool never writes them."""

    speedup: float | None = None  #: Lowest acceptable lower end of the speedup's interval.
    library: float | None = None  #: The same for the speedup over the library.
    share: float | None = None  #: Lowest acceptable ratio of the optimized arm's rate to its limit.


@dataclass(frozen=True, slots=True)
class Recorded:
    """Figures recorded for a claim on one kind of GPU, from its latest accepted run."""

    speedup: tuple[float, float, float]  #: Lower end, estimate and upper end.
    runs: int  #: Number of consecutive accepted runs with this code and stack.
    code: str  #: Hash of the source code.
    stack: str  #: Versions of the software; of a host claim, also the processor.
    recorded: str  #: Date of the last update, as YYYY-MM-DD.
    share: float | None = None  #: Ratio of the optimized arm's rate to its limit.
    lowest: float | None = None  #: The lowest of the runs' estimates, if not the latest.

    @property
    def least(self) -> float:
        """The least speedup that one of the runs has reached: GPUs of one kind can differ."""
        return min(self.speedup[0], self.lowest or self.speedup[0])


@dataclass(frozen=True, slots=True)
class Expectation:
    """Entry of expectations.yaml for a claim on this GPU."""

    require: Require = field(default_factory=Require)  #: Bounds set by an author.
    recorded: Recorded | None = None  #: Figures of the latest accepted run.
    key: str | None = None  #: GPU or architecture that the figures are recorded for.
    stale: bool = False  #: Whether the claim's code has changed since the recorded run.


@dataclass(frozen=True, slots=True)
class Result:
    """The record of one claim."""

    claim: str  #: Id of the claim; from ``measure``, the name of the optimized arm.
    nodeid: str  #: pytest's id of the test.
    title: str  #: First line of the docstring of the test file or, from ``measure``, of the arm.
    outcome: Outcome  #: How the claim ended.
    key: str  #: Kind of GPU, such as "h200" or, with several ranks, "2xh200"; or "cpu".
    run: str  #: Id of the run.
    started: str  #: Time of the start, ISO 8601.
    seed: int  #: Seed of the inputs checked before timing; with --reproducible, of all inputs.
    message: str = ""  #: Reason for the outcome.
    host: bool = False  #: Whether it is a host claim.
    against: Against = Against.IDIOMATIC  #: Kind of baseline.
    verdict: Verdict | None = None  #: Verdict on the speedup.
    speedup: Interval | None = None  #: Speedup of the optimized arm over the baseline.
    library: Interval | None = None  #: Speedup of the optimized arm over the library.
    first: Interval | None = None
    """Speedup over the first arm of the ladder; None if that arm is the baseline."""
    floor: float = 0.0  #: The session's noise floor: 0.01 is 1 %; 0 if the metric is not a time.
    timing: Timing | None = None  #: Samples of the judged metric.
    also: tuple[Timing, ...] = ()  #: Samples of the other metrics.
    work: Work | None = None  #: Work of one call.
    agreement: tuple[Error, ...] = ()  #: Largest error of each arm.
    kernels: tuple[KernelRecord, ...] = ()  #: Kernels of the CUDA builds.
    evidence: tuple[Finding, ...] = ()  #: Results of checking the evidence.
    limits: Mapping[str, Limit] = field(default_factory=dict)  #: Each arm's rate and limit.
    traces: Mapping[str, Trace] = field(default_factory=dict)  #: Trace of one call of each arm.
    diagnosis: Mapping[str, str] = field(default_factory=dict)  #: What limits each arm's speed.
    profiles: tuple[Profile, ...] = ()  #: Profiles of the arms.
    notes: tuple[str, ...] = ()  #: Remarks about the claim, for reports.
    unchecked: tuple[str, ...] = ()
    """Checks that the measurement could not make; a record that lists any is not accepted."""
    sources: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    """Lines of source code of each arm."""
    expectation: Expectation | None = None  #: Expectation that the claim was judged against.
    code: str = ""  #: Hash of the source code.
    gpu: Gpu | None = None  #: GPU that the claim ran on.
    stack: Mapping[str, str] = field(default_factory=dict)
    """Versions of the software; without a GPU, also the "processor"."""
    seconds: float = 0.0  #: Duration, without the time spent waiting for locks.
    attempts: int = 1  #: Number of this attempt, counted from 1.
    quick: bool = False  #: Whether --quick was given.
    conditions: Mapping[str, str] = field(default_factory=dict)
    """Conditions of the run that options such as "reproducible" have set, by option."""
    ladder: str = ""
    """Id of the ladder: the claim's id without the rung; "" if the test has no parameter `rung`."""
    rung_index: int = 0
    """Position among the rungs of its ladder, in the order of the test's parameters."""
    schema: int = SCHEMA  #: Version of the record's format.


class Prepared:
    """An arm with an untimed setup; made by :func:`~pytest_aiperf.prepared`."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Callable[..., object]]) -> None:
        self.make = make


def prepared(make: Callable[..., Callable[..., object]]) -> Prepared:
    """Wrap an arm that must set up first (capture a graph, quantize weights, fill a cache).

    ``make(*inputs)`` runs untimed for each input set and returns the callable to time, which is
    called with the same inputs. Before that call, every input that is not :func:`static` is
    overwritten in place with new values. An arm that computes its result during the setup therefore
    returns a wrong result and fails the check.
    Callables for many input sets exist at the same time, so they must not share buffers.
    """
    return Prepared(make)


class Static:
    """An input whose values an arm may use in its setup; made by :func:`~pytest_aiperf.static`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def static(value: T) -> T:
    """Mark an input (weights, tables) whose values an arm may use during its setup.

    Use it in ``inputs``: ``return x, static(weights)``. Arms receive ``weights`` itself, and it is
    not overwritten after the setup.
    """
    return cast("T", Static(value))
