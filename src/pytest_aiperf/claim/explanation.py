"""Explains a timed claim: its evidence, and each arm's roofline limit and bottleneck."""

import resource
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from pytest_aiperf.build import triton_build
from pytest_aiperf.build.nvcc import Build, opcode_counts
from pytest_aiperf.device import counters
from pytest_aiperf.device.device import Call
from pytest_aiperf.errors import (
    BuildError,
    CaptureFailed,
    ClaimNotMet,
    InvalidMeasurement,
    ToolMissing,
)
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.model import (
    Evidence,
    EvidenceKind,
    Metric,
    Mode,
    Prepared,
    Result,
    Trace,
)
from pytest_aiperf.rules import evidence, roofline, validity
from pytest_aiperf.rules.evidence import STATIC, TRACED, Compiled, Facts

from . import triton_launches
from .bound_claim import BoundClaim
from .claim import Claim
from .ladder import identity

_HOST: Final = {
    EvidenceKind.PAGE_FAULTS: ("ru_minflt", "ru_majflt"),
    EvidenceKind.CONTEXT_SWITCHES: ("ru_nvcsw", "ru_nivcsw"),
    EvidenceKind.BUSY_CORES: ("ru_utime", "ru_stime"),  # divided by the call's seconds
}
"""Kinds of evidence about the host, with the fields of getrusage whose sum is the figure. Page
faults of processes that an arm has started are added."""

_PACED: Final = (EvidenceKind.OVERLAP, EvidenceKind.BUSY_SHARE)
"""Kinds of evidence that depend on how fast the host enqueues, if the claim's figure does."""

OTHERS_WORK: Final = "processes that the arm has started do a part of the work"
"""Reason for missing figures of the host: those of the claim's own process would say little."""


@dataclass(slots=True)
class Inspected:
    """Observations of one arm while it ran alone."""

    trace: Trace | None = None
    figures: dict[str, float] = field(default_factory=dict)
    reasons: dict[EvidenceKind, str] = field(default_factory=dict)
    """Why figures of a kind could not be read."""
    errors: list[str] = field(default_factory=list)  #: What went wrong; the timing is valid.
    invalid: InvalidMeasurement | None = None  #: Why the arm's timing is not valid.
    read_trace: Callable[[], Trace | None] = lambda: None  #: Reads the recorded trace, once.

    def read(self) -> None:
        """Read the recorded trace, which takes long and needs no lock."""
        reading, self.read_trace = self.read_trace, lambda: None
        with _noted(self):
            self.trace = self.trace or reading()


Step = Callable[[Call, Inspected], None]


def check(
    claim: Claim, builds: Sequence[Build], bound: BoundClaim | None, archs: Sequence[str]
) -> None:
    """Check the evidence that needs no GPU: compiled code, and launches counted on the CPU.

    If ``bound`` is None, the arms cannot run here, and only the code of ``builds`` is checked.
    Triton kernels are compiled for ``archs``.
    """
    if not claim.evidence:
        return
    code, complete = compiled_code(claim.evidence, builds), bool(builds)
    figures: dict[str, float] = {}
    optimized = claim.arms["optimized"]
    if bound is not None and not isinstance(optimized, Prepared):
        counted = triton_launches.count(optimized, bound.make_inputs(bound.seed).args)
        figures = {EvidenceKind.LAUNCHES: counted.launches, EvidenceKind.KERNELS: counted.kernels}
        if _has(claim.evidence, EvidenceKind.GRAPH_BREAKS):
            figures |= _graph_breaks(lambda: optimized(*bound.make_inputs(bound.seed).args))
        if counted.triton and _has(claim.evidence, *STATIC):
            try:
                code += triton_build.compile_for_targets(counted.triton, archs)
                complete = True
            except BuildError:  # a machine with a GPU can still check this evidence
                complete = False
    facts = Facts(code=code, complete=complete, figures={"optimized": figures}, at_least=True)
    if broken := evidence.broken(evidence.hold(claim.evidence, facts)):
        raise ClaimNotMet(broken)


def compiled_code(pieces: Sequence[Evidence], builds: Sequence[Build]) -> list[Compiled]:
    """Return the kernels of builds; disassemble them if evidence is about opcodes."""
    if not _has(pieces, EvidenceKind.OPCODE):
        return [Compiled(kernel) for build in builds for kernel in build.kernels]
    with ThreadPoolExecutor() as pool:
        tables = list(pool.map(opcode_counts, builds))
    return [
        Compiled(kernel, table[kernel.function])
        for build, table in zip(builds, tables, strict=True)
        for kernel in build.kernels
    ]


