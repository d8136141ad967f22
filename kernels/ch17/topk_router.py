"""Softmax, the largest EXPERTS_PER_TOKEN of it, and their renormalisation in one Triton kernel.

A program holds the logits of some tokens in registers and takes the largest out of each row, one
after the other. Renormalised, the sum over all experts cancels: exp(x - max) over the chosen ones
is all that is left of the softmax.
"""

import torch
import triton
import triton.language as tl

EXPERTS_PER_TOKEN = 4


@triton.jit
def _route(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    logits, weights, experts, tokens, EXPERTS: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, EXPERTS)
    inside = row < tokens
    left = tl.load(logits + row[:, None] * EXPERTS + column[None, :], mask=inside[:, None], other=0)
    place = tl.arange(0, TOP)
    chosen = tl.zeros((ROWS, TOP), tl.int32)
    values = tl.zeros((ROWS, TOP), tl.float32)
    for i in tl.static_range(TOP):
        value, expert = tl.max(left, 1, return_indices=True)
        values = tl.where(place[None, :] == i, value[:, None], values)
        chosen = tl.where(place[None, :] == i, expert[:, None], chosen)
        left = tl.where(column[None, :] == expert[:, None], -float("inf"), left)
    powers = tl.exp(values - tl.max(values, 1)[:, None])
    at = row[:, None] * TOP + place[None, :]
    tl.store(weights + at, powers / tl.sum(powers, 1)[:, None], mask=inside[:, None])
    tl.store(experts + at, chosen.to(tl.int64), mask=inside[:, None])


def route(logits):
    """Return weights and experts of each token (rows of ``logits``), the largest first."""
    tokens, count = logits.shape
    weights = torch.empty(tokens, EXPERTS_PER_TOKEN, device=logits.device)
    experts = torch.empty_like(weights, dtype=torch.long)
    rows = 16
    _route[(triton.cdiv(tokens, rows),)](
        logits, weights, experts, tokens, count, EXPERTS_PER_TOKEN, rows, num_warps=4
    )
    return weights, experts
