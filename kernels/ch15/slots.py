"""Greedy decoding of many requests in a fixed number of slots, as one captured step.

All that changes lies in tensors (which request a slot serves, how far it is, what comes next), so
that one CUDA graph serves every step. Two rules say when a slot whose request has ended gets the
next one:

static       when the requests of all slots have ended. Until then the slot computes what nobody
             wants.
continuous   in the same step.
"""

import heapq

import torch

from kernels.ch15.decoder import HEAD, attention, block, captured, norm


class Engine:
    """The slots, and a row of answers for each request; one more row takes what nobody wants."""

    def __init__(self, model, first, limits, longest, *, slots, together):
        self.model, self.together, self.longest = model, together, longest
        device, width = model.embedding.device, model.embedding.shape[1]
        ids = {"dtype": torch.long, "device": device}
        self.none, self.slots = len(first), torch.arange(slots, device=device)
        self.places = torch.arange(longest, device=device)
        self.first, self.limits = first.new_zeros(self.none + 1), limits.new_ones(self.none + 1)
        self.request, self.done, self.token = (torch.zeros(slots, **ids) for _ in range(3))
        self.waiting = torch.zeros((), **ids)
        self.tokens = torch.zeros(self.none + 1, longest, **ids)
        self.shown = model.embedding.new_zeros(self.none + 1, longest)
        shape = 2, slots, longest, width // HEAD, HEAD
        self.caches = [model.embedding.new_zeros(shape) for _ in model.qkv]
        self.replay = captured(self.step, device)

    def start(self, first, limits):
        self.first[:-1], self.limits[:-1] = first, limits
        self.request.copy_(self.slots)
        self.token.copy_(first[: len(self.slots)])
        self.waiting.fill_(len(self.slots))
        for state in (self.done, self.tokens, self.shown):
            state.zero_()

    def step(self):
        at = self.done.clamp(max=self.longest - 1)
        seen = (self.places <= at[:, None])[:, None, None]
        x = self.model.embedding[self.token][:, None]
        for layer, cache in zip(self.model.layers(), self.caches, strict=True):

            def attend(q, k, v, cache=cache):
                for kept, new in zip(cache, (k, v), strict=True):
                    kept[self.slots, at] = new[:, 0]
                return attention(q, *cache, attn_mask=seen)

            x = block(x, layer, attend)
        logits = norm(x[:, 0]) @ self.model.head.T
        row = torch.where(self.done < self.limits[self.request], self.request, self.none)
        self.token.copy_(logits.argmax(1))
        self.tokens[row, at] = self.token
        self.shown[row, at] = logits[:, 0]
        self.done += 1
        self.refill()

    def refill(self):
        """Give the requests that wait, in order, to the slots whose requests have ended."""
        free = self.done >= self.limits[self.request]
        if self.together:
            free &= free.all()
        turn = self.waiting + free.cumsum(0) - 1
        self.request.copy_(torch.where(free, turn.clamp(max=self.none), self.request))
        self.token.copy_(torch.where(free, self.first[self.request], self.token))
        self.done.masked_fill_(free, 0)
        self.waiting += free.sum()


def steps_together(lengths, slots):
    return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


def steps_continuous(lengths, slots):
    ends = [0] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def serve(slots, *, together, ordered=False):
    """Prepare an engine; it gives the tokens of each request, and the logit of token 0 at each."""

    def prepare(model, first, limits, _lengths, longest):
        engine = Engine(model, first, limits, longest, slots=slots, together=together)

        def run(_model, first, limits, lengths, _longest):
            order = limits.argsort() if ordered else torch.arange(len(first), device=first.device)
            counts = sorted(lengths.tolist()) if ordered else lengths.tolist()
            engine.start(first[order], limits[order])
            for _ in range((steps_together if together else steps_continuous)(counts, slots)):
                engine.replay()
            back = order.argsort()
            return engine.tokens[back], engine.shown[back]

        return run

    return prepare
