"""Decode one sequence token by token: from eager PyTorch to 4-bit weights, bound by reading them.

eager       PyTorch's operations, launched one by one; the KV cache is a preallocated slab.
graph       The same operations in a CUDA graph, replayed per token. The token and its position
            change from replay to replay, so they live in tensors, and a mask hides the unused slots
            of the cache.
fused       Two Triton kernels replace the library's matrix-vector products and what is between
            them: one computes the norm and the activation function with the product, the other the
            residual. Attention is flash-decoding: a part of a head's cache is a block of its own,
            and a second kernel merges the parts. The first one also writes the new key and value to
            the cache.
overlapped  Programmatic dependent launch: a kernel's blocks start while the previous kernel still
            runs, load their first weights or cached keys, and only then wait for its result.
int8        Each weight is a byte (W8A16). 64 weights of a row are a group with a common scale.
int4        Each weight is a nibble, two per byte (W4A16). 128 weights of a row are a group.

``Compiled`` is the graph rung with torch.compile's kernels. ``CompiledInt8`` and ``CompiledInt4``
add the weight-only products of gpt-fast: for int8 a product that torch.compile generates, with a
scale per row; for int4 PyTorch's tinygemm kernel, which torchao calls, with the groups of ``int4``.

The tokens are given instead of chosen, so rounding cannot select another token. The result is the
last hidden state of each token (tokens x width), and the keys and values that were added to the
cache. ``past`` holds those of the previous tokens (layers x 2 x heads x tokens x HEAD_DIM).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import gelu, linear, rms_norm, scaled_dot_product_attention
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.ch15.decoder import captured

HEAD_DIM = 128
"""Channels per attention head."""

EPSILON = 1e-6
"""Added to the mean square in the RMS norm, so that a zero vector causes no division by zero."""

KEYS, PARTS = 16, 16
"""Cached tokens that a block loads at a time, and the most parts of a head's cache.

With 16 keys and values of 128 channels, and those of the next step, 4 warps need about 100
registers per thread, so that 4 blocks run on an SM at once. 16 parts of 32 heads are 512 blocks,
fewer than 132 SMs hold. With 32 keys fewer blocks fit, and the last would run in a second wave.
"""

GROUP_WORDS = tl.constexpr(16)
"""32-bit words with a common scale: 64 weights of a byte, or 128 of a nibble."""

TILES = {16: (2, 2048, 4), 8: (8, 256, 2), 4: (4, 512, 4)}
"""Rows and columns that a block of a product loads at a time, and its warps, by bits per weight.

Packed columns are counted in words. They are the fastest of some twenty tiles on an H200.
"""


class Decoder(NamedTuple):
    """Weights, one tensor per kind for all layers; a layer's matrix has one row per output."""

    embedding: torch.Tensor
    """Vocabulary x width."""
    qkv: torch.Tensor
    """Layers x 3 width x width."""
    out: torch.Tensor
    """Layers x width x width: the output projection of attention."""
    up: torch.Tensor
    """Layers x 4 width x width."""
    down: torch.Tensor
    """Layers x width x 4 width."""

    def layers(self):
        """Return the matrices of each layer."""
        return list(zip(*self[1:], strict=True))


def random_decoder(layers, width, vocabulary, length, **options):
    """Draw weights for which attention and the MLPs add to x about as much as the embedding.

    As in GPT-2, the matrices that write to x are the smaller, the more layers there are. Queries
    are larger than keys, so that attention prefers some tokens, and its output projection makes up
    for the averaging over ``length`` cached values.
    """

    def draw(outputs, inputs, gain=1.0):
        return torch.randn(layers, outputs, inputs, **options).mul_(gain * inputs**-0.5)

    qkv, residual_gain = draw(3 * width, width), layers**-0.5
    qkv[:, :width] *= 1.5
    out = draw(width, width, residual_gain * length**0.5 / 9)
    up = draw(4 * width, width)
    embedding = torch.randn(vocabulary, width, **options)
    return Decoder(embedding, qkv, out, up, draw(width, 4 * width, residual_gain))


