"""The roofline model: which limit bounds an arm, how close the arm comes, and what would help.

An arm is compute-bound, memory-bound or overhead-bound (the GPU waits for launches). An arm far
from all three limits does more than ``work`` counts, because it is unfused or computes in a wider
dtype, or it is latency-bound: its own instructions wait for each other. A rate and a trace do not
show bank conflicts or full issue slots, so for an arm between ``FAR`` and ``_NEAR`` of its limit,
the advice lists possible causes.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pytest_aiperf.model import Interval, Limit, Metric, Profile, Result, Timing, Trace, Work
from pytest_aiperf.text import percent, si

from . import advice, stats

MEMORY: Final = ("copy", "read", "l2")

_NEAR = 0.8  #: From this share of its limit on, an arm is bounded by it.
_AT = 0.97  #: Below this share of its limit, an arm can become faster with the same work.
_WASTE = 1.5  #: Above this many times the bytes of ``work``, traffic is avoidable.
_NARROW = ("tf32", "fp16", "bf16", "fp8")  #: Dtypes of the tensor cores, faster than fp32.

_UNITS = {
    "tensor share": ("compute-bound", "the tensor cores", "only fewer operations help"),
    "sm share": (
        "compute-bound", "the SMs",
        "save instructions that work= does not count: addresses, conversions, special functions",
    ),
    "dram share": ("memory-bound", "device memory", "only fewer bytes help"),
    "l2 share": ("memory-bound", "the L2", "read it less often: reuse in shared memory"),
    "l1 share": (
        "memory-bound", "the L1 and shared memory",
        "make fewer and wider accesses, and keep more in registers",
    ),
}  # fmt: skip
_PCIE_5 = 64e9  #: Bytes per second over 16 lanes in one direction.
_C2C = 450e9  #: Bytes per second between the CPU and the GPU of a superchip in one direction.
_MATRIX = {"fp64": 67e12, "fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12}
_HOPPER = _MATRIX | {"fp8": 1979e12, "int8": 1979e12, "h2d": _PCIE_5, "d2h": _PCIE_5}


def _sheet(memory: float, link: float = 0.0, **others: float) -> Mapping[str, float]:
    # datasheets give the sum of both directions of a link; one copy uses one direction
    links = {"p2p": link / 2, "p2p_both": link} if link else {}
    return {"copy": memory, "read": memory, **links, **others}


DATASHEET: Final[Mapping[str, Mapping[str, float]]] = {
    "a100": _sheet(
        2.04e12, 600e9, fp64=19.5e12, fp32=19.5e12, tf32=156e12, bf16=312e12, fp16=312e12,
        int8=624e12, h2d=32e9, d2h=32e9,
    ),
    "h100": _sheet(3.35e12, 900e9, **_HOPPER),
    "h200": _sheet(4.8e12, 900e9, **_HOPPER),
    "b200": _sheet(
        8e12, 1.8e12, fp64=40e12, fp32=80e12, tf32=1.13e15, bf16=2.25e15, fp16=2.25e15,
        fp8=4.5e15, int8=4.5e15, h2d=_PCIE_5, d2h=_PCIE_5,
    ),
    # datasheets of the B300 disagree on int8 and on the number of PCIe lanes: both are left out
    "b300": _sheet(
        8e12, 1.8e12, fp64=1.3e12, fp32=80e12, tf32=1.25e15, bf16=2.5e15, fp16=2.5e15, fp8=5e15,
    ),
    # specifications of the GB200 NVL72 and GB300 NVL72, by 72 GPUs, and those of sparse matrices by
    # 2; fp64 and fp32 of the GB200 from NVIDIA's Blackwell Architecture Technical Brief; the CPU is
    # reached over NVLink-C2C
    "gb200": _sheet(
        8e12, 1.8e12, fp64=45e12, fp32=90e12, tf32=1.25e15, bf16=2.5e15, fp16=2.5e15, fp8=5e15,
        int8=5e15, h2d=_C2C, d2h=_C2C,
    ),
    "gb300": _sheet(
        8e12, 1.8e12, fp64=1.4e12, fp32=83.4e12, tf32=1.25e15, bf16=2.5e15, fp16=2.5e15, fp8=5e15,
        int8=167e12, h2d=_C2C, d2h=_C2C,
    ),
    # no matrix rates: NVIDIA states only that of sparse FP4, which is no limit here
    "gb10": _sheet(301e9, fp32=31e12),
}  # fmt: skip
"""NVIDIA's peak rates (dense) by GPU key and limit, in bytes or operations per second.

