"""A small transformer decoder for serving claims: blocks of attention and an MLP, without biases.

There is no positional encoding: the causal mask suffices for these claims.
"""

import gc
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import gelu, rms_norm

HEAD_DIM = 64
"""Channels per attention head."""


class Decoder(NamedTuple):
    """Weights, one tensor per kind for all layers. Inputs are rows: a layer is ``x @ weight``."""

    embedding: torch.Tensor
    """Vocabulary x width."""
    lm_head: torch.Tensor
    """Vocabulary x width: the logits of a hidden state are ``x @ lm_head.T``."""
    qkv: torch.Tensor
    """Layers x width x 3 width."""
    out: torch.Tensor
    """Layers x width x width: the output projection of attention."""
    up: torch.Tensor
    """Layers x width x 4 width."""
    down: torch.Tensor
    """Layers x 4 width x width."""

    def layers(self, count=None):
        """Return the weights of each layer, or of the first ``count`` layers."""
        return list(zip(*(kind[:count] for kind in self[2:]), strict=True))

    def to(self, dtype):
        return Decoder(*(weight.to(dtype) for weight in self))


def random_decoder(layers, width, vocabulary, **options):
    """Draw weights scaled so that each layer adds about as much to x as the embedding does."""
    shapes = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)
    weights = [torch.randn(layers, *s, **options).mul_(s[0] ** -0.5) for s in shapes]
    tables = [torch.randn(vocabulary, width, **options) for _ in range(2)]
    return Decoder(*tables, *weights)


def norm(x):
    return rms_norm(x, x.shape[-1:])


def qkv_projection(x, qkv):
    """Return queries, keys and values, each (... x heads x HEAD_DIM)."""
    return (norm(x) @ qkv).unflatten(-1, (3, -1, HEAD_DIM)).unbind(-3)


def output_and_mlp(x, attended, out, up, down):
    """Add the output projection of the attention result (... x width), then the MLP."""
    x = x + attended @ out
    return x + gelu(norm(x) @ up) @ down


def block(x, layer, attend):
    """Run one layer; ``attend`` maps queries, keys and values to the attention result."""
    qkv, *rest = layer
    return output_and_mlp(x, attend(*qkv_projection(x, qkv)).flatten(-2), *rest)


def attention(q, k, v, **options):
    """Run scaled_dot_product_attention on (batch x tokens x heads x HEAD_DIM)."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(*heads_first, **options).transpose(1, 2)


def causal(q, k, v):
    return attention(q, k, v, is_causal=True)


def forward(model, tokens, attend=causal):
    """Return the hidden states of the last layer for sequences (batch x tokens)."""
    x = model.embedding[tokens]
    for layer in model.layers():
        x = block(x, layer, attend)
    return x


def captured(step, device):
    """Capture a step in a CUDA graph and return its replay; without a GPU, return the step.

    The graph holds addresses, not tensors: the caller must hold the tensors that the step reads and
    writes for as long as it replays.
    """
    if torch.device(device).type != "cuda":
        return step
    return capture_graph(step).replay


@cache
def _capture_stream():
    return torch.cuda.Stream()


def capture_graph(step, *pool):
    """Capture a step in a CUDA graph. The graph allocates from ``pool`` if one is given.

    This does not use torch.cuda.graph(), which first returns all unused memory to the driver:
    returning and reallocating it takes many times as long as a capture.
    """
    step()  # initializes the libraries, which a capture forbids
    graph, gc_was_enabled = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()  # a collection may destroy another graph, which would invalidate this capture
    try:
        with torch.cuda.stream(_capture_stream()):
            graph.capture_begin(*pool)
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # the error of the step explains more
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if gc_was_enabled:
            gc.enable()
    return graph
