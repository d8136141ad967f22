"""Decode one text, token by token: the rungs from eager PyTorch to 8-bit weights in a graph.

eager   PyTorch's operations, launched one by one; keys and values lie in a slab.
graph   the same operations in a CUDA graph, which is replayed for every token. What changes (the
        token, its position) lies in tensors.
fused   Triton kernels: five a layer instead of sixteen. A product of a matrix and one vector
        only reads the matrix, so norm, activation function and residual are done on the way.
int8    the same kernels, with a byte for each weight and a scale for each row.

Tokens are given, so that no choice between near ties can differ; the result is the last hidden
state at each of them. ``past`` holds the keys and values of the text so far (layers x 2 x heads x
tokens x HEAD_DIM).
"""

import torch
import triton
import triton.language as tl

from kernels.ch15.decoder import HEAD_DIM, attention, block, captured

EPSILON = 1e-6
TILE = 4096  # weights that a program has on their way at a time


def room_for(past, tokens):
    """Make slabs that hold the past and leave room for the new tokens."""
    grown = past.new_zeros(*past.shape[:3], past.shape[3] + len(tokens), HEAD_DIM)
    grown[:, :, :, : past.shape[3]] = past
    return grown


def eager(model, past, tokens):  # noqa: ARG001  it sees the model when it decodes
    slabs, length = room_for(past, tokens), past.shape[3]

    def decode(model, past, tokens):  # noqa: ARG001  the slabs begin with the past
        answers = []
        for at, token in enumerate(tokens[:, None], length):
            x = model.embedding[token][None]
            for layer, slab in zip(model.layers(), slabs, strict=True):

                def attend(q, k, v, at=at, slab=slab):
                    for kept, new in zip(slab, (k, v), strict=True):
                        kept[:, at : at + 1] = new[0].transpose(0, 1)
                    return attention(q, *(kept[:, : at + 1].transpose(0, 1)[None] for kept in slab))

                x = block(x, layer, attend)
            answers.append(x[0, 0])
        return torch.stack(answers)

    return decode


class Replay:
    """A captured step; ``step`` computes the hidden state of ``token`` at position ``at``."""

    def __init__(self, model, past, tokens):
        self.model, self.slabs = model, room_for(past, tokens)
        self.token, self.at = tokens[:1].clone(), torch.full_like(tokens[:1], past.shape[3])
        self.start, self.places = (
            past.shape[3],
            torch.arange(self.slabs.shape[3], device=past.device),
        )
        self.out = model.embedding.new_zeros(len(tokens), model.embedding.shape[1])
        self.load()
        self.replay = captured(self.step, past.device)

    def load(self):
        """Convert the weights, where a rung wants others."""

    def __call__(self, model, past, tokens):  # noqa: ARG002  they were loaded, as a server does
        self.at.fill_(self.start)
        for i in range(len(tokens)):
            self.token.copy_(tokens[i : i + 1])
            self.replay()
        return self.out.clone()

    def finish(self, x):
        self.out.index_copy_(0, self.at - self.start, x)
        self.at += 1


class Graph(Replay):
    def step(self):
        seen = (self.places <= self.at)[None, None, None]
        x = self.model.embedding[self.token][None]
        for layer, slab in zip(self.model.layers(), self.slabs, strict=True):

            def attend(q, k, v, slab=slab):
                for kept, new in zip(slab, (k, v), strict=True):
                    kept.index_copy_(1, self.at, new[0].transpose(0, 1))
                heads = (kept.transpose(0, 1)[None] for kept in slab)
                return attention(q, *heads, attn_mask=seen)

            x = block(x, layer, attend)
        self.finish(x[0])


