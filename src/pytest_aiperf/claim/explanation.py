"""Explains a timed claim: its evidence, and each arm's roofline limit and bottleneck."""

import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
    Limit,
    Metric,
    Mode,
    Prepared,
    Result,
    Timing,
    Trace,
)
from pytest_aiperf.rules import evidence, roofline, stats
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
"""Kinds of evidence about the host, with the fields of getrusage whose sum is the figure."""
Seen = dict[Hashable, tuple[Trace, dict[str, float]]]
"""Traces and further figures of arms, by what identifies the arm and what was read."""


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


def explain(
    bound: BoundClaim,
    record: Result,
    builds: Sequence[Build],
    ceilings: Mapping[str, float],
    lock: GpuLock,
    *,
    seen: Seen,
) -> Result:
    """Inspect the arms after they are timed. Time nothing later: CUPTI slows launches down.

    Arms are prepared under the shared lock, and traced and counted under the exclusive one: other
    claims would lengthen their kernels. The caller does not hold ``lock``. An arm that is in
    ``seen``, because another rung of the ladder uses it as well, is not traced again.
    """
    claim, device, work = bound.claim, bound.device, record.work
    timing = _first_in_seconds((record.timing, *record.also))
    seconds = {a: stats.mean_call_s(timing.replicates, a) for a in claim.arms} if timing else {}
    limits = {
        arm: limit
        for arm, call_s in seconds.items()
        if work and timing and device.gpu
        if (limit := roofline.limit_of(call_s, work, timing.cache, ceilings))
    }
    inspection = _Inspection(bound, record, lock, seen)
    inspection.run_alone(timing)
    inspection.measure()
    code: list[Compiled] = []
    baseline_code: list[Compiled] = []
    if _has(claim.evidence, *STATIC):
        built = compiled_code(claim.evidence, builds)
        code = [*built, *inspection.triton_kernels("optimized")]
        baseline_code = [*built, *inspection.triton_kernels("baseline")]
    facts = Facts(
        code=code,
        baseline_code=baseline_code,
        # on a GPU all kernels are built by now: evidence that names any other kernel is an error
        complete=bool(code) or device.torch_device != "cpu",
        traces=inspection.traces,
        figures=inspection.figures,
        reasons=inspection.reasons,
        work=work,
    )
    diagnosis = {
        arm: text
        for arm, call_s in seconds.items()
        if (
            text := roofline.diagnose(
                limits.get(arm),
                inspection.traces.get(arm),
                call_s,
                ceilings=ceilings,
                sms=device.gpu.sms if device.gpu else 0,
            )
        )
    }
    return replace(
        record,
        limits=limits,
        traces=inspection.traces,
        diagnosis=diagnosis,
        evidence=evidence.hold(claim.evidence, facts),
        notes=tuple(dict.fromkeys((*record.notes, *inspection.notes))),
    )


def _first_in_seconds(timings: Iterable[Timing | None]) -> Timing | None:
    return next((timing for timing in timings if timing and timing.unit == "s"), None)


def refuse_impossible_times(record: Result) -> None:
    """Raise InvalidMeasurement if a time beats the GPU's datasheet or its measured ceilings."""
    if problem := roofline.impossible_time(record):
        raise InvalidMeasurement(problem)


def min_share(limits: Mapping[str, Limit], timings: Iterable[Timing | None]) -> float | None:
    """Return the lower confidence bound of the optimized arm's fraction of its roofline limit."""
    limit, timing = limits.get("optimized"), _first_in_seconds(timings)
    if limit is None or timing is None:
        return None
    logs = [
        statistics.fmean(math.log(s) for r in replicate.rounds for s in r.seconds["optimized"])
        for replicate in timing.replicates
    ]
    seconds = stats.interval(logs)
    return limit.share * seconds.value / seconds.high


