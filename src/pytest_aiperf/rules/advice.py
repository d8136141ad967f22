"""Rules that turn figures of a trace or a profile into advice.

Each rule names a claim of the course that measures its remedy.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

from pytest_aiperf.text import percent, si

_Bounds = Mapping[str, tuple[float, float]]

MAX: Final = 3
"""Most sentences of advice about one arm: further ones describe effects of the first causes."""
IDLE: Final = 0.3  #: An overhead-bound arm leaves the GPU idle for at least this share of time.
FAR: Final = 0.4  #: Below this share of a limit, an arm is not bounded by it.
BUSY: Final = 0.6  #: Above this utilization in ncu's counters, a unit limits an arm.
MAX_SHARE: Final = 1.05
"""A rate may exceed a limit by 5 %: limits are measured, and GPUs of one model differ."""

_SHORT_KERNEL_S: Final = 10e-6
"""Kernels that are shorter on average spend most of their time starting and draining."""
_FULL_SECTORS: Final = 16
"""Sectors per request of a coalesced access with 16 bytes per lane."""
_LOOP: Final = 10
"""From this number on, waits of the host are taken to be in a loop: any program waits sometimes."""
_UNCERTAIN: Final = 1.05
"""Ratio of two counters from which on their difference is larger than their error."""

LEADING: Final = 0.5
"""A part with at least this share takes as long as all others together."""
_SHORT_GAPS: Final = {"long gap share": (0.0, LEADING)}
_OVERHEAD: Final = {"idle share": (IDLE, inf)}
_LATENCY: Final = {"utilization": (0.0, BUSY)}


class Rule(NamedTuple):
    """Advice, and the figures for which it holds."""

    kind: str  #: Bottleneck of an arm for which the rule holds.
    when: _Bounds  #: Lower bound (inclusive) and upper bound (exclusive) of each figure.
    sentence: str  #: The advice, with the names of figures in braces.
    claim: str  #: The claim of the course that measures the remedy.

    def holds(self, figures: Mapping[str, float]) -> bool:
        """Whether all figures of the rule are known and within their bounds."""
        bounds = self.when.items()
        return all(n in figures and low <= figures[n] < high for n, (low, high) in bounds)

    def text(self, figures: Mapping[str, float]) -> str:
        """Return the advice with its figures and its claim."""
        values = {name: _format(name, value) for name, value in figures.items()}
        return f"{self.sentence.format_map(values)} (see {self.claim})"


def _stall(reason: str, sentence: str, claim: str) -> Rule:
    when = {f"top stall {reason}": (0.0, inf), **_LATENCY}
    return Rule("latency-bound", when, f"warps wait {sentence}", claim)


def _limited(resource: str, sentence: str) -> Rule:
    """Return the rule for an occupancy that a resource of the SM limits the most."""
    limited = {f"blocks by {resource}": (0.0, inf), "theoretical occupancy": (0.0, FAR)}
    return Rule(
        "latency-bound", limited | _LATENCY,
        f"{resource} allow {{blocks by {resource}}} blocks per SM, an occupancy of "
        f"{{theoretical occupancy}}: {sentence}",
        "ch08/occupancy_block_size",
    )  # fmt: skip


RULES: Final[Sequence[Rule]] = (
    # figures of a trace
    Rule(
        "copy-bound", {"lead of host copies": (LEADING, inf)},
        "keep data on the GPU, or copy from pinned memory while kernels run",
        "ch03/pinned_prefetch_stream",
    ),
    Rule(
        "overhead-bound", _OVERHEAD | {"long gap share": (LEADING, inf)},
        "{long gap share} of the gaps are longer than 10 ms, which no graph closes: the program "
        "starts up, compiles or loads data; --nvtx RANGE captures only its steps",
        "ch13/dataloader_workers",
    ),
    Rule(
        "overhead-bound", _OVERHEAD | _SHORT_GAPS | {"launches": (2, inf)},
        "capture a graph or fuse", "ch12/graph_replay",
    ),
    Rule(
        "overhead-bound", _OVERHEAD | _SHORT_GAPS | {"launches": (0, 2), "activities": (2, inf)},
        "fuse: it is one launch already", "ch09/elementwise_chain_fusion",
    ),
    Rule(
        "overhead-bound", _OVERHEAD | {"launches": (0, 2), "activities": (0, 2)},
        "do more per launch", "ch01/batched_gemm",
    ),
    Rule(
        "overhead-bound", {"synchronizations": (_LOOP, inf), "idle share": (0.1, inf)},
        "the host waits for the GPU {synchronizations} times, once per {launches per wait} "
        "launches: keep the values on the GPU that .item() and .cpu() fetch",
        "ch12/conditional_graph",
    ),
    Rule(
        "overhead-bound", {"graph breaks": (1, inf)},
        "{graph breaks} graph breaks in compiled code: TORCH_LOGS=graph_breaks names them",
        "ch14/graph_break_removal",
    ),
    Rule(
        # one recompilation is how torch.compile finds out that a dimension is dynamic
        "overhead-bound", {"recompilations": (2, inf)},
        "{recompilations} recompilations: TORCH_LOGS=recompiles names the guards; mark dimensions "
        "as dynamic, or pad to a few sizes",
        "ch16/piecewise_graphs",
    ),
    Rule(
        "compute-bound if it computes in fp32",
        {"fp32 share": (FAR, MAX_SHARE), "limit share": (0.0, FAR)},
        "{fp32 share} of the fp32 rate: use tensor cores", "ch02/tf32_policy",
    ),
    Rule(
        "latency-bound",
        {"seconds per kernel": (0.0, _SHORT_KERNEL_S), "idle share": (-inf, IDLE)},
        "{kernels} kernels of {seconds per kernel} each: fuse them", "ch01/batched_gemm",
    ),
    Rule(
        # a trace adds up the launches of one kernel: all but the first may take almost no time, as
        # in the passes of a reduction
        "unfused",
        {
            "seconds per kernel": (_SHORT_KERNEL_S, inf),
            "limit share": (0.0, FAR),
            "kinds of kernels": (2, inf),
        },
        "with {kernels} kernels it moves or computes more than it must: fuse them",
        "ch09/elementwise_chain_fusion",
    ),
    # figures of a trace or of ncu
    Rule(
        "latency-bound", {"blocks per SM": (0.0, 1.0), **_LATENCY},
        "{blocks} blocks on {SMs} SMs: split the work further", "ch18/split_kv_decode",
    ),
    # figures of ncu
    Rule(
        "latency-bound", {"sectors per access": (_FULL_SECTORS * _UNCERTAIN, inf)},
        f"{{sectors per access}} sectors per load or store where 4 to {_FULL_SECTORS} suffice: let "
        "neighboring lanes access neighboring addresses",
        "ch07/coalesced_copy",
    ),
    Rule(
        "memory-bound", {"bank conflicts": (1, inf), "l1 share": (BUSY, inf)},
        "{bank conflicts} bank conflicts: pad or swizzle the tile", "ch06/bank_conflicts",
    ),
    Rule(
        "latency-bound", {"local per DRAM byte": (0.1, inf)},
        "{local bytes} of local memory accessed, {local per DRAM byte} times the DRAM bytes: avoid "
        "spilled registers and arrays with computed indices",
        "ch06/launch_bounds_spills",
    ),
    Rule(
        "latency-bound", {"threads per instruction": (0.0, 20.0)},
        "{threads per instruction} of 32 threads per warp are active: let a warp take one branch, "
        "or compact the work first",
        "ch08/threshold_predication",
    ),
    Rule(
        "compute-bound", {"fma share": (BUSY, inf), "tensor share": (0.0, 0.01)},
        "the tensor cores idle while the FMA units are {fma share} busy: compute matrix products "
        "in tf32 or bf16",
        "ch02/tf32_policy",
    ),
    _limited("registers", "use fewer per thread"),
    _limited("shared memory", "use smaller tiles"),
    _limited("slots", "use larger blocks"),
    Rule(
        "latency-bound",
        {
            "achieved of theoretical": (0.0, BUSY),
            "theoretical occupancy": (FAR, inf),
            "blocks per SM": (1.0, inf),
            **_LATENCY,
        },
        "occupancy is {occupancy} where {theoretical occupancy} is possible: blocks are too few "
        "or uneven",
        "ch12/atomic_work_queue",
    ),
    _stall(
        "long scoreboard", "for device memory: more loads in flight before the first use",
        "ch06/elementwise_ilp",
    ),
    _stall(
        "short scoreboard", "for shared memory: fewer, wider accesses without bank conflicts",
        "ch06/bank_conflicts",
    ),
    _stall(
        "mio throttle", "for shared memory's queue: fewer, wider accesses",
        "ch07/tiled_matmul_ladder",
    ),
    _stall("lg throttle", "for the load queue: fewer, wider loads", "ch07/vectorized_copy"),
    _stall(
        "barrier", "at barriers: use smaller blocks or fewer dependences between warps",
        "ch07/reduction_ladder",
    ),
    _stall(
        "wait", "for the previous instruction: more independent work per thread",
        "ch08/fma_ilp_chains",
    ),
    _stall(
        "math pipe throttle", "for the arithmetic units, which are the limit",
        "ch09/inline_ptx_packed_math",
    ),
    _stall("gmma", "for the tensor cores, which are the limit", "ch10/wgmma_ladder"),
)  # fmt: skip
"""All rules, the most important ones first.

