"""Decode one sequence token by token, from eager PyTorch to 8-bit weights in a CUDA graph.

eager   PyTorch's operations, launched one by one; the KV cache is a preallocated slab.
graph   The same operations in a CUDA graph, replayed per token. The token and its position change
        from replay to replay, so they live in tensors.
fused   Triton kernels: five per layer instead of sixteen. A matrix-vector product is bound by
        reading the matrix, so norm, activation function and residual are computed in it for free.
int8    The same kernels with one byte per weight and one scale per row (weight-only quantization).

The tokens are given instead of chosen, so rounding cannot select another token. The result is the
last hidden state at each token. ``past`` holds the keys and values of the previous tokens
(layers x 2 x heads x tokens x HEAD_DIM).
"""

import torch
import triton
import triton.language as tl

from kernels.ch15.decoder import HEAD_DIM, attention, block, captured

EPSILON = 1e-6
"""Added to the mean square in the RMS norm, so that a zero vector causes no division by zero."""

TILE = 4096
"""Weights that a program of the matrix-vector product loads at a time."""


def cache_slab(past, tokens):
    """Copy the past into slabs that have room for the new tokens."""
    slabs = past.new_zeros(*past.shape[:3], past.shape[3] + len(tokens), HEAD_DIM)
    slabs[:, :, :, : past.shape[3]] = past
    return slabs


def eager(model, past, tokens):  # noqa: ARG001  model: used in decode()
    slabs, length = cache_slab(past, tokens), past.shape[3]

    def decode(model, past, tokens):  # noqa: ARG001  the slabs contain the past
        states = []
        for position, token in enumerate(tokens[:, None], length):
            x = model.embedding[token][None]
            for layer, slab in zip(model.layers(), slabs, strict=True):

                def attend(q, k, v, position=position, slab=slab):
                    for cached, new in zip(slab, (k, v), strict=True):
                        cached[:, position : position + 1] = new[0].transpose(0, 1)
                    filled = (cached[:, : position + 1].transpose(0, 1)[None] for cached in slab)
                    return attention(q, *filled)

                x = block(x, layer, attend)
            states.append(x[0, 0])
        return torch.stack(states)

    return decode


class Replay:
    """A captured step; ``step`` computes the hidden state of ``token`` at ``position``."""

    def __init__(self, model, past, tokens):
        self.model, self.slabs = model, cache_slab(past, tokens)
        self.token = tokens[:1].clone()
        self.position = torch.full_like(tokens[:1], past.shape[3])
        self.start = past.shape[3]
        self.positions = torch.arange(self.slabs.shape[3], device=past.device)
        self.out = model.embedding.new_zeros(len(tokens), model.embedding.shape[1])
        self.load_weights()
        self.replay = captured(self.step, past.device)

    def load_weights(self):
        """Convert the weights to the rung's format; here, keep them as they are."""

    def __call__(self, model, past, tokens):  # noqa: ARG002  model, past: loaded once
        self.position.fill_(self.start)
        for i in range(len(tokens)):
            self.token.copy_(tokens[i : i + 1])
            self.replay()
        return self.out.clone()

    def finish(self, x):
        self.out.index_copy_(0, self.position - self.start, x)
        self.position += 1


class Graph(Replay):
    def step(self):
        mask = (self.positions <= self.position)[None, None, None]
        x = self.model.embedding[self.token][None]
        for layer, slab in zip(self.model.layers(), self.slabs, strict=True):

            def attend(q, k, v, slab=slab):
                for cached, new in zip(slab, (k, v), strict=True):
                    cached.index_copy_(1, self.position, new[0].transpose(0, 1))
                heads = (cached.transpose(0, 1)[None] for cached in slab)
                return attention(q, *heads, attn_mask=mask)

            x = block(x, layer, attend)
        self.finish(x[0])


