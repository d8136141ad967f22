"""The profiled process: run the calls of one arm inside the range that is profiled."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.claim.bound_claim import BoundClaim
from pytest_aiperf.claim.claim import Claim
from pytest_aiperf.device.device import Device
from pytest_aiperf.errors import AiperfError, UsageError
from pytest_aiperf.machine import distributed
from pytest_aiperf.machine.file_lock import locked
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.model import Gpu, Mode, Prepared, Profile, Work
from pytest_aiperf.schema import from_json, to_json

from . import injected
from .timeline import RANGE
from .tools import TOOLS, Tool

VARIABLE: Final = "PYTEST_AIPERF_CAPTURE"
"""Environment variable that passes a CaptureJob, as JSON, to the profiled process."""
WARM_UP_CALLS: Final = 3
"""Calls before the profiled ones: they compile kernels, load modules and choose algorithms."""
WAITING: Final = "waiting"
"""File in the scratch folder; it exists while the profiled process waits for other processes."""
SAMPLING_S: Final = 1.0
"""Seconds for which calls repeat under perf: at 999 Hz it then takes about 1000 samples."""


@dataclass(frozen=True, slots=True)
class CaptureJob:
    """The task of the profiled process."""

    tool: str
    preset: str
    arm: str
    calls: int  #: Number of calls inside the profiled range.
    seed: int  #: Random seed for the inputs.
    stem: str  #: Path of the artifact without its suffix.
    scratch: str  #: Folder for the reply, for perf's FIFOs and for the file WAITING.
    before: tuple[Profile, ...] = ()
    """Profiles that the same test made before this one: the process does not make them again."""
    turn: str = ""
    """File to lock before the arm's inputs are made, if the arms of a claim start together."""


@dataclass(frozen=True, slots=True)
class CaptureReply:
    """What the profiled process reports to its parent, besides the profiler's file."""

    work: Work | None = None  #: Bytes and FLOPs of one call.
    gpu: Gpu | None = None  #: The GPU that the process used, if any.
    error: str = ""  #: First line of the exception that ended the process.


def job_from(environ: Mapping[str, str]) -> CaptureJob | None:
    """Return the capture job of this process; None if no profiler runs it.

    In a multi-GPU claim every rank writes its own file. HTA reads the files of all ranks; for other
    profilers only the file of rank 0 is read.
    """
    if not (text := environ.get(VARIABLE)):
        return None
    job = from_json(CaptureJob, json.loads(text))
    rank = environ.get("RANK", "0") if distributed.VARIABLE in environ else "0"
    if rank == "0":
        return job
    stem = Path(job.stem)
    name = rank if TOOLS[job.tool].steps else f"{stem.name}.rank{rank}"
    return replace(job, stem=str(stem.with_name(name)))


def sender(job: CaptureJob) -> Callable[..., None]:
    """Return a function that takes the claim's messages ``waiting`` and ``working``.

    In between, the file WAITING exists, and the parent's deadline is paused.
    """
    waiting = Path(job.scratch, WAITING)

    def send(kind: str, **_fields: object) -> None:
        if kind == "waiting":
            waiting.touch()
        elif kind == "working":
            waiting.unlink(missing_ok=True)

    return send


def perform_arm(job: CaptureJob, claim: Claim, device: Device, lock: GpuLock) -> None:
    """Profile one arm of a claim at full size, or at check size under a checker.

    Checkers get the small check size because they slow a call down a hundredfold; inputs of this
    size have the ragged edges where invalid accesses occur. A prepared arm is called with the
    inputs of its preparation: to copy new inputs into them may read unwritten memory, which
    initcheck would report.
    """

    def make_call() -> tuple[Callable[[], object], Work | None]:
        bound = BoundClaim(claim, device, job.seed, full=not TOOLS[job.tool].is_checker)
        args = bound.make_inputs(job.seed).args
        arm = claim.arms[job.arm]
        call = arm.make(*args) if isinstance(arm, Prepared) else arm
        return lambda: call(*args), claim.work(*args) if claim.work else None

    with _turn(job):
        perform(job, device, lock, make_call, cold=claim.cache == "cold")
        device.release()


@contextmanager
def _turn(job: CaptureJob) -> Iterator[None]:
    """Wait until no other arm of the claim has its inputs in memory."""
    if not job.turn:
        yield
        return
    send = sender(job)
    with locked(Path(job.turn), wait=partial(send, "waiting")):
        send("working")
        yield


def perform(
    job: CaptureJob,
    device: Device,
    lock: GpuLock,
    make_call: Callable[[], tuple[Callable[[], object], Work | None]],
    *,
    cold: bool = True,
) -> None:
    """Make a call, warm it up, run it inside the profiled range and write the reply.

    Several profiled processes may start at the same time, but each holds the exclusive GPU lock
    from its inputs on. If several warmed up on one GPU, each launch would wait for the others, and
    whoever is ready to be profiled for the slowest. Checkers and the memory recorder measure no
    time, so they hold the shared lock: otherwise the slow sanitizer would block all other
    processes.
    """
    tool = TOOLS[job.tool]
    reply = CaptureReply(gpu=device.gpu)
    exclusive = lock.exclusive_gpu if device.gpu else lock.exclusive_host
    is_untimed = tool.is_checker or tool.hook == "memory"
    try:
        with lock.shared() if is_untimed else exclusive():
            call, work = make_call()
            reply = replace(reply, work=work)
            warm_up = device.block([call], Mode.WALL)
            calls = device.block([call] * job.calls, Mode.WALL)
            for _ in range(0 if tool.is_checker else WARM_UP_CALLS):
                warm_up.run()
            with _HOOKS[tool.hook](job, device, warm_up.run):
                if cold and tool.hook != "memory":
                    _flush_l2(device)
                with _range(tool, device):
                    end = time.monotonic() + (SAMPLING_S if tool.hook == "perf" else 0.0)
                    calls.run()
                    while time.monotonic() < end:
                        calls.run()
                    # wait: the first rank that leaves the range may end the profiling of all ranks
                    device.ranks.barrier()
    except Exception as error:
        name = "" if isinstance(error, AiperfError) else f"{type(error).__name__}: "
        reply = replace(reply, error=f"{name}{error}".partition("\n")[0])
        raise
    finally:
        if device.ranks.rank == 0:
            Path(job.scratch, "reply").write_text(json.dumps(to_json(reply)))


