"""A layer of experts: each token goes through its best two, and their results are added up.

An expert is silu(x gate) * (x up) down; gate and up lie in one array. `route` gives each token's
experts and their weights.

loop     tokens are sorted by expert; for each expert, in Python, its tokens run through its
         matrices. The loop must know their numbers: the CPU waits for the GPU.
grouped  all experts in one product (`grouped_mm`), which reads the borders of the groups on the
         GPU: no loop, and no waiting.
fused    the same; gate and activation in one Triton kernel, and the weighted sum of a token's
         two results in another one, which reads them where they lie.
graph    the same, captured: nothing depends on the CPU any more.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

from kernels.ch15.decoder import captured

TOP = 2


def route(x, router):
    weights, experts = torch.softmax(x.float() @ router.float(), 1).topk(TOP)
    return weights, experts


def ordered(x, router):
    """Sort: each slot (a token's choice) by its expert, and the ends of the experts' groups."""
    weights, experts = route(x, router)
    slots = experts.flatten().sort(stable=True).indices
    # not bincount, which asks the GPU how long its result is
    ends = torch.zeros(router.shape[1], device=x.device, dtype=torch.int32)
    ends = ends.index_add(0, experts.flatten(), torch.ones_like(slots, dtype=torch.int32))
    return weights, slots, ends.cumsum(0, dtype=torch.int32)


def gated(mixed):
    gate, up = mixed.chunk(2, 1)
    return silu(gate) * up


def loop(x, router, up, down):
    weights, slots, ends = ordered(x, router)
    out = torch.zeros_like(x, dtype=torch.float32)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        mine = slots[start:end]
        results = gated(x[mine // TOP] @ up[expert]) @ down[expert]
        out.index_add_(0, mine // TOP, results * weights.flatten()[mine, None])
        start = end
    return out.to(x.dtype)


def grouped(x, router, up, down):
    weights, slots, ends = ordered(x, router)
    multiply = torch._grouped_mm  # noqa: SLF001  public only in later versions
    results = multiply(gated(multiply(x[slots // TOP], up, offs=ends)), down, offs=ends)
    results = results * weights.flatten()[slots, None]
    return torch.zeros_like(x, dtype=torch.float32).index_add_(0, slots // TOP, results).to(x.dtype)


@triton.jit
def _gate(mixed, out, width, TILE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < width
    gate = tl.load(mixed + row * 2 * width + at, mask=inside, other=0).to(tl.float32)
    up = tl.load(mixed + row * 2 * width + width + at, mask=inside, other=0).to(tl.float32)
    value = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * width + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    results, weights, places, out, width, TOP: tl.constexpr, TILE: tl.constexpr
):
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < width
    total = tl.zeros((TILE,), tl.float32)
    for choice in tl.static_range(TOP):
        place = tl.load(places + token * TOP + choice)
        value = tl.load(results + place * width + at, mask=inside, other=0).to(tl.float32)
        total += value * tl.load(weights + token * TOP + choice)
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=inside)


def fused(x, router, up, down):
    weights, slots, ends = ordered(x, router)
    multiply = torch._grouped_mm  # noqa: SLF001  as above
    mixed = multiply(x[slots // TOP], up, offs=ends)
    hidden = mixed.new_empty(len(mixed), mixed.shape[1] // 2)
    tile = 1024
    _gate[len(hidden), triton.cdiv(hidden.shape[1], tile)](mixed, hidden, hidden.shape[1], tile)
    results = multiply(hidden, down, offs=ends)
    places = torch.empty_like(slots)
    places[slots] = torch.arange(len(slots), device=x.device)
    out, width = torch.empty_like(x), x.shape[1]
    _combine[len(x), triton.cdiv(width, tile)](results, weights, places, out, width, TOP, tile)
    return out


def graph(*inputs):
    kept = {}

    def step():
        kept["out"] = fused(*inputs)

    replay = captured(step, inputs[0].device)

    def run(*_):  # the graph knows their addresses
        replay()
        return kept["out"]

    return run