@triton.jit
def _matrix_vector(  # noqa: PLR0917  a kernel's arguments have no names when it is launched
    weight, scale, x, residual, out, columns, epsilon,
    NORM: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, TILE)
    total = tl.zeros((ROWS, TILE), tl.float32)
    squares = tl.zeros((TILE,), tl.float32)
    for start in range(0, columns, TILE):
        w = tl.load(weight + row[:, None] * columns + (start + at)[None, :]).to(tl.float32)
        value = tl.load(x + start + at).to(tl.float32)
        total += w * value[None, :]
        if NORM:
            squares += value * value
    result = tl.sum(total, 1)
    if SCALED:
        result *= tl.load(scale + row)
    if NORM:  # x / rms(x) times a matrix is the product over rms(x)
        result *= 1 / tl.sqrt(tl.sum(squares, 0) / columns + epsilon)
    if GELU:
        result = result * 0.5 * (1 + tl.erf(result * 0.7071067811865476))
    if RESIDUAL:
        result += tl.load(residual + row).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty))


@triton.jit
def _attend(  # noqa: PLR0917  as above
    qkv, keys, values, position, out, heads, room, scale, D: tl.constexpr, TILE: tl.constexpr
):
    head, column, key = tl.program_id(0), tl.arange(0, D), tl.arange(0, TILE)
    at = tl.load(position).to(tl.int32)
    q = tl.load(qkv + head * D + column).to(tl.float32) * scale
    k = tl.load(qkv + (heads + head) * D + column)
    v = tl.load(qkv + (2 * heads + head) * D + column)
    tl.store(keys + (head * room + at) * D + column, k)
    tl.store(values + (head * room + at) * D + column, v)
    top = tl.sum(q * k.to(tl.float32), 0)  # of the token itself, which need not be read back
    weight = tl.exp(top - top)
    total = v.to(tl.float32)
    for base in range(0, at, TILE):
        inside = (base + key < at)[:, None]
        rows = (head * room + base + key)[:, None] * D + column[None, :]
        old = tl.load(keys + rows, mask=inside, other=0).to(tl.float32)
        scores = tl.where(base + key < at, tl.sum(old * q[None, :], 1), -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 0))
        shrink = tl.exp(top - higher)
        weights = tl.exp(scores - higher)
        old = tl.load(values + rows, mask=inside, other=0).to(tl.float32)
        weight = weight * shrink + tl.sum(weights, 0)
        total = total * shrink + tl.sum(old * weights[:, None], 0)
        top = higher
    tl.store(out + head * D + column, (total / weight).to(out.dtype.element_ty))


class Fused(Replay):
    def load(self):
        """Turn the matrices: a row for each output, whose sum a program computes."""
        kinds = (self.model.qkv, self.model.out, self.model.up, self.model.down)
        self.weights = [[(w.T.contiguous(), None) for w in kind] for kind in kinds]

    def step(self):
        x = self.model.embedding[self.token][0]
        for qkv, out, up, down, slab in zip(*self.weights, self.slabs, strict=True):
            mixed, heads = self.product(qkv, x, norm=True), torch.empty_like(x)
            _attend[(slab.shape[1],)](
                *(mixed, *slab, self.at, heads, slab.shape[1], slab.shape[2], HEAD_DIM**-0.5),
                *(HEAD_DIM, 64),
            )
            x = self.product(out, heads, residual=x)
            x = self.product(down, self.product(up, x, norm=True, gelu=True), residual=x)
        self.finish(x[None])

    @staticmethod
    def product(matrix, x, residual=None, *, norm=False, gelu=False):
        weight, scale = matrix
        rows, columns = weight.shape
        out, tile = x.new_empty(rows), min(columns, 1024)
        each = TILE // tile
        _matrix_vector[(rows // each,)](
            *(weight, scale, x, residual, out, columns, EPSILON),
            *(norm, gelu, residual is not None, scale is not None, each, tile),
        )
        return out


class Int8(Fused):
    def load(self):
        super().load()
        self.weights = [[self.narrow(w) for w, _ in kind] for kind in self.weights]

    @staticmethod
    def narrow(weight):
        scale = weight.abs().amax(1).float() / 127
        return (weight.float() / scale[:, None]).round().to(torch.int8), scale


RUNGS = {"graph": Graph, "fused": Fused, "int8": Int8}
