"""One call in a child: inside the range, under the tool that looks on."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.claim.bound_claim import BoundClaim
from pytest_aiperf.claim.claim import Claim
from pytest_aiperf.device.device import Device
from pytest_aiperf.errors import AiperfError, UsageError
from pytest_aiperf.machine import distributed
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.model import Gpu, Mode, Prepared, Profile, Work
from pytest_aiperf.schema import from_json, to_json

from .timeline import RANGE
from .tools import TOOLS, Tool

VARIABLE: Final = "PYTEST_AIPERF_CAPTURE"
"""Environment variable that tells a child, as JSON, what it is to capture."""
WARM: Final = 3
"""Calls before the one that is captured: to compile, to load, to choose an algorithm."""
SAMPLED: Final = 1.0
"""Seconds for which a sampling profiler looks on."""


@dataclass(frozen=True, slots=True)
class CaptureJob:
    """What a child captures, and what the captures before it gave."""

    tool: str
    preset: str
    arm: str
    calls: int
    seed: int
    stem: str
    scratch: str
    before: tuple[Profile, ...] = ()


@dataclass(frozen=True, slots=True)
class CaptureReply:
    """What a child says of itself; the artefact says the rest."""

    work: Work | None = None
    gpu: Gpu | None = None
    error: str = ""


def job(environ: Mapping[str, str]) -> CaptureJob | None:
    """Return what this process is to capture; None where it is no child.

    Of a claim of several GPUs each rank leaves an artefact, rank 0 the one that is read.
    """
    if not (text := environ.get(VARIABLE)):
        return None
    found = from_json(CaptureJob, json.loads(text))
    rank = environ.get("RANK", "0") if distributed.VARIABLE in environ else "0"
    if rank == "0":
        return found
    stem = Path(found.stem)
    steps = TOOLS[found.tool].steps
    return replace(found, stem=str(stem.with_name(rank if steps else f"{stem.name}.rank{rank}")))


def perform_arm(job: CaptureJob, claim: Claim, clock: Device, lease: GpuLock) -> None:
    """Capture one arm of a claim: at full size, or at check size where the tool looks at no time.

    Checkers slow a call down a hundredfold, and what they look for is in the ragged edges that
    check sizes have. A prepared arm is not put to the test with fresh inputs: what would be copied
    over them may never have been written, which initcheck would report.
    """

    def make() -> tuple[Callable[[], object], Work | None]:
        full = not TOOLS[job.tool].checks
        bound = BoundClaim(claim, clock, job.seed, full=full)
        args = bound.make_inputs(job.seed).args
        arm = claim.arms[job.arm]
        call = arm.make(*args) if isinstance(arm, Prepared) else arm
        return lambda: call(*args), claim.work(*args) if claim.work else None

    perform(job, clock, lease, make, cold=claim.cache == "cold")


def perform(
    job: CaptureJob,
    clock: Device,
    lease: GpuLock,
    make: Callable[[], tuple[Callable[[], object], Work | None]],
    *,
    cold: bool = True,
) -> None:
    """Make a call, warm it up, run it inside the range, and answer.

    Children start and warm up side by side, and each has the device alone for what is captured.
    Tools that look at no time share it there, too: the sanitizer's are the longest runs.
    """
    tool = TOOLS[job.tool]
    answer = CaptureReply(gpu=clock.gpu)
    alone = lease.exclusive_gpu if clock.gpu else lease.exclusive_host
    shared = tool.checks or tool.inside == "memory"
    try:
        with lease.shared():
            call, work = make()
            answer = replace(answer, work=work)
            warm = clock.block([call], Mode.WALL)
            calls = clock.block([call] * job.calls, Mode.WALL)
            for _ in range(0 if tool.checks else WARM):
                warm.run()
        with (
            lease.shared() if shared else alone(),
            _INSIDE[tool.inside](job, clock, warm.run),
        ):
            if cold and tool.inside != "memory":
                _flush(clock)
            with _range(tool, clock):
                until = time.monotonic() + (SAMPLED if tool.inside == "perf" else 0.0)
                calls.run()
                while time.monotonic() < until:
                    calls.run()
                clock.ranks.barrier()  # who leaves the range first may end the capture of all
    except Exception as why:
        name = "" if isinstance(why, AiperfError) else f"{type(why).__name__}: "
        answer = replace(answer, error=f"{name}{why}".partition("\n")[0])
        raise
    finally:
        if clock.ranks.rank == 0:
            Path(job.scratch, "answer").write_text(json.dumps(to_json(answer)))


def _flush(clock: Device) -> None:
    """Fill the L2 with something else: what the first call reads is cold."""
    if clock.torch_device == "cuda" and clock.gpu is not None and clock.gpu.l2_bytes:
        import torch

        torch.empty(3 * clock.gpu.l2_bytes, dtype=torch.uint8, device="cuda").zero_()


@contextmanager
def _range(tool: Tool, clock: Device) -> Iterator[None]:
    """Mark the calls, for whichever tool looks on."""
    with ExitStack() as marks:
        if tool.inside == "torch":
            import torch

            marks.enter_context(torch.autograd.profiler.record_function(RANGE))
        elif tool.inside == "proton":
            from triton import profiler

            marks.enter_context(profiler.scope(RANGE))
        if clock.torch_device == "cuda":
            marks.enter_context(_cuda_range())
        yield


@contextmanager
def _cuda_range() -> Iterator[None]:
    import torch

    runtime: Any = torch.cuda.cudart()
    torch.cuda.synchronize()
    runtime.cudaProfilerStart()
    try:
        with _nvtx(torch):
            yield
            torch.cuda.synchronize()
    finally:
        runtime.cudaProfilerStop()


def _nvtx(torch: Any) -> AbstractContextManager[object]:
    try:
        import nvtx
    except ImportError:
        return torch.cuda.nvtx.range(RANGE)  # type: ignore[no-any-return]  # torch is Any here
    return nvtx.annotate(RANGE)  # type: ignore[no-any-return]  # it has no types


Warm = Callable[[], object]


def _nothing(_job: CaptureJob, _clock: Device, _warm: Warm) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def _torch(job: CaptureJob, clock: Device, warm: Warm) -> Iterator[None]:
    from torch import profiler

    kinds = [profiler.ProfilerActivity.CPU]
    if clock.torch_device == "cuda":
        kinds.append(profiler.ProfilerActivity.CUDA)
    deep = job.preset == "deep_dive"
    with profiler.profile(
        activities=kinds,
        schedule=profiler.schedule(wait=0, warmup=1, active=1),  # CUPTI's start is not the call's
        record_shapes=deep,
        profile_memory=deep,
        with_stack=deep,
    ) as profile:
        warm()
        profile.step()
        yield
        dynamo = sys.modules.get("torch._dynamo.utils")
        breaks = sum(dynamo.counters["graph_break"].values()) if dynamo else 0
        profile.add_metadata_json("graph_breaks", str(breaks))
    profile.export_chrome_trace(f"{job.stem}.json")


@contextmanager
def _proton(job: CaptureJob, _clock: Device, _warm: Warm) -> Iterator[None]:
    from triton import profiler

    deep = job.preset == "deep_dive"
    profiler.start(job.stem, context="python" if deep else "shadow", hook="triton")
    yield
    profiler.finalize()


@contextmanager
def _memory(job: CaptureJob, clock: Device, _warm: Warm) -> Iterator[None]:
    import torch

    if clock.torch_device != "cuda":
        raise UsageError("torch records the GPU's memory only: run with --gpu, without @host")
    memory: Any = torch.cuda.memory
    clock.release()
    memory.reset_peak_memory_stats()
    before = memory.memory_stats()
    memory._record_memory_history(stacks="all" if job.preset == "deep_dive" else "python")  # noqa: SLF001  documented by torch
    yield
    after = memory.memory_stats()
    memory._dump_snapshot(f"{job.stem}.pickle")  # noqa: SLF001  documented by torch
    count = "allocation.all.allocated"
    told = {
        "peak": after["allocated_bytes.all.peak"],
        "allocated": after["allocated_bytes.all.current"],
        "allocations": after[count] - before[count],
        "reserved": after["reserved_bytes.all.peak"],
    }
    Path(f"{job.stem}.json").write_text(json.dumps(told))


@contextmanager
def _perf(job: CaptureJob, _clock: Device, _warm: Warm) -> Iterator[None]:
    # perf waits for orders: only what runs between two of them is sampled
    with (
        os.fdopen(os.open(f"{job.scratch}/control", os.O_RDWR), "w") as control,
        os.fdopen(os.open(f"{job.scratch}/answered", os.O_RDWR)) as answered,
    ):
        for order in ("enable", "disable"):
            print(order, file=control, flush=True)
            answered.readline()
            if order == "enable":
                yield


_INSIDE: Final[Mapping[str, Callable[[CaptureJob, Device, Warm], AbstractContextManager[None]]]] = {
    "": _nothing,
    "torch": _torch,
    "proton": _proton,
    "memory": _memory,
    "perf": _perf,
}
