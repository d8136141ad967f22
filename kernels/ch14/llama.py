"""A decoder of the Llama kind, as a module that torch.compile gets whole or block by block.

Each block normalizes (RMSNorm with weights), attends with rotary position embeddings, and has a
SwiGLU MLP. The weights are one tensor per kind for all layers; the modules share their memory. The
arms run whole sequences, or one decode step with a KV cache, and also return the CPU time of their
first call in this process, which compiles them.
"""

import time
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from pytest_aiperf import Score

HEAD_DIM = 128
"""Channels per attention head."""
THETA = 10000.0
"""Base of the rotary position embeddings' frequencies."""


class Weights(NamedTuple):
    """Inputs are rows: a layer is ``x @ weight``."""

    embedding: torch.Tensor
    """Vocabulary x width."""
    lm_head: torch.Tensor
    """Width x vocabulary."""
    norms: torch.Tensor
    """Layers x 2 x width: before attention, and before the MLP."""
    qkv: torch.Tensor
    """Layers x width x 3 width."""
    out: torch.Tensor
    """Layers x width x width."""
    gate_up: torch.Tensor
    """Layers x width x 2 hidden."""
    down: torch.Tensor
    """Layers x hidden x width."""

    def layers(self):
        return zip(*self[2:], strict=True)


def random_weights(layers, width, hidden, vocabulary, **options):
    """Draw weights; those that add to the residual stream are smaller, as in GPT-2."""
    branches = (2 * layers) ** -0.5
    shapes = [
        (width, 3 * width, 1.0),
        (width, width, branches),
        (width, 2 * hidden, 1.0),
        (hidden, width, branches),
    ]
    kinds = [
        torch.randn(layers, rows, columns, **options).mul_(scale * rows**-0.5)
        for rows, columns, scale in shapes
    ]
    embedding = torch.randn(vocabulary, width, **options)
    lm_head = torch.randn(width, vocabulary, **options).mul_(width**-0.5)
    norms = torch.rand(layers, 2, width, **options) + 0.5
    return Weights(embedding, lm_head, norms, *kinds)


def rotations(positions, dtype):
    """Return cosine and sine of each position's angles (positions x HEAD_DIM / 2)."""
    exponents = torch.arange(0, HEAD_DIM, 2, device=positions.device) / HEAD_DIM
    angles = positions[:, None] * THETA**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x, cos, sin):
    """Rotate each pair of channels (c, c + HEAD_DIM / 2) by its position's angle."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Module):
    def __init__(self, norms, *weights, cached=()):
        super().__init__()
        self.attention_norm, self.mlp_norm = map(nn.Parameter, norms)
        self.qkv, self.out, self.gate_up, self.down = map(nn.Parameter, weights)
        self.keys, self.values = map(nn.Buffer, cached) if cached else (None, None)

    def forward(self, x, cos, sin, position=None, mask=None):
        width = x.shape[-1:]
        qkv = rms_norm(x, width, self.attention_norm) @ self.qkv
        q, k, v = qkv.unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.keys is not None:
            self.keys[:, :, position] = k
            self.values[:, :, position] = v
            k, v = self.keys, self.values
        attended = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + attended.transpose(1, 2).flatten(-2) @ self.out
        gate, up = (rms_norm(x, width, self.mlp_norm) @ self.gate_up).chunk(2, -1)
        return x + (silu(gate) * up) @ self.down


class Llama(nn.Module):
    """The caches, if there are any, are (2 x layers x sequences x heads x capacity x HEAD_DIM).

    The rotations are tables of all positions: a model that is compiled whole would compute them
    anew in the kernels of each layer.
    """

    def __init__(self, weights, length, caches=None):
        super().__init__()
        self.embedding, self.lm_head = map(nn.Parameter, weights[:2])
        positions = torch.arange(length, device=self.embedding.device)
        self.cos, self.sin = map(nn.Buffer, rotations(positions, self.embedding.dtype))
        cached = [()] * len(weights.qkv) if caches is None else list(zip(*caches, strict=True))
        pairs = zip(weights.layers(), cached, strict=True)
        self.blocks = nn.ModuleList(Block(*layer, cached=pair) for layer, pair in pairs)

    def forward(self, tokens, position=None):
        """Return logits of whole sequences, or of one token each at a position of the caches."""
        x, cos, sin, mask = self.embedding[tokens], self.cos, self.sin, None
        if position is not None:
            positions = torch.arange(len(cos), device=x.device)
            mask = (positions <= position)[None, None, None]
            cos, sin = cos[position], sin[position]
        for block in self.blocks:
            x = block(x, cos, sin, position, mask)
        return rms_norm(x, x.shape[-1:]) @ self.lm_head


def whole(model, **options):
    model.compile(dynamic=False, **options)


def per_block(model, **options):
    for block in model.blocks:
        block.compile(dynamic=False, **options)


class FirstCall:
    """The CPU seconds that this process spent in an arm's first call, its compilation included.

    Not the time that passed: meanwhile the process may wait for a GPU that others use. The
    compiler's own worker processes, which translate kernels, are not counted.
    """

    def __init__(self):
        self.seconds = None

    def __call__(self, function, *args):
        """Call a function; its first call compiles without the results of earlier processes."""
        if self.seconds is not None:
            return function(*args)
        load_compiler(args[0].device)
        with torch.compiler.config.patch(force_disable_caches=True):
            begin = time.process_time()
            result = function(*args)
            self.seconds = time.process_time() - begin
        return result

    def score(self):
        return Score(self.seconds, "s of CPU time in the first call", "lower")


@cache
def load_compiler(device):
    """Compile another function, so that no arm's first call imports the parts of the compiler."""
    weight = torch.ones(64, 64, device=device)
    torch.compile(lambda x: rms_norm(silu(x @ weight), weight.shape[1:]))(weight)


