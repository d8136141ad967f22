"""Why a claim holds: its evidence, how near each arm comes to what this GPU can do, what binds."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from pytest_aiperf.build import triton_build
from pytest_aiperf.build.nvcc import Build, sass
from pytest_aiperf.errors import BuildError, ClaimNotMet, InvalidMeasurement
from pytest_aiperf.model import Evidence, EvidenceKind, Metric, Prepared, Result, Timing, Trace
from pytest_aiperf.rules import evidence, roofline, stats
from pytest_aiperf.rules.datasheet import DATASHEET
from pytest_aiperf.rules.evidence import STATIC, Compiled, Facts

from . import triton_launches
from .inputs import Args, Claim, Trial

_TRACED = (EvidenceKind.LAUNCHES, EvidenceKind.KERNELS)


def check(claim: Claim, builds: Sequence[Build], trial: Trial | None, archs: Sequence[str]) -> None:
    """Hold what is known without a GPU: compiled code, and what the CPU counts of the arm.

    Without a ``trial`` the arms cannot run here and the claim is only built; ``archs`` are the
    architectures that Triton's kernels are compiled for.
    """
    if not claim.evidence:
        return
    code, every = of_builds(claim.evidence, builds), bool(builds)
    figures: dict[str, float] = {}
    optimized = claim.arms["optimized"]
    if trial is not None and not isinstance(optimized, Prepared):
        counted = triton_launches.count(optimized, trial.make(trial.seed))
        figures = {EvidenceKind.LAUNCHES: counted.launches, EvidenceKind.KERNELS: counted.kernels}
        figures |= _breaks(claim.evidence, lambda: optimized(*trial.make(trial.seed)))
        if counted.triton and _about(claim.evidence, *STATIC):
            try:
                code += triton_build.compile_apart(counted.triton, archs)
                every = True
            except BuildError:  # looked at where there is a GPU
                every = False
    facts = Facts(code, every=every, figures={"optimized": figures}, at_least=True)
    if broken := evidence.broken(evidence.hold(claim.evidence, facts)):
        raise ClaimNotMet(broken)


def of_builds(wanted: Sequence[Evidence], builds: Sequence[Build]) -> list[Compiled]:
    """Return the kernels of builds, disassembled where evidence is about opcodes."""
    if not _about(wanted, EvidenceKind.OPCODE):
        return [Compiled(kernel) for made in builds for kernel in made.kernels]
    with ThreadPoolExecutor() as pool:
        tables = list(pool.map(sass, builds))
    return [
        Compiled(kernel, table[kernel.function])
        for made, table in zip(builds, tables, strict=True)
        for kernel in made.kernels
    ]


def explain(
    trial: Trial, result: Result, builds: Sequence[Build], ceilings: Mapping[str, float]
) -> Result:
    """Fill in what is learned of a claim after it was timed; nothing is timed after this."""
    claim = trial.claim
    timing = timed(result)
    seconds = {a: stats.typical(timing.replicates, a) for a in claim.arms} if timing else {}
    limits = {
        arm: limit
        for arm, took in seconds.items()
        if result.work and timing and trial.clock.gpu
        if (limit := roofline.limit_of(took, result.work, timing.cache, ceilings))
    }
    looked = _Looked(trial)
    wanted = claim.evidence
    if trial.clock.gpu and (seconds or _about(wanted, *_TRACED)):
        looked.trace()
    looked.figures_of(wanted)
    code: list[Compiled] = []
    if _about(wanted, *STATIC):
        code = [*of_builds(wanted, builds), *looked.tritons()]
    # on a GPU nothing is left to be looked at elsewhere
    every = bool(code) or trial.clock.torch_device != "cpu"
    facts = Facts(code, every=every, figures=looked.figures, work=result.work)
    diagnosis = {
        arm: roofline.diagnose(limits.get(arm), looked.traces.get(arm), took)
        for arm, took in seconds.items()
        if arm in limits or arm in looked.traces
    }
    return replace(
        result,
        limits=limits,
        traces=looked.traces,
        diagnosis={arm: said for arm, said in diagnosis.items() if said},
        evidence=evidence.hold(wanted, facts),
        notes=(*result.notes, *looked.notes),
    )


def timed(result: Result) -> Timing | None:
    """Return the first timing of a claim that counts seconds: the judged one, or one beside it."""
    timings = (result.timing, *result.also)
    return next((t for t in timings if t is not None and t.unit == "s"), None)


def hold_limits(result: Result) -> None:
    """Refuse a time that this GPU cannot need, by its datasheet and by what was measured of it."""
    timing = result.timing
    if timing is None or timing.metric is not Metric.DEVICE or result.work is None:
        return
    sheet = DATASHEET.get(result.key, {})
    for arm in timing.replicates[0].rounds[0].seconds:
        seconds = stats.typical(timing.replicates, arm)
        by_sheet = roofline.limit_of(seconds, result.work, timing.cache, sheet)
        for limit, source in ((by_sheet, "datasheet"), (result.limits.get(arm), "measured")):
            if limit is None or (timing.cache == "warm" and limit.ceiling in roofline.MEMORY):
                continue  # what stays in registers and shared memory need not pass the L2 again
            if problem := roofline.too_fast(limit, source):
                raise InvalidMeasurement(f"{arm}: {problem}")


def least_share(result: Result) -> float | None:
    """Return the lower end of the optimized arm's share of its limit."""
    limit, timing = result.limits.get("optimized"), timed(result)
    if limit is None or timing is None:
        return None
    logs = [
        statistics.fmean(math.log(s) for r in replicate.rounds for s in r.seconds["optimized"])
        for replicate in timing.replicates
    ]
    took = stats.interval(logs)
    return limit.share * took.value / took.high


