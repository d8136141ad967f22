"""Which ceiling binds an arm, how near it comes, and what to do about it: pure rules.

The method is the known one of three bottlenecks: a GPU computes, moves bytes, or waits to be told
what to do, and only what binds is worth mending. Whatever does none of the three waits for itself:
it is bound by latency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from pytest_aiperf.model import Limit, Trace, Work

MEMORY: Final = ("copy", "read", "l2")

_LENIENCE = 1.05  # a ceiling is measured like everything else, and parts differ a little
_IDLE = 0.3  # with this share of the time outside all kernels, overhead binds
_NEAR = 0.8  # from here on the ceiling itself is what is left
_FAR = 0.4  # below this share of its ceiling, no ceiling binds
_BUSY = 0.6  # from here on a unit's counter says that it is what binds
_WASTE = 1.5  # so many times the counted bytes are traffic that need not be
_WIDEST = 16  # sectors of a warp that reads 16 bytes a lane, side by side

_UNITS = {
    "tensor share": ("compute-bound", "the tensor cores", "only fewer operations help"),
    "sm share": (
        "compute-bound",
        "the multiprocessors",
        "save instructions that work= does not count: addresses, conversions, special functions",
    ),
    "dram share": ("memory-bound", "device memory", "only fewer bytes help"),
    "l2 share": ("memory-bound", "the L2", "read it less often: reuse in shared memory"),
    "l1 share": (
        "memory-bound",
        "the L1 and shared memory",
        "make fewer and wider accesses, and keep more in registers",
    ),
}
_STALLS = {
    "long scoreboard": "for device memory: more loads under way before the first use",
    "short scoreboard": "for shared memory: fewer, wider accesses without bank conflicts",
    "mio throttle": "for shared memory's queue: fewer, wider accesses",
    "lg throttle": "for the load queue: fewer, wider loads",
    "barrier": "at barriers: let blocks be smaller or warps less dependent",
    "wait": "for the instruction before: more independent work a thread",
    "math pipe throttle": "for the arithmetic units: they are what binds",
    "gmma": "for the tensor cores: they are what binds",
}


def limit_of(seconds: float, work: Work, cache: str, ceilings: Mapping[str, float]) -> Limit | None:
    """Find the ceiling that allows the least; None where no known ceiling applies."""
    amounts = {}  # ceiling to amount and rate
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
    """Name the ceiling of a call's traffic, and its rate.

    Reads and writes take turns on the memory bus, and every turn costs: a copy turns most often,
    and between all reads (or all writes) and a copy the time a byte goes with their mixture.
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


def too_fast(limit: Limit, source: str = "measured") -> str | None:
    """Say what a rate would take that this GPU does not have.

    Of warm caches as well: what a call must read comes through the L2 whatever lies in it, since
    a kernel finds the L1 and shared memory empty.
    """
    if limit.share <= _LENIENCE:
        return None
    again = ", or the ceilings are too low: python -m pytest_aiperf ceilings --fresh"
    return (
        f"{shown(limit.rate, limit.unit)} are more than the {shown(limit.limit, limit.unit)} "
        f"({limit.ceiling}, {source}) that this GPU reaches: the arm skips work, or work= counts "
        "more than a call must do" + (again if source == "measured" else "")
    )


def diagnose(
    limit: Limit | None,
    trace: Trace | None,
    seconds: float,
    counters: Mapping[str, float] | None = None,
) -> str:
    """Say in one line what binds an arm and what would help; nothing where nothing is known.

    ``seconds`` are those of one call as it was timed, so gaps count where the claim counts them;
    ``counters`` are the figures of an ncu profile.
    """
    counters = counters or {}
    return (
        _overhead(limit, trace, seconds)
        or _wasted(limit, seconds, counters)
        or _bound(limit)
        or _busiest(counters)
        or _latency(limit, counters)
        or _unknown(trace, seconds)
    )