Where datasheets differ, the larger figure is taken.
"""


def limit_of(
    seconds: float, work: Work, cache: str, ceilings: Mapping[str, float], l2_bytes: int = 0
) -> Limit | None:
    """Return the limit at which this work takes the longest; None if no limit applies.

    The bytes of a warm call come from the L2 cache, of ``l2_bytes``, unless they are more than it
    holds; 0 means that its size is not known.
    """
    amounts = {}  # by limit: (bytes or operations of one call, the limit's rate)
    in_l2 = cache == "warm" and not 0 < l2_bytes < work.bytes
    if work.bytes > 0 and (memory := _memory(work, ceilings, in_l2=in_l2)):
        amounts[memory[0]] = (work.bytes, memory[1])
    if work.flops > 0 and work.dtype and work.dtype in ceilings:
        amounts[work.dtype] = (work.flops, ceilings[work.dtype])
    if not amounts or not 0 < seconds < math.inf:
        return None
    name = max(amounts, key=lambda n: amounts[n][0] / amounts[n][1])
    amount, limit = amounts[name]
    rate = amount / seconds
    return Limit(name, rate, limit, unit_of(name), rate / limit)


def _memory(work: Work, ceilings: Mapping[str, float], *, in_l2: bool) -> tuple[str, float] | None:
    """Return the limit of a call's memory traffic and its rate in bytes per second.

    Every switch between reading and writing costs time on the memory bus, and a copy switches most
    often. The time per byte is interpolated between that of pure reads (or writes) and of a copy.
    """
    if in_l2:
        return ("l2", ceilings["l2"]) if "l2" in ceilings else None
    written = work.written / work.bytes
    mixed = 2 * min(max(written, 0.0), max(1 - written, 0.0))
    name = "copy" if mixed > 0.5 else "read"
    if mixed == 1.0 and "copy" in ceilings:
        return name, ceilings["copy"]
    if "copy" in ceilings and "read" in ceilings:
        return name, 1 / (mixed / ceilings["copy"] + (1 - mixed) / ceilings["read"])
    return None


def impossible_time(record: Result) -> str | None:
    """Describe a time that beats the GPU's datasheet or its measured limits; None without one."""
    timing, work = record.timing, record.work
    if timing is None or timing.metric is not Metric.DEVICE or work is None:
        return None
    peaks, l2_bytes = DATASHEET.get(record.key, {}), record.gpu.l2_bytes if record.gpu else 0
    for arm in timing.calls:
        seconds = stats.mean_call_s(timing.replicates, arm)
        on_datasheet = limit_of(seconds, work, timing.cache, peaks, l2_bytes)
        for limit, source in ((on_datasheet, "datasheet"), (record.limits.get(arm), "measured")):
            if limit is None or (timing.cache == "warm" and limit.ceiling in MEMORY):
                continue  # warm data may stay in registers or shared memory: no such limit applies
            if problem := too_fast(limit, source):
                return f"{arm}: {problem}"
    return None


def too_fast(limit: Limit, source: str = "measured") -> str | None:
    """Describe a rate that this GPU cannot reach; None if it is possible.

    The check holds for warm caches as well: a kernel starts with an empty L1 and empty shared
    memory, so every byte that it must read passes through the L2.
    """
    if limit.share <= advice.MAX_SHARE:
        return None
    again = ", or the limits are too low: python -m pytest_aiperf ceilings --fresh"
    return (
        f"{si(limit.rate, limit.unit)} exceed the {si(limit.limit, limit.unit)} that this GPU "
        f"reaches ({limit.ceiling}, {source}): the arm skips work, or work= counts more than a "
        "call must do" + (again if source == "measured" else "")
    )


def diagnose(
    limit: Limit | None,
    trace: Trace | None,
    seconds: float,
    counters: Mapping[str, float] = {},
    *,
    ceilings: Mapping[str, float] = {},
    sms: int = 0,
    hint: str = "state work= to learn its limit",
) -> str:
    """Describe in one line what limits an arm and what would help; "" if nothing is known.

    ``seconds`` is the time of one call as the claim counts it, with or without launch gaps;
    ``counters`` are the figures of a profile, ``ceilings`` and ``sms`` those of the GPU. ``hint``
    ends the line if a trace alone does not show the cause.
    """
    figures = advice.derived(counters) | _known(limit, trace, seconds, ceilings, sms)
    rules = [rule for rule in advice.RULES if rule.holds(figures)]
    if limit and limit.share >= _NEAR:
        rules = []
    elif trace:  # a trace shows symptoms, and the first of them explains the others
        rules = [rule for rule in rules if rule.kind == rules[0].kind]
    head, remedy = (
        _copying(figures)
        or _overhead(trace, figures)
        or _wasted(limit, seconds, counters)
        or _bound(limit)
        or _busiest(counters)
        or _latency(limit, rules, figures)
        or _unknown(figures, hint)
    )
    remedies = [rule.text(figures) for rule in rules[: advice.MAX]]
    return "; ".join(filter(None, [head, *(remedies or [remedy])]))