class _Inspection:
    """Inspects calls that are not timed; each inspection builds new inputs."""

    def __init__(self, bound: BoundClaim, record: Result, lock: GpuLock, seen: Seen) -> None:
        self.bound = bound
        self.record = record
        self.lock = lock
        self.seen = seen
        self.traces: dict[str, Trace] = {}
        self.figures: dict[str, dict[str, float]] = {name: {} for name in bound.claim.arms}
        self.reasons: dict[EvidenceKind, str] = {}
        self.notes: list[str] = []

    def run_alone(self, timing: Timing | None) -> None:
        """Trace each arm, and read the counters and the host's figures that evidence is about."""
        device, pieces = self.bound.device, self.bound.claim.evidence
        needs_trace = timing or _has(pieces, *TRACED, *STATIC, EvidenceKind.COUNTER)
        metrics = sorted({piece.of for piece in pieces if piece.kind is EvidenceKind.COUNTER})
        if device.ranks.count > 1:
            metrics = []
            self.reasons[EvidenceKind.COUNTER] = "counters are read in claims on a single GPU only"
        for name, arm in self.bound.claim.arms.items():
            read = () if name == "library" else (*metrics, _has(pieces, *_HOST))
            key = identity(arm), identity(self.bound.claim.inputs), timing and timing.mode, read
            if key in self.seen:
                self.traces[name], figures = self.seen[key]
                self.figures[name] = dict(figures)
                continue
            steps: list[Callable[[Call], None]] = []
            if name != "library" and _has(pieces, *_HOST):
                steps.append(partial(self._use_host, name))  # first: CUPTI adds to the figures
            if device.gpu and needs_trace:
                mode = timing.mode if timing else Mode.PLAIN
                steps.append(partial(self._trace, name, mode))
                if self.record.timing and self.record.timing.metric is Metric.DEVICE:
                    steps.append(partial(self._refuse_unordered, name))
            if name != "library" and metrics and not self._cached(name, metrics):
                steps.append(partial(self._count, name, metrics))
            if steps:
                self._call(name, *steps, alone=True)
            if name in self.traces and not self.reasons:
                self.seen[key] = self.traces[name], dict(self.figures[name])

    def _trace(self, name: str, mode: Mode, call: Call) -> None:
        cold = self.bound.claim.cache == "cold"
        if (trace := self.bound.device.trace(call, mode, cold=cold)) is not None:
            self.traces[name] = trace

    def _refuse_unordered(self, name: str, call: Call) -> None:
        try:
            self.bound.device.refuse_unordered(call)
        except InvalidMeasurement as why:
            raise InvalidMeasurement(f"{name}: {why}") from None

    def _use_host(self, name: str, call: Call) -> None:
        call()  # the first call also loads code
        start_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        call()
        self.bound.device.synchronize()
        call_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_SELF)
        figures: dict[str, float] = {
            kind: sum(getattr(after, f) - getattr(before, f) for f in fields)
            for kind, fields in _HOST.items()
        }
        figures[EvidenceKind.BUSY_CORES] /= call_s
        self.figures[name] |= figures

    def _cached(self, name: str, metrics: Sequence[str]) -> bool:
        """Use the counters that an earlier run of the same code read, if there are any."""
        key = self._key(name, metrics)
        values = counters.cached(key) if key else None
        self.figures[name] |= values or {}
        return values is not None

    def _key(self, name: str, metrics: Sequence[str]) -> str:
        record = self.record
        if not record.gpu or not record.code:
            return ""
        return counters.key(record.claim, name, record.code, metrics, record.gpu)

    def _count(self, name: str, metrics: Sequence[str], call: Call) -> None:
        cold = self.bound.claim.cache == "cold"
        try:
            values = self.bound.device.counters(call, metrics, cold=cold)
        except (ToolMissing, CaptureFailed) as why:
            self.reasons[EvidenceKind.COUNTER] = str(why)
            self.notes.append(f"counters were not read: {why}")
            return
        self.figures[name] |= values
        if values and (key := self._key(name, metrics)):
            counters.keep(key, values)

    def measure(self) -> None:
        """Measure peak memory and count graph breaks if evidence is about them."""
        pieces = self.bound.claim.evidence
        for kind, inspect in (
            (EvidenceKind.PEAK_MEMORY, self._measure_peak),
            (EvidenceKind.GRAPH_BREAKS, self._count_breaks),  # last: it discards compiled code
        ):
            for name in ("baseline", "optimized") if _has(pieces, kind) else ():
                self._call(name, partial(inspect, name))

    def _measure_peak(self, name: str, call: Call) -> None:
        self.figures[name][EvidenceKind.PEAK_MEMORY], _ = self.bound.device.peak_bytes(call, call)

    def _count_breaks(self, name: str, call: Call) -> None:
        self.figures[name] |= _graph_breaks(call)

    def triton_kernels(self, name: str) -> list[Compiled]:
        """Return the Triton kernels that an arm launches, alone or in a CUDA graph."""
        if self.bound.device.torch_device == "cpu":
            return []
        return triton_build.launched_kernels(lambda: self._call(name, lambda call: call()))

    def _call(self, name: str, *inspections: Callable[[Call], object], alone: bool = False) -> None:
        """Pass a call of an arm to functions; errors become notes: the timing is still valid."""
        bound = self.bound
        try:
            with self.lock.shared():
                inputs = bound.make_inputs(bound.seed)
                call = partial(bound.prepare(name, inputs), *inputs.args)
                bound.device.synchronize()
        except Exception as why:  # noqa: BLE001  becomes a note
            self._note(name, why)
            return
        lock = self.lock
        exclusive = (
            lock.exclusive_host if _has(bound.claim.evidence, *_HOST) else lock.exclusive_gpu
        )
        with exclusive() if alone else lock.shared():
            for inspect in inspections:
                try:
                    inspect(call)
                except InvalidMeasurement:
                    raise  # the timing is not valid
                except Exception as why:  # noqa: BLE001  becomes a note
                    self._note(name, why)

    def _note(self, name: str, why: Exception) -> None:
        message = str(why).strip().partition("\n")[0]
        self.notes.append(f"{name} was not inspected: {type(why).__name__}: {message}")


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
