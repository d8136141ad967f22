"""A transformer's forward pass over prompts of any length, launched in three ways.

eager       operation by operation.
recapture   the whole pass as a CUDA graph. A graph fits one length, so each prompt is captured
            anew, into the memory pool of the previous graph.
piecewise   one graph per piece between two attentions. The pieces treat each token independently,
            so they may run on padding: each piece is captured for a few token counts (buckets), and
            a prompt uses the smallest bucket that fits. Attention needs the exact length and is
            launched eagerly.

Each of the three writes the last hidden state of each prompt.
"""

import torch

from kernels.ch15.decoder import (
    HEAD_DIM,
    capture_graph,
    captured,
    causal,
    forward,
    norm,
    output_and_mlp,
)

BUCKETS = 64, 128, 256
"""Token counts for which the pieces are captured."""


def eager(model, prompts, lengths, out):
    for prompt, length, answer in zip(prompts, lengths.tolist(), out, strict=True):
        answer.copy_(forward(model, prompt[None, :length])[0, -1])


def recapture(_model, _prompts, _lengths, _out):
    previous = []  # keeps a graph alive until the next one has taken over its memory pool

    def run(model, prompts, lengths, out):
        for prompt, length, answer in zip(prompts, lengths.tolist(), out, strict=True):

            def step(prompt=prompt, length=length, answer=answer):
                answer.copy_(forward(model, prompt[None, :length])[0, -1])

            if out.is_cuda:
                previous[:] = [capture_graph(step, *(graph.pool() for graph in previous))]
                previous[0].replay()
            else:
                step()

    return run


class Pieces:
    """The graphs of one bucket, and the tensors that they read and write."""

    def __init__(self, model, bucket):
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

    def run(self, prompt, answer):
        length = len(prompt)
        self.tokens[:length] = prompt
        self.replays[0]()
        for replay in self.replays[1:]:
            q, k, v = self.qkv[None, :length].unflatten(-1, (3, -1, HEAD_DIM)).unbind(-3)
            self.attended[:length] = causal(q, k, v)[0].flatten(1)
            replay()
        answer.copy_(self.x[length - 1])


def piecewise(model, _prompts, _lengths, _out):
    pieces_of = {bucket: Pieces(model, bucket) for bucket in BUCKETS}

    def run(_model, prompts, lengths, out):
        for prompt, length, answer in zip(prompts, lengths.tolist(), out, strict=True):
            bucket = next(bucket for bucket in BUCKETS if bucket >= length)
            pieces_of[bucket].run(prompt[:length], answer)

    return run
