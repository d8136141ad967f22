"""From the packed QKV projection to attention: Q/K norm, rotary embedding (RoPE), cache write.

A row of qkv holds a token's query heads, key heads and value heads. Per head, q and k get an RMS
norm and are rotated by the token's position; q is returned, k and v go to the token's slot of a
paged cache.

vectorized   PyTorch operations on whole arrays, as model code is written: 21 kernels. Most of them
             write an array that the next one reads.
fused        A Triton kernel; a program holds one token in registers from the load to the stores.

Shapes: qkv is tokens x (HEADS + 2 KV_HEADS) * D; caches are pages x tokens per page x KV_HEADS x D.
Rows of the table are positions: D / 2 cosines, then D / 2 sines. Slots number the tokens of a cache
through all its pages.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import rms_norm

EPSILON = 1e-6
HEADS, KV_HEADS, D = 32, 8, 128


def rotate(x, cos, sin):
    """Rotate the pairs (i, i + D / 2) of each head."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def vectorized(  # noqa: PLR0917  an arm gets its inputs by position
    qkv, q_weight, k_weight, table, positions, slots, key_cache, value_cache
):
    q, k, v = qkv.unflatten(1, (-1, D)).split((HEADS, KV_HEADS, KV_HEADS), 1)
    cos, sin = table[positions][:, None].chunk(2, -1)
    q = rotate(rms_norm(q, (D,), q_weight, EPSILON), cos, sin)
    k = rotate(rms_norm(k, (D,), k_weight, EPSILON), cos, sin)
    key_cache.flatten(0, 1)[slots] = k
    value_cache.flatten(0, 1)[slots] = v
    return q


@triton.jit
def _norm_and_rotate(  # noqa: PLR0917  Triton passes arguments by position
    first, second, weight, cos, sin, epsilon, HALF: tl.constexpr
):
    """Return both halves of normalized and rotated heads, one per row, in fp32."""
    column = tl.arange(0, HALF)
    first, second = first.to(tl.float32), second.to(tl.float32)
    mean_square = tl.sum(first * first + second * second, 1) / (2 * HALF)
    scale = (1 / tl.sqrt(mean_square + epsilon))[:, None]
    first *= scale * tl.load(weight + column).to(tl.float32)[None, :]
    second *= scale * tl.load(weight + HALF + column).to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _norm_rope_cache(  # noqa: PLR0917  a launch passes arguments by position
    qkv, q_weight, k_weight, table, positions, slots, q_out, key_cache, value_cache, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    position, slot = tl.load(positions + token), tl.load(slots + token)
    column = tl.arange(0, HALF)[None, :]
    q_offsets = tl.arange(0, HEADS)[:, None] * D + column
    k_offsets = tl.arange(0, KV_HEADS)[:, None] * D + column
    v_offsets = tl.arange(0, KV_HEADS * D)
    q = qkv + token * ((HEADS + 2 * KV_HEADS) * D)
    k = q + HEADS * D
    v = k + KV_HEADS * D
    # all loads of the token before its first store, so that they are in flight together
    q_first, q_second = tl.load(q + q_offsets), tl.load(q + HALF + q_offsets)
    k_first, k_second = tl.load(k + k_offsets), tl.load(k + HALF + k_offsets)
    values = tl.load(v + v_offsets)
    cos = tl.load(table + position * D + column).to(tl.float32)
    sin = tl.load(table + position * D + HALF + column).to(tl.float32)

    dtype = q_out.dtype.element_ty
    first, second = _norm_and_rotate(q_first, q_second, q_weight, cos, sin, epsilon, HALF)
    q_row = q_out + token * (HEADS * D)
    tl.store(q_row + q_offsets, first.to(dtype))
    tl.store(q_row + HALF + q_offsets, second.to(dtype))
    first, second = _norm_and_rotate(k_first, k_second, k_weight, cos, sin, epsilon, HALF)
    k_row = key_cache + slot * (KV_HEADS * D)
    tl.store(k_row + k_offsets, first.to(dtype))
    tl.store(k_row + HALF + k_offsets, second.to(dtype))
    tl.store(value_cache + slot * (KV_HEADS * D) + v_offsets, values)


def fused(  # noqa: PLR0917  an arm gets its inputs by position
    qkv, q_weight, k_weight, table, positions, slots, key_cache, value_cache
):
    q = torch.empty(len(qkv), HEADS, D, dtype=qkv.dtype, device=qkv.device)
    _norm_rope_cache[(len(qkv),)](
        *(qkv, q_weight, k_weight, table, positions, slots, q, key_cache, value_cache, EPSILON),
        HEADS=HEADS,
        KV_HEADS=KV_HEADS,
        D=D,
        # 2 warps would give key heads the 16-byte accesses that query heads have, but Triton would
        # pass cosines, sines and weights through shared memory, with barriers
        num_warps=4,
    )
    return q