class Inspection:
    """Runs the arms of timed claims alone, and traces them or reads counters and figures.

    Call :meth:`prepare` under the shared or the exclusive lock, and :meth:`run` under the exclusive
    lock, since other claims would lengthen the arms' kernels. Time nothing after ``prepare``: CUPTI
    slows launches down. An arm that several rungs of a ladder use is inspected once. ``step`` is
    called before each part.
    """

    def __init__(
        self, claims: Sequence[tuple[BoundClaim, Result]], step: Callable[[], object]
    ) -> None:
        self._step = step
        by_identity: dict[Hashable, Inspected] = {}
        self.arms: list[dict[str, Inspected]] = []  #: The observations, per claim and arm.
        self._planned: list[tuple[BoundClaim, str, Sequence[Step], Inspected]] = []
        self._calls: list[tuple[Call, Sequence[Step], Inspected]] = []
        for bound, record in claims:
            of_claim = _ClaimInspection(bound, record)
            arms = {}
            for name in bound.claim.arms:
                key = of_claim.identity(name)
                if key not in by_identity:
                    by_identity[key] = Inspected()
                    if steps := of_claim.steps(name):
                        self._planned.append((bound, name, steps, by_identity[key]))
                arms[name] = by_identity[key]
            self.arms.append(arms)
        self._reads_host = any(_has(bound.claim.evidence, *_HOST) for bound, *_ in self._planned)
        self.uses_host = self._reads_host or any(
            record.timing and record.timing.metric.needs_quiet_host
            for bound, record in claims
            if _has(bound.claim.evidence, *_PACED)
        )
        """Whether :meth:`run` needs the exclusive lock of the host as well."""

    def locked(self, lock: GpuLock) -> None:
        """Prepare and run; the caller does not hold the lock, which is taken exclusively once."""
        if not self._planned:
            return
        with lock.shared():
            self.prepare()
        with lock.exclusive_host() if self.uses_host else lock.exclusive_gpu():
            self.run()

    def prepare(self) -> None:
        """Prepare all arms and call each once, which loads modules and libraries."""
        for bound, name, steps, inspected in self._planned:
            self._step()
            with _noted(inspected):
                call = _prepared(bound, name)
                call()
                bound.device.synchronize()
                self._calls.append((call, steps, inspected))
        # a loaded tracer would add to the figures of the host
        for bound, *_ in self._planned[: not self._reads_host]:
            with _noted(Inspected()):  # no note: tracing an arm then fails as well, and is noted
                bound.device.load_tracer()

    def run(self) -> None:
        """Trace the arms, and read counters and the host's figures."""
        for call, steps, inspected in self._calls:
            for each in steps:
                self._step()
                with _noted(inspected):
                    each(call, inspected)
        self._calls.clear()
        for bound, *_ in self._planned[:1]:
            bound.device.release()  # freeing memory later would disturb another claim


@contextmanager
def _noted(inspected: Inspected) -> Iterator[None]:
    """Store an error in ``inspected``, so that the other arms are still inspected."""
    try:
        yield
    except InvalidMeasurement as why:
        inspected.invalid = inspected.invalid or why
    except Exception as why:  # noqa: BLE001  becomes a note
        message = str(why).strip().partition("\n")[0]
        inspected.errors.append(f"{type(why).__name__}: {message}")


def _prepared(bound: BoundClaim, name: str) -> Call:
    """Return a call of an arm on new inputs."""
    inputs = bound.make_inputs(bound.seed)
    call = partial(bound.prepare(name, inputs), *inputs.args)
    bound.device.synchronize()
    return call