def norm(x):
    return rms_norm(x, x.shape[-1:], eps=EPSILON)


def project(x, qkv, linear=linear):
    """Return the query and the stacked key and value of token x: 1 and 2 x heads x HEAD_DIM."""
    return linear(norm(x), qkv).view(3, -1, HEAD_DIM).split((1, 2))


def output_and_up(x, attended, out, up, *, linear=linear):
    """Add the output projection of the attention result (1 x width) to x; also return GELU."""
    x = x + linear(attended, out)
    return x, gelu(linear(norm(x), up))


def output_and_mlp(x, attended, out, up, down, *, linear=linear):
    x, hidden = output_and_up(x, attended, out, up, linear=linear)
    return x + linear(hidden, down)


def attention(q, keys, values, **options):
    """Attend with a query (1 x heads x HEAD_DIM) to keys and values (heads x tokens x HEAD_DIM)."""
    q, keys, values = q[:, :, None], keys[None], values[None]
    return scaled_dot_product_attention(q, keys, values, **options).flatten(1)


def cache_slabs(past, tokens):
    """Copy the past into slabs that have room for the new tokens."""
    slabs = past.new_zeros(*past.shape[:3], past.shape[3] + len(tokens), HEAD_DIM)
    slabs[:, :, :, : past.shape[3]] = past
    return slabs


def eager(model, past, tokens):
    layers, slabs, length = model.layers(), cache_slabs(past, tokens), past.shape[3]

    def decode(model, past, tokens):  # noqa: ARG001  past: the slabs contain it
        states = []
        for position, token in enumerate(tokens[:, None], length):
            x = model.embedding[token]
            for (qkv, *rest), slab in zip(layers, slabs, strict=True):
                q, kv = project(x, qkv)
                slab[:, :, position] = kv
                x = output_and_mlp(x, attention(q, *slab[:, :, : position + 1]), *rest)
            states.append(x[0])
        return torch.stack(states), slabs[:, :, :, length:].clone()

    return decode


class Replay:
    """A captured step; ``step`` computes the hidden state of ``token`` at ``position``."""

    bits = 16
    """Bits per weight."""

    def __init__(self, model, past, tokens):
        self.model, self.slabs = model, cache_slabs(past, tokens)
        self.token = tokens[:1].clone()
        self.start, capacity = past.shape[3], self.slabs.shape[3]
        self.position = torch.full_like(tokens[:1], self.start)
        self.slots = torch.arange(capacity, device=past.device)
        self.out = model.embedding.new_zeros(len(tokens), model.embedding.shape[1])
        self.layers = [[self.load(matrix) for matrix in layer] for layer in model.layers()]
        self.replay = captured(self.step, past.device)

    def load(self, matrix):
        """Convert a matrix to the rung's format; here, keep it as it is."""
        return matrix

    def __call__(self, model, past, tokens):  # noqa: ARG002  model, past: loaded once
        self.position.fill_(self.start)
        for i in range(len(tokens)):
            self.token.copy_(tokens[i : i + 1])
            self.replay()
        return self.out.clone(), self.slabs[:, :, :, self.start :].clone()

    def step(self):
        x = self.model.embedding[self.token]
        mask = (self.slots <= self.position)[None, None, None]
        for matrices, slab in zip(self.layers, self.slabs, strict=True):
            x = self.layer(x, slab, self.position, mask, *matrices)
        self.out.index_copy_(0, self.position - self.start, x)
        self.position += 1


def masked_layer(x, slab, position, mask, qkv, *rest, linear=linear, then=output_and_mlp):
    q, kv = project(x, qkv, linear)
    slab.index_copy_(2, position, kv[:, :, None])
    return then(x, attention(q, *slab, attn_mask=mask), *rest, linear=linear)


class Graph(Replay):
    layer = staticmethod(masked_layer)