class _Looked:
    """What single calls of the arms tell, each on inputs of its own."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.traces: dict[str, Trace] = {}
        self.figures: dict[str, dict[str, float]] = {name: {} for name in trial.claim.arms}
        self.notes: list[str] = []

    def trace(self) -> None:
        for name in self.figures:
            if (trace := self._call(name, self.trial.clock.trace)) is not None:
                self.traces[name] = trace
                self.figures[name][EvidenceKind.LAUNCHES] = trace.launches
                self.figures[name][EvidenceKind.KERNELS] = trace.kernels

    def figures_of(self, wanted: Sequence[Evidence]) -> None:
        if _about(wanted, EvidenceKind.PEAK_MEMORY):
            for name in ("baseline", "optimized"):
                if (peak := self._call(name, self._peak)) is not None:
                    self.figures[name][EvidenceKind.PEAK_MEMORY] = peak
        # last, since it makes torch forget what it has compiled
        found = self._call("optimized", lambda call: _breaks(wanted, call))
        self.figures["optimized"] |= found or {}

    def tritons(self) -> list[Compiled]:
        """Return the Triton kernels of the optimized arm, launched or captured while preparing."""
        if self.trial.clock.torch_device == "cpu":
            return []
        return triton_build.launched_by(lambda: self._call("optimized", lambda call: call()))

    def _peak(self, call: Callable[[], object]) -> int:
        self.trial.clock.peak_bytes(call)  # lazily built handles and workspaces are not the claim's
        self.trial.clock.release()
        return self.trial.clock.peak_bytes(call)

    def _call(self, name: str, look: Callable[[Callable[[], object]], Any]) -> Any:
        """Look at one call; what goes wrong costs the look, not the claim."""
        trial = self.trial
        args: Args = ()
        call: Callable[..., object] | None = None
        try:
            args = trial.make(trial.seed)
            call = trial.prepare(name, trial.seed, args)
            return look(partial(call, *args))
        except Exception as why:  # noqa: BLE001  the claim was timed and agreed already
            said = str(why).strip().partition("\n")[0]
            self.notes.append(f"{name} was not looked into: {type(why).__name__}: {said}")
            return None
        finally:
            del args, call


def _about(wanted: Sequence[Evidence], *proofs: EvidenceKind) -> bool:
    return any(piece.kind in proofs for piece in wanted)


def _breaks(wanted: Sequence[Evidence], call: Callable[[], object]) -> dict[str, float]:
    """Count where torch.compile falls back to Python in a call; nothing where it compiles none."""
    torch = sys.modules.get("torch")
    if torch is None or not _about(wanted, EvidenceKind.GRAPH_BREAKS):
        return {}
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    counters.clear()
    with torch.compiler.set_stance("default", force_backend="eager"):  # code is not the question
        call()
    if not counters["frames"]["total"]:
        return {}
    return {EvidenceKind.GRAPH_BREAKS: sum(counters["graph_break"].values())}
