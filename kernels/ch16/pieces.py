"""A transformer's forward pass over batches of prompts of any length, launched in four ways.

The tokens of a batch are packed: its prompts follow each other without padding, and offsets say
where each begins. Variable-length attention attends within each prompt.

eager       operation by operation.
padded      the whole pass as one CUDA graph for the most tokens. Each batch is padded to them.
bucketed    the whole pass as a graph for each of a few numbers of tokens (buckets). A batch uses
            the smallest bucket that fits.
piecewise   one graph per bucket and piece, where a piece is what lies between two attentions. The
            pieces treat each token independently, so they may run on padding. Attention is launched
            eagerly, for exactly the batch's prompts.

Padding follows the last prompt and belongs to none, so it does not change their results. Each of
the four writes the hidden state of each prompt's last token.
"""

import itertools
from typing import NamedTuple

import torch

from kernels.ch15.decoder import captured, norm, output_and_mlp
from kernels.ch15.decoder128 import HEAD_DIM, forward, packed_causal

BUCKETS = 128, 256, 512, 1024
"""Token counts for which graphs are captured."""

SIZES = 1, 2, 3, 4, 5, 6, 7, 8
"""Prompts per batch, in turn: the load of a server changes."""


class Batch(NamedTuple):
    rows: slice
    """Its prompts."""
    tokens: torch.Tensor
    """The tokens of all prompts, packed."""
    offsets: torch.Tensor
    """Where each prompt begins. The end follows, once for the last and for each missing prompt."""
    longest: int

    @property
    def exact_offsets(self):
        return self.offsets[: self.rows.stop - self.rows.start + 1]


def batches(prompts, lengths):
    """Yield the batches. Offsets reach the GPU in one copy."""
    counts, sizes, batches_of_counts = lengths.tolist(), itertools.cycle(SIZES), []
    while counts:
        size = next(sizes)
        batches_of_counts.append(counts[:size])
        counts = counts[size:]
    offsets = []
    for batch in batches_of_counts:
        missing = [0] * (max(SIZES) - len(batch))
        offsets.append(list(itertools.accumulate([*batch, *missing], initial=0)))
    offsets = torch.tensor(offsets, dtype=torch.int32).to(prompts.device)
    first = 0
    for batch, offsets_of_batch in zip(batches_of_counts, offsets, strict=True):
        rows = slice(first, first + len(batch))
        pairs = zip(prompts[rows], batch, strict=True)
        tokens = torch.cat([prompt[:count] for prompt, count in pairs])
        yield Batch(rows, tokens, offsets_of_batch, max(batch))
        first = rows.stop


def write_last(batch, x, out):
    """Write the hidden state of each prompt's last token."""
    torch.index_select(x, 0, batch.exact_offsets[1:] - 1, out=out[batch.rows])


def eager(model, prompts, lengths, out):
    for batch in batches(prompts, lengths):
        layout = batch.exact_offsets, batch.longest
        x = forward(model, batch.tokens, lambda *qkv, layout=layout: packed_causal(*qkv, *layout))
        write_last(batch, x, out)


class Whole:
    """The graph of the whole pass for one bucket, and the tensors that it reads and writes."""

    def __init__(self, model, bucket, longest):
        self.model, self.longest, device = model, longest, model.embedding.device
        self.tokens = torch.zeros(bucket, dtype=torch.long, device=device)
        self.offsets = torch.zeros(max(SIZES) + 1, dtype=torch.int32, device=device)
        self.x = model.embedding.new_zeros(bucket, model.embedding.shape[1])
        self.replay = captured(self.step, device)

    def step(self):
        layout = self.offsets, self.longest
        self.x.copy_(forward(self.model, self.tokens, lambda *qkv: packed_causal(*qkv, *layout)))

    def run(self, batch):
        self.tokens[: len(batch.tokens)] = batch.tokens
        self.offsets.copy_(batch.offsets)
        self.replay()
        return self.x


class Pieces:
    """The graphs of one bucket, and the tensors that they read and write."""

    def __init__(self, model, bucket, _longest):
        width = model.embedding.shape[1]
        self.model, self.layers = model, model.layers()
        self.tokens = torch.zeros(bucket, dtype=torch.long, device=model.embedding.device)
        self.x, self.attended = (model.embedding.new_zeros(bucket, width) for _ in range(2))
        self.qkv = model.embedding.new_zeros(bucket, 3 * width)
        self.replays = [
            captured(lambda i=i: self.piece(i), self.x.device) for i in range(len(self.layers) + 1)
        ]

    def piece(self, i):
        """Compute what lies between two attentions; the first piece embeds the tokens."""
        if i == 0:
            self.x.copy_(self.model.embedding[self.tokens])
        else:
            self.x.copy_(output_and_mlp(self.x, self.attended, *self.layers[i - 1][1:]))
        if i < len(self.layers):
            torch.mm(norm(self.x), self.layers[i][0], out=self.qkv)

    def run(self, batch):
        count = len(batch.tokens)
        self.tokens[:count] = batch.tokens
        qkv = self.qkv[:count].unflatten(-1, (3, -1, HEAD_DIM)).unbind(1)
        self.replays[0]()
        for replay in self.replays[1:]:
            attended = packed_causal(*qkv, batch.exact_offsets, batch.longest)
            self.attended[:count] = attended.flatten(1)
            replay()
        return self.x


def padded(model, prompts, _lengths, _out):
    longest = prompts.shape[1]
    return _by_bucket(Whole, model, [max(SIZES) * longest], longest)


def bucketed(model, prompts, _lengths, _out):
    return _by_bucket(Whole, model, BUCKETS, prompts.shape[1])


def piecewise(model, prompts, _lengths, _out):
    return _by_bucket(Pieces, model, BUCKETS, prompts.shape[1])


def _by_bucket(graphs, model, buckets, longest):
    """Capture graphs for each bucket, and return an arm that runs each batch in the smallest."""
    graphs_of = {bucket: graphs(model, bucket, longest) for bucket in buckets}

    def run(_model, prompts, lengths, out):
        for batch in batches(prompts, lengths):
            bucket = next(bucket for bucket in buckets if bucket >= len(batch.tokens))
            write_last(batch, graphs_of[bucket].run(batch), out)

    return run
