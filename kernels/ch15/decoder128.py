"""The decoder of kernels/ch15/decoder.py with attention heads of 128 channels, as in large models.

Weights, norm and MLP are the same. Heads of 64 channels remain in ``decoder.py``.
"""

from kernels.ch15.decoder import causal, norm, output_and_mlp

HEAD_DIM = 128
"""Channels per attention head."""


def qkv_projection(x, qkv):
    """Return queries, keys and values, each (... x heads x HEAD_DIM)."""
    return (norm(x) @ qkv).unflatten(-1, (3, -1, HEAD_DIM)).unbind(-3)


def block(x, layer, attend):
    """Run one layer; ``attend`` maps queries, keys and values to the attention result."""
    qkv, *rest = layer
    return output_and_mlp(x, attend(*qkv_projection(x, qkv)).flatten(-2), *rest)


def forward(model, tokens, attend=causal):
    """Return the hidden states of the last layer for sequences (... x tokens)."""
    x = model.embedding[tokens]
    for layer in model.layers():
        x = block(x, layer, attend)
    return x
