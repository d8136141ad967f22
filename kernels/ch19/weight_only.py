"""A linear layer for one token with 4-bit weights that stay packed in memory, y = x W^T.

`gemv` keeps the weights packed, as int8 or int4, until they are in registers. A block takes whole
rows of W, so that it keeps the token in registers, and copies the next rows to shared memory while
it multiplies (a software pipeline of asynchronous copies).

A weight is a code, an integer from -8 to 7, times the scale of its group: 128 weights of a row.
Codes are stored without sign (plus half of their range), in 32-bit words of 4 bytes or 8 nibbles. A
group has W = 32 words in int8 and 16 in int4, and field n of its word j is column W n + j. So
neighbouring words need neighbouring elements of the token.

Unpacking must not take longer than reading. In the time in which the half byte of an int4 weight
arrives, an SM of an H200 issues about 3.4 instructions per thread. Converting an integer takes five
(shift, AND, conversion, subtraction, multiply-add). But an integer n whose bits are put into the
mantissa of 1.0, from bit b on, is the float 1 + n / 2^(23 - b). So the kernel selects a field and
sets the exponent in one instruction (LOP3), and multiply-adds this float with the token's element
times 2^(23 - b). The sum then contains a part that depends on the token only, from the 1 and the
offset of the codes. A block computes it once, and each row's sum starts with its negative. Two
neighbouring nibbles share a shift. The price is cancellation: the 1 counts as much as the integer
2^(23 - b), at most 2048, so the sums lose up to 11 of their 24 bits. The result, in bf16, has 8.
"""

import torch
import triton
import triton.language as tl

GROUP = 128
"""Weights with a common scale."""

GEMV_TILES = {8: (4, 3), 4: (8, 3)}
"""Rows per step and pipeline stages, by bits per weight: a step copies 32 KiB for 8192 inputs."""

GEMV_WARPS = 8
"""Warps per block: with 8192 inputs, each thread keeps 32 elements of the token in registers."""

GEMV_BLOCKS = 3
"""Blocks per SM: 24 warps with 80 registers per thread, and up to 216 KiB of shared memory."""

ONE = 0x3F800000
"""The bits of 1.0 in fp32.

The kernel takes it as an argument: an instruction has room for one constant, which is the mask.
With two, the compiler makes an AND and an OR.
"""


@triton.jit
def _unit(FIELD: tl.constexpr, BITS: tl.constexpr):
    """Return the integer that counts as much as the 1 of the float: 2^(23 - b)."""
    return 256.0 if BITS == 8 else (2048.0 if FIELD % 2 else 128.0)


@triton.jit
def _one_plus(words, one, FIELD: tl.constexpr, BITS: tl.constexpr):
    """Return 1 + (a field of each word) / unit, in fp32."""
    BIT: tl.constexpr = 15 if BITS == 8 else (12 if FIELD % 2 else 16)
    SHIFT: tl.constexpr = FIELD * BITS - BIT
    shifted = words >> SHIFT if SHIFT > 0 else words << -SHIFT
    return ((shifted & (((1 << BITS) - 1) << BIT)) | one).to(tl.float32, bitcast=True)


@triton.jit
def _elements(x, word, FIELD: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Load the token's elements that a field of all words is multiplied with, times the unit."""
    WORDS: tl.constexpr = GROUP * BITS // 32
    column = word // WORDS * GROUP + FIELD * WORDS + word % WORDS
    return tl.load(x + column[None, :]).to(tl.float32) * _unit(FIELD, BITS)


@triton.jit
def _gemv(  # noqa: PLR0917  a launch passes arguments by position
    words, scales, x, out, tiles, one,
    BITS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = 32 // BITS
    QUADS: tl.constexpr = WORDS // 4
    GROUP_QUADS: tl.constexpr = GROUP * BITS // 128
    row, word, quad = tl.arange(0, ROWS), tl.arange(0, WORDS), tl.arange(0, QUADS)
    # read once, because the loop is over rows
    if BITS == 8:
        token = (
            _elements(x, word, 0, BITS, GROUP), _elements(x, word, 1, BITS, GROUP),
            _elements(x, word, 2, BITS, GROUP), _elements(x, word, 3, BITS, GROUP),
        )  # fmt: skip
    else:
        token = (
            _elements(x, word, 0, BITS, GROUP), _elements(x, word, 1, BITS, GROUP),
            _elements(x, word, 2, BITS, GROUP), _elements(x, word, 3, BITS, GROUP),
            _elements(x, word, 4, BITS, GROUP), _elements(x, word, 5, BITS, GROUP),
            _elements(x, word, 6, BITS, GROUP), _elements(x, word, 7, BITS, GROUP),
        )  # fmt: skip
    token_part = tl.zeros((1, WORDS), tl.float32)
    for n in tl.static_range(FIELDS):
        token_part += token[n] * (1 + (1 << (BITS - 1)) / _unit(n, BITS))
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + row
        packed = tl.load(words + rows[:, None] * WORDS + word[None, :])
        scale = tl.load(
            scales + rows[:, None] * (QUADS // GROUP_QUADS) + (quad // GROUP_QUADS)[None, :]
        )
        sums = tl.broadcast_to(-token_part, (ROWS, WORDS))
        for field in tl.static_range(FIELDS):
            sums += _one_plus(packed, one, field, BITS) * token[field]
        # a thread has all four words, and all are of one group
        quad_sums = tl.sum(tl.reshape(sums, (ROWS, QUADS, 4)), 2)
        y = tl.sum(quad_sums * scale.to(tl.float32), 1)
        tl.store(out + rows, y.to(out.dtype.element_ty))


def gemv(bits, x, words, scales):
    """Multiply one token with packed weights.

    The number of inputs is a power of two, at most 8192, and that of outputs a multiple of 8.
    """
    (outputs, columns), (rows, stages) = words.shape, GEMV_TILES[bits]
    out = x.new_empty(1, outputs)
    programs = 3  # few in Triton's interpreter, so that a program has several tiles
    if x.is_cuda:
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count * GEMV_BLOCKS
    tiles = outputs // rows
    _gemv[(min(programs, tiles),)](
        *(words, scales, x, out, tiles, ONE, bits, GROUP, columns, rows, stages),
        num_warps=GEMV_WARPS,
    )
    return out


def integers(words):
    """Return the codes of int4 words, with their offset of 8: rows x groups x 128 bytes."""
    bits = torch.arange(0, 32, 4, device=words.device)
    fields = words.unflatten(1, (-1, 1, GROUP // 8)) >> bits[:, None].int() & 15
    return fields.flatten(2).to(torch.uint8)


def dequantized(words, scales):
    """Return the matrix in the type of the scales."""
    return ((integers(words).to(scales.dtype) - 8) * scales[:, :, None]).flatten(1)


def widened(words):
    """Repack int4 words as int8 words with the same codes, whose offset is 128."""
    words_of_bytes = (integers(words) + (128 - 8)).unflatten(2, (4, -1)).mT.contiguous()
    return words_of_bytes.view(torch.int32).flatten(1)