def _overhead(limit: Limit | None, trace: Trace | None, seconds: float) -> str | None:
    if trace is None or not 0 < seconds < math.inf:
        return None
    # a traced call may find its data in the cache where the timed one did not; but what runs at
    # 90 % of a ceiling has idled for 10 % at most
    idle = 1 - max(trace.busy / seconds, limit.share if limit else 0.0)
    if idle < _IDLE:
        return None
    items = trace.kernels + trace.copies
    if items < 2:
        return f"overhead-bound: {_percent(idle)} of the time outside kernels; do more in a launch"
    advice = "capture a graph or fuse" if trace.launches > 1 else "fuse, it is one launch already"
    what = "kernels and copies" if trace.copies else "kernels"
    return f"overhead-bound: {_percent(idle)} of the time between {items} {what}; {advice}"


def _wasted(limit: Limit | None, seconds: float, counters: Mapping[str, float]) -> str | None:
    if limit is None or limit.ceiling not in MEMORY:
        return None
    times = counters.get("dram bytes", 0.0) / (limit.rate * seconds)
    if times < _WASTE or counters.get("dram share", 0.0) < _BUSY:
        return None
    return (
        f"memory-bound: device memory is {_percent(counters['dram share'])} busy with "
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
    return f"{kind}-bound: {_percent(limit.share)} of the {limit.ceiling} rate; {advice}"


def _busiest(counters: Mapping[str, float]) -> str | None:
    """Name the unit that is busy, with what work= does not count or where nothing is counted."""
    found = [name for name in _UNITS if name in counters]
    name = max(found, key=counters.__getitem__, default=None)
    if name is None or counters[name] < _BUSY:
        return None
    kind, unit, advice = _UNITS[name]
    if name == "l1 share" and counters.get("bank conflicts", 0) > 0:
        advice = f"{counters['bank conflicts']:.3g} bank conflicts: pad or swizzle the tile"
    elif name in ("l1 share", "l2 share"):
        advice = _scattered(counters) or advice
    return f"{kind}: {unit} {_percent(counters[name])} busy; {advice}"


def _latency(limit: Limit | None, counters: Mapping[str, float]) -> str | None:
    if limit is None and not counters:
        return None
    if limit is None:
        head = "latency-bound: no unit is busy"
    else:
        head = f"latency-bound: {_percent(limit.share)} of the {limit.ceiling} rate"
    stalls = {n.removeprefix("stall "): v for n, v in counters.items() if n.startswith("stall ")}
    top = max(stalls, key=stalls.__getitem__, default="")
    occupancy = counters.get("occupancy", 1.0)
    if scattered := _scattered(counters):
        advice = scattered
    elif occupancy < 0.25:
        advice = (
            f"{_percent(occupancy)} of the warps that fit are there: more blocks, or blocks that "
            "take fewer registers and less shared memory"
        )
    elif top in _STALLS:
        advice = f"warps wait {_STALLS[top]}"
    elif top:
        advice = f"warps wait for {top}"
    else:
        advice = "more independent work in flight (--profile=ncu says what it waits for)"
    return f"{head}; {advice}"


def _scattered(counters: Mapping[str, float]) -> str | None:
    for name in ("sectors per load", "sectors per store"):
        if (sectors := counters.get(name, 0.0)) > _WIDEST:
            return (
                f"{sectors:.0f} {name} where 4 to {_WIDEST} do: let neighbouring lanes take "
                "neighbouring addresses"
            )
    return None


def _unknown(trace: Trace | None, seconds: float) -> str:
    if trace is None or not 0 < seconds < math.inf:
        return ""
    busy = min(1.0, trace.busy / seconds)
    return f"the GPU is busy {_percent(busy)} of the time; give work= to learn what binds"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def unit_of(ceiling: str) -> str:
    """Name the unit of a ceiling."""
    if ceiling in ("launch", "graph_launch"):
        return "s"
    if ceiling == "int8":
        return "OP/s"
    return "FLOP/s" if ceiling in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8") else "B/s"


def shown(figure: float, unit: str) -> str:
    """Write a rate or a time with the prefix that people use for it."""
    scales = [(1e-6, "u"), (1e-9, "n")] if unit == "s" else [(1e12, "T"), (1e9, "G"), (1e6, "M")]
    scale, prefix = next((s for s in scales if figure >= s[0]), scales[-1])
    return f"{figure / scale:.4g} {prefix}{unit}"
