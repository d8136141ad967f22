"""A mixture-of-experts layer: each token runs through two experts, and their results are summed.

An expert computes (silu(x gate) * (x up)) down; gate and up share one matrix. `route` returns the
experts of each token and their weights. A slot is one choice of a token: slot // TOP is the token.

loop     Slots are sorted by expert, and a Python loop runs the tokens of one expert at a time. The
         loop needs the group sizes, so the CPU waits for the GPU.
grouped  One grouped GEMM (`grouped_mm`) for all experts; it reads the group offsets on the GPU, so
         there is no loop and no wait.
graph    The grouped rung in a CUDA graph, which is possible because no step depends on the CPU.
fused    Also a graph, with five Triton kernels around the GEMMs: choose the experts; sort the
         slots, that is, find the row of each; copy the tokens to these rows; gate and activation;
         weighted sum of a token's results.
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
def _choose(  # noqa: PLR0917  a launch passes arguments by position
    logits, weights, experts, tokens, TOP: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr
):
    """Choose the TOP experts of TILE tokens; their weights are the softmax over all experts."""
    token, expert = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, EXPERTS)
    is_token = token < tokens
    offsets = token[:, None] * EXPERTS + expert[None, :]
    remaining = tl.load(logits + offsets, mask=is_token[:, None], other=0)
    largest = tl.max(remaining, 1)
    denominator = tl.sum(tl.exp(remaining - largest[:, None]), 1)
    for choice in tl.static_range(TOP):
        logit, chosen = tl.max(remaining, 1), tl.argmax(remaining, 1)
        slot = token * TOP + choice
        tl.store(weights + slot, tl.exp(logit - largest) / denominator, mask=is_token)
        tl.store(experts + slot, chosen, mask=is_token)
        remaining = tl.where(expert[None, :] == chosen[:, None], -float("inf"), remaining)


@triton.jit
def _sort(  # noqa: PLR0917  as above
    experts, rows, ends, slots, SLOTS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Sort slots by expert in one block: the row of each slot, and the end of each group."""
    slot, expert = tl.arange(0, SLOTS), tl.arange(0, EXPERTS)
    chosen = tl.load(experts + slot, mask=slot < slots, other=-1)
    is_chosen = (chosen[:, None] == expert[None, :]).to(tl.int32)
    counts = tl.sum(is_chosen, 0)
    end = tl.cumsum(counts, 0)
    row = tl.cumsum(is_chosen, 0) - 1 + (end - counts)[None, :]
    tl.store(rows + slot, tl.sum(is_chosen * row, 1), mask=slot < slots)
    tl.store(ends + expert, end)


@triton.jit
def _permute(  # noqa: PLR0917  as above
    x, rows, out, width, TOP: tl.constexpr, TILE: tl.constexpr
):
    slot, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid, row = column < width, tl.load(rows + slot).to(tl.int64)
    value = tl.load(x + slot // TOP * width + column, mask=valid, other=0)
    tl.store(out + row * width + column, value, mask=valid)


@triton.jit
def _gate(gate_up, out, width, TILE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=valid, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=valid, other=0).to(tl.float32)
    value = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _combine(  # noqa: PLR0917  as above
    results, weights, rows, out, width, TOP: tl.constexpr, TILE: tl.constexpr
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid = column < width
    total = tl.zeros((TILE,), tl.float32)
    for choice in tl.static_range(TOP):
        row = tl.load(rows + token * TOP + choice).to(tl.int64)
        value = tl.load(results + row * width + column, mask=valid, other=0).to(tl.float32)
        total += value * tl.load(weights + token * TOP + choice)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=valid)


def fused(x, router, up, down):
    """Compute the layer; the number of experts is a power of two."""
    (tokens, width), experts, tile = x.shape, router.shape[1], 1024
    slots = tokens * TOP
    logits, ends = x.float() @ router, x.new_empty(experts, dtype=torch.int32)
    chosen, rows = torch.empty(2, slots, device=x.device, dtype=torch.int32)
    weights = torch.empty(slots, device=x.device)
    _choose[(triton.cdiv(tokens, 16),)](logits, weights, chosen, tokens, TOP, experts, 16)
    padded_slots = triton.next_power_of_2(slots)
    _sort[(1,)](chosen, rows, ends, slots, padded_slots, experts, num_warps=16)
    grouped_mm = torch._grouped_mm  # noqa: SLF001  as above
    permuted = x.new_empty(slots, width)
    _permute[slots, triton.cdiv(width, tile)](x, rows, permuted, width, TOP, tile)
    gate_up = grouped_mm(permuted, up, offs=ends)
    hidden = gate_up.new_empty(slots, gate_up.shape[1] // 2)
    _gate[slots, triton.cdiv(hidden.shape[1], tile)](gate_up, hidden, hidden.shape[1], tile)
    results, out = grouped_mm(hidden, down, offs=ends), torch.empty_like(x)
    _combine[tokens, triton.cdiv(width, tile)](results, weights, rows, out, width, TOP, tile)
    return out


def in_graph(layer):
    """Return a function that captures ``layer`` and returns a callable that replays it."""

    def prepare(*inputs):
        outputs = {}

        def step():
            outputs["out"] = layer(*inputs)

        replay = captured(step, inputs[0].device)

        def run(*_):  # unused: the graph reads the inputs by address
            replay()
            return outputs["out"]

        return run

    return prepare
