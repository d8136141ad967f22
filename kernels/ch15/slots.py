"""Greedy decoding of many requests in a fixed number of slots, one captured step per token.

All state lives in tensors, so that one CUDA graph serves every step: for each slot its request, the
position of its newest token and that token; for each request its answer. A request ends when the
model emits END, which nobody knows beforehand. Its slot then idles until it is refilled. Two rules
decide when that happens:

static       When the requests of all slots have ended. All prompts of a batch are prefilled at
             once; until the last request has ended, the other slots compute padding.
             ``sorted_static`` makes the batches of requests whose answers have similar lengths.
continuous   As soon as its request has ended. Every third step takes up to eight waiting requests
             into idle slots and prefills their prompts. Their tokens share that step's GEMMs with
             the decoding tokens, so prefill does not read the weights again.

Prefill packs prompts without padding, and variable-length attention attends within each.

The GPU decides which slots are refilled. The host only counts ended requests: each step copies the
count to pinned memory, and the host reads it LAG steps late, so that the GPU never waits for it.
"""

import itertools
from collections import deque
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from kernels.ch15.decoder import attention, captured, norm
from kernels.ch15.decoder128 import HEAD_DIM, block, packed_causal

END = 0
"""The token that ends a text."""

ADMITTED = 8
"""Requests admitted per step with prefill. Such a step takes as long for one request as for eight,
because the captured step launches the same kernels and reads the same weights: rare admissions of
many requests cost less than frequent ones of a few."""

BUDGET = 0.5
"""Most tokens in the prompts admitted per step, as a share of ADMITTED of the longest prompts. The
captured step computes all of them, whether there are prompts or padding."""

ADMISSION_INTERVAL = 3
"""Steps between admissions: a slot idles for half of them on average. Together with ADMITTED, this
admits more requests than end."""

LAG = 2
"""Steps that the host launches ahead: enough work to hide its own time."""

SAMPLING_INTERVAL = 16
"""Logits are returned of one request in so many, because the oracle computes them in fp64."""


class Admission(NamedTuple):
    """The requests that a step takes into idle slots, with their prompts packed."""

    slot: torch.Tensor
    request: torch.Tensor
    tokens: torch.Tensor
    """The tokens of all prompts, then padding."""
    row: torch.Tensor
    """The row of each token in a cache that is viewed as one row per token."""
    offsets: torch.Tensor
    """Where each prompt begins among the tokens, and where the last one ends."""


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

    def capture(self, admitted=0, budget=0):
        """Capture a step that admits requests; return its replay."""
        return captured(lambda: self.step(admitted, budget), self.device)

    def start(self, prompts, prompt_lengths):
        self.prompts[:-1], self.prompt_lengths[:-1] = prompts, prompt_lengths
        self.request.fill_(self.nobody)
        for state in (self.position, self.next_request, self.answers, self.logits_of_end):
            state.zero_()
        self.expected = self.ended.item()  # waits for the steps that an earlier call left over

    def step(self, admitted=0, budget=0):
        """Decode one token in each slot, and admit and prefill requests.

        They are up to ``admitted`` requests with up to ``budget`` tokens in their prompts.
        """
        slots, model, decoding = self.slots, self.model, slice(self.slots)
        position, tokens = self.position[decoding], self.token[decoding]
        mask = (self.positions <= position[:, None])[:, None, None]
        new = self.admit(admitted, budget) if admitted else None
        offsets = new.offsets.int() if new else None
        x = model.embedding[torch.cat([tokens, new.tokens]) if new else tokens]
        for layer, cache in zip(model.layers(), self.caches, strict=True):

            def attend(q, k, v, cache=cache):
                write(cache, self.row(position), k[decoding], v[decoding])
                attended = attention(q[decoding, None], *cache[:, decoding], attn_mask=mask)[:, 0]
                if not new:
                    return attended
                packed = [y[slots:] for y in (q, k, v)]
                write(cache, new.row, *packed[1:])
                of_prompts = packed_causal(*packed, offsets, self.padded_length)
                return torch.cat([attended, of_prompts])

            x = block(x, layer, attend)
        if new:
            x = torch.cat([x[decoding], x[slots + new.offsets[1:] - 1]])
        logits = norm(x) @ model.lm_head.T
        nobody = self.request[:0]
        self.emit(logits, *((new.slot, new.request) if new else (nobody, nobody)))

    def row(self, position):
        """Return the row of each slot's position in a cache that is viewed as one row per token."""
        return torch.arange(self.slots, device=self.device) * len(self.positions) + position

    def admit(self, admitted, budget):
        """Admit waiting requests to idle slots; the rest of the admitted are nobody."""
        is_idle = self.request[: self.slots] == self.nobody
        slot = is_idle.long().argsort(descending=True, stable=True)[:admitted]
        request = self.next_request + torch.arange(admitted, device=self.device)
        request = request.clamp(max=self.nobody)
        fits = self.prompt_lengths[request].cumsum(0) <= budget
        is_admitted = is_idle[slot] & fits & (request < self.nobody)
        self.next_request += is_admitted.sum()
        slot = torch.where(is_admitted, slot, self.slots)
        request = torch.where(is_admitted, request, self.nobody)
        offsets = pad(self.prompt_lengths[request].cumsum(0), (1, 0))  # nobody's prompt is empty
        token = torch.arange(budget, device=self.device)
        prompt = torch.searchsorted(offsets[1:], token, right=True)  # ``admitted`` for padding
        within = (token - offsets[prompt]).clamp(max=self.padded_length - 1)
        tokens = self.prompts[pad(request, (0, 1), value=self.nobody)[prompt], within]
        row = pad(slot, (0, 1), value=self.slots)[prompt] * len(self.positions) + within
        return Admission(slot, request, tokens, row, offsets)

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

    def results(self, rows=slice(None)):
        """Return the answers in the order of ``rows``, and the sampled logits."""
        logits = self.logits_of_end[:-1][rows][::SAMPLING_INTERVAL]
        return self.answers[:-1][rows].clone(), logits.clone()

    def serve_in_batches(self, decode, prompts, prompt_lengths):
        """Serve static batches; the host knows the prompts' lengths, so prefill is exact."""
        self.start(prompts, prompt_lengths)
        lengths, slots = prompt_lengths.tolist(), self.slots
        for first in range(0, len(prompts), slots):
            batch = lengths[first : first + slots]
            self.step(slots, sum(batch))
            self.replay_until_ended([decode], len(batch))


