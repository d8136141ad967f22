"""Attention of one new token over a long cache, with the cache split among blocks, in Triton.

The queries of the heads that share keys and values (a group) lie in one tile, so that the cache is
read once for all of them. A block runs through its part of the cache with an online softmax, and
leaves a weighted mean of the values, the largest score and the sum of the weights. `_merge` brings
the parts to a common scale and adds them up: softmax over parts is exact, in any partition.

Shapes: q is key heads x group x D, k and v are key heads x tokens x D.
"""

import torch
import triton
import triton.language as tl

TILE = 64  # keys at a time
ROWS = 16  # the smallest tile of the tensor cores: groups are filled up to it


@triton.jit
def _part(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    q, k, v, partial, tops, sums, length, part, scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head, at, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, column, key = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TILE)
    ours = (row < GROUP)[:, None]
    # the exponent's base is 2, for which the GPU has an instruction
    queries = tl.load(q + (head * GROUP + row[:, None]) * D + column[None, :], mask=ours, other=0)
    start = at * part
    stop = tl.minimum(start + part, length)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, D), tl.float32)
    first = head.to(tl.int64) * length
    for base in range(start, stop, TILE):
        inside = base + key < stop
        rows = (first + base + key)[:, None] * D + column[None, :]
        keys = tl.load(k + rows, mask=inside[:, None], other=0)
        values = tl.load(v + rows, mask=inside[:, None], other=0)
        scores = tl.dot(queries, tl.trans(keys)) * (scale * 1.44269504)
        scores = tl.where(inside[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        weight = weight * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        top = higher
    place = (head * parts + at) * GROUP + row
    tl.store(tops + place, top, mask=row < GROUP)
    tl.store(sums + place, weight, mask=row < GROUP)
    tl.store(partial + place[:, None] * D + column[None, :], total / weight[:, None], mask=ours)


@triton.jit
def _merge(  # noqa: PLR0917  as above
    partial, tops, sums, out, parts, GROUP: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr
):
    row, at, column = tl.program_id(0), tl.arange(0, MOST), tl.arange(0, D)
    head, member = row // GROUP, row % GROUP
    place = (head * parts + at) * GROUP + member
    top = tl.load(tops + place, mask=at < parts, other=-float("inf"))
    share = tl.load(sums + place, mask=at < parts, other=0) * tl.exp2(top - tl.max(top, 0))
    means = tl.load(
        partial + place[:, None] * D + column[None, :], mask=(at < parts)[:, None], other=0
    )
    result = tl.sum(means * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + row * D + column, result.to(out.dtype.element_ty))


def attend(q, k, v, parts):
    """Attend over parts of the cache that are computed at the same time."""
    heads, group, width = q.shape
    length = k.shape[1]
    part = triton.cdiv(triton.cdiv(length, parts), TILE) * TILE
    parts = triton.cdiv(length, part)  # none of them is empty
    partial = torch.empty(heads, parts, group, width, device=q.device)
    tops, sums = torch.empty(2, heads, parts, group, device=q.device)
    _part[heads, parts](
        *(q, k, v, partial, tops, sums, length, part, width**-0.5),
        GROUP=group,
        D=width,
        ROWS=ROWS,
        TILE=TILE,
        num_stages=3,
    )
    out, most = torch.empty_like(q), triton.next_power_of_2(parts)
    _merge[(heads * group,)](partial, tops, sums, out, parts, group, width, most)
    return out
