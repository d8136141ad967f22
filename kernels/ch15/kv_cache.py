"""Decode given tokens after their prompts: without a KV cache, and with two kinds of KV cache.

recompute  No cache: prompt and new tokens run through the model for each new token.
concat     ``torch.cat`` appends the keys and values of each new token to those of all earlier
           tokens. The new ones are made contiguous first, because `cat` is slow on strided views.
slab       Keys and values are written in place into arrays of the final length.

Each function prefills its cache from the prompts and returns the function that decodes. Decoding
returns the last hidden state of each new token (new tokens x batch x width).
"""

import torch

from kernels.ch15.decoder import attention, causal
from kernels.ch15.decoder128 import block, forward


def recompute(_model, _prompts, _new):
    def decode(model, prompts, new):
        sequences = torch.cat([prompts, new], 1)
        ends = range(prompts.shape[1] + 1, sequences.shape[1] + 1)
        return torch.stack([forward(model, sequences[:, :end])[:, -1] for end in ends])

    return decode


def _prefill(model, prompts):
    """Return keys and values of each layer (batch x tokens x heads x HEAD_DIM)."""
    kv = []

    def attend(q, k, v):
        kv.append((k.contiguous(), v.contiguous()))
        return causal(q, k, v)

    forward(model, prompts, attend)
    return kv


def concat(model, prompts, _new):
    prefilled = _prefill(model, prompts)

    def decode(model, _prompts, new):
        caches, hidden_states = list(prefilled), []
        for tokens in new.unbind(1):
            x = model.embedding[tokens[:, None]]
            for i, layer in enumerate(model.layers()):

                def attend(q, k, v, i=i):
                    pairs = zip(caches[i], (k, v), strict=True)
                    caches[i] = tuple(torch.cat([old, new.contiguous()], 1) for old, new in pairs)
                    return attention(q, *caches[i])

                x = block(x, layer, attend)
            hidden_states.append(x[:, 0])
        return torch.stack(hidden_states)

    return decode


def slab(model, prompts, new):
    length, slabs = prompts.shape[1], []
    for kv in _prefill(model, prompts):
        kv_slab = [x.new_empty(len(x), length + new.shape[1], *x.shape[2:]) for x in kv]
        for cache, x in zip(kv_slab, kv, strict=True):
            cache[:, :length] = x
        slabs.append(kv_slab)

    def decode(model, _prompts, new):
        hidden_states = []
        for at, tokens in enumerate(new.unbind(1), length):
            x = model.embedding[tokens[:, None]]
            for layer, kv_slab in zip(model.layers(), slabs, strict=True):

                def attend(q, k, v, at=at, kv_slab=kv_slab):
                    for cache, latest in zip(kv_slab, (k, v), strict=True):
                        cache[:, at : at + 1] = latest
                    return attention(q, *(cache[:, : at + 1] for cache in kv_slab))

                x = block(x, layer, attend)
            hidden_states.append(x[:, 0])
        return torch.stack(hidden_states)

    return decode
