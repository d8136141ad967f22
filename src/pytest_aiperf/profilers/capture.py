"""Run the arms of a claim under a profiler, each in its own process."""

import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pytest_aiperf.claim.claim import Claim
from pytest_aiperf.errors import AiperfError, CaptureFailed, ClaimNotMet, ToolMissing
from pytest_aiperf.limits import ceilings
from pytest_aiperf.machine.cache_folder import create_tagged
from pytest_aiperf.machine.nvml import visible
from pytest_aiperf.machine.process_group import run_in_group
from pytest_aiperf.model import (
    ARMS,
    Evidence,
    EvidenceKind,
    Finding,
    Outcome,
    Profile,
    Result,
    Work,
)
from pytest_aiperf.records.results import writing
from pytest_aiperf.rules import evidence, roofline
from pytest_aiperf.schema import from_json, to_json

from . import ncu, parsers, tools
from .target import VARIABLE, WAITING, CaptureJob, CaptureReply
from .tools import Invocation, Tool

ARTIFACTS: Final = "artifacts"
"""Folder of profilers' output files, by default, in pytest's root folder."""


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """The settings of one profiler run."""

    tool: Tool
    preset: str  #: One of the tool's presets.
    folder: Path  #: Where artifacts and logs are written.
    target: tuple[str, ...]  #: Command of the process that is profiled; it runs one arm.
    deadline_s: float  #: Seconds after which the process is killed.
    calls: int = 1  #: Number of calls inside the profiled range.
    seed: int = 1  #: Random seed for the arm's inputs.
    turn: str = ""  #: See CaptureJob.
    setting: str = "aiperf_deadline"  #: What sets the deadline, for messages.


@dataclass(frozen=True, slots=True)
class ExpectedKernels:
    """Kernels and counters that a report must contain; a kernel is given by a part of its name."""

    required: tuple[str, ...] = ()  #: Each of these kernels must have run.
    built: tuple[str, ...] = ()  #: Kernels that the claim compiles: at least one must have run.
    counters: tuple[tuple[str, str], ...] = ()
    """Pairs of an ncu metric that the evidence names and a part of a kernel name ("": all)."""
    cache: str = "cold"  #: "cold": ncu flushes the caches before a kernel; "warm": it does not.


def run_folder(artifacts: Path, run: str) -> Path:
    """Create the folder for a run's artifacts, tagged so that `clean` removes it.

    Raise UsageError if that is impossible.
    """
    folder = artifacts / run
    with writing(folder):
        create_tagged(folder)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    return folder


def folder_name(claim: str) -> str:
    """Return a folder name for a claim id; different ids get different names."""
    name = re.sub(r"[^\w-]+", ".", claim, flags=re.ASCII).strip(".")[:100]
    plain = re.fullmatch(r"[\w-]+(/[\w-]+(\[[\w-]+\])?)?", claim, re.ASCII)
    return name if plain and len(claim) <= 100 else f"{name}-{zlib.crc32(claim.encode()):08x}"


def run(
    claim: Claim,
    request: CaptureRequest,
    record: Result,
    built: Sequence[str],
    progress: Callable[[str], object],
) -> tuple[Result, AiperfError | None]:
    """Profile each arm of a claim; return the claim's record and the error to raise, if any.

    ``built`` names the kernels that the claim compiles. ToolMissing is raised instead of returned,
    because a missing profiler says nothing about the claim.
    """
    started = time.monotonic()
    result = replace(record, against=claim.against)
    error: AiperfError | None
    try:
        result = _capture_arms(claim, request, result, built, progress)
        message = _first_finding(result.profiles) or evidence.broken(result.evidence)
        outcome = Outcome.FAILED if message else Outcome.PASSED
        result = replace(result, outcome=outcome, message=message)
        error = ClaimNotMet(message) if message else None
    except ToolMissing:
        raise
    except AiperfError as failure:
        result = replace(result, outcome=Outcome.ERROR, message=str(failure))
        error = failure
    return replace(result, seconds=time.monotonic() - started), error


