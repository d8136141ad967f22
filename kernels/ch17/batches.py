"""An encoder over texts of different lengths, whose mean hidden states are wanted: three batchings.

padded     batches in order of arrival, each as long as its longest text.
bucketed   the same, of texts sorted by length.
packed     all texts end to end in one row of tokens; attention is told where each begins.
"""

import torch
from torch.nn.attention.varlen import varlen_attn

from kernels.ch15.decoder import attention, block, forward

BATCH = 32


def _in_batches(model, ids, limits, order, lengths):
    means = model.embedding.new_empty(len(ids), model.embedding.shape[1])
    places = torch.arange(ids.shape[1], device=ids.device)
    for first in range(0, len(ids), BATCH):
        part = order[first : first + BATCH]
        longest = -(-max(lengths[first : first + BATCH]) // 8) * 8  # what kernels like
        inside = places[:longest] < limits[part, None]

        def attend(q, k, v, inside=inside):
            return attention(q, k, v, attn_mask=inside[:, None, None])

        x = forward(model, ids[part, :longest], attend)
        means[part] = (x * inside[:, :, None]).sum(1) / limits[part, None]
    return means


def padded(model, ids, limits, lengths):
    order = torch.arange(len(ids), device=ids.device)
    return _in_batches(model, ids, limits, order, lengths.tolist())


def bucketed(model, ids, limits, lengths):
    return _in_batches(model, ids, limits, limits.argsort(), sorted(lengths.tolist()))


def packed(model, ids, limits, lengths):
    total, longest = int(lengths.sum()), int(lengths.max())
    numbers = torch.arange(len(ids), device=ids.device)
    text = numbers.repeat_interleave(limits, output_size=total)
    ends = limits.cumsum(0)
    place = torch.arange(total, device=ids.device) - (ends - limits)[text]
    bounds = torch.nn.functional.pad(ends, (1, 0)).int()

    def attend(q, k, v):
        if q.is_cuda:
            return varlen_attn(q, k, v, bounds, bounds, longest, longest)
        parts = (x.split(lengths.tolist()) for x in (q, k, v))
        texts = ([x[None] for x in text] for text in zip(*parts, strict=True))
        return torch.cat([attention(*text)[0] for text in texts])

    x = model.embedding[ids[text, place]]
    for layer in model.layers():
        x = block(x, layer, attend)
    sums = torch.zeros(len(ids), x.shape[1], device=x.device).index_add_(0, text, x.float())
    return (sums / limits[:, None]).to(x.dtype)
