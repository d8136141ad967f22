"""Greedy decoding of many requests in a fixed number of slots, one captured step per token.

All state lives in tensors (the request of each slot, its position, its next token), so that one
CUDA graph serves every step. Two rules decide when a slot whose request has ended is refilled:

static       Only when the requests of all slots have ended. Until then the slot computes padding.
continuous   In the step in which its request ends.
"""

import heapq

import torch

from kernels.ch15.decoder import HEAD_DIM, attention, block, captured, norm


class Engine:
    """The slots and one output row per request. An extra row takes the output of idle slots."""

    def __init__(self, model, first, limits, longest, *, slots, static):
        self.model, self.static, self.longest = model, static, longest
        device, width = model.embedding.device, model.embedding.shape[1]
        ids = {"dtype": torch.long, "device": device}
        self.dummy, self.slots = len(first), torch.arange(slots, device=device)
        self.positions = torch.arange(longest, device=device)
        self.first, self.limits = first.new_zeros(self.dummy + 1), limits.new_ones(self.dummy + 1)
        self.request, self.generated, self.token = (torch.zeros(slots, **ids) for _ in range(3))
        self.next_request = torch.zeros((), **ids)
        self.tokens = torch.zeros(self.dummy + 1, longest, **ids)
        self.logits_of_token_0 = model.embedding.new_zeros(self.dummy + 1, longest)
        shape = 2, slots, longest, width // HEAD_DIM, HEAD_DIM
        self.caches = [model.embedding.new_zeros(shape) for _ in model.qkv]
        self.replay = captured(self.step, device)

    def start(self, first, limits):
        self.first[:-1], self.limits[:-1] = first, limits
        self.request.copy_(self.slots)
        self.token.copy_(first[: len(self.slots)])
        self.next_request.fill_(len(self.slots))
        for state in (self.generated, self.tokens, self.logits_of_token_0):
            state.zero_()

    def step(self):
        at = self.generated.clamp(max=self.longest - 1)
        mask = (self.positions <= at[:, None])[:, None, None]
        x = self.model.embedding[self.token][:, None]
        for layer, cache in zip(self.model.layers(), self.caches, strict=True):

            def attend(q, k, v, cache=cache):
                for cached, new in zip(cache, (k, v), strict=True):
                    cached[self.slots, at] = new[:, 0]
                return attention(q, *cache, attn_mask=mask)

            x = block(x, layer, attend)
        logits = norm(x[:, 0]) @ self.model.lm_head.T
        row = torch.where(self.generated < self.limits[self.request], self.request, self.dummy)
        self.token.copy_(logits.argmax(1))
        self.tokens[row, at] = self.token
        self.logits_of_token_0[row, at] = logits[:, 0]
        self.generated += 1
        self.refill()

    def refill(self):
        """Assign the waiting requests, in order, to the slots whose requests have ended."""
        free = self.generated >= self.limits[self.request]
        if self.static:
            free &= free.all()
        request = self.next_request + free.cumsum(0) - 1
        self.request.copy_(torch.where(free, request.clamp(max=self.dummy), self.request))
        self.token.copy_(torch.where(free, self.first[self.request], self.token))
        self.generated.masked_fill_(free, 0)
        self.next_request += free.sum()


def steps_static(lengths, slots):
    return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


def steps_continuous(lengths, slots):
    ends = [0] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def serve(slots, *, static, sort_by_length=False):
    """Prepare an engine that returns, per request, its tokens and the logit of token 0 per step.

    The host computes the number of steps from the lengths; there is no end-of-text detection.
    """

    def prepare(model, first, limits, _lengths, longest):
        engine = Engine(model, first, limits, longest, slots=slots, static=static)

        def run(_model, first, limits, lengths, _longest):
            if sort_by_length:
                order, counts = limits.argsort(), sorted(lengths.tolist())
            else:
                order, counts = torch.arange(len(first), device=first.device), lengths.tolist()
            engine.start(first[order], limits[order])
            for _ in range((steps_static if static else steps_continuous)(counts, slots)):
                engine.replay()
            original_order = order.argsort()
            return engine.tokens[original_order], engine.logits_of_token_0[original_order]

        return run

    return prepare