def _flush_l2(device: Device) -> None:
    """Fill the L2 cache with other data, so that the first call reads from device memory."""
    if device.torch_device == "cuda" and device.gpu is not None and device.gpu.l2_bytes:
        import torch

        torch.empty(3 * device.gpu.l2_bytes, dtype=torch.uint8, device="cuda").zero_()


@contextmanager
def _range(tool: Tool, device: Device) -> Iterator[None]:
    """Mark the profiled calls in the way that the tool expects."""
    with ExitStack() as marks:
        if tool.hook == "torch":
            from torch.autograd.profiler import record_function

            marks.enter_context(record_function(RANGE))
        elif tool.hook == "proton":
            from triton import profiler

            marks.enter_context(profiler.scope(RANGE))
        if device.torch_device != "cuda":
            yield
            return
        import torch

        runtime: Any = torch.cuda.cudart()
        torch.cuda.synchronize()
        runtime.cudaProfilerStart()
        marks.callback(runtime.cudaProfilerStop)
        # start/end, not push/pop: autograd launches kernels in threads of its own
        marks.callback(torch.cuda.nvtx.range_end, torch.cuda.nvtx.range_start(RANGE))
        yield
        torch.cuda.synchronize()


Run = Callable[[], object]
Hook = Callable[[CaptureJob, Device, Run], AbstractContextManager[None]]
"""Returns a context manager for the profiled calls; its last argument runs warm-up calls."""


@contextmanager
def _torch(job: CaptureJob, device: Device, warm_up: Run) -> Iterator[None]:
    from torch import profiler

    kinds = [profiler.ProfilerActivity.CPU]
    if device.torch_device == "cuda":
        kinds.append(profiler.ProfilerActivity.CUDA)
    deep = job.preset != "minimal"
    stacks = job.preset == "deep_dive"
    with profiler.profile(
        activities=kinds,
        # without the warm-up step, CUPTI would start inside the profiled call
        schedule=profiler.schedule(wait=0, warmup=1, active=1),
        record_shapes=deep,
        profile_memory=deep,
        with_stack=stacks,
        with_flops=deep,
    ) as profile:
        warm_up()
        profile.step()
        yield
        injected.add_compiler_figures(profile)
    profile.export_chrome_trace(f"{job.stem}{TOOLS[job.tool].suffix}")
    if not stacks:  # with stacks, PyTorch 2.13 fails to decode the names of some Python functions
        file = Path(f"{job.stem}{injected.OPERATORS}")
        injected.write_operators(profile.events(), file, RANGE)


@contextmanager
def _proton(job: CaptureJob, _device: Device, _warm_up: Run) -> Iterator[None]:
    from triton import profiler

    deep = job.preset == "deep_dive"
    profiler.start(job.stem, context="python" if deep else "shadow", hook="triton")
    yield
    profiler.finalize()


@contextmanager
def _memory(job: CaptureJob, device: Device, _warm_up: Run) -> Iterator[None]:
    import torch

    if device.torch_device != "cuda":
        raise UsageError(
            "it records only GPU memory, and the call ran on the CPU: use a machine with a GPU, "
            "and --gpu for a test"
        )
    memory: Any = torch.cuda.memory
    device.release()
    memory.reset_peak_memory_stats()
    before = memory.memory_stats()
    memory._record_memory_history(stacks="all" if job.preset == "deep_dive" else "python")  # noqa: SLF001  documented by torch
    yield
    after = memory.memory_stats()
    memory._dump_snapshot(f"{job.stem}.pickle")  # noqa: SLF001  documented by torch
    count = "allocation.all.allocated"
    figures = {
        "peak": after["allocated_bytes.all.peak"],
        "allocated": after["allocated_bytes.all.current"],
        "allocations": after[count] - before[count],
        "calls": job.calls,
        "reserved": after["reserved_bytes.all.peak"],
        "inactive split": after["inactive_split_bytes.all.current"],
    }
    Path(f"{job.stem}.json").write_text(json.dumps(figures))


@contextmanager
def _perf(job: CaptureJob, _device: Device, _warm_up: Run) -> Iterator[None]:
    # perf starts disabled; it samples from the "enable" command to the "disable" command
    with (
        os.fdopen(os.open(f"{job.scratch}/control", os.O_RDWR), "w") as control,
        os.fdopen(os.open(f"{job.scratch}/ack", os.O_RDWR)) as acknowledged,
    ):
        for command in ("enable", "disable"):
            print(command, file=control, flush=True)
            acknowledged.readline()
            if command == "enable":
                yield


_HOOKS: Final[Mapping[str, Hook]] = {
    "": lambda *_: nullcontext(), "torch": _torch, "proton": _proton, "memory": _memory,
    "perf": _perf,
}  # fmt: skip