def explain(
    bound: BoundClaim,
    record: Result,
    builds: Sequence[Build],
    ceilings: Mapping[str, float],
    lock: GpuLock,
    *,
    inspected: Mapping[str, Inspected],
) -> Result:
    """Add limits, diagnosis and evidence to the record of a timed claim.

    ``inspected`` has the observations of an :class:`Inspection` of its arms. The caller does not
    hold ``lock``.
    """
    for arm in inspected.values():
        arm.read()
        if arm.invalid is not None:
            raise arm.invalid
    claim, device, work = bound.claim, bound.device, record.work
    seconds = roofline.call_seconds(record, claim.arms)
    limits = roofline.limits_of(record, seconds, ceilings)
    further = _further_figures(bound, lock)
    figures = {a: {**inspected[a].figures, **further[a].figures} for a in claim.arms}
    traces = {name: arm.trace for name, arm in inspected.items() if arm.trace}
    code: list[Compiled] = []
    baseline_code: list[Compiled] = []
    if _has(claim.evidence, *STATIC):
        built = compiled_code(claim.evidence, builds)
        code = [*built, *_triton_kernels(bound, "optimized", lock, further)]
        baseline_code = [*built, *_triton_kernels(bound, "baseline", lock, further)]
    facts = Facts(
        code=code,
        baseline_code=baseline_code,
        # on a GPU all kernels are built by now: evidence that names any other kernel is an error
        complete=bool(code) or device.torch_device != "cpu",
        traces=traces,
        figures=figures,
        reasons={
            kind: why
            for arm in (*inspected.values(), *further.values())
            for kind, why in arm.reasons.items()
        },
        work=work,
    )
    diagnosis = {
        arm: text
        for arm, call_s in seconds.items()
        if (
            text := roofline.diagnose(
                limits.get(arm),
                traces.get(arm),
                call_s,
                ceilings=ceilings,
                sms=device.gpu.sms if device.gpu else 0,
            )
        )
    }
    return replace(
        record,
        limits=limits,
        traces=traces,
        diagnosis=diagnosis,
        evidence=evidence.hold(claim.evidence, facts),
        notes=tuple(dict.fromkeys((*record.notes, *_notes(inspected), *_notes(further)))),
    )


def _notes(inspected: Mapping[str, Inspected]) -> Iterator[str]:
    """Describe what the inspection could not observe."""
    for name, arm in inspected.items():
        if EvidenceKind.COUNTER in arm.reasons:
            yield f"counters were not read: {arm.reasons[EvidenceKind.COUNTER]}"
        for why in arm.errors:
            yield f"{name} was not inspected: {why}"


def refuse_impossible_times(record: Result) -> None:
    """Raise InvalidMeasurement if a time beats the GPU's datasheet or its measured limits."""
    if problem := roofline.impossible_time(record):
        raise InvalidMeasurement(problem)


class _ClaimInspection:
    """Chooses the steps that inspect the arms of one claim while they run alone."""

    def __init__(self, bound: BoundClaim, record: Result) -> None:
        self.bound = bound
        self.record = record
        self.timing = roofline.in_seconds(record)
        pieces = bound.claim.evidence
        self.metrics = sorted({p.of for p in pieces if p.kind is EvidenceKind.COUNTER})

    def identity(self, name: str) -> Hashable:
        """Return a key that is equal for arms that are the same and need the same inspection."""
        claim, read = self.bound.claim, None
        if name != "library":
            read = (*self.metrics, _has(claim.evidence, *_HOST))
        mode = self.timing and self.timing.mode
        return identity(claim.arms[name]), identity(claim.inputs), mode, read

    def steps(self, name: str) -> list[Step]:
        """Return the steps that trace an arm and read the counters and figures for its evidence."""
        device, pieces = self.bound.device, self.bound.claim.evidence
        steps: list[Step] = []
        if name != "library" and _has(pieces, *_HOST):
            steps.append(self._use_host)  # first: CUPTI adds to the figures
        if device.gpu and (self.timing or _has(pieces, *TRACED, *STATIC, EvidenceKind.COUNTER)):
            steps.append(self._trace)
            if self.record.timing and self.record.timing.metric is Metric.DEVICE:
                steps.append(partial(self._refuse_unordered, name))
        if name != "library" and self.metrics:
            steps.append(partial(self._count, name))
        return steps

    def _trace(self, call: Call, inspected: Inspected) -> None:
        mode = self.timing.mode if self.timing else Mode.PLAIN
        cold = self.bound.claim.cache == "cold"
        inspected.read_trace = self.bound.device.trace(call, mode, cold=cold)

    def _refuse_unordered(self, name: str, call: Call, _: Inspected) -> None:
        try:
            self.bound.device.refuse_unordered(call)
        except InvalidMeasurement as why:
            raise InvalidMeasurement(f"{name}: {why}") from None

    def _use_host(self, call: Call, inspected: Inspected) -> None:
        faults = validity.faults_of_started()
        with validity.OtherProcesses() as others:
            start_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
            call()
            self.bound.device.synchronize()
            call_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_SELF)
        figures: dict[str, float] = {
            kind: sum(getattr(after, f) - getattr(before, f) for f in fields)
            for kind, fields in _HOST.items()
        }
        figures[EvidenceKind.PAGE_FAULTS] += validity.faults_of_started() - faults
        figures[EvidenceKind.BUSY_CORES] /= call_s
        if others.do_work():
            own = [kind for kind in _HOST if kind is not EvidenceKind.PAGE_FAULTS]
            inspected.reasons |= dict.fromkeys(own, OTHERS_WORK)
            figures = {kind: x for kind, x in figures.items() if kind not in own}
        inspected.figures |= figures

    def _count(self, name: str, call: Call, inspected: Inspected) -> None:
        """Read counters, unless an earlier run of the same code has read them."""
        bound = self.bound
        if bound.device.ranks.count > 1:
            why = "counters are read in claims on a single GPU only"
            inspected.reasons[EvidenceKind.COUNTER] = why
            return
        record, key = self.record, ""
        if record.gpu and record.code:
            key = counters.key(record.claim, name, record.code, self.metrics, record.gpu)
        if key and (known := counters.cached(key)) is not None:
            inspected.figures |= known
            return
        cold = bound.claim.cache == "cold"
        try:
            values = bound.device.counters(call, self.metrics, cold=cold)
        except (ToolMissing, CaptureFailed) as error:
            inspected.reasons[EvidenceKind.COUNTER] = str(error)
            return
        inspected.figures |= values
        if values and key:
            counters.keep(key, values)


