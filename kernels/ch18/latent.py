"""Decode attention of multi-head latent attention (MLA), one query token per sequence.

The cache has one row per token: a latent vector and a rotary key (RoPE), both shared by all heads.
The up-projection makes each head's values and the rest of its keys from the latent vector c. It is
linear, so it can move to the other operand of each product, where there is one vector per head
instead of one per head and token (t):

    q . (W_uk c_t)  =  (W_uk^T q) . c_t              sum w_t (W_uv c_t)  =  W_uv (sum w_t c_t)

attend    Attends with the keys and values of all heads, which `expand` makes from the cache.
absorbed  Applies W_uk to the queries and W_uv to the outputs. All heads then share one key per
          token, its row of the cache, and one value, the latent part of that row. Two matrix
          products and a softmax read the rows twice and store the scores.
fused     `_part` runs an online softmax over tiles of the cache, so that a row is read once, as key
          and as value, and no scores are stored. The cache of a sequence is split into parts
          (flash-decoding), which `_merge` rescales to their common maximum and adds.

Shapes: q is sequences x heads x (NOPE + ROPE), cache is sequences x tokens x (LATENT + ROPE), up is
heads x (NOPE + V) x LATENT, the outputs are sequences x heads x V. Each head's scores are scaled by
its query's width.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

NOPE, ROPE, V, LATENT = 128, 64, 128, 512  # DeepSeek-V2, V2-Lite and V3
TILE = 32  # tokens per step of the online softmax; with 64, only one block would fit on an SM
ROWS = 16  # heads per block: the M of an mma.sync tile


def expand(cache, up):
    """Return the keys and values of all heads, sequences x heads x tokens x width."""
    latents, rotary_keys = cache.split([LATENT, ROPE], 2)
    expanded_latents = (latents @ up.flatten(0, 1).T).unflatten(2, up.shape[:2])
    keys, values = expanded_latents.split([NOPE, V], 3)
    rotary_keys = rotary_keys[:, :, None].expand(-1, -1, len(up), -1)
    return torch.cat([keys, rotary_keys], 3).transpose(1, 2), values.transpose(1, 2)


def attend(q, keys, values):
    return scaled_dot_product_attention(q[:, :, None], keys, values)[:, :, 0]


def to_latent_queries(q, up):
    """Return heads x sequences x LATENT."""
    return q[:, :, :NOPE].transpose(0, 1) @ up[:, :NOPE]


def to_head_outputs(latent_outputs, up):
    """Return sequences x heads x V, from heads x sequences x LATENT."""
    return (latent_outputs @ up[:, NOPE:].mT).transpose(0, 1)


def absorbed(q, cache, up):
    latent_queries, rotary_queries = to_latent_queries(q, up).transpose(0, 1), q[:, :, NOPE:]
    # scaling the queries takes less time than scaling the scores
    queries = torch.cat([latent_queries, rotary_queries], 2) * q.shape[2] ** -0.5
    weights = torch.softmax(queries @ cache.mT, 2)
    return to_head_outputs((weights @ cache[:, :, :LATENT]).transpose(0, 1), up)


@triton.jit
def _part(  # noqa: PLR0917  a launch passes arguments by position
    latent_q, rotary_q, q_width, cache, part_out, part_max, part_denominator,
    length, part_length, scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # blocks for other heads of the same part have neighbouring ids, so they find its rows in L2
    group, part, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, parts, sequences = tl.num_programs(0) * ROWS, tl.num_programs(1), tl.num_programs(2)
    head, token = group * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE)
    column, rotary_column = tl.arange(0, LATENT), tl.arange(0, ROPE)
    query = head * sequences + sequence
    latent_queries = tl.load(latent_q + query[:, None] * LATENT + column[None, :])
    rotary_row = (sequence * heads + head)[:, None] * q_width
    rotary_queries = tl.load(rotary_q + rotary_row + rotary_column[None, :])
    begin = part * part_length
    end = tl.minimum(begin + part_length, length)
    running_max = tl.full((ROWS,), -float("inf"), tl.float32)
    denominator = tl.zeros((ROWS,), tl.float32)
    accumulator = tl.zeros((ROWS, LATENT), tl.float32)
    first_token = sequence.to(tl.int64) * length
    for start in range(begin, end, TILE):
        valid = start + token < end
        row = cache + (first_token + start + token)[:, None] * (LATENT + ROPE)
        latents = tl.load(row + column[None, :], mask=valid[:, None], other=0)
        rotary_keys = tl.load(row + LATENT + rotary_column[None, :], mask=valid[:, None], other=0)
        scores = tl.dot(rotary_queries, tl.trans(rotary_keys))
        scores = tl.dot(latent_queries, tl.trans(latents), scores)
        # times log2(e): exp2 is a single instruction, exp is not
        scores = tl.where(valid[None, :], scores * (scale * 1.44269504), -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        rescale = tl.exp2(running_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        denominator = denominator * rescale + tl.sum(weights, 1)
        weights = weights.to(latents.dtype)
        accumulator = tl.dot(weights, latents, accumulator * rescale[:, None])
        running_max = new_max
    slot = query * parts + part
    tl.store(part_max + slot, running_max)
    tl.store(part_denominator + slot, denominator)
    output = accumulator / denominator[:, None]
    tl.store(part_out + slot[:, None] * LATENT + column[None, :], output)


@triton.jit
def _merge(  # noqa: PLR0917  as above
    part_out, part_max, part_denominator, out, parts,
    LATENT: tl.constexpr, PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    query, part, column = tl.program_id(0), tl.arange(0, PADDED_PARTS), tl.arange(0, LATENT)
    slot = query * parts + part
    maxima = tl.load(part_max + slot, mask=part < parts, other=-float("inf"))
    denominators = tl.load(part_denominator + slot, mask=part < parts, other=0)
    weights = denominators * tl.exp2(maxima - tl.max(maxima, 0))
    outputs = tl.load(
        part_out + slot[:, None] * LATENT + column[None, :], mask=(part < parts)[:, None], other=0
    )
    result = tl.sum(outputs * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + query * LATENT + column, result.to(out.dtype.element_ty))


def fused(q, cache, up, *, parts):
    """Attend with each sequence's cache split into at most ``parts`` parts.

    The number of heads is a multiple of ROWS. A block takes 91 KiB of shared memory, so 2 of them
    fit on an SM of Hopper: choose ``parts`` such that all blocks run in one wave.
    """
    sequences, heads, q_width = q.shape
    length = cache.shape[1]
    part_length = triton.cdiv(triton.cdiv(length, parts), TILE) * TILE
    parts = triton.cdiv(length, part_length)  # fewer if part_length was rounded up; none is empty
    latent_q = to_latent_queries(q, up)
    part_out = torch.empty(heads, sequences, parts, LATENT, device=q.device)
    part_max, part_denominator = torch.empty(2, heads, sequences, parts, device=q.device)
    _part[heads // ROWS, parts, sequences](
        *(latent_q, q[:, :, NOPE:], q_width, cache, part_out, part_max, part_denominator),
        *(length, part_length, q_width**-0.5),
        LATENT=LATENT,
        ROPE=ROPE,
        ROWS=ROWS,
        TILE=TILE,
        num_warps=4,
        num_stages=3,
    )
    latent_outputs, padded_parts = torch.empty_like(latent_q), triton.next_power_of_2(parts)
    _merge[(heads * sequences,)](
        *(part_out, part_max, part_denominator, latent_outputs, parts, LATENT, padded_parts)
    )
    return to_head_outputs(latent_outputs, up)
