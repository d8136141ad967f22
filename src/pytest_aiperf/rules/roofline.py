"""The roofline model: which ceiling limits an arm, how close the arm comes, and what would help.

An arm is compute-bound, memory-bound or overhead-bound (the GPU waits for launches). An arm far
from all three limits does more than ``work`` counts, because it is unfused or computes in a wider
dtype, or it is latency-bound: its own instructions wait for each other.
"""

import math
from collections.abc import Mapping
from typing import Final

from pytest_aiperf.model import Limit, Metric, Result, Trace, Work
from pytest_aiperf.text import percent, si

from . import stats

MEMORY: Final = ("copy", "read", "l2")

_MAX_SHARE = 1.05
"""A rate may exceed a ceiling by 5 %: ceilings are measured, and GPUs of one model differ."""
_OVERHEAD_SHARE = 0.3  #: An overhead-bound arm leaves the GPU idle for at least this share of time.
_NEAR = 0.8  #: Above this share of its ceiling, little but less work makes an arm faster.
_AT = 0.97  #: Below this share of its ceiling, an arm can still gain without less work.
_FAR = 0.4  #: Below this share of a ceiling, an arm is not limited by it.
_BUSY = 0.6  #: Above this utilisation in ncu's counters, a unit limits an arm.
_WASTE = 1.5  #: Above this many times the bytes of ``work``, traffic is avoidable.
_FULL_SECTORS = 16  #: Sectors per request of a warp whose lanes access 16 bytes each, side by side.

_SHORT_KERNEL_S = 10e-6
"""Kernels that are shorter on average spend most of their time starting and draining."""
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
_STALLS = {
    "long scoreboard": "for device memory: more loads in flight before the first use",
    "short scoreboard": "for shared memory: fewer, wider accesses without bank conflicts",
    "mio throttle": "for shared memory's queue: fewer, wider accesses",
    "lg throttle": "for the load queue: fewer, wider loads",
    "barrier": "at barriers: use smaller blocks or fewer dependences between warps",
    "wait": "for the previous instruction: more independent work per thread",
    "math pipe throttle": "for the arithmetic units, which are the limit",
    "gmma": "for the tensor cores, which are the limit",
}

_PCIE_5 = 64e9  #: Bytes per second over 16 lanes in one direction.
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
    # no matrix rates: NVIDIA states only that of sparse FP4, which is no ceiling here
    "gb10": _sheet(301e9, fp32=31e12),
}  # fmt: skip
"""NVIDIA's peak rates (dense) by GPU key and ceiling, in bytes or operations per second.

Where datasheets differ, the larger figure is taken.
"""


def limit_of(seconds: float, work: Work, cache: str, ceilings: Mapping[str, float]) -> Limit | None:
    """Return the ceiling at which this work takes the longest; None if no ceiling applies."""
    amounts = {}  # by ceiling: (bytes or operations of one call, the ceiling's rate)
    if work.bytes > 0 and (memory := _memory(work, cache, ceilings)):
        amounts[memory[0]] = (work.bytes, memory[1])
    if work.flops > 0 and work.dtype and work.dtype in ceilings:
        amounts[work.dtype] = (work.flops, ceilings[work.dtype])
    if not amounts or not 0 < seconds < math.inf:
        return None
    name = max(amounts, key=lambda n: amounts[n][0] / amounts[n][1])
    amount, limit = amounts[name]
    rate = amount / seconds
    return Limit(name, rate, limit, unit_of(name), rate / limit)


