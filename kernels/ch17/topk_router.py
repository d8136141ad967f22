"""A fused mixture-of-experts router: softmax, top-k and renormalization in one Triton kernel.

A program keeps the logits of several tokens in registers and takes the top experts of each row one
after the other. Renormalization cancels the softmax denominator over all experts, so only
exp(x - max) of the selected logits is computed.
"""

import torch
import triton
import triton.language as tl

EXPERTS_PER_TOKEN = 4
"""Experts selected per token: the k of top-k."""


@triton.jit
def _route(  # noqa: PLR0917  a Triton launch passes arguments by position
    logits, weights, experts, tokens, EXPERTS: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    inside = row < tokens
    row_start = logits + row[:, None] * EXPERTS
    remaining = tl.load(row_start + expert[None, :], mask=inside[:, None], other=0)
    rank = tl.arange(0, TOP)
    selected = tl.zeros((ROWS, TOP), tl.int32)
    values = tl.zeros((ROWS, TOP), tl.float32)
    for i in tl.static_range(TOP):
        row_max, argmax = tl.max(remaining, 1, return_indices=True)
        values = tl.where(rank[None, :] == i, row_max[:, None], values)
        selected = tl.where(rank[None, :] == i, argmax[:, None], selected)
        remaining = tl.where(expert[None, :] == argmax[:, None], -float("inf"), remaining)
    exponentials = tl.exp(values - tl.max(values, 1)[:, None])
    at = row[:, None] * TOP + rank[None, :]
    tl.store(weights + at, exponentials / tl.sum(exponentials, 1)[:, None], mask=inside[:, None])
    tl.store(experts + at, selected.to(tl.int64), mask=inside[:, None])


def route(logits):
    """Return weights and experts per token (row of ``logits``), the largest weight first."""
    tokens, expert_count = logits.shape
    weights = torch.empty(tokens, EXPERTS_PER_TOKEN, device=logits.device)
    experts = torch.empty_like(weights, dtype=torch.long)
    rows = 16
    _route[(triton.cdiv(tokens, rows),)](
        logits, weights, experts, tokens, expert_count, EXPERTS_PER_TOKEN, rows, num_warps=4
    )
    return weights, experts
