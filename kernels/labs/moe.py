"""A mixture-of-experts layer: each token runs through two experts, and their results are summed.

An expert computes (silu(x gate) * (x up)) down; gate and up share one matrix. `route` returns the
experts of each token and their weights. A slot is one choice of a token: slot // TOP is the token.

loop     Slots are sorted by expert, and a Python loop runs the tokens of one expert at a time. The
         loop needs the group sizes, so the CPU waits for the GPU.
grouped  One grouped GEMM (`grouped_mm`) for all experts; it reads the group offsets on the GPU, so
         there is no loop and no wait.
fused    As grouped, but gate and activation are one Triton kernel, and the weighted sum of a
         token's results is another, which reads them where the GEMM wrote them.
graph    The fused rung in a CUDA graph: no step depends on the CPU any more.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

from kernels.ch15.decoder import captured

TOP = 2
"""Experts per token."""


def route(x, router):
    weights, experts = torch.softmax(x.float() @ router.float(), 1).topk(TOP)
    return weights, experts


def sort_by_expert(x, router):
    """Return the weights, the slots in the order of their experts, and the ends of the groups."""
    weights, experts = route(x, router)
    slots = experts.flatten().sort(stable=True).indices
    # not bincount, which waits for the GPU to compute the length of its result
    counts = torch.zeros(router.shape[1], device=x.device, dtype=torch.int32)
    counts = counts.index_add(0, experts.flatten(), torch.ones_like(slots, dtype=torch.int32))
    return weights, slots, counts.cumsum(0, dtype=torch.int32)


def gated(gate_up):
    gate, up = gate_up.chunk(2, 1)
    return silu(gate) * up


def loop(x, router, up, down):
    weights, slots, ends = sort_by_expert(x, router)
    out = torch.zeros_like(x, dtype=torch.float32)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        group = slots[start:end]
        results = gated(x[group // TOP] @ up[expert]) @ down[expert]
        out.index_add_(0, group // TOP, results * weights.flatten()[group, None])
        start = end
    return out.to(x.dtype)


def grouped(x, router, up, down):
    weights, slots, ends = sort_by_expert(x, router)
    grouped_mm = torch._grouped_mm  # noqa: SLF001  public only in later versions
    results = grouped_mm(gated(grouped_mm(x[slots // TOP], up, offs=ends)), down, offs=ends)
    results = results * weights.flatten()[slots, None]
    return torch.zeros_like(x, dtype=torch.float32).index_add_(0, slots // TOP, results).to(x.dtype)


@triton.jit
def _gate(gate_up, out, width, TILE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=valid, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=valid, other=0).to(tl.float32)
    value = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _combine(  # noqa: PLR0917  a launch passes arguments by position
    results, weights, result_rows, out, width, TOP: tl.constexpr, TILE: tl.constexpr
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid = column < width
    total = tl.zeros((TILE,), tl.float32)
    for choice in tl.static_range(TOP):
        row = tl.load(result_rows + token * TOP + choice)
        value = tl.load(results + row * width + column, mask=valid, other=0).to(tl.float32)
        total += value * tl.load(weights + token * TOP + choice)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=valid)


def fused(x, router, up, down):
    weights, slots, ends = sort_by_expert(x, router)
    grouped_mm = torch._grouped_mm  # noqa: SLF001  as above
    gate_up = grouped_mm(x[slots // TOP], up, offs=ends)
    hidden = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    tile = 1024
    _gate[len(hidden), triton.cdiv(hidden.shape[1], tile)](gate_up, hidden, hidden.shape[1], tile)
    results = grouped_mm(hidden, down, offs=ends)
    result_rows = torch.empty_like(slots)  # the inverse permutation: slot -> row of results
    result_rows[slots] = torch.arange(len(slots), device=x.device)
    out, width = torch.empty_like(x), x.shape[1]
    _combine[len(x), triton.cdiv(width, tile)](results, weights, result_rows, out, width, TOP, tile)
    return out


def graph(*inputs):
    outputs = {}

    def step():
        outputs["out"] = fused(*inputs)

    replay = captured(step, inputs[0].device)

    def run(*_):  # unused: the graph reads the inputs by address
        replay()
        return outputs["out"]

    return run
