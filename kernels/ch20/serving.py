"""A small service that answers prompts with greedy tokens, in three stages of its life.

one_by_one  a request after the other; keys and values are appended to those so far.
batched     all requests together, the same way.
graph       the step of a token is a captured CUDA graph: token and position lie in tensors, and
            keys and values are written into arrays as long as the text will become.

Each returns the tokens (requests x count) and the last hidden states. The prompts are processed
in the clock, eagerly, by all of them.
"""

import torch

from kernels.ch15.decoder import HEAD_DIM, attention, block, captured, causal, forward, norm


def prefill(model, prompts, keep):
    """Process the prompts; ``keep`` gets keys and values of each layer, in order."""

    def attend(q, k, v):
        keep(k, v)
        return causal(q, k, v)

    return forward(model, prompts, attend)[:, -1]


def choose(model, x):
    return (norm(x) @ model.lm_head.T).argmax(1)


def batched(model, prompts, count):
    caches = []
    x = prefill(model, prompts, lambda *pair: caches.append(pair))
    tokens = [choose(model, x)]
    for _ in range(count - 1):
        x = model.embedding[tokens[-1][:, None]]
        for i, layer in enumerate(model.layers()):

            def attend(q, k, v, i=i):
                pairs = zip(caches[i], (k, v), strict=True)
                caches[i] = tuple(torch.cat(pair, 1) for pair in pairs)
                return attention(q, *caches[i])

            x = block(x, layer, attend)
        x = x[:, 0]
        tokens.append(choose(model, x))
    return torch.stack(tokens, 1), x


def one_by_one(model, prompts, count):
    answers = [batched(model, prompt, count) for prompt in prompts.split(1)]
    return tuple(torch.cat(parts) for parts in zip(*answers, strict=True))


class Slabs:
    """Keys and values of each layer (requests x room x heads x HEAD_DIM), filled by the prompts.

    What a graph reads must live as long as the graph, which knows addresses only: so the numbers
    of all places are kept here, too.
    """

    def __init__(self, model, prompts, count):
        requests, self.length = prompts.shape
        width = model.embedding.shape[1]
        shape = 2, requests, self.length + count, width // HEAD_DIM, HEAD_DIM
        self.layers = [model.embedding.new_zeros(shape) for _ in model.qkv]
        self.places = torch.arange(self.length + count, device=prompts.device)

    def fill(self, model, prompts):
        waiting = iter(self.layers)

        def keep(*pair):
            for kept, new in zip(next(waiting), pair, strict=True):
                kept[:, : self.length] = new

        return prefill(model, prompts, keep)


def graph(model, prompts, count):
    slabs, device = Slabs(model, prompts, count), prompts.device
    token, at = prompts[:, 0].clone(), torch.full((1,), slabs.length, device=device)
    tokens = torch.zeros(len(prompts), slabs.length + count, dtype=torch.long, device=device)
    last = model.embedding.new_zeros(len(prompts), model.embedding.shape[1])

    def step():
        seen = (slabs.places <= at)[None, None, None]
        x = model.embedding[token][:, None]
        for layer, slab in zip(model.layers(), slabs.layers, strict=True):

            def attend(q, k, v, slab=slab):
                for kept, new in zip(slab, (k, v), strict=True):
                    kept.index_copy_(1, at, new)
                return attention(q, *slab, attn_mask=seen)

            x = block(x, layer, attend)
        last.copy_(x[:, 0])
        token.copy_(choose(model, last))
        tokens.index_copy_(1, at, token[:, None])
        at.add_(1)

    replay = captured(step, device)

    def run(model, prompts, count):
        last.copy_(slabs.fill(model, prompts))
        token.copy_(choose(model, last))
        tokens[:, slabs.length - 1] = token
        at.fill_(slabs.length)
        for _ in range(count - 1):
            replay()
        return tokens[:, slabs.length - 1 : -1].clone(), last.clone()

    return run