def inference(compile_model=None, **options):
    """Make an arm that returns the logits of whole sequences or, with caches, of one token each."""
    first_call = FirstCall()

    def make(weights, tokens, *cache_and_position):
        caches = cache_and_position[:1]
        length = caches[0].shape[-2] if caches else tokens.shape[1]
        model = Llama(weights, length, *caches).requires_grad_(requires_grad=False)
        if compile_model:
            compile_model(model, **options)

        def forward(tokens, *position):
            torch.compiler.cudagraph_mark_step_begin()
            # a graph overwrites its own output in the next replay
            return model(tokens, *position).clone()

        first_call(forward, tokens, *cache_and_position[1:])

        def step(_weights, tokens, *cache_and_position):
            return forward(tokens, *cache_and_position[1:]), first_call.score()

        return step

    return make


def in_fp64(weights, tokens, caches=None, position=None):
    """Return logits; rotations are complex products, and backward passes recompute each block."""
    x = weights.embedding[tokens].double()
    ranges = torch.arange(tokens.shape[1], device=x.device) if position is None else position
    exponents = torch.arange(HEAD_DIM // 2, device=x.device, dtype=torch.float64)
    angles = ranges[:, None].double() / THETA ** (2 * exponents / HEAD_DIM)
    turn = torch.polar(torch.ones_like(angles), angles)
    layers = list(weights.layers())
    cached = [None] * len(layers) if caches is None else list(zip(*caches, strict=True))
    for layer, pair in zip(layers, cached, strict=True):
        run = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        x = run(_block_in_fp64, x, turn, pair, position, *layer)
    return x / x.square().mean(-1, keepdim=True).sqrt() @ weights.lm_head.double()


def _block_in_fp64(x, turn, cached, position, norms, *weights):
    qkv_weight, out, gate_up, down = (w.double() for w in weights)
    first_norm, second_norm = norms.double()

    def turned(heads):
        pairs = torch.complex(*heads.unflatten(-1, (2, -1)).unbind(-2))
        pairs = pairs * turn[:, None]
        return torch.cat((pairs.real, pairs.imag), -1)

    qkv = normalized(x) * first_norm @ qkv_weight
    q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in qkv.chunk(3, -1))
    q, k = turned(q), turned(k)
    last = torch.arange(x.shape[1], device=x.device)
    if cached is not None:
        for kept, new in zip(cached, (k, v), strict=True):
            kept[:, :, position] = new.transpose(1, 2)
        k, v = (kept.transpose(1, 2) for kept in cached)
        last = position
    scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / HEAD_DIM**0.5
    hidden = torch.arange(k.shape[1], device=x.device) > last[:, None]
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    x = x + torch.einsum("bhqk,bkhc->bqhc", shares, v).flatten(-2) @ out
    gate, up = (normalized(x) * second_norm @ gate_up).chunk(2, -1)
    return x + gate * torch.sigmoid(gate) * up @ down


def normalized(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()
