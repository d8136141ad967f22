"""A small service that answers prompts with greedy tokens, in three stages.

one_by_one  One request after the other; new keys and values are concatenated to the KV cache.
batched     All requests in one batch, with the same KV cache.
graph       The decode step is a captured CUDA graph. Tokens and position live in tensors, and keys
            and values are written into preallocated slabs.

Each stage returns the tokens (requests x count) and the last hidden states. All of them run prefill
eagerly, inside the timed region.
"""

import torch

from kernels.ch15.decoder import HEAD_DIM, attention, block, captured, causal, forward, norm


def prefill(model, prompts, store):
    """Process the prompts; ``store`` receives the keys and values of each layer, in order."""

    def attend(q, k, v):
        store(k, v)
        return causal(q, k, v)

    return forward(model, prompts, attend)[:, -1]


def greedy_token(model, x):
    return (norm(x) @ model.lm_head.T).argmax(1)


def batched(model, prompts, count):
    caches = []
    x = prefill(model, prompts, lambda *pair: caches.append(pair))
    tokens = [greedy_token(model, x)]
    for _ in range(count - 1):
        x = model.embedding[tokens[-1][:, None]]
        for i, layer in enumerate(model.layers()):

            def attend(q, k, v, i=i):
                pairs = zip(caches[i], (k, v), strict=True)
                caches[i] = tuple(torch.cat(pair, 1) for pair in pairs)
                return attention(q, *caches[i])

            x = block(x, layer, attend)
        x = x[:, 0]
        tokens.append(greedy_token(model, x))
    return torch.stack(tokens, 1), x


def one_by_one(model, prompts, count):
    answers = [batched(model, prompt, count) for prompt in prompts.split(1)]
    return tuple(torch.cat(parts) for parts in zip(*answers, strict=True))


class Slabs:
    """A preallocated KV cache: per layer, 2 x requests x capacity x heads x HEAD_DIM.

    A captured graph refers to tensors by address, so every tensor that it reads must outlive it.
    That is why the positions are stored here as well.
    """

    def __init__(self, model, prompts, count):
        requests, self.prompt_length = prompts.shape
        width, capacity = model.embedding.shape[1], self.prompt_length + count
        shape = 2, requests, capacity, width // HEAD_DIM, HEAD_DIM
        self.layers = [model.embedding.new_zeros(shape) for _ in model.qkv]
        self.positions = torch.arange(capacity, device=prompts.device)

    def prefill(self, model, prompts):
        remaining = iter(self.layers)

        def store(*pair):
            for cached, new in zip(next(remaining), pair, strict=True):
                cached[:, : self.prompt_length] = new

        return prefill(model, prompts, store)


def graph(model, prompts, count):
    slabs, device = Slabs(model, prompts, count), prompts.device
    length = slabs.prompt_length
    token, position = prompts[:, 0].clone(), torch.full((1,), length, device=device)
    tokens = torch.zeros(len(prompts), length + count, dtype=torch.long, device=device)
    last = model.embedding.new_zeros(len(prompts), model.embedding.shape[1])

    def step():
        mask = (slabs.positions <= position)[None, None, None]
        x = model.embedding[token][:, None]
        for layer, slab in zip(model.layers(), slabs.layers, strict=True):

            def attend(q, k, v, slab=slab):
                for cached, new in zip(slab, (k, v), strict=True):
                    cached.index_copy_(1, position, new)
                return attention(q, *slab, attn_mask=mask)

            x = block(x, layer, attend)
        last.copy_(x[:, 0])
        token.copy_(greedy_token(model, last))
        tokens.index_copy_(1, position, token[:, None])
        position.add_(1)

    replay = captured(step, device)

    def run(model, prompts, count):
        last.copy_(slabs.prefill(model, prompts))
        token.copy_(greedy_token(model, last))
        tokens[:, length - 1] = token
        position.fill_(length)
        for _ in range(count - 1):
            replay()
        return tokens[:, length - 1 : -1].clone(), last.clone()

    return run