def _memory(work: Work, cache: str, ceilings: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the ceiling of a call's memory traffic and its rate in bytes per second.

    Every switch between reading and writing costs time on the memory bus, and a copy switches most
    often. The time per byte is interpolated between that of pure reads (or writes) and of a copy.
    """
    if cache == "warm":
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
    """Describe a time that beats the GPU's datasheet or its measured ceilings; None without one."""
    timing, work = record.timing, record.work
    if timing is None or timing.metric is not Metric.DEVICE or work is None:
        return None
    peaks = DATASHEET.get(record.key, {})
    for arm in timing.calls:
        seconds = stats.mean_call_s(timing.replicates, arm)
        on_datasheet = limit_of(seconds, work, timing.cache, peaks)
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
    if limit.share <= _MAX_SHARE:
        return None
    again = ", or the ceilings are too low: python -m pytest_aiperf ceilings --fresh"
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
) -> str:
    """Describe in one line what limits an arm and what would help; "" if nothing is known.

    ``seconds`` is the time of one call as the claim counts it, with or without launch gaps;
    ``counters`` are the figures of an ncu profile, ``ceilings`` and ``sms`` those of the GPU.
    """
    return (
        _overhead(limit, trace, seconds)
        or _wasted(limit, seconds, counters)
        or _bound(limit)
        or _busiest(counters)
        or _wider(limit, ceilings)
        or (_beyond_work(limit, trace, sms) if not counters else None)
        or _latency(limit, counters)
        or _unknown(trace, seconds)
    )


def _overhead(limit: Limit | None, trace: Trace | None, seconds: float) -> str | None:
    if trace is None or not 0 < seconds < math.inf:
        return None
    # The traced call may hit caches that the timed calls miss, and then its busy time is too short.
    # An arm at 90 % of a ceiling is busy for at least 90 % of its time, so the larger share counts.
    idle = 1 - max(trace.busy / seconds, limit.share if limit else 0.0)
    if idle < _OVERHEAD_SHARE:
        return None
    items = trace.kernels + trace.copies
    if items < 2:
        return f"overhead-bound: {percent(idle)} of the time outside kernels; do more per launch"
    advice = "capture a graph or fuse" if trace.launches > 1 else "fuse: it is one launch already"
    what = "kernels and copies" if trace.copies else "kernels"
    return f"overhead-bound: {percent(idle)} of the time between {items} {what}; {advice}"


def _wasted(limit: Limit | None, seconds: float, counters: Mapping[str, float]) -> str | None:
    if limit is None or limit.ceiling not in MEMORY:
        return None
    times = counters.get("dram bytes", 0.0) / (limit.rate * seconds)
    if times < _WASTE or counters.get("dram share", 0.0) < _BUSY:
        return None
    return (
        f"memory-bound: device memory is {percent(counters['dram share'])} busy with "
        f"{times:.1f} times the bytes that work= counts; {_scattered(counters) or 'reuse or fuse'}"
    )


def _bound(limit: Limit | None) -> str | None:
    if limit is None or limit.share < _FAR:
        return None
    near = limit.share >= _NEAR
    if limit.ceiling in MEMORY:
        kind, advice = "memory", "only fewer bytes help"
        if not near:
            advice = "more bytes in flight (16-byte accesses, several before the first use)"
    else:
        kind, advice = "compute", "only fewer operations or a narrower dtype help"
        if not near:
            advice = "feed the units better (larger tiles, a deeper pipeline)"
        elif limit.ceiling in ("fp32", "fp64"):
            advice = "only fewer operations or tensor cores (a narrower dtype) help"
    if _NEAR <= limit.share < _AT:
        work = "bytes" if kind == "memory" else "operations"
        gain = percent(1 / limit.share - 1)
        advice = f"up to {gain} faster with the same {work}, then {advice}"
    return f"{kind}-bound: {percent(limit.share)} of the {limit.ceiling} rate; {advice}"


def _wider(limit: Limit | None, ceilings: Mapping[str, float]) -> str | None:
    """Describe an arm whose rate suits fp32 and not the narrower dtype that ``work`` names."""
    fp32 = limit.rate / ceilings.get("fp32", math.inf) if limit else 0.0
    if limit is None or limit.ceiling not in _NARROW or not _FAR <= fp32 <= _MAX_SHARE:
        return None
    return (
        f"compute-bound if it computes in fp32: {percent(fp32)} of the fp32 rate, "
        f"{percent(limit.share)} of the {limit.ceiling} rate; tensor cores help"
    )