def diagnose_profile(profile: Profile, limit: Limit | None = None, hint: str = "") -> str:
    """Describe what limits a profiled arm, process or GPU; "" if its tool does not show it.

    ``limit`` is for a profile of ncu; ``hint`` says how to find what limits kernels of a timeline.
    """
    figures = profile.figures
    if profile.tool == "ncu":
        return diagnose(limit, None, figures.get("duration", 0.0), figures)
    if profile.tool not in ("nsys", "torch"):
        return ""
    if not figures.get("span"):  # nothing ran on a GPU
        return diagnose(None, None, 0.0, figures)
    launches, kernels, copies = (int(figures[k]) for k in ("launches", "kernels", "copies"))
    traced = Trace(launches, kernels, copies, figures["busy"], figures["span"])
    return diagnose(None, traced, figures["span"], figures, hint=hint if kernels else "")


def _known(
    limit: Limit | None,
    trace: Trace | None,
    seconds: float,
    ceilings: Mapping[str, float],
    sms: int,
) -> dict[str, float]:
    """Return the figures of a limit and a trace for which there is advice."""
    known: dict[str, float] = {}
    if limit:
        known |= {"limit share": limit.share, "utilization": limit.share}
        if limit.ceiling in _NARROW and "fp32" in ceilings:
            known["fp32 share"] = limit.rate / ceilings["fp32"]
    if trace is None or not 0 < seconds < math.inf:
        return known
    # The traced call may hit caches that the timed calls miss, and then its busy time is too short.
    # An arm at 90 % of a limit is busy for at least 90 % of its time, so the larger share counts.
    known["idle share"] = 1 - max(trace.busy / seconds, limit.share if limit else 0.0)
    known |= {"launches": trace.launches, "activities": trace.kernels + trace.copies}
    is_one = bool(trace.seconds) and trace.seconds[0] / trace.counts[0] > 0.5 * trace.busy
    if is_one or trace.kernels == 1:  # one launch takes most of the time
        if sms and trace.grids and trace.grids[0]:
            blocks = trace.grids[0]
            known |= {"blocks": blocks, "SMs": sms, "blocks per SM": blocks / sms}
    elif trace.kernels:
        known |= {"kernels": trace.kernels, "seconds per kernel": trace.busy / trace.kernels}
        known["kinds of kernels"] = len(trace.counts)
    return known


def _copying(figures: Mapping[str, float]) -> tuple[str, str] | None:
    """Name the copies of a timeline if they take longer than its kernels, and than its gaps."""
    if figures.get("lead of host copies", 0.0) < advice.LEADING:
        return None
    share = percent(figures["host copy time"] / figures["span"])
    moved = (
        f"{si(figures[f'{way} bytes'], 'B')} {way}"
        for way in ("host to device", "device to host")
        if f"{way} bytes" in figures
    )
    return f"copy-bound: {share} of the time in copies, {' and '.join(moved)}", ""


def _overhead(trace: Trace | None, figures: Mapping[str, float]) -> tuple[str, str] | None:
    idle = figures.get("idle share", 0.0)
    if trace is None or idle < advice.IDLE:
        return None
    items = trace.kernels + trace.copies
    if items < 2:
        return f"overhead-bound: {percent(idle)} of the time outside kernels", ""
    what = "kernels and copies" if trace.copies else "kernels"
    return f"overhead-bound: {percent(idle)} of the time between {items} {what}", ""


def _wasted(
    limit: Limit | None, seconds: float, counters: Mapping[str, float]
) -> tuple[str, str] | None:
    if limit is None or limit.ceiling not in MEMORY:
        return None
    times = counters.get("dram bytes", 0.0) / (limit.rate * seconds)
    if times < _WASTE or counters.get("dram share", 0.0) < advice.BUSY:
        return None
    busy = f"device memory is {percent(counters['dram share'])} busy with {times:.1f} times"
    return f"memory-bound: {busy} the bytes that work= counts", "reuse or fuse"


