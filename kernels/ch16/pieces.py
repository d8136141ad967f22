"""A transformer's forward pass over prompts of any length, launched in four ways.

eager       operation by operation.
padded      the whole pass as one CUDA graph for the longest prompt. Each prompt is padded to it.
bucketed    the whole pass as a graph for each of a few lengths (buckets). A prompt uses the
            smallest bucket that fits.
piecewise   one graph per bucket and piece, where a piece is what lies between two attentions. The
            pieces treat each token independently, so they may run on padding. Attention is launched
            eagerly, for exactly the prompt's tokens.

Padding follows the prompt, and the attention is causal: it does not change the prompt's results.
Each of the four writes the last hidden state of each prompt.

Attention is forced to FlashAttention 2, which takes any length at once. cuDNN, the default on
Hopper, builds an execution plan for each length that it has not seen; the ways that launch
attention for exactly the prompt's tokens would wait for that.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.ch15.decoder import HEAD_DIM, captured, causal, forward, norm, output_and_mlp

BUCKETS = 256, 512, 1024, 2048
"""Token counts for which graphs are captured."""

with_flash_attention = sdpa_kernel(SDPBackend.FLASH_ATTENTION)


@with_flash_attention
def eager(model, prompts, lengths, out):
    for prompt, length, answer in zip(prompts, lengths.tolist(), out, strict=True):
        answer.copy_(forward(model, prompt[None, :length])[0, -1])


class Whole:
    """The graph of the whole pass for one bucket, and the tensors that it reads and writes."""

    def __init__(self, model, bucket):
        self.model = model
        self.tokens = torch.zeros(1, bucket, dtype=torch.long, device=model.embedding.device)
        self.x = model.embedding.new_zeros(bucket, model.embedding.shape[1])
        self.replay = captured(self.step, self.x.device)

    def step(self):
        self.x.copy_(forward(self.model, self.tokens)[0])

    def run(self, prompt, answer):
        length = len(prompt)
        self.tokens[0, :length] = prompt
        self.replay()
        answer.copy_(self.x[length - 1])


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


def padded(model, prompts, _lengths, _out):
    return _by_bucket(Whole, model, prompts.shape[1:])


def bucketed(model, _prompts, _lengths, _out):
    return _by_bucket(Whole, model, BUCKETS)


def piecewise(model, _prompts, _lengths, _out):
    return _by_bucket(Pieces, model, BUCKETS)


@with_flash_attention
def _by_bucket(graphs, model, buckets):
    """Capture graphs for each bucket, and return an arm that runs each prompt in the smallest."""
    graphs_of = {bucket: graphs(model, bucket) for bucket in buckets}

    @with_flash_attention
    def run(_model, prompts, lengths, out):
        for prompt, length, answer in zip(prompts, lengths.tolist(), out, strict=True):
            bucket = next(bucket for bucket in buckets if bucket >= length)
            graphs_of[bucket].run(prompt[:length], answer)

    return run