def _beyond_work(limit: Limit | None, trace: Trace | None, sms: int) -> str | None:
    """Describe an arm that keeps the GPU busy, far from its ceiling.

    It may do more than ``work`` counts, as an arm does that is not fused.
    """
    if limit is None or trace is None:
        return None
    rate, kernels = f"{percent(limit.share)} of the {limit.ceiling} rate", trace.kernels
    blocks = next(iter(trace.grids), 0)
    if trace.seconds and trace.seconds[0] / trace.counts[0] > 0.5 * trace.busy:
        kernels = 1  # one launch takes most of the time
    if kernels > 1 and trace.busy < _SHORT_KERNEL_S * kernels:
        each = si(trace.busy / kernels, "s", 2)
        return f"latency-bound: {rate}; {kernels} kernels of {each} each: fuse them"
    if kernels > 1:
        does = "moves" if limit.ceiling in MEMORY else "computes or moves"
        return f"unfused: {rate}; with {kernels} kernels it {does} more than it must: fuse them"
    if 0 < blocks < sms:
        return f"latency-bound: {rate}; {blocks} blocks on {sms} SMs: split the work further"
    return f"moves or computes more than it must, or waits: {rate}; --profile=ncu shows which"


def _busiest(counters: Mapping[str, float]) -> str | None:
    """Name the busiest unit by ncu's counters, if ``work`` does not show what limits the arm."""
    name = max((n for n in _UNITS if n in counters), key=counters.__getitem__, default=None)
    if name is None or counters[name] < _BUSY:
        return None
    kind, unit, advice = _UNITS[name]
    if name == "l1 share" and counters.get("bank conflicts", 0) > 0:
        advice = f"{counters['bank conflicts']:.3g} bank conflicts: pad or swizzle the tile"
    elif name in ("l1 share", "l2 share"):
        advice = _scattered(counters) or advice
    return f"{kind}: {unit} {percent(counters[name])} busy; {advice}"


def _latency(limit: Limit | None, counters: Mapping[str, float]) -> str | None:
    if limit is None and not counters:
        return None
    if limit is None:
        head = "latency-bound: no unit is busy"
    else:
        head = f"latency-bound: {percent(limit.share)} of the {limit.ceiling} rate"
    stalls = {n.removeprefix("stall "): v for n, v in counters.items() if n.startswith("stall ")}
    top = max(stalls, key=stalls.__getitem__, default="")
    occupancy = counters.get("occupancy", 1.0)
    if scattered := _scattered(counters):
        advice = scattered
    elif occupancy < 0.25:
        advice = (
            f"occupancy is {percent(occupancy)}: more blocks, or blocks that take fewer "
            "registers and less shared memory"
        )
    elif top in _STALLS:
        advice = f"warps wait {_STALLS[top]}"
    elif top:
        advice = f"warps wait for {top}"
    else:
        advice = "more independent work in flight (--profile=ncu shows the stalls)"
    return f"{head}; {advice}"


def _scattered(counters: Mapping[str, float]) -> str | None:
    for name in ("sectors per load", "sectors per store"):
        if (sectors := counters.get(name, 0.0)) > _FULL_SECTORS:
            return (
                f"{sectors:.0f} {name} where 4 to {_FULL_SECTORS} suffice: let neighbouring lanes "
                "access neighbouring addresses"
            )
    return None


def _unknown(trace: Trace | None, seconds: float) -> str:
    if trace is None or not 0 < seconds < math.inf:
        return ""
    busy = min(1.0, trace.busy / seconds)
    return f"the GPU is busy {percent(busy)} of the time; state work= to learn its limit"


def unit_of(ceiling: str) -> str:
    """Name the unit of a ceiling."""
    if ceiling in ("launch", "graph_launch"):
        return "s"
    if ceiling == "int8":
        return "OP/s"
    return "FLOP/s" if ceiling in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8") else "B/s"