@triton.jit
def _matrix_vector(  # noqa: PLR0917  a launch passes arguments by position
    weight, scale, x, residual, out, columns, epsilon,
    NORM: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, TILE)
    products = tl.zeros((ROWS, TILE), tl.float32)
    squares = tl.zeros((TILE,), tl.float32)
    for start in range(0, columns, TILE):
        w = tl.load(weight + row[:, None] * columns + (start + column)[None, :]).to(tl.float32)
        value = tl.load(x + start + column).to(tl.float32)
        products += w * value[None, :]
        if NORM:
            squares += value * value
    result = tl.sum(products, 1)
    if SCALED:
        result *= tl.load(scale + row)
    if NORM:  # W (x / rms(x)) = (W x) / rms(x)
        result *= 1 / tl.sqrt(tl.sum(squares, 0) / columns + epsilon)
    if GELU:
        result = result * 0.5 * (1 + tl.erf(result * 0.7071067811865476))
    if RESIDUAL:
        result += tl.load(residual + row).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty))


@triton.jit
def _attend(  # noqa: PLR0917  as above
    qkv, keys, values, position, out, heads, capacity, scale, D: tl.constexpr, TILE: tl.constexpr
):
    head, column, key = tl.program_id(0), tl.arange(0, D), tl.arange(0, TILE)
    length = tl.load(position).to(tl.int32)
    q = tl.load(qkv + head * D + column).to(tl.float32) * scale
    k = tl.load(qkv + (heads + head) * D + column)
    v = tl.load(qkv + (2 * heads + head) * D + column)
    tl.store(keys + (head * capacity + length) * D + column, k)
    tl.store(values + (head * capacity + length) * D + column, v)
    # start with the new token, whose key and value are already in registers
    running_max = tl.sum(q * k.to(tl.float32), 0)
    denominator = tl.exp(running_max - running_max)
    accumulator = v.to(tl.float32)
    for start in range(0, length, TILE):
        valid = (start + key < length)[:, None]
        offsets = (head * capacity + start + key)[:, None] * D + column[None, :]
        cached = tl.load(keys + offsets, mask=valid, other=0).to(tl.float32)
        scores = tl.where(start + key < length, tl.sum(cached * q[None, :], 1), -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 0))
        rescale = tl.exp(running_max - new_max)
        weights = tl.exp(scores - new_max)
        cached = tl.load(values + offsets, mask=valid, other=0).to(tl.float32)
        denominator = denominator * rescale + tl.sum(weights, 0)
        accumulator = accumulator * rescale + tl.sum(cached * weights[:, None], 0)
        running_max = new_max
    tl.store(out + head * D + column, (accumulator / denominator).to(out.dtype.element_ty))


class Fused(Replay):
    def load_weights(self):
        """Transpose the matrices: one contiguous row per output."""
        kinds = (self.model.qkv, self.model.out, self.model.up, self.model.down)
        self.weights = [[(w.T.contiguous(), None) for w in kind] for kind in kinds]

    def step(self):
        x = self.model.embedding[self.token][0]
        for qkv, out, up, down, slab in zip(*self.weights, self.slabs, strict=True):
            projected, attended = self.product(qkv, x, norm=True), torch.empty_like(x)
            _attend[(slab.shape[1],)](
                *(projected, *slab, self.position, attended),
                *(slab.shape[1], slab.shape[2], HEAD_DIM**-0.5, HEAD_DIM, 64),
            )
            x = self.product(out, attended, residual=x)
            x = self.product(down, self.product(up, x, norm=True, gelu=True), residual=x)
        self.finish(x[None])

    @staticmethod
    def product(matrix, x, residual=None, *, norm=False, gelu=False):
        """Multiply ``matrix`` (weights, scale) by x or norm(x); apply GELU; add residual."""
        weight, scale = matrix
        rows, columns = weight.shape
        out, tile = x.new_empty(rows), min(columns, 1024)
        tile_rows = TILE // tile
        _matrix_vector[(rows // tile_rows,)](
            *(weight, scale, x, residual, out, columns, EPSILON),
            *(norm, gelu, residual is not None, scale is not None, tile_rows, tile),
        )
        return out


class Int8(Fused):
    def load_weights(self):
        super().load_weights()
        self.weights = [[self.quantize(w) for w, _ in kind] for kind in self.weights]

    @staticmethod
    def quantize(weight):
        scale = weight.abs().amax(1).float() / 127
        return (weight.float() / scale[:, None]).round().to(torch.int8), scale


RUNGS = {"graph": Graph, "fused": Fused, "int8": Int8}
