"""One claim under a profiler: a child for each arm, and what came back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
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
from pytest_aiperf.model import EvidenceKind, Finding, Outcome, Profile, Result
from pytest_aiperf.rules import evidence, roofline
from pytest_aiperf.schema import from_json, to_json

from . import ncu, parsers, tools
from .target import VARIABLE, CaptureJob, CaptureReply
from .tools import Fallback, Tool

ARTIFACTS: Final = "artifacts"
"""The folder of artefacts, under pytest's root folder."""


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """How to capture: ``target`` is the command whose process is the child."""

    tool: Tool
    preset: str
    folder: Path
    target: tuple[str, ...]
    deadline: float
    calls: int = 1
    seed: int = 1


@dataclass(frozen=True, slots=True)
class ExpectedKernels:
    """What must be found: all of ``expected``, any of ``own`` (parts of kernels' names)."""

    expected: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    counters: tuple[tuple[str, str], ...] = ()
    cache: str = "cold"


def safe(claim: str) -> str:
    """Make a claim's id a file's name; two ids never share one."""
    name = re.sub(r"[^\w-]+", ".", claim, flags=re.ASCII).strip(".")[:100]
    plain = re.fullmatch(r"[\w-]+(/[\w-]+)?(\[[\w-]+\])?", claim, re.ASCII)
    return name if plain and len(claim) <= 100 else f"{name}-{zlib.crc32(claim.encode()):08x}"


def run(
    claim: Claim,
    order: CaptureRequest,
    blank: Result,
    own: Sequence[str],
    say: Callable[[str], object],
) -> tuple[Result, AiperfError | None]:
    """Capture each arm of a claim: the record, and what is to be raised of it.

    ``own`` are names of the kernels that this claim has built. ToolMissing is no outcome of a
    claim, and goes on to the caller.
    """
    started = time.monotonic()
    result = replace(blank, against=claim.against)
    problem: AiperfError | None = None
    try:
        result = _captured(claim, order, result, own, say)
    except ToolMissing:
        raise
    except AiperfError as why:
        result, problem = replace(result, outcome=Outcome.ERROR, message=str(why)), why
    else:
        why_not = _found(result.profiles) or evidence.broken(result.evidence)
        outcome = Outcome.FAILED if why_not else Outcome.PASSED
        result = replace(result, outcome=outcome, message=why_not)
        problem = ClaimNotMet(why_not) if why_not else None
    return replace(result, seconds=time.monotonic() - started), problem


def _captured(
    claim: Claim,
    order: CaptureRequest,
    result: Result,
    own: Sequence[str],
    say: Callable[[str], object],
) -> Result:
    pieces = [piece for piece in claim.evidence if piece.kind is EvidenceKind.COUNTER]
    # the baseline's kernels may have other names: there the counter is of them all
    counters = [(p.of, kernel) for p in pieces for kernel in dict.fromkeys((p.kernel, ""))]
    # compiled code may be compared with that of another rung, which the optimized arm does not run
    named = tuple(dict.fromkeys(p.kernel for p in pieces if p.kernel))
    profiles: dict[str, Profile] = {}
    answer = CaptureReply()
    for arm, call in claim.arms.items():
        sought = ExpectedKernels(
            expected=named if arm == "optimized" else (),
            # a launcher that stands for a library may call one, which need not run a kernel
            own=tuple(own) if arm != "library" and getattr(call, "needs_gpu", False) else (),
            counters=tuple(counters),
            cache=claim.cache,
        )
        say(f"{order.tool.name}: {arm}")
        profiles[arm], answer = capture(order, arm, sought)
    findings: list[Finding] = []
    for piece in claim.evidence if order.calls == 1 else ():  # it is about one call
        figures = {}
        if piece.kind is EvidenceKind.COUNTER and order.tool.name == "ncu":
            names = [ncu.counter(piece.of, kernel) for kernel in (piece.kernel, "")]
            for arm in ("baseline", "optimized"):  # a library's arm may run no kernel at all
                profile = profiles[arm]
                seen = [profile.figures[name] for name in names if name in profile.figures]
                if not seen:
                    raise CaptureFailed(
                        f"{profile.artefact} has no {piece.of}, which the evidence names: see "
                        "`ncu --query-metrics` for what this GPU counts"
                    )
                figures[arm] = {piece.of: seen[0]}
        findings += evidence.hold([piece], evidence.Facts(figures=figures, work=answer.work))
    return replace(
        result,
        gpu=answer.gpu,
        work=answer.work,
        profiles=tuple(profiles.values()),
        diagnosis=_diagnosis(profiles, answer, claim.cache) if order.calls == 1 else {},
        evidence=tuple(findings),
    )


def _diagnosis(profiles: Mapping[str, Profile], answer: CaptureReply, cache: str) -> dict[str, str]:
    """Say what binds each arm by its counters, and by its limit where the ceilings are known."""
    found = {}
    for arm, profile in profiles.items():
        seconds = profile.figures.get("duration", 0.0)
        if profile.tool != "ncu" or not seconds:
            continue
        known = ceilings.cached(answer.gpu) if answer.gpu and answer.work else {}
        limit = roofline.limit_of(seconds, answer.work, cache, known) if answer.work else None
        found[arm] = roofline.diagnose(limit, None, seconds, profile.figures)
    return found


def _found(profiles: Sequence[Profile]) -> str:
    """Say the first thing that a tool which checks has found."""
    for profile in profiles:
        if tools.TOOLS[profile.tool].checks and profile.figures["findings"]:
            count = f"{profile.figures['findings']:.0f} findings"
            first = profile.notes[0] if profile.notes else "see the artefact"
            return f"{profile.arm}: {count} ({profile.artefact}), the first: {first}"
    return ""