def write(cache, rows, *kv):
    """Write keys and values to rows of a cache, which is viewed as one row per token."""
    for cached, new in zip(cache, kv, strict=True):
        cached.view(-1, *new.shape[1:])[rows] = new


def static(slots):
    def prepare(model, prompts, _prompt_lengths, longest):
        engine = Engine(model, prompts, longest, slots)
        decode = engine.capture()

        def run(_model, prompts, prompt_lengths, _longest):
            engine.serve_in_batches(decode, prompts, prompt_lengths)
            return engine.results()

        return run

    return prepare


def sorted_static(slots):
    """Sort by the length of the answers, which a service cannot know beforehand.

    Here it follows from the last token of the prompt, because the model's output layer is
    constructed.
    """

    def prepare(model, prompts, _prompt_lengths, longest):
        engine = Engine(model, prompts, longest, slots)
        decode, steps_to_end = engine.capture(), steps_after_token(model, longest)

        def run(_model, prompts, prompt_lengths, _longest):
            last_token = prompts.gather(1, prompt_lengths[:, None] - 1)[:, 0]
            order = steps_to_end[last_token].argsort()
            engine.serve_in_batches(decode, prompts[order], prompt_lengths[order])
            return engine.results(order.argsort())

        return run

    return prepare


def steps_after_token(model, longest):
    """Return for each token how many steps END takes to follow, up to ``longest``."""
    successor = (model.embedding.float() @ model.lm_head.T.float()).argmax(1)
    token = torch.arange(len(successor), device=successor.device)
    steps, runs = torch.zeros_like(token), torch.ones_like(token, dtype=torch.bool)
    for _ in range(longest):
        steps += runs
        token = successor[token]
        runs &= token != END
    return steps


def continuous(slots):
    def prepare(model, prompts, _prompt_lengths, longest):
        engine = Engine(model, prompts, longest, slots)
        budget = int(BUDGET * ADMITTED * prompts.shape[1])
        admit = engine.capture(ADMITTED, budget)
        steps = [admit, *[engine.capture()] * (ADMISSION_INTERVAL - 1)]

        def run(_model, prompts, prompt_lengths, _longest):
            engine.start(prompts, prompt_lengths)
            engine.replay_until_ended(steps, len(prompts))
            return engine.results()

        return run

    return prepare