def _bound(limit: Limit | None) -> tuple[str, str] | None:
    if limit is None or limit.share < advice.FAR:
        return None
    kind, work, remedy = "compute", "operations", "only fewer operations or a narrower dtype help"
    causes = "operands that arrive too late, or other instructions"
    if limit.ceiling in MEMORY:
        kind, work, remedy = "memory", "bytes", "only fewer bytes help"
        causes = "too few bytes in flight (narrow accesses), bank conflicts or instructions"
    elif limit.ceiling in ("fp32", "fp64"):
        remedy = "only fewer operations or tensor cores (a narrower dtype) help"
    if limit.share < _NEAR:
        return f"below its {kind} limit: {_rate(limit)}", f"{causes}: --profile=ncu shows which"
    if limit.share < _AT:
        remedy = f"up to {percent(1 / limit.share - 1)} faster with the same {work}"
    return f"{kind}-bound: {_rate(limit)}", remedy


def _rate(limit: Limit) -> str:
    return f"{percent(limit.share)} of the {limit.ceiling} rate"


def _busiest(counters: Mapping[str, float]) -> tuple[str, str] | None:
    """Name the busiest unit by ncu's counters, if ``work`` does not show what limits the arm."""
    name = max((n for n in _UNITS if n in counters), key=counters.__getitem__, default=None)
    if name is None or counters[name] < advice.BUSY:
        return None
    kind, unit, remedy = _UNITS[name]
    return f"{kind}: {unit} {percent(counters[name])} busy", remedy


def _latency(
    limit: Limit | None, rules: Sequence[advice.Rule], figures: Mapping[str, float]
) -> tuple[str, str] | None:
    """Describe an arm that is far from its limit and in whose profile no unit is busy."""
    if "utilization" not in figures:
        return None
    rate = _rate(limit) if limit else "no unit is busy"
    if rules:
        return f"{rules[0].kind}: {rate}", ""
    if "idle share" not in figures:  # counters, and no trace
        return f"latency-bound: {rate}", _stalled(figures)
    return f"moves or computes more than it must, or waits: {rate}", "--profile=ncu shows which"


def _stalled(figures: Mapping[str, float]) -> str:
    top = next((name for name in figures if name.startswith("top stall ")), None)
    if top:
        return f"warps wait for {top.removeprefix('top stall ')}"
    return "more independent work in flight (--profile=ncu shows the stalls)"


def _unknown(figures: Mapping[str, float], hint: str) -> tuple[str, str]:
    if "idle share" not in figures:
        return "", ""
    busy = percent(min(1.0, 1 - figures["idle share"]))
    return f"the GPU is busy {busy} of the time", hint


def unit_of(ceiling: str) -> str:
    """Name the unit of a limit."""
    if ceiling in ("launch", "graph_launch"):
        return "s"
    if ceiling == "int8":
        return "OP/s"
    return "FLOP/s" if ceiling in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8") else "B/s"


def in_seconds(record: Result) -> Timing | None:
    """Return the first timing of a record that is in seconds; others are bytes or scores."""
    timings = (record.timing, *record.also)
    return next((timing for timing in timings if timing and timing.unit == "s"), None)


def limits_of(
    record: Result, seconds: Mapping[str, float], ceilings: Mapping[str, float]
) -> dict[str, Limit]:
    """Return the limits of a GPU claim's arms, given the seconds per call of each."""
    timing, work, gpu = in_seconds(record), record.work, record.gpu
    if timing is None or work is None or gpu is None:
        return {}
    return {
        arm: limit
        for arm, call_s in seconds.items()
        if (limit := limit_of(call_s, work, timing.cache, ceilings, gpu.l2_bytes))
    }


def call_seconds(record: Result, arms: Iterable[str]) -> dict[str, float]:
    """Return the seconds per call of each arm; empty if no metric is in seconds."""
    timing = in_seconds(record)
    return {arm: stats.mean_call_s(timing.replicates, arm) for arm in arms} if timing else {}


def optimized_share(record: Result) -> Interval | None:
    """Return the optimized arm's share of its limit, with its confidence interval."""
    limit, timing = record.limits.get("optimized"), in_seconds(record)
    if limit is None or timing is None:
        return None
    logs = [
        statistics.fmean(-math.log(s) for r in replicate.rounds for s in r.seconds["optimized"])
        for replicate in timing.replicates
    ]
    calls = stats.interval(logs)  # per second
    scale = limit.share / calls.value
    return Interval(scale * calls.low, limit.share, scale * calls.high)
