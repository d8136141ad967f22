"""Decode tokens that are given, one after the other, behind prompts: three caches.

recompute  none: prompt and new tokens run through the model for each new token.
concat     keys and values of all tokens so far, to which those of the new token are appended.
           Those are views of a projection: copied first, since `cat` is slow where one is strided.
slab       the same, in arrays as long as the text will become.

Each prepares what it keeps of the prompts, and returns what decodes: the last hidden state at each
new token (new tokens x batch x width).
"""

import torch

from kernels.ch15.decoder import attention, block, causal, forward


def recompute(_model, _prompts, _new):
    def decode(model, prompts, new):
        whole = torch.cat([prompts, new], 1)
        ends = range(prompts.shape[1] + 1, whole.shape[1] + 1)
        return torch.stack([forward(model, whole[:, :end])[:, -1] for end in ends])

    return decode


def _prefill(model, prompts):
    """Give keys and values of each layer (batch x tokens x heads x HEAD)."""
    kept = []

    def attend(q, k, v):
        kept.append((k.contiguous(), v.contiguous()))
        return causal(q, k, v)

    forward(model, prompts, attend)
    return kept


def concat(model, prompts, _new):
    prefilled = _prefill(model, prompts)

    def decode(model, _prompts, new):
        caches, answers = list(prefilled), []
        for tokens in new.unbind(1):
            x = model.embedding[tokens[:, None]]
            for i, layer in enumerate(model.layers()):

                def attend(q, k, v, i=i):
                    pairs = zip(caches[i], (k, v), strict=True)
                    caches[i] = tuple(torch.cat([old, new.contiguous()], 1) for old, new in pairs)
                    return attention(q, *caches[i])

                x = block(x, layer, attend)
            answers.append(x[:, 0])
        return torch.stack(answers)

    return decode


def slab(model, prompts, new):
    length, slabs = prompts.shape[1], []
    for pair in _prefill(model, prompts):
        room = [x.new_empty(len(x), length + new.shape[1], *x.shape[2:]) for x in pair]
        for kept, x in zip(room, pair, strict=True):
            kept[:, :length] = x
        slabs.append(room)

    def decode(model, _prompts, new):
        answers = []
        for at, tokens in enumerate(new.unbind(1), length):
            x = model.embedding[tokens[:, None]]
            for layer, room in zip(model.layers(), slabs, strict=True):

                def attend(q, k, v, at=at, room=room):
                    for kept, latest in zip(room, (k, v), strict=True):
                        kept[:, at : at + 1] = latest
                    return attention(q, *(kept[:, : at + 1] for kept in room))

                x = block(x, layer, attend)
            answers.append(x[:, 0])
        return torch.stack(answers)

    return decode
