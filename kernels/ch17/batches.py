"""The mean hidden state of sequences of different lengths in an encoder, batched in three ways.

padded     batches in order of arrival, each padded to its longest sequence.
bucketed   the same, with sequences sorted by length.
packed     all sequences concatenated into one row of tokens; variable-length attention gets the
           offset at which each begins.

``lengths`` are the lengths of the sequences, on the host; ``limits`` is a copy on the GPU.
"""

import torch
from torch.nn.attention.varlen import varlen_attn

from kernels.ch15.decoder import attention
from kernels.ch15.decoder128 import block, forward

BATCH = 32
"""Sequences per batch."""


def _in_batches(model, ids, limits, order, lengths):
    means = model.embedding.new_empty(len(ids), model.embedding.shape[1])
    positions = torch.arange(ids.shape[1], device=ids.device)
    for first in range(0, len(ids), BATCH):
        rows = order[first : first + BATCH]
        # a multiple of 8: aligned for GEMM and attention kernels
        longest = -(-max(lengths[first : first + BATCH]) // 8) * 8
        is_token = positions[:longest] < limits[rows, None]

        def attend(q, k, v, is_token=is_token):
            return attention(q, k, v, attn_mask=is_token[:, None, None])

        x = forward(model, ids[rows, :longest], attend)
        means[rows] = (x * is_token[:, :, None]).sum(1) / limits[rows, None]
    return means


def padded(model, ids, limits, lengths):
    order = torch.arange(len(ids), device=ids.device)
    return _in_batches(model, ids, limits, order, lengths.tolist())


def bucketed(model, ids, limits, lengths):
    return _in_batches(model, ids, limits, limits.argsort(), sorted(lengths.tolist()))


def packed(model, ids, limits, lengths):
    total, longest = int(lengths.sum()), int(lengths.max())
    numbers = torch.arange(len(ids), device=ids.device)
    sequence = numbers.repeat_interleave(limits, output_size=total)
    ends = limits.cumsum(0)
    position = torch.arange(total, device=ids.device) - (ends - limits)[sequence]
    offsets = torch.nn.functional.pad(ends, (1, 0)).int()

    def attend(q, k, v):
        if q.is_cuda:
            return varlen_attn(q, k, v, offsets, offsets, longest, longest)
        split = (x.split(lengths.tolist()) for x in (q, k, v))
        sequences = ([x[None] for x in qkv] for qkv in zip(*split, strict=True))
        return torch.cat([attention(*qkv)[0] for qkv in sequences])

    x = model.embedding[ids[sequence, position]]
    for layer in model.layers():
        x = block(x, layer, attend)
    sums = torch.zeros(len(ids), x.shape[1], device=x.device).index_add_(0, sequence, x.float())
    return (sums / limits[:, None]).to(x.dtype)
