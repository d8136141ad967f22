"""A block mask skips what a sliding window hides; a mask in memory computes it and throws it away.

With a window of 1024 tokens, 94 % of the scores of 16384 tokens are masked. PyTorch's attention
takes a mask as a tensor: all products are computed, and 512 MB of mask are read for each head.
FlexAttention gets the rule as a function, finds out once for each tile of 128 x 128 whether all,
some or none of it is seen, and visits the tiles that are not empty. The rule itself is evaluated
only in tiles at the window's two edges.

Both masks are built outside the clock, as models do it: once for all layers; the baseline's as what
is added to the scores, which PyTorch would otherwise make of it in each call. The limit is that of
the tiles visited, here 9 in 128. The gain ends where the window is as long as the text, and the
tiles at the edges count whole, so that windows below 128 gain nothing more.
"""

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention

from pytest_aiperf import Bench, Compare, Work, evidence, prepared

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


def heads(bench: Bench) -> Heads:
    shape = 3, 1, bench.size(8, check=2), bench.size(16384, check=384), bench.size(128, check=32)
    q, k, v = torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
    return q, k, v, bench.size(1024, check=100)


def seen(window):
    def rule(_batch, _head, query, key):
        return (query >= key) & (query - key < window)

    return rule


def masked(q, _k, _v, window):
    at = torch.arange(q.shape[2], device=q.device)
    hidden = ~seen(window)(0, 0, at[:, None], at)
    mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
    return lambda q, k, v, _: scaled_dot_product_attention(q, k, v, attn_mask=mask)


COMPILED = torch.compile(flex.flex_attention, dynamic=False)


def block_mask(q, _k, _v, window):
    length = q.shape[2]
    mask = flex.create_block_mask(seen(window), None, None, length, length, device=q.device)
    visited = 1 - mask.sparsity() / 100
    assert visited < 0.1 or length < 1000
    return lambda q, k, v, _: COMPILED(q, k, v, block_mask=mask)


def in_fp64(q, k, v, window):
    """Take 1024 queries at a time, and only the keys that one of them sees."""
    parts = []
    for start in range(0, q.shape[2], 1024):
        rows = torch.arange(start, min(start + 1024, q.shape[2]), device=q.device)
        keys = torch.arange(max(0, start - window), int(rows[-1]) + 1, device=q.device)
        scores = q[:, :, rows].double() @ k[:, :, keys].double().mT * q.shape[3] ** -0.5
        hidden = ~seen(window)(0, 0, rows[:, None], keys)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), 3)
        parts.append(weights @ v[:, :, keys].double())
    return torch.cat(parts, 2)


def test_sliding_window_block_mask(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    # only without torch.compile, that is, where the claim is checked and not measured
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    compare(
        baseline=prepared(masked),
        optimized=prepared(block_mask),
        against="library",
        inputs=heads,
        work=lambda q, k, v, window: Work(flops=4 * q.numel() * window, dtype="bf16"),
        reference=in_fp64,
        evidence=[evidence.counter("smsp__inst_executed.sum", most=0.2, per="baseline")],
    )