A figure has the name that the profile's parser gives it, or is added by :func:`derived` or by
``diagnose``. Divergence begins at about two thirds of a warp, because tails are partly empty.
"""

_SHARES: Final = (
    "tensor share", "sm share", "dram share", "l2 share", "l1 share",
)  # fmt: skip
_BLOCKS: Final = ("registers", "shared memory", "slots")
"""Resources that limit the resident blocks per SM. The number of warps is left out: a block has at
most half of an SM's warps, so that this limit alone never makes the occupancy low."""


def derived(figures: Mapping[str, float]) -> dict[str, float]:
    """Return a profile's figures with those that rules compute from them."""
    known = dict(figures)
    spent = figures.get("gaps", 0.0)
    known["long gap share"] = figures.get("long gaps", 0.0) / spent if spent else 0.0
    if copying := figures.get("host copy time"):
        largest = max(spent, figures["busy"] - copying)
        known["lead of host copies"] = copying / (copying + largest)
    if shares := [figures[name] for name in _SHARES if name in figures]:
        known["utilization"] = max(shares)
    if sectors := [v for n, v in figures.items() if n in ("sectors per load", "sectors per store")]:
        known["sectors per access"] = max(sectors)
    if figures.get("dram bytes"):
        known["local per DRAM byte"] = figures.get("local bytes", 0.0) / figures["dram bytes"]
    if figures.get("theoretical occupancy") and "occupancy" in figures:
        known["achieved of theoretical"] = figures["occupancy"] / figures["theoretical occupancy"]
    limits = {f"blocks by {n}": figures[f"block limit {n}"]
              for n in _BLOCKS if f"block limit {n}" in figures}  # fmt: skip
    if limits:
        name = min(limits, key=limits.__getitem__)
        known[name] = limits[name]
    stalls = {n: v for n, v in figures.items() if n.startswith("stall ")}
    if stalls:
        top = max(stalls, key=stalls.__getitem__)
        known[f"top {top}"] = stalls[top]
    if figures.get("SMs"):
        known["blocks per SM"] = figures.get("blocks", 0.0) / figures["SMs"]
    if figures.get("synchronizations"):
        known["launches per wait"] = figures.get("launches", 0.0) / figures["synchronizations"]
    return known


def _format(name: str, value: float) -> str:
    if name.endswith(("share", "occupancy")):
        return percent(value)
    if name.startswith("seconds"):
        return si(value, "s", 2)
    if name.endswith("bytes"):
        return si(value, "B")
    is_short = 10 <= value < 10_000 or value == int(value) < 10
    return f"{value:.0f}" if is_short else f"{value:.3g}"
