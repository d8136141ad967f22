"""A transformer's forward pass over prompts of any length: three ways to launch it.

eager       operation by operation.
recapture   the whole pass in a CUDA graph, which is good for one length, and made for each prompt,
            in the memory of the one before.
piecewise   what lies between two attentions treats each token alone, so that it may work on more
            tokens than there are: captured for a few numbers of tokens, of which the next larger is
            used. Attention, which must know the length, is launched as ever.

Each writes the last hidden state of each prompt.
"""

import torch

from kernels.ch15.decoder import HEAD, after, captured, causal, forward, graph_of, norm

BUCKETS = 64, 128, 256


def eager(model, prompts, lengths, out):
    for prompt, length, answer in zip(prompts, lengths.tolist(), out, strict=True):
        answer.copy_(forward(model, prompt[None, :length])[0, -1])


def recapture(_model, _prompts, _lengths, _out):
    last = []  # it lives on until the next graph has taken over its memory

    def run(model, prompts, lengths, out):
        for prompt, length, answer in zip(prompts, lengths.tolist(), out, strict=True):

            def step(prompt=prompt, length=length, answer=answer):
                answer.copy_(forward(model, prompt[None, :length])[0, -1])

            if out.is_cuda:
                last[:] = [graph_of(step, *(graph.pool() for graph in last))]
                last[0].replay()
            else:
                step()

    return run


class Pieces:
    """The graphs for so many tokens at most, and the tensors that they read and write."""

    def __init__(self, model, count):
        width = model.embedding.shape[1]
        self.model, self.layers = model, model.layers()
        self.tokens = torch.zeros(count, dtype=torch.long, device=model.embedding.device)
        self.x, self.mixed = (model.embedding.new_zeros(count, width) for _ in range(2))
        self.qkv = model.embedding.new_zeros(count, 3 * width)
        self.replays = [
            captured(lambda i=i: self.piece(i), self.x.device) for i in range(len(self.layers) + 1)
        ]

    def piece(self, i):
        """From attention ``i - 1`` to attention ``i``; before the first, and behind the last."""
        if i == 0:
            self.x.copy_(self.model.embedding[self.tokens])
        else:
            self.x.copy_(after(self.x, self.mixed, *self.layers[i - 1][1:]))
        if i < len(self.layers):
            torch.mm(norm(self.x), self.layers[i][0], out=self.qkv)

    def run(self, prompt, answer):
        length = len(prompt)
        self.tokens[:length] = prompt
        self.replays[0]()
        for replay in self.replays[1:]:
            q, k, v = self.qkv[None, :length].unflatten(-1, (3, -1, HEAD)).unbind(-3)
            self.mixed[:length] = causal(q, k, v)[0].flatten(1)
            replay()
        answer.copy_(self.x[length - 1])


def piecewise(model, _prompts, _lengths, _out):
    sizes = {count: Pieces(model, count) for count in BUCKETS}

    def run(_model, prompts, lengths, out):
        for prompt, length, answer in zip(prompts, lengths.tolist(), out, strict=True):
            pieces = sizes[next(count for count in BUCKETS if count >= length)]
            pieces.run(prompt[:length], answer)

    return run