def capture(
    order: CaptureRequest,
    arm: str,
    sought: ExpectedKernels = ExpectedKernels(),
    before: Sequence[Profile] = (),
) -> tuple[Profile, CaptureReply]:
    """Run the target under the tool and read what it left; the last attempt's failure is told."""
    attempts = order.tool.presets[order.preset]
    for attempt in attempts:
        try:
            return _try(order, attempt, arm, sought, before)
        except (CaptureFailed, ToolMissing):
            if attempt is attempts[-1]:
                raise
    raise AssertionError(attempts)


def _try(
    order: CaptureRequest,
    attempt: Fallback,
    arm: str,
    sought: ExpectedKernels,
    before: Sequence[Profile],
) -> tuple[Profile, CaptureReply]:
    tool = order.tool
    binary = tools.find(tool.name)
    front: list[str] = []
    if binary:
        front = [binary, *tool.command, *attempt.words]
        if tool.name == "ncu":
            front += tools.metrics(tuple(metric for metric, _ in sought.counters))
            front += ("--cache-control", "none") if sought.cache == "warm" else ()
    artefact = order.folder / (f"{arm}.{tool.name}" if tool.steps else f"{arm}{tool.suffix}")

    def child(step: str) -> CaptureReply:
        stem = artefact / step if step else order.folder / arm
        job = CaptureJob(
            tool.name, order.preset, arm, order.calls, order.seed, str(stem), "", (*before,)
        )
        answer = _child(order, job, [*front, *tool.steps.get(step, ())], attempt.environ)
        # where a tool has found something, the arm may well have failed of it
        if answer.error and not (tool.checks and _findings(tool, stem, arm)):
            raise CaptureFailed(f"the {arm} arm under {tool.name}: {answer.error}")
        return answer

    with ThreadPoolExecutor() as pool:
        answer, *_ = pool.map(child, tool.steps or ("",))
    if not artefact.exists():
        if sought.expected or sought.own:
            wanted = ", ".join(sought.expected or sought.own)
            raise CaptureFailed(f"the {arm} arm ran no kernel, and {wanted} was expected")
        note = "ran no kernel: a copy is not one"
        log = os.path.relpath(order.folder / f"{arm}.log")
        return Profile(tool.name, arm, log, {"kernels": 0.0}, notes=(note,)), answer
    profile = parsers.read(
        tool.name, artefact, arm, sought.expected, counters=sought.counters, binary=binary
    )
    names = profile.kernels
    if sought.own and names and not any(part in name for part in sought.own for name in names):
        raise CaptureFailed(
            f"{artefact} has none of the arm's own kernels ({', '.join(sought.own)}): "
            f"the {arm} arm ran {', '.join(names[:3])}"
        )
    notes = (*profile.notes, *filter(None, [attempt.note]))
    return replace(profile, artefact=os.path.relpath(artefact), notes=notes), answer


def _findings(tool: Tool, stem: Path, arm: str) -> float:
    return parsers.read(tool.name, Path(f"{stem}{tool.suffix}"), arm).figures["findings"]


def _child(
    order: CaptureRequest, job: CaptureJob, front: Sequence[str], environ: Mapping[str, str]
) -> CaptureReply:
    """Run one child to its end; raise CaptureFailed or ToolMissing when it leaves no artefact."""
    tool, stem = order.tool, Path(job.stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    log, artefact = Path(f"{stem}.log"), Path(f"{stem}{tool.suffix}")
    artefact.unlink(missing_ok=True)  # of an attempt before this one
    with tempfile.TemporaryDirectory(prefix="pytest-aiperf-") as scratch:
        names = {"stem": str(stem), "step": stem.name, "scratch": scratch}
        told = json.dumps(to_json(replace(job, scratch=scratch)))
        ours = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
        ours |= {VARIABLE: told, **environ}
        for fifo in ("control", "answered") if tool.inside == "perf" else ():
            os.mkfifo(f"{scratch}/{fifo}")
        argv = [*(word.format_map(names) for word in front), *order.target]
        ended = _wait(argv, ours, log, order.deadline)
        answered = Path(scratch, "answer")
        answer = (
            from_json(CaptureReply, json.loads(answered.read_text()))
            if answered.exists()
            else CaptureReply(error=f"its process {ended}; see {os.path.relpath(log)}")
        )
        if tool.report:
            with artefact.open("wb") as out:
                report = [front[0], *(word.format_map(names) for word in tool.report)]
                subprocess.run(report, stdout=out, stderr=subprocess.DEVNULL, check=False)
    if artefact.exists() and artefact.stat().st_size:
        return answer
    said = log.read_text(errors="replace")
    if tool.nothing and tool.nothing in said and not answer.error:
        return answer
    tools.refuse(tool, said)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    why = answer.error or (lines[-1][:300] if lines else f"its process {ended}")
    raise CaptureFailed(
        f"{tool.name} captured nothing of the {job.arm} arm ({why}); see {os.path.relpath(log)}"
    )


def _wait(argv: Sequence[str], environ: Mapping[str, str], log: Path, deadline: float) -> str:
    """Run a command in a group of its own, none of which is left; say how it ended."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
    try:
        code = process.wait(deadline)
    except subprocess.TimeoutExpired:
        return f"exceeded its deadline of {deadline:g} s (aiperf_deadline)"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