class Compiled(Replay):
    layer = staticmethod(torch.compile(masked_layer, dynamic=False))


def int8_linear(x, matrix):
    """Multiply by bytes with a scale per row; torch.compile makes one reduction of it."""
    weight, scales = matrix
    return ((weight * x).sum(1, dtype=torch.float32) * scales)[None].to(x.dtype)


def int4_linear(x, matrix):
    """Multiply by nibbles: with tinygemm, or without a GPU by the weights that they stand for."""
    weight, scales_and_zeros = matrix
    if x.is_cuda:
        mm = torch.ops.aten._weight_int4pack_mm  # noqa: SLF001  torchao calls it as well
        return mm(x, weight, GROUP_WORDS.value * 8, scales_and_zeros)
    return linear(x, weight)


@torch.compile(dynamic=False)
def compiled_int8_up(*args):
    return masked_layer(*args, linear=int8_linear, then=output_and_up)


@torch.compile(dynamic=False)
def compiled_int8_down(x, hidden, down):
    return x + int8_linear(hidden, down)


class CompiledInt8(Compiled):
    @staticmethod
    def layer(*args):
        # in two parts, because in one the last product would repeat the GELU for each output
        *args, down = args
        return compiled_int8_down(*compiled_int8_up(*args), down)

    def load(self, matrix):
        scales = matrix.abs().amax(1).float() / 127
        return (matrix / scales[:, None]).round().to(torch.int8), scales


class CompiledInt4(Compiled):
    @staticmethod
    @torch.compile(dynamic=False)
    def layer(*args):
        return masked_layer(*args, linear=int4_linear)

    def load(self, matrix):
        """Pack the integers of the rung "int4" for tinygemm, which subtracts 8 from a nibble."""
        integers, scales = quantized(matrix, 4)
        zeros_after_scales = torch.stack([scales.T, torch.zeros_like(scales.T)], 2)
        if not matrix.is_cuda:
            groups = (integers - 8) * scales[:, :, None]
            return groups.flatten(1).to(matrix.dtype), zeros_after_scales
        nibbles = integers.flatten(1).to(torch.uint8)
        pairs = nibbles[:, ::2] << 4 | nibbles[:, 1::2]
        pack = torch.ops.aten._convert_weight_to_int4pack  # noqa: SLF001  as above
        return pack(pairs.contiguous(), 8), zeros_after_scales.contiguous()


@triton.jit
def _load_keys(  # noqa: PLR0917  as below
    keys, values, head, start, length, capacity, D: tl.constexpr, KEYS: tl.constexpr
):
    """Load the cached keys and values of the tokens from ``start``."""
    token = start + tl.arange(0, KEYS)
    offsets = (head * capacity + token)[:, None] * D + tl.arange(0, D)[None, :]
    is_cached = (token < length)[:, None]
    return (
        tl.load(keys + offsets, mask=is_cached, other=0),
        tl.load(values + offsets, mask=is_cached, other=0),
    )


