"""Decode attention (one new token per sequence) over a paged KV cache.

Each key head has a pool of pages; a page holds PAGE tokens of D values. Row s of the block table
lists the pages of sequence s in order.

gather           Copies the pages of each sequence into one contiguous array, padded to the longest
                 sequence, and calls PyTorch's attention with a mask. The copy indexes heads and
                 pages as one flattened first dimension, because only then does PyTorch move 16
                 bytes at a time. The query heads that share a key head (a group) take the place of
                 the query tokens: keys and values are not repeated. The mask rules FlashAttention
                 out; other backends take it.
paged_attention  A Triton kernel that looks up each key's page in the block table and reads the
                 page where it is.

Shapes: q is sequences x key heads x group x D; keys and values are key heads x pages x PAGE x D.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

TILE = 64  # keys per step of the online softmax
ROWS = 16  # smallest M of a tensor-core tile; groups are padded to it


def gather(q, keys, values, table, lengths):
    heads, pages, page, _ = keys.shape
    page_ids = torch.arange(heads, device=q.device)[None, :, None] * pages + table[:, None]
    contiguous = [pool.flatten(0, 1)[page_ids].flatten(2, 3) for pool in (keys, values)]
    positions = torch.arange(table.shape[1] * page, device=q.device)
    mask = (positions < lengths[:, None])[:, None, None]
    return scaled_dot_product_attention(q, *contiguous, attn_mask=mask)


@triton.jit
def _attend(  # noqa: PLR0917  a launch passes arguments by position
    q, k, v, table, lengths, out, pages, table_columns, scale,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    sequence, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, column, key = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TILE)
    row_mask = (row < GROUP)[:, None]
    q_offsets = ((sequence * heads + head) * GROUP + row[:, None]) * D + column[None, :]
    queries = tl.load(q + q_offsets, mask=row_mask, other=0)
    length = tl.load(lengths + sequence).to(tl.int32)
    running_max = tl.full((ROWS,), -float("inf"), tl.float32)
    denominator = tl.zeros((ROWS,), tl.float32)
    accumulator = tl.zeros((ROWS, D), tl.float32)
    for start in range(0, length, TILE):
        position = start + key
        valid = position < length
        page = tl.load(table + sequence * table_columns + position // PAGE, mask=valid, other=0)
        token = (head * pages + page).to(tl.int64) * PAGE + position % PAGE
        kv_offsets = token[:, None] * D + column[None, :]
        keys = tl.load(k + kv_offsets, mask=valid[:, None], other=0)
        values = tl.load(v + kv_offsets, mask=valid[:, None], other=0)
        # times log2(e): exp2 is a single instruction, exp is not
        scores = tl.dot(queries, tl.trans(keys)) * (scale * 1.44269504)
        scores = tl.where(valid[None, :], scores, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        rescale = tl.exp2(running_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        denominator = denominator * rescale + tl.sum(weights, 1)
        accumulator = accumulator * rescale[:, None] + tl.dot(weights.to(values.dtype), values)
        running_max = new_max
    tl.store(
        out + q_offsets,
        (accumulator / denominator[:, None]).to(out.dtype.element_ty),
        mask=row_mask,
    )


def paged_attention(q, keys, values, table, lengths):
    sequences, heads, group, width = q.shape
    out = torch.empty_like(q)
    _attend[sequences, heads](
        *(q, keys, values, table, lengths, out, keys.shape[1], table.shape[1], width**-0.5),
        GROUP=group,
        D=width,
        PAGE=keys.shape[2],
        ROWS=ROWS,
        TILE=TILE,
        num_stages=3,
    )
    return out
