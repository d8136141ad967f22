"""Explains a timed claim: its evidence, and each arm's roofline limit and bottleneck."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from pytest_aiperf.build import triton_build
from pytest_aiperf.build.nvcc import Build, opcode_counts
from pytest_aiperf.errors import BuildError, ClaimNotMet, InvalidMeasurement
from pytest_aiperf.model import (
    Evidence,
    EvidenceKind,
    Limit,
    Metric,
    Prepared,
    Result,
    Timing,
    Trace,
)
from pytest_aiperf.rules import evidence, roofline, stats
from pytest_aiperf.rules.evidence import STATIC, Compiled, Facts

from . import triton_launches
from .bound_claim import BoundClaim
from .claim import Claim
from .scores import peak_bytes

_TRACED = (EvidenceKind.LAUNCHES, EvidenceKind.KERNELS)


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
    bound: BoundClaim, record: Result, builds: Sequence[Build], ceilings: Mapping[str, float]
) -> Result:
    """Inspect the arms after they are timed. Time nothing later: CUPTI slows launches down."""
    claim, device, work = bound.claim, bound.device, record.work
    timing = _first_in_seconds((record.timing, *record.also))
    seconds = {a: stats.mean_call_s(timing.replicates, a) for a in claim.arms} if timing else {}
    limits = {
        arm: limit
        for arm, call_s in seconds.items()
        if work and timing and device.gpu
        if (limit := roofline.limit_of(call_s, work, timing.cache, ceilings))
    }
    inspection = _Inspection(bound)
    if device.gpu and (seconds or _has(claim.evidence, *_TRACED)):
        inspection.trace()
    inspection.measure(claim.evidence)
    code: list[Compiled] = []
    if _has(claim.evidence, *STATIC):
        code = [*compiled_code(claim.evidence, builds), *inspection.triton_kernels()]
    # on a GPU all kernels are built by now: evidence that names any other kernel is an error
    complete = bool(code) or device.torch_device != "cpu"
    facts = Facts(code=code, complete=complete, figures=inspection.figures, work=work)
    diagnosis = {
        arm: text
        for arm, call_s in seconds.items()
        if (text := roofline.diagnose(limits.get(arm), inspection.traces.get(arm), call_s))
    }
    return replace(
        record,
        limits=limits,
        traces=inspection.traces,
        diagnosis=diagnosis,
        evidence=evidence.hold(claim.evidence, facts),
        notes=(*record.notes, *inspection.notes),
    )


def _first_in_seconds(timings: Iterable[Timing | None]) -> Timing | None:
    return next((timing for timing in timings if timing and timing.unit == "s"), None)


def refuse_impossible_times(record: Result) -> None:
    """Raise InvalidMeasurement if a time beats the GPU's datasheet or its measured ceilings."""
    timing, work = record.timing, record.work
    if timing is None or timing.metric is not Metric.DEVICE or work is None:
        return
    peaks = roofline.DATASHEET.get(record.key, {})
    for arm in timing.replicates[0].rounds[0].seconds:
        seconds = stats.mean_call_s(timing.replicates, arm)
        on_datasheet = roofline.limit_of(seconds, work, timing.cache, peaks)
        for limit, source in ((on_datasheet, "datasheet"), (record.limits.get(arm), "measured")):
            if limit is None or (timing.cache == "warm" and limit.ceiling in roofline.MEMORY):
                continue  # warm data may stay in registers or shared memory: no such limit applies
            if problem := roofline.too_fast(limit, source):
                raise InvalidMeasurement(f"{arm}: {problem}")


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

    def __init__(self, bound: BoundClaim) -> None:
        self.bound = bound
        self.traces: dict[str, Trace] = {}
        self.figures: dict[str, dict[str, float]] = {name: {} for name in bound.claim.arms}
        self.notes: list[str] = []

    def trace(self) -> None:
        """Trace one call of each arm."""
        for name in self.figures:
            if (trace := self._call(name, self.bound.device.trace)) is not None:
                self.traces[name] = trace
                self.figures[name][EvidenceKind.LAUNCHES] = trace.launches
                self.figures[name][EvidenceKind.KERNELS] = trace.kernels

    def measure(self, pieces: Sequence[Evidence]) -> None:
        """Measure peak memory and count graph breaks if evidence is about them."""
        if _has(pieces, EvidenceKind.PEAK_MEMORY):
            for name in ("baseline", "optimized"):
                peak = self._call(name, partial(peak_bytes, self.bound.device))
                if peak is not None:
                    self.figures[name][EvidenceKind.PEAK_MEMORY] = peak
        if _has(pieces, EvidenceKind.GRAPH_BREAKS):  # last, as it discards torch's compiled code
            self.figures["optimized"] |= self._call("optimized", _graph_breaks) or {}

    def triton_kernels(self) -> list[Compiled]:
        """Return the Triton kernels that the optimized arm launches, alone or in a CUDA graph."""
        if self.bound.device.torch_device == "cpu":
            return []
        return triton_build.launched_kernels(lambda: self._call("optimized", lambda call: call()))

    def _call(self, name: str, inspect: Callable[[Callable[[], object]], Any]) -> Any:
        """Inspect a call of an arm; an error becomes a note, because the timing is still valid."""
        bound = self.bound
        try:
            inputs = bound.make_inputs(bound.seed)
            return inspect(partial(bound.prepare(name, inputs), *inputs.args))
        except Exception as why:  # noqa: BLE001  becomes a note
            message = str(why).strip().partition("\n")[0]
            self.notes.append(f"{name} was not inspected: {type(why).__name__}: {message}")
            return None


def _has(pieces: Sequence[Evidence], *kinds: EvidenceKind) -> bool:
    return any(piece.kind in kinds for piece in pieces)


def _graph_breaks(call: Callable[[], object]) -> dict[str, float]:
    """Count how often torch.compile falls back to Python in a call; {} if it compiles nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    counters.clear()
    with torch.compiler.set_stance("default", force_backend="eager"):  # generate no code
        call()
    if not counters["frames"]["total"]:
        return {}
    return {EvidenceKind.GRAPH_BREAKS: sum(counters["graph_break"].values())}