@triton.jit
def _attend_part(  # noqa: PLR0917  a launch passes arguments by position
    qkv, keys, values, position, part_out, part_max, part_sum, capacity, part_length, scale,
    D: tl.constexpr, KEYS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head, part, column = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    heads, slot = tl.num_programs(0), head * tl.num_programs(1) + part
    length, begin = tl.load(position).to(tl.int32), part * part_length
    end = tl.minimum(begin + part_length, length + 1)
    loaded_k, loaded_v = _load_keys(keys, values, head, begin, length, capacity, D, KEYS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # qkv is the previous kernel's result
    q = tl.load(qkv + head * D + column).to(tl.float32) * (scale * 1.44269504)
    new_k = tl.load(qkv + (heads + head) * D + column)
    new_v = tl.load(qkv + (2 * heads + head) * D + column)
    # One online softmax per row of the tile: a common one would need barriers in each step. The
    # maximum begins at a finite value, because the difference of two infinite ones is not a number.
    maximum, total = tl.full((KEYS,), -1e30, tl.float32), tl.zeros((KEYS,), tl.float32)
    sums = tl.zeros((KEYS, D), tl.float32)
    for start in range(begin, end, KEYS):
        token = start + tl.arange(0, KEYS)
        is_new = (token == length)[:, None]
        k = tl.where(is_new, new_k[None, :], loaded_k).to(tl.float32)
        v = tl.where(is_new, new_v[None, :], loaded_v).to(tl.float32)
        # the next tile's loads are under way during the arithmetic of this one
        loaded_k, loaded_v = _load_keys(
            keys, values, head, start + KEYS, tl.minimum(length, end), capacity, D, KEYS
        )
        # q contains log2(e): exp2 is a single instruction, exp is not
        scores = tl.where(token < end, tl.sum(k * q[None, :], 1), -float("inf"))
        new_maximum = tl.maximum(maximum, scores)
        weights, rescale = tl.exp2(scores - new_maximum), tl.exp2(maximum - new_maximum)
        sums = sums * rescale[:, None] + v * weights[:, None]
        total = total * rescale + weights
        maximum = new_maximum
    if (begin <= length) & (length < begin + part_length):  # a part per head has the new token
        tl.store(keys + (head * capacity + length) * D + column, new_k)
        tl.store(values + (head * capacity + length) * D + column, new_v)
    part_maximum = tl.max(maximum, 0)
    rescale = tl.exp2(maximum - part_maximum)
    tl.store(part_max + slot, part_maximum)
    tl.store(part_sum + slot, tl.sum(total * rescale, 0))  # of a part behind the new token: 0
    tl.store(part_out + slot * D + column, tl.sum(sums * rescale[:, None], 0))


@triton.jit
def _merge_parts(  # noqa: PLR0917  as above
    part_out, part_max, part_sum, out, parts,
    D: tl.constexpr, PADDED_PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head, part, column = tl.program_id(0), tl.arange(0, PADDED_PARTS), tl.arange(0, D)
    slot, valid = head * parts + part, part < parts
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    maxima = tl.load(part_max + slot, mask=valid, other=-float("inf"))
    sums = tl.load(part_sum + slot, mask=valid, other=0)
    outputs = tl.load(part_out + slot[:, None] * D + column[None, :], mask=valid[:, None], other=0)
    rescale = tl.exp2(maxima - tl.max(maxima, 0))
    result = tl.sum(outputs * rescale[:, None], 0) / tl.sum(sums * rescale, 0)
    tl.store(out + head * D + column, result.to(out.dtype.element_ty))


class SplitKV(Replay):
    overlaps = False
    """Whether a kernel starts before the previous one has finished."""

    @property
    def launch_options(self):
        """The constant OVERLAP and, on GPUs since Hopper, the launch attribute that belongs to it.

        Triton's interpreter knows neither the attribute nor the instructions.
        """
        x = self.slabs
        overlaps = self.overlaps and x.is_cuda and torch.cuda.get_device_capability(x.device)[0] > 8
        return {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}

    def attend(self, qkv, slab):
        """Attend with the new token's query, key and value (3 width); return 1 x width."""
        _, heads, capacity, _ = slab.shape
        part_length = triton.cdiv(triton.cdiv(capacity, PARTS), KEYS) * KEYS
        parts = triton.cdiv(capacity, part_length)
        part_out = torch.empty(heads, parts, HEAD_DIM, device=slab.device)
        part_max, part_sum = torch.empty(2, heads, parts, device=slab.device)
        _attend_part[heads, parts](
            *(qkv, *slab, self.position, part_out, part_max, part_sum),
            *(capacity, part_length, HEAD_DIM**-0.5, HEAD_DIM, KEYS),
            num_warps=4,
            **self.launch_options,
        )
        out = slab.new_empty(1, heads * HEAD_DIM)
        _merge_parts[(heads,)](
            *(part_out, part_max, part_sum, out, parts, HEAD_DIM, triton.next_power_of_2(parts)),
            **self.launch_options,
        )
        return out

    def layer(self, x, slab, position, mask, qkv, *rest):  # noqa: ARG002  position: in attend()
        return output_and_mlp(x, self.attend(linear(norm(x), qkv), slab), *rest)


@triton.jit
def _dot(  # noqa: PLR0917  as above
    weight, x, row, columns, ROWS: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr
):
    """Return the products of x with rows of a matrix, and the sum of the squares of x."""
    at = tl.arange(0, STEP)
    address = weight + row[:, None] * columns + at[None, :]
    loaded = tl.load(address, eviction_policy="evict_first")
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # x is the previous kernel's result, the weights are not
    sums = tl.zeros((ROWS, STEP), tl.float32)
    squares = tl.zeros((STEP,), tl.float32)
    for start in range(0, columns, STEP):
        tile = loaded.to(tl.float32)
        ahead = start + STEP
        loaded = tl.load(address + ahead, mask=ahead < columns, eviction_policy="evict_first")
        value = tl.load(x + start + at).to(tl.float32)
        sums += tile * value[None, :]
        squares += value * value
    return tl.sum(sums, 1), tl.sum(squares, 0)


@triton.jit
def _dot_packed(  # noqa: PLR0917  as above
    weight, scales, x, row, row_words,
    BITS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Do the same for a matrix of packed unsigned integers; STEP counts words.

    A conversion from integer to float has a fraction of the rate of a multiply-add. So there is
    none: the bits of an integer n below 2**16, taken as those of a float, are the subnormal number
    n * 2**-149. The factor 2**149 is split in two, because a float is less than 2**128.
    """
    PER_HALF: tl.constexpr = 16 // BITS
    word = tl.arange(0, STEP)
    # value n of a group's word j is the weight of column 16 n + j: loads of x stay contiguous
    column = word // GROUP_WORDS * (GROUP_WORDS * 2 * PER_HALF) + word % GROUP_WORDS
    address = weight + row[:, None] * row_words + word[None, :]
    scale_address = (
        scales + row[:, None] * (row_words // GROUP_WORDS) + (word // GROUP_WORDS)[None, :]
    )
    loaded = tl.load(address, eviction_policy="evict_first")
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros((ROWS, STEP), tl.float32)
    squares = tl.zeros((STEP,), tl.float32)
    for start in range(0, row_words, STEP):
        words = loaded
        ahead = start + STEP
        loaded = tl.load(address + ahead, mask=ahead < row_words, eviction_policy="evict_first")
        scale = tl.load(scale_address + start // GROUP_WORDS).to(tl.float32)
        products = tl.zeros((ROWS, STEP), tl.float32)
        total = tl.zeros((STEP,), tl.float32)
        for half in tl.static_range(2):
            bits = words >> (16 * half)
            for i in tl.static_range(PER_HALF):
                n = half * PER_HALF + i
                value = tl.load(x + start * (2 * PER_HALF) + column + n * GROUP_WORDS)
                value = value.to(tl.float32)
                total += value
                squares += value * value
                # an integer stays where it is in the word, which multiplies it by 2**(BITS * i)
                integer = bits & (((1 << BITS) - 1) << (BITS * i))
                value *= 2.0 ** (100 - BITS * i)
                products += integer.to(tl.float32, bitcast=True) * value[None, :]
        offset = total * (1 << (BITS - 1))  # the integers are stored with this offset
        sums += (products * 2.0**49 - offset[None, :]) * scale
    return tl.sum(sums, 1), tl.sum(squares, 0)


@triton.jit
def _norm_linear(  # noqa: PLR0917  as above
    weight, scales, x, out, stored_columns, columns, epsilon, GELU: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if BITS == 16:
        product, squares = _dot(weight, x, row, stored_columns, ROWS, STEP, OVERLAP)
    else:
        product, squares = _dot_packed(
            weight, scales, x, row, stored_columns, BITS, ROWS, STEP, OVERLAP
        )  # fmt: skip
    result = product / tl.sqrt(squares / columns + epsilon)  # W (x / rms(x)) = (W x) / rms(x)
    if GELU:
        result = result * 0.5 * (1 + tl.erf(result * 0.7071067811865476))
    tl.store(out + row, result.to(out.dtype.element_ty))


@triton.jit
def _linear_residual(  # noqa: PLR0917  as above
    weight, scales, x, residual, out, stored_columns,
    BITS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if BITS == 16:
        product, _ = _dot(weight, x, row, stored_columns, ROWS, STEP, OVERLAP)
    else:
        product, _ = _dot_packed(
            weight, scales, x, row, stored_columns, BITS, ROWS, STEP, OVERLAP
        )  # fmt: skip
    result = product + tl.load(residual + row).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty))


class Fused(SplitKV):
    def load(self, matrix):
        """Return the stored weights, and their scales if they have any."""
        return matrix, None

    def layer(self, x, slab, position, mask, *matrices):  # noqa: ARG002  as above
        qkv, out, up, down = matrices
        attended = self.attend(self.norm_linear(qkv, x), slab)
        x = self.linear_residual(out, attended, x)
        return self.linear_residual(down, self.norm_linear(up, x, gelu=True), x)

    def norm_linear(self, matrix, x, *, gelu=False):
        weight, scales = matrix
        out = x.new_empty(1, len(weight))
        _norm_linear[self.grid(weight)](
            *(weight, scales, x, out, weight.shape[1], x.shape[1], EPSILON, gelu),
            *(self.bits, *self.tile(weight)),
            num_warps=TILES[self.bits][2],
            **self.launch_options,
        )
        return out

    def linear_residual(self, matrix, x, residual):
        weight, scales = matrix
        out = torch.empty_like(residual)
        _linear_residual[self.grid(weight)](
            *(weight, scales, x, residual, out, weight.shape[1]),
            *(self.bits, *self.tile(weight)),
            num_warps=TILES[self.bits][2],
            **self.launch_options,
        )
        return out

    def tile(self, weight):
        rows, step, _ = TILES[self.bits]
        # few programs in Triton's interpreter, which takes milliseconds for each
        return rows if weight.is_cuda else 64, min(step, weight.shape[1])

    def grid(self, weight):
        return (len(weight) // self.tile(weight)[0],)


class Overlapped(Fused):
    overlaps = True


class Int8(Overlapped):
    bits = 8

    def load(self, matrix):
        return packed(matrix, self.bits)


class Int4(Int8):
    bits = 4


def quantized(weight, bits):
    """Return unsigned integers (rows x groups x weights of a group) and scales (rows x groups).

    The scale of a group turns its largest weight into the lowest integer, so that all integers are
    used. Half of their range is added to make them unsigned.
    """
    per_word, offset = 32 // bits, 1 << (bits - 1)
    groups = weight.unflatten(1, (-1, GROUP_WORDS.value * per_word))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = largest / -offset
    integers = (groups.float() / scales.float()).round().clamp(-offset, offset - 1) + offset
    return integers.to(torch.int32), scales.squeeze(2)


def packed(weight, bits):
    """Quantize a matrix; return 32-bit words (rows x words) and scales (rows x groups).

    Value n of a group's word j is the weight of column 16 n + j.
    """
    words_per_group = GROUP_WORDS.value
    integers, scales = quantized(weight, bits)
    words = torch.zeros_like(integers[:, :, :words_per_group])
    for n, part in enumerate(integers.split(words_per_group, 2)):
        words |= part << (bits * n)
    return words.flatten(1), scales


RUNGS = {
    "graph": Graph,
    "fused": Fused,
    "overlapped": Overlapped,
    "int8": Int8,
    "int4": Int4,
}
