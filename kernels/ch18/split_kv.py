"""Flash-decoding: attention of one new token over a long KV cache that is split among blocks.

The query heads that share a key head (a group) form one tile, so each key and value is read once
for the whole group. A block runs an online softmax over its part of the cache and stores three
results: the normalized output of the part, its running max and its denominator. `_merge` rescales
the parts to the common maximum and adds them. Up to rounding, the result does not depend on how the
cache is split. On GPUs since Hopper `_merge` is launched while `_part` runs (programmatic dependent
launch) and waits for its results, so that its launch takes no time of its own.

Shapes: q is key heads x group x D, k and v are key heads x tokens x D.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TILE = 64  # keys per step of the online softmax
ROWS = 16  # smallest M of a tensor-core tile; groups are padded to it


@triton.jit
def _part(  # noqa: PLR0917  a launch passes arguments by position
    q, k, v, part_out, part_max, part_denominator, length, part_length, scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    head, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, column, key = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TILE)
    row_mask = (row < GROUP)[:, None]
    query_row = head * GROUP + row[:, None]
    queries = tl.load(q + query_row * D + column[None, :], mask=row_mask, other=0)
    begin = part * part_length
    end = tl.minimum(begin + part_length, length)
    running_max = tl.full((ROWS,), -float("inf"), tl.float32)
    denominator = tl.zeros((ROWS,), tl.float32)
    accumulator = tl.zeros((ROWS, D), tl.float32)
    first_token = head.to(tl.int64) * length
    for start in range(begin, end, TILE):
        valid = start + key < end
        kv_offsets = (first_token + start + key)[:, None] * D + column[None, :]
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
    slot = (head * parts + part) * GROUP + row
    tl.store(part_max + slot, running_max, mask=row < GROUP)
    tl.store(part_denominator + slot, denominator, mask=row < GROUP)
    output = accumulator / denominator[:, None]
    tl.store(part_out + slot[:, None] * D + column[None, :], output, mask=row_mask)


@triton.jit
def _merge(  # noqa: PLR0917  as above
    part_out, part_max, part_denominator, out, parts,
    GROUP: tl.constexpr, D: tl.constexpr, PADDED_PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    query_head, part, column = tl.program_id(0), tl.arange(0, PADDED_PARTS), tl.arange(0, D)
    head, member = query_head // GROUP, query_head % GROUP
    slot = (head * parts + part) * GROUP + member
    maxima = tl.load(part_max + slot, mask=part < parts, other=-float("inf"))
    denominators = tl.load(part_denominator + slot, mask=part < parts, other=0)
    weights = denominators * tl.exp2(maxima - tl.max(maxima, 0))
    outputs = tl.load(
        part_out + slot[:, None] * D + column[None, :], mask=(part < parts)[:, None], other=0
    )
    result = tl.sum(outputs * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + query_head * D + column, result.to(out.dtype.element_ty))


def attend(q, k, v, parts, *, tile=TILE, warps=4, stages=3):
    """Attend with the cache of each key head split into at most ``parts`` parts.

    With a ``tile`` of 64 keys and 3 pipeline ``stages`` a block takes 70 KiB of shared memory, so 3
    of them fit on an SM of Hopper: choose ``parts`` such that all blocks run in one wave.
    """
    heads, group, width = q.shape
    length = k.shape[1]
    part_length = triton.cdiv(triton.cdiv(length, parts), 16) * 16  # keeps loads aligned
    parts = triton.cdiv(length, part_length)  # fewer if part_length was rounded up; none is empty
    # Triton's interpreter knows neither the launch attribute nor the instructions
    overlaps = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] > 8
    part_out = torch.empty(heads, parts, group, width, device=q.device)
    part_max, part_denominator = torch.empty(2, heads, parts, group, device=q.device)
    _part[heads, parts](
        *(q, k, v, part_out, part_max, part_denominator, length, part_length, width**-0.5),
        GROUP=group,
        D=width,
        ROWS=ROWS,
        TILE=tile,
        OVERLAP=overlaps,
        num_warps=warps,
        num_stages=stages,
    )
    out, padded_parts = torch.empty_like(q), triton.next_power_of_2(parts)
    _merge[(heads * group,)](
        *(part_out, part_max, part_denominator, out, parts, group, width, padded_parts, overlaps),
        **({"launch_pdl": True} if overlaps else {}),
    )
    return out
