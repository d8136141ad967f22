"""A small transformer for claims about serving: blocks of attention and an MLP, and no biases.

Positions are not encoded: a causal mask is all the order that these claims need.
"""

import gc
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import gelu, rms_norm

HEAD = 64


class Decoder(NamedTuple):
    """Weights, those of a kind in one array; inputs are rows, so that ``x @ weight`` is a layer."""

    embedding: torch.Tensor  # tokens x width
    head: torch.Tensor  # tokens x width
    qkv: torch.Tensor  # layers x width x 3 width
    out: torch.Tensor  # layers x width x width
    up: torch.Tensor  # layers x width x 4 width
    down: torch.Tensor  # layers x 4 width x width

    def layers(self, count=None):
        """The weights of each layer, of the first ``count`` where that is given."""
        return list(zip(*(kind[:count] for kind in self[2:]), strict=True))

    def to(self, dtype):
        return Decoder(*(weight.to(dtype) for weight in self))


def random_decoder(layers, width, tokens, **kind):
    """Draw weights under which every layer adds about as much as the embedding brings."""
    shapes = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)
    weights = [torch.randn(layers, *s, **kind).mul_(s[0] ** -0.5) for s in shapes]
    tables = [torch.randn(tokens, width, **kind) for _ in range(2)]
    return Decoder(*tables, *weights)


def norm(x):
    return rms_norm(x, x.shape[-1:])


def before(x, qkv):
    """Give queries, keys and values (... x heads x HEAD), which attention takes."""
    return (norm(x) @ qkv).unflatten(-1, (3, -1, HEAD)).unbind(-3)


def after(x, mixed, out, up, down):
    """Do what follows attention, whose result is ``mixed`` (... x width)."""
    x = x + mixed @ out
    return x + gelu(norm(x) @ up) @ down


def block(x, layer, attend):
    """One layer; ``attend`` gets queries, keys and values."""
    qkv, *rest = layer
    return after(x, attend(*before(x, qkv)).flatten(-2), *rest)


def attention(q, k, v, **how):
    """Attend over (batch x tokens x heads x HEAD)."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, **how).transpose(1, 2)


def causal(q, k, v):
    return attention(q, k, v, is_causal=True)


def forward(model, tokens, attend=causal):
    """Give the last hidden states of sequences (batch x tokens), all positions at once."""
    x = model.embedding[tokens]
    for layer in model.layers():
        x = block(x, layer, attend)
    return x


def captured(step, device):
    """Capture a step in a CUDA graph and return its replay; without a GPU, the step itself."""
    if torch.device(device).type != "cuda":
        return step
    return graph_of(step).replay


@cache
def _aside():
    return torch.cuda.Stream()


def graph_of(step, *pool):
    """Capture a step in a CUDA graph, whose memory comes from ``pool`` where one is given.

    Not by torch.cuda.graph(), which first gives all unused memory back to the driver: that, and
    asking for it anew, takes many times as long as a capture.
    """
    step()  # libraries set themselves up in a first call, which captures forbid
    graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()  # a collection may destroy another graph, which would invalidate this capture
    try:
        with torch.cuda.stream(_aside()):
            graph.capture_begin(*pool)
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # that of the step says more
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    return graph