def _capture_arms(
    claim: Claim,
    request: CaptureRequest,
    result: Result,
    built: Sequence[str],
    progress: Callable[[str], object],
) -> Result:
    pieces = [piece for piece in claim.evidence if piece.kind is EvidenceKind.COUNTER]
    # "" (all kernels) is for the baseline, whose kernels may have other names
    counters = [(p.of, kernel) for p in pieces for kernel in dict.fromkeys((p.kernel, ""))]
    # code evidence is left out, because it may name a kernel that only another rung runs
    named = tuple(dict.fromkeys(p.kernel for p in pieces if p.kernel))

    def capture_arm(arm: str) -> tuple[Profile, CaptureReply]:
        call = claim.arms[arm]
        kernels = ExpectedKernels(
            required=named if arm == "optimized" else (),
            # the library arm may call a library instead of a kernel that the claim compiles
            built=tuple(built) if arm != "library" and getattr(call, "needs_gpu", False) else (),
            counters=tuple(counters),
            cache=claim.cache,
        )
        progress(f"{request.tool.name}: {arm}")
        return capture(request, arm, kernels)

    with (
        tempfile.TemporaryDirectory(prefix="pytest-aiperf-") as scratch,
        ThreadPoolExecutor() as pool,
    ):
        if together := request.tool.name == "ncu":
            # most of an arm's time is the start of its process, and counters do not depend on
            # what else runs on the host
            request = replace(request, turn=f"{scratch}/turn")
        captured = list((pool.map if together else map)(capture_arm, claim.arms))
    profiles = {arm: profile for arm, (profile, _) in zip(claim.arms, captured, strict=True)}
    reply = captured[-1][1]
    single = request.calls == 1  # evidence and diagnosis are about one call
    return replace(
        result,
        gpu=reply.gpu,
        work=reply.work,
        profiles=tuple(profiles.values()),
        diagnosis=_diagnosis(profiles, reply, claim.cache) if single else {},
        evidence=tuple(_findings(claim.evidence if single else (), profiles, reply.work)),
    )


def _findings(
    pieces: Sequence[Evidence], profiles: Mapping[str, Profile], work: Work | None
) -> list[Finding]:
    """Check the evidence; counter evidence is checked only in a profile by ncu."""
    findings: list[Finding] = []
    for piece in pieces:
        figures: dict[str, dict[str, float]] = {}
        reasons: dict[EvidenceKind, str] = {}
        if piece.kind is EvidenceKind.COUNTER and profiles["optimized"].tool == "ncu":
            names = [ncu.counter(piece.of, kernel) for kernel in (piece.kernel, "")]
            for arm in ("baseline", "optimized"):  # not library: that arm may run no kernel
                profile = profiles[arm]
                if ncu.CUT in profile.notes:
                    reasons[piece.kind] = f"the {arm} arm: {ncu.CUT}"
                    continue
                values = [profile.figures[name] for name in names if name in profile.figures]
                if not values:
                    raise CaptureFailed(
                        f"{profile.artifact} has no {piece.of}, which the evidence names: see "
                        "`ncu --query-metrics` for the metrics of this GPU"
                    )
                figures[arm] = {piece.of: values[0]}
        findings += evidence.hold(
            [piece], evidence.Facts(figures=figures, reasons=reasons, work=work)
        )
    return findings


def _diagnosis(profiles: Mapping[str, Profile], reply: CaptureReply, cache: str) -> dict[str, str]:
    """Diagnose each arm from its figures and, under ncu, from its limit if that is known."""
    diagnosis = {}
    for arm, profile in profiles.items():
        seconds = profile.figures.get("duration", 0.0)
        if ncu.CUT in profile.notes:
            continue
        limit = None
        if reply.gpu and reply.work and seconds:
            limits, l2_bytes = ceilings.cached(reply.gpu), reply.gpu.l2_bytes
            limit = roofline.limit_of(seconds, reply.work, cache, limits, l2_bytes)
        hint = "--profile=ncu shows what limits the kernels"
        if text := roofline.diagnose_profile(profile, limit, hint):
            diagnosis[arm] = text
    return diagnosis


def _first_finding(profiles: Sequence[Profile]) -> str:
    """Describe a checker's first finding, such as an invalid access; return "" if it has none."""
    for profile in profiles:
        if tools.TOOLS[profile.tool].is_checker and profile.figures["findings"]:
            count = f"{profile.figures['findings']:.0f} findings"
            first = profile.notes[0] if profile.notes else "see the artifact"
            return f"{profile.arm}: {count} ({profile.artifact}), the first: {first}"
    return ""


def capture(
    request: CaptureRequest,
    arm: str,
    kernels: ExpectedKernels = ExpectedKernels(),
    before: Sequence[Profile] = (),
) -> tuple[Profile, CaptureReply]:
    """Profile one arm and read the file that the profiler wrote.

    The preset's invocations are tried in order; an error is raised only if the last one fails.
    """
    *earlier, last = request.tool.presets[request.preset]
    for invocation in earlier:
        with suppress(CaptureFailed, ToolMissing):
            return _capture(request, invocation, arm, kernels, before)
    return _capture(request, last, arm, kernels, before)


