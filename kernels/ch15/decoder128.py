"""The decoder of kernels/ch15/decoder.py with attention heads of 128 channels, as in large models.

Weights, norm and MLP are the same. Heads of 64 channels remain in ``decoder.py``.
"""

import itertools

import torch

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


def packed_causal(q, k, v, offsets, longest):
    """Run causal attention within each prompt on packed tokens (tokens x heads x HEAD_DIM).

    ``offsets`` (int32) are where each prompt begins and where the last one ends; rows after it are
    padding and remain undefined. FlashAttention 2 reads them on the GPU. Its grid covers the number
    of prompts times ``longest``, which the host passes, so a CUDA graph can capture it for the most
    and longest prompts: blocks without tokens end at once.
    """
    if q.is_cuda:
        # varlen_attn() calls it too, but its argument for a causal mask differs between versions
        flash = torch.ops.aten._flash_attention_forward  # noqa: SLF001
        return flash(q, k, v, offsets, offsets, longest, longest, 0.0, True, False)[0]
    out = torch.zeros_like(q)
    for begin, end in itertools.pairwise(offsets.tolist()):
        if begin < end:
            out[begin:end] = causal(*(x[None, begin:end] for x in (q, k, v)))[0]
    return out
