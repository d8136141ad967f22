"""Greedy decoding of many requests in a fixed number of slots, one captured step per token.

All state lives in tensors, so that one CUDA graph serves every step: for each slot its request, the
position of its newest token and that token; for each request its answer. A request ends when the
model emits END, which nobody knows beforehand. Its slot then idles until it is refilled. Two rules
decide when that happens:

static       When the requests of all slots have ended. All prompts of a batch are prefilled at
             once; until the last request has ended, the other slots compute padding.
continuous   As soon as its request has ended. Every third step takes up to eight waiting requests
             into idle slots and prefills their prompts. Their tokens share that step's GEMMs with
             the decoding tokens, so prefill does not read the weights again.

The GPU decides which slots are refilled. The host only counts ended requests: each step copies the
count to pinned memory, and the host reads it LAG steps late, so that the GPU never waits for it.
"""

import itertools
from collections import deque

import torch

from kernels.ch15.decoder import HEAD_DIM, attention, block, captured, causal, norm

END = 0
"""The token that ends a text."""

ADMITTED = 8
"""Requests admitted per step with prefill. Such a step takes as long for one request as for eight,
because the captured step launches the same kernels and reads the same weights: rare admissions of
many requests cost less than frequent ones of a few."""

ADMISSION_INTERVAL = 3
"""Steps between admissions: a slot idles for half of them on average. Together with ADMITTED, this
admits more requests than end."""

LAG = 2
"""Steps that the host launches ahead: enough work to hide its own time."""

SAMPLING_INTERVAL = 16
"""Logits are returned of one request in so many, because the oracle computes them in fp64."""