def _capture(
    request: CaptureRequest,
    invocation: Invocation,
    arm: str,
    kernels: ExpectedKernels,
    before: Sequence[Profile],
) -> tuple[Profile, CaptureReply]:
    tool = request.tool
    binary = tools.require_tool(tool.name)
    command: list[str] = []
    if binary:
        command = [binary, *tool.command, *invocation.arguments]
        if tool.name == "ncu":
            arch = next((gpu.arch for gpu in visible()), "")  # the arm runs on the first GPU
            metrics = ncu.ncu_metrics(arch, [metric for metric, _ in kernels.counters])
            command += ("--metrics", ",".join(metrics))
            command += ("--cache-control", "none") if kernels.cache == "warm" else ()
    artifact = request.folder / (f"{arm}.{tool.name}" if tool.steps else f"{arm}{tool.suffix}")

    def run_step(step: str) -> CaptureReply:
        stem = artifact / step if step else request.folder / arm
        calls, seed = request.calls, request.seed
        job = CaptureJob(
            tool.name, request.preset, arm, calls, seed, str(stem), "", (*before,), request.turn
        )
        step_command = [*command, *tool.steps.get(step, ())]
        reply = _run_target(request, job, step_command, invocation.environ)
        # if a checker has findings, report these: they may be the cause of the arm's error
        if reply.error:
            file = Path(f"{stem}{tool.suffix}")
            if not (tool.is_checker and parsers.read(tool.name, file, arm).figures["findings"]):
                raise CaptureFailed(f"the {arm} arm under {tool.name}: {reply.error}")
        return reply

    with ThreadPoolExecutor() as pool:
        reply, *_ = pool.map(run_step, tool.steps or ("",))
    if not artifact.exists():
        if kernels.required or kernels.built:
            names = ", ".join(kernels.required or kernels.built)
            raise CaptureFailed(f"the {arm} arm ran no kernel; expected: {names}")
        note = "ran no kernel (copies do not count)"
        log = os.path.relpath(request.folder / f"{arm}.log")
        return Profile(tool.name, arm, log, {"kernels": 0.0}, notes=(note,)), reply
    profile = parsers.read(
        tool.name,
        artifact,
        arm,
        kernels.required,
        counters=kernels.counters,
        binary=binary,
        limited="--launch-count" in invocation.arguments,
    )
    ran, is_cut = profile.kernels, ncu.CUT in profile.notes
    has_built = any(part in name for part in kernels.built for name in ran)
    if kernels.built and ran and not has_built and not is_cut:
        raise CaptureFailed(
            f"{artifact} has none of the kernels that the claim builds "
            f"({', '.join(kernels.built)}): the {arm} arm ran {', '.join(ran[:3])}"
        )
    files = {request.folder / f"{arm}{suffix}": what for suffix, what in tool.further.items()}
    further = (f"{what}: {os.path.relpath(file)}" for file, what in files.items() if file.exists())
    output = request.folder / f"{arm}.log"
    chosen = tools.autotuned(output.read_text(errors="replace")) if output.exists() else []
    notes = (*profile.notes, *filter(None, [invocation.note]), *chosen, *further)
    return replace(profile, artifact=os.path.relpath(artifact), notes=notes), reply


def _run_target(
    request: CaptureRequest,
    job: CaptureJob,
    tool_command: Sequence[str],
    environ: Mapping[str, str],
) -> CaptureReply:
    """Run the target under the tool; raise CaptureFailed or ToolMissing if no file was written.

    It is no error if the tool writes no file because the target ran no kernel.
    """
    tool, stem = request.tool, Path(job.stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    log, artifact = Path(f"{stem}.log"), Path(f"{stem}{tool.suffix}")
    artifact.unlink(missing_ok=True)  # an earlier invocation may have left it
    with tempfile.TemporaryDirectory(prefix="pytest-aiperf-") as scratch:
        names = {"stem": str(stem), "step": stem.name, "scratch": scratch}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
        serialized = json.dumps(to_json(replace(job, scratch=scratch)))
        for fifo in ("control", "ack") if tool.hook == "perf" else ():
            os.mkfifo(f"{scratch}/{fifo}")
        command = [*(word.format_map(names) for word in tool_command), *request.target]
        env = {**tools.AUTOTUNING, **inherited, VARIABLE: serialized, **environ}
        is_waiting = Path(scratch, WAITING).exists
        status = run_in_group(command, log, request.deadline_s, env=env, is_paused=is_waiting)
        ending = _ending(status, request)
        answer = _answer(Path(scratch, "reply"))
        if tool.report:
            tools.write_reports(tool, tool_command[0], stem)
    reply = answer or CaptureReply(error=f"its process {ending}; see {os.path.relpath(log)}")
    if artifact.exists() and artifact.stat().st_size:
        return reply
    output = log.read_text(errors="replace")
    if tool.no_kernels_message and tool.no_kernels_message in output and not reply.error:
        return reply
    if not (answer and answer.error):  # an error of the arm may read like a refusal of the tool
        tools.raise_if_refused(tool, output)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reason = reply.error or (lines[-1][:300] if lines else f"its process {ending}")
    what = f"the {job.arm} arm" if job.arm in ARMS else "the call"
    raise CaptureFailed(
        f"{tool.name} captured nothing of {what} ({reason}); see {os.path.relpath(log)}"
    )


def _answer(file: Path) -> CaptureReply | None:
    """Read the reply of a profiled process; None if it left none, or died while it wrote it."""
    try:
        return from_json(CaptureReply, json.loads(file.read_text()))
    except (OSError, ValueError):
        return None


def _ending(status: int | None, request: CaptureRequest) -> str:
    if status is None:
        return f"exceeded its deadline of {request.deadline_s:g} s ({request.setting})"
    return f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
