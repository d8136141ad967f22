"""Attention of one new token a sequence over a cache that is stored in pages.

The pool of each key head holds pages (PAGE tokens, D values each) of all sequences; the row of a
sequence in the block table names its pages in order.

gather    copies the pages of each sequence into one array, as long as the longest, and calls
          PyTorch's attention with a mask. To the indexing, heads and pages are one dimension, the
          first: only then does PyTorch copy 16 bytes at a time. The queries that share a key head
          are its "tokens": that way keys and values are not repeated, and every backend can be
          used.
in_place  a Triton kernel that looks up the page of each key, and reads it where it is.

Shapes: q is sequences x key heads x group x D, keys and values are key heads x pages x PAGE x D.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

TILE = 64  # keys at a time
ROWS = 16  # the smallest tile of the tensor cores: groups are filled up to it


def gather(q, keys, values, table, lengths):
    heads, pages, page, _ = keys.shape
    rows = torch.arange(heads, device=q.device)[None, :, None] * pages + table[:, None]
    whole = [pool.flatten(0, 1)[rows].flatten(2, 3) for pool in (keys, values)]
    places = torch.arange(table.shape[1] * page, device=q.device)
    mask = (places < lengths[:, None])[:, None, None]
    return scaled_dot_product_attention(q, *whole, attn_mask=mask)


@triton.jit
def _attend(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    q, k, v, table, lengths, out, pages, columns, scale,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    sequence, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, column, key = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TILE)
    ours = (row < GROUP)[:, None]
    mine = ((sequence * heads + head) * GROUP + row[:, None]) * D + column[None, :]
    queries = tl.load(q + mine, mask=ours, other=0)
    length = tl.load(lengths + sequence).to(tl.int32)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, D), tl.float32)
    for base in range(0, length, TILE):
        at = base + key
        inside = at < length
        page = tl.load(table + sequence * columns + at // PAGE, mask=inside, other=0)
        token = (head * pages + page).to(tl.int64) * PAGE + at % PAGE
        rows = token[:, None] * D + column[None, :]
        keys = tl.load(k + rows, mask=inside[:, None], other=0)
        values = tl.load(v + rows, mask=inside[:, None], other=0)
        # the exponent's base is 2, for which the GPU has an instruction
        scores = tl.dot(queries, tl.trans(keys)) * (scale * 1.44269504)
        scores = tl.where(inside[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        weight = weight * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        top = higher
    tl.store(out + mine, (total / weight[:, None]).to(out.dtype.element_ty), mask=ours)


def in_place(q, keys, values, table, lengths):
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
