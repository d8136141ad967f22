"""Decode attention (one new token per sequence) over a KV cache of 16-bit or fp8 elements.

attend            Flash-decoding as in split_kv.py. Elements of an fp8 cache are converted to fp16
                  in registers, between shared memory and the tensor cores; with a 16-bit cache
                  that conversion does nothing. The rest of the kernel is the same for both.
dequantize_first  Converts the whole fp8 cache to 16 bits, then attends to the copy.

The cache holds blocks of BLOCK tokens. A block of keys is BLOCK x D and one of values is D x BLOCK:
a tensor core takes its operands in groups of adjacent elements along the dimension that it sums
over, which is D for the keys and the tokens for the values. Shared-memory loads (ldmatrix) can
transpose 16-bit elements but not bytes, so fp8 values in the order of the keys would be loaded byte
by byte. The last block is padded with zeros, so loads need no mask.

An fp8 cache has one scale for the keys and one for the values of each head. e4m3 is a floating-
point format: within its range, the relative error of an element hardly depends on the scale, so a
scale per token, in fp32, would cost 3 % more bytes and gain little. The scale of the keys
multiplies the scores and that of the values the output, so no element is multiplied by it.

Shapes: q is sequences x query heads x D, keys and values before `blocked` are sequences x key heads
x tokens x D.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.ch18 import split_kv

FP8 = torch.float8_e4m3fn

FP8_MAX = 448
"""The largest finite value of float8_e4m3fn."""

BLOCK = 64
"""Tokens per block of the cache, and keys per step of the online softmax."""

PARTS = 2
"""Parts of a sequence's cache: with 24 sequences and 8 key heads, 384 blocks run in one wave."""


def blocked(keys, values):
    """Copy keys and values into the blocks of a 16-bit cache."""
    padding = -keys.shape[2] % BLOCK
    keys, values = (
        pad(part, (0, 0, 0, padding)).unflatten(2, (-1, BLOCK)) for part in (keys, values)
    )
    return keys.contiguous(), values.mT.contiguous()


def quantized(cache):
    """Return keys or values (sequences x key heads x ...) in fp8, and the scale of each head.

    The scale follows from the largest magnitude in the cache. It is a power of two, so that numbers
    which are in fp8 already stay as they are. A service knows only the tokens so far: it calibrates
    the scale on other texts, and clamps.
    """
    by_head = cache.transpose(0, 1).flatten(1)
    scale = (by_head.abs().amax(1).float() / FP8_MAX).log2().ceil().exp2()
    return (cache / scale.view(-1, *[1] * (cache.ndim - 2))).to(FP8), scale


@triton.jit
def _attend_part(  # noqa: PLR0917  a launch passes arguments by position
    q, k, v, key_scales, value_scales, part_out, part_max, part_denominator,
    length, blocks, part_blocks, heads, scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    pair, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, column, token = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, BLOCK)
    row_mask = (row < GROUP)[:, None]
    query_row = pair * GROUP + row[:, None]
    queries = tl.load(q + query_row * D + column[None, :], mask=row_mask, other=0)
    first = part * part_blocks
    running_max = tl.full((ROWS,), -float("inf"), tl.float32)
    denominator = tl.zeros((ROWS,), tl.float32)
    accumulator = tl.zeros((ROWS, D), tl.float32)
    # times log2(e): exp2 is a single instruction, exp is not
    score_scale = tl.load(key_scales + pair % heads) * scale * 1.44269504
    for block in range(first, tl.minimum(first + part_blocks, blocks)):
        start = (pair.to(tl.int64) * blocks + block) * BLOCK * D
        keys = tl.load(k + start + token[:, None] * D + column[None, :]).to(queries.dtype)
        values = tl.load(v + start + column[:, None] * BLOCK + token[None, :]).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys)) * score_scale
        scores = tl.where((block * BLOCK + token < length)[None, :], scores, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        rescale = tl.exp2(running_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        denominator = denominator * rescale + tl.sum(weights, 1)
        products = tl.dot(weights.to(queries.dtype), tl.trans(values))
        accumulator = accumulator * rescale[:, None] + products
        running_max = new_max
    slot = (pair * parts + part) * GROUP + row
    tl.store(part_max + slot, running_max, mask=row < GROUP)
    tl.store(part_denominator + slot, denominator, mask=row < GROUP)
    output = accumulator / denominator[:, None] * tl.load(value_scales + pair % heads)
    tl.store(part_out + slot[:, None] * D + column[None, :], output, mask=row_mask)


def attend(  # noqa: PLR0917  the arrays of the cache, in the order of the kernel
    q, keys, values, key_scales, value_scales, length
):  # fmt: skip
    """Attend to the first ``length`` tokens of each sequence."""
    sequences, query_heads, width = q.shape
    heads, blocks = keys.shape[1:3]
    pairs, group = sequences * heads, query_heads // heads
    part_blocks = triton.cdiv(blocks, PARTS)
    parts = triton.cdiv(blocks, part_blocks)  # none is empty
    # Triton's interpreter knows neither the launch attribute nor the instructions
    overlaps = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] > 8
    part_out = torch.empty(pairs, parts, group, width, device=q.device)
    part_max, part_denominator = torch.empty(2, pairs, parts, group, device=q.device)
    _attend_part[pairs, parts](
        *(q, keys, values, key_scales, value_scales, part_out, part_max, part_denominator),
        *(length, blocks, part_blocks, heads, width**-0.5),
        GROUP=group,
        D=width,
        ROWS=split_kv.ROWS,
        BLOCK=BLOCK,
        OVERLAP=overlaps,
        num_warps=4,
        # 64 KiB in shared memory with either: 2 blocks of keys and values in 16 bits, or 4 in fp8.
        # So 3 thread blocks fit on an SM, and as many bytes are in flight.
        num_stages=1 + 4 // keys.element_size(),
    )
    out, padded_parts = torch.empty_like(q), triton.next_power_of_2(parts)
    split_kv._merge[(pairs * group,)](  # noqa: SLF001  its parts are those of split_kv.attend
        *(part_out, part_max, part_denominator, out, parts, group, width, padded_parts, overlaps),
        **({"launch_pdl": True} if overlaps else {}),
    )
    return out


@torch.compile(dynamic=False)
def converted(keys, values, dtype):
    return keys.to(dtype), values.to(dtype)


def dequantize_first(q, keys, values, *scales_and_length):
    return attend(q, *converted(keys, values, q.dtype), *scales_and_length)