class Engine:
    """The slots, and one output row per request.

    One more slot and one more row exist: what idle slots compute is written there.
    """

    def __init__(self, model, prompts, longest, slots):
        self.model, self.longest, self.slots = model, longest, slots
        self.count, self.padded_length = prompts.shape
        self.device, width = prompts.device, model.embedding.shape[1]
        self.nobody = self.count
        self.prompts, self.prompt_lengths = (
            prompts.new_zeros(self.count + 1, *shape) for shape in ((self.padded_length,), ())
        )
        self.request, self.position, self.generated, self.token = (
            prompts.new_zeros(slots + 1) for _ in range(4)
        )
        self.next_request, self.ended = prompts.new_zeros(()), prompts.new_zeros(())
        self.answers = prompts.new_zeros(self.count + 1, longest)
        self.logits_of_end = model.embedding.new_zeros(self.count + 1, longest)
        capacity = -(-(self.padded_length + longest) // 16) * 16  # aligned for attention kernels
        self.positions = torch.arange(capacity, device=self.device)
        shape = 2, slots + 1, capacity, width // HEAD_DIM, HEAD_DIM
        self.caches = [model.embedding.new_zeros(shape) for _ in model.qkv]
        on_gpu = self.device.type == "cuda"
        self.ended_on_host = torch.zeros((), dtype=torch.long, pin_memory=on_gpu)
        self.lag = LAG if on_gpu else None

    def capture(self, admitted):
        """Capture a step that admits up to ``admitted`` requests; return its replay."""
        return captured(lambda: self.step(admitted), self.device)

    def start(self, prompts, prompt_lengths):
        self.prompts[:-1], self.prompt_lengths[:-1] = prompts, prompt_lengths
        self.request.fill_(self.nobody)
        for state in (self.position, self.next_request, self.answers, self.logits_of_end):
            state.zero_()
        self.expected = self.ended.item()  # waits for the steps that an earlier call left over

    def step(self, admitted):
        """Decode one token in each slot, and prefill the prompts of up to ``admitted`` requests."""
        slots, model, decoding = self.slots, self.model, slice(self.slots)
        position, tokens = self.position[decoding], self.token[decoding]
        mask = (self.positions <= position[:, None])[:, None, None]
        slot, request = self.admit(admitted) if admitted else (self.request[:0], self.request[:0])
        prompts = self.prompts[request]
        x = model.embedding[torch.cat([tokens, prompts.flatten()])]
        for layer, cache in zip(model.layers(), self.caches, strict=True):

            def attend(q, k, v, cache=cache):
                for cached, new in zip(cache, (k, v), strict=True):
                    cached[decoding].view(-1, *new.shape[1:])[self.row(position)] = new[decoding]
                attended = attention(q[decoding, None], *cache[:, decoding], attn_mask=mask)[:, 0]
                if not admitted:
                    return attended
                of_prompts = [y[slots:].unflatten(0, prompts.shape) for y in (q, k, v)]
                for cached, new in zip(cache, of_prompts[1:], strict=True):
                    cached[slot, : self.padded_length] = new
                return torch.cat([attended, causal(*of_prompts).flatten(0, 1)])

            x = block(x, layer, attend)
        last = torch.arange(admitted, device=self.device) * self.padded_length
        last = last + slots + self.prompt_lengths[request] - 1
        x = torch.cat([x[decoding], x[last]])
        logits = norm(x) @ model.lm_head.T
        self.emit(logits, slot, request)

    def row(self, position):
        """Return the row of each slot's position in a cache that is viewed as one row per token."""
        return torch.arange(self.slots, device=self.device) * len(self.positions) + position

    def admit(self, admitted):
        """Return up to ``admitted`` idle slots and the requests for them; the rest are nobody."""
        is_idle = self.request[: self.slots] == self.nobody
        slot = is_idle.long().argsort(descending=True, stable=True)[:admitted]
        request = self.next_request + torch.arange(admitted, device=self.device)
        is_admitted = is_idle[slot] & (request < self.count)
        self.next_request += is_admitted.sum()
        return (
            torch.where(is_admitted, slot, self.slots),
            torch.where(is_admitted, request, self.nobody),
        )

    def emit(self, logits, slot, admitted):
        """Append a token to each request that runs, and end the requests whose token is END."""
        decoding, slots = slice(self.slots), self.slots
        request = torch.cat([self.request[decoding], admitted])
        generated = torch.cat([self.generated[decoding], torch.zeros_like(admitted)])
        token = logits.argmax(1)
        self.answers[request, generated] = token
        self.logits_of_end[request, generated] = logits[:, END]
        has_ended = (token == END) | (generated + 1 == self.longest)
        self.ended += (has_ended & (request != self.nobody)).sum()
        request = torch.where(has_ended, self.nobody, request)
        is_idle = request[decoding] == self.nobody
        position = torch.where(is_idle, 0, self.position[decoding] + 1)
        generated = torch.where(is_idle, 0, generated[decoding] + 1)
        new_state = (
            (self.request, request[decoding], request[slots:]),
            (self.token, token[decoding], token[slots:]),
            (self.position, position, self.prompt_lengths[admitted]),
            (self.generated, generated, torch.ones_like(admitted)),
        )
        for state, of_slots, of_admitted in new_state:
            state[decoding] = of_slots
            state[slot] = of_admitted
        self.ended_on_host.copy_(self.ended, non_blocking=True)

    def replay_until_ended(self, replays, count):
        """Replay steps, in turn, until ``count`` more requests have ended."""
        self.expected += count
        events, ended = deque(), self.ended_on_host.numpy()
        for replay in itertools.cycle(replays):
            replay()
            if self.lag is not None:
                events.append(torch.cuda.Event())
                events[-1].record()
                if len(events) > self.lag:
                    events.popleft().synchronize()
            if ended >= self.expected:
                return

    def results(self):
        return self.answers[:-1].clone(), self.logits_of_end[:-1:SAMPLING_INTERVAL].clone()


def static(slots):
    def prepare(model, prompts, _prompt_lengths, longest):
        engine = Engine(model, prompts, longest, slots)
        prefill, decode = engine.capture(slots), engine.capture(0)

        def run(_model, prompts, prompt_lengths, _longest):
            engine.start(prompts, prompt_lengths)
            for first in range(0, len(prompts), slots):
                prefill()
                engine.replay_until_ended([decode], min(slots, len(prompts) - first))
            return engine.results()

        return run

    return prepare


def continuous(slots):
    def prepare(model, prompts, _prompt_lengths, longest):
        engine = Engine(model, prompts, longest, slots)
        steps = [engine.capture(ADMITTED), *[engine.capture(0)] * (ADMISSION_INTERVAL - 1)]

        def run(_model, prompts, prompt_lengths, _longest):
            engine.start(prompts, prompt_lengths)
            engine.replay_until_ended(steps, len(prompts))
            return engine.results()

        return run

    return prepare