def _further_figures(bound: BoundClaim, lock: GpuLock) -> dict[str, Inspected]:
    """Measure peak memory and count graph breaks if evidence is about them.

    Other claims do not change these figures, so the shared lock suffices.
    """
    pieces = bound.claim.evidence
    further = {name: Inspected() for name in bound.claim.arms}
    for kind, step in (
        (EvidenceKind.PEAK_MEMORY, partial(_measure_peak, bound)),
        (EvidenceKind.GRAPH_BREAKS, _count_breaks),  # last: it discards compiled code
    ):
        for name in ("baseline", "optimized") if _has(pieces, kind) else ():
            with lock.shared(), _noted(further[name]):
                step(_prepared(bound, name), further[name])
    return further


def _measure_peak(bound: BoundClaim, call: Call, inspected: Inspected) -> None:
    with validity.OtherProcesses() as others:
        peak, _ = bound.device.peak_bytes(call, call)
    if others.do_work() and not bound.device.gpu:
        inspected.reasons[EvidenceKind.PEAK_MEMORY] = OTHERS_WORK
    else:
        inspected.figures[EvidenceKind.PEAK_MEMORY] = peak


def _count_breaks(call: Call, inspected: Inspected) -> None:
    inspected.figures |= _graph_breaks(call)


def _triton_kernels(
    bound: BoundClaim, name: str, lock: GpuLock, further: Mapping[str, Inspected]
) -> list[Compiled]:
    """Return the Triton kernels that an arm launches, alone or in a CUDA graph."""
    if bound.device.torch_device == "cpu":
        return []

    def launch() -> None:
        with lock.shared(), _noted(further[name]):
            _prepared(bound, name)()

    return triton_build.launched_kernels(launch)


def _has(pieces: Sequence[Evidence], *kinds: EvidenceKind) -> bool:
    return any(piece.kind in kinds for piece in pieces)


def _graph_breaks(call: Callable[[], object]) -> dict[str, float]:
    """Count how often torch.compile falls back to Python in a call; {} if it compiles nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    import torch._dynamo as dynamo
    from torch._dynamo import utils

    dynamo.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    with torch.compiler.set_stance("default", force_backend="eager"):  # generate no code
        call()
    if not utils.counters["frames"]["total"]:
        return {}
    breaks = sum(utils.counters["graph_break"].values())
    # a branch on the value of a tensor is not in that counter; the code after it is a function
    resumed = sum(
        str(each.co_name).startswith("torch_dynamo_resume_in")
        for each in utils.get_compilation_metrics()
    )
    return {EvidenceKind.GRAPH_BREAKS: max(breaks, resumed)}
