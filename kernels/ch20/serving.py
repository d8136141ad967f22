"""A small service that answers prompts with greedy tokens, in four stages.

one_by_one  One request after the other; new keys and values are concatenated to the KV cache, as
            contiguous tensors, because `cat` is slow on strided views.
batched     Requests in batches, in order of arrival, with the same KV cache.
slab        The same batches; keys and values are written in place into a preallocated slab.
graph       The decode step over the slab is a captured CUDA graph. Tokens and position live in
            tensors, and a mask hides the part of the slab that is not yet written.

``compiled`` is the last stage with a step that torch.compile has fused before it is captured.

A request ends when the model emits END, which nobody knows beforehand: after each step the host
asks whether all requests of the batch have ended. Until then those that have ended compute padding.
Each stage returns the answers (requests x longest, filled up with END) and the hidden states that
led to END (requests x width). All of them run prefill eagerly, inside the timed region.
"""

from functools import partial

import torch

from kernels.ch15.decoder import attention, captured, causal, norm, output_and_mlp

HEAD_DIM = 128
"""Channels per attention head."""

END = 0
"""The token that ends a text."""


def block(x, layer, attend):
    """Run one layer; ``attend`` maps queries, keys and values to the attention result."""
    qkv, *rest = layer
    heads = (norm(x) @ qkv).unflatten(-1, (3, -1, HEAD_DIM)).unbind(-3)
    return output_and_mlp(x, attend(*heads).flatten(-2), *rest)


def forward(model, tokens, attend=causal):
    """Return the hidden states of the last layer for sequences (requests x tokens)."""
    x = model.embedding[tokens]
    for layer in model.layers():
        x = block(x, layer, attend)
    return x


def greedy_token(model, x):
    return (norm(x) @ model.lm_head.T).argmax(1)


def prefill(model, prompts, lengths, store):
    """Return the hidden state of each prompt's last token; ``store`` gets each layer's k and v."""

    def attend(q, k, v):
        store(k, v)
        return causal(q, k, v)

    x = forward(model, prompts, attend)
    return x[torch.arange(len(prompts), device=x.device), lengths - 1]


def decode(model, token, attend):
    """Run one token per request through the layers; ``attend`` also gets the layer's number."""
    x = model.embedding[token][:, None]
    for i, layer in enumerate(model.layers()):
        x = block(x, layer, lambda q, k, v, i=i: attend(i, q, k, v))
    return x[:, 0]


class Batch:
    """The requests of a batch: what they have generated, and which of them have ended."""

    def __init__(self, model, count, longest):
        self.model, device = model, model.embedding.device
        self.steps = torch.arange(longest, device=device)
        self.token = torch.zeros(count, dtype=torch.long, device=device)
        self.ended = torch.zeros(count, dtype=torch.bool, device=device)
        self.answers = self.token.new_full((count, longest), END)
        self.hidden = model.embedding.new_zeros(count, model.embedding.shape[1])

    def emit(self, x, step):
        """Append a token to each request that has not ended; ``step`` is a tensor of one number."""
        token = greedy_token(self.model, x)
        self.hidden.copy_(torch.where(self.ended[:, None], self.hidden, x))
        self.token.copy_(torch.where(self.ended, END, token))
        self.answers.index_copy_(1, step, self.token[:, None])
        self.ended.logical_or_(self.token == END)


class Concatenated:
    """A KV cache that grows by concatenation. Prompts are padded to ``width`` tokens."""

    def __init__(self, model, lengths, width, longest):
        self.model, self.lengths, self.width, self.layers = model, lengths, width, []
        self.columns = torch.arange(width + longest, device=lengths.device)
        is_padding = (self.columns >= lengths[:, None]) & (self.columns < width)
        self.visible = ~is_padding[:, None, None]

    def store(self, k, v):
        self.layers.append((k.contiguous(), v.contiguous()))

    def attend(self, i, q, k, v):
        pairs = zip(self.layers[i], (k, v), strict=True)
        self.layers[i] = k, v = tuple(torch.cat([old, new.contiguous()], 1) for old, new in pairs)
        return attention(q, k, v, attn_mask=self.visible[..., : k.shape[1]])

    def decode(self, token, _step):
        return decode(self.model, token, self.attend)


class Slab(Concatenated):
    """A KV cache of the final length.

    A layer has a tensor for keys and one for values (requests x tokens x heads x HEAD_DIM): into
    two parts of one tensor, torch.compile would not write in place.
    """

    def __init__(self, model, lengths, width, longest):
        super().__init__(model, lengths, width, longest)
        shape = len(lengths), width + longest, model.embedding.shape[1] // HEAD_DIM, HEAD_DIM
        self.layers = [
            (model.embedding.new_zeros(shape), model.embedding.new_zeros(shape)) for _ in model.qkv
        ]
        self.stored = 0

    def store(self, k, v):
        for cached, new in zip(self.layers[self.stored], (k, v), strict=True):
            cached[:, : self.width] = new
        self.stored = (self.stored + 1) % len(self.layers)

    def decode(self, token, step):
        end = self.width + step

        def attend(i, q, k, v):
            for cached, new in zip(self.layers[i], (k, v), strict=True):
                cached[:, end - 1 : end] = new
            k, v = (cached[:, :end] for cached in self.layers[i])
            return attention(q, k, v, attn_mask=self.visible[..., :end])

        return decode(self.model, token, attend)


def _answer(cache_type, model, prompts, lengths, longest):
    width = int(lengths.max())
    prompts, lengths = prompts[:, :width], lengths.to(prompts.device)
    batch = Batch(model, len(prompts), longest)
    cache = cache_type(model, lengths, width, longest)
    batch.emit(prefill(model, prompts, lengths, cache.store), batch.steps[:1])
    for step in range(1, longest):
        if batch.ended.all():  # waits for the step
            break
        batch.emit(cache.decode(batch.token, step), batch.steps[step : step + 1])
    return batch.answers, batch.hidden


def _in_batches(answer, prompts, lengths, size):
    answers = [
        answer(*batch) for batch in zip(prompts.split(size), lengths.split(size), strict=True)
    ]
    return tuple(torch.cat(parts) for parts in zip(*answers, strict=True))


def _eager(cache_type, size, model, prompts, lengths, longest):  # noqa: PLR0917  a call's inputs
    def answer(prompts, lengths):
        return _answer(cache_type, model, prompts, lengths, longest)

    return _in_batches(answer, prompts, lengths, size)


def one_by_one(model, prompts, lengths, longest, _size):
    return _eager(Concatenated, 1, model, prompts, lengths, longest)


def batched(model, prompts, lengths, longest, size):
    return _eager(Concatenated, size, model, prompts, lengths, longest)


def slab(model, prompts, lengths, longest, size):
    return _eager(Slab, size, model, prompts, lengths, longest)


def _in_graph(prepare_step, model, prompts, lengths, longest, size):  # noqa: PLR0917  a call's inputs
    """Capture a step for batches of ``size`` requests, into which their number must divide."""
    device, width = prompts.device, prompts.shape[1]
    batch = Batch(model, size, longest)
    cache = Slab(model, lengths[:size].to(device), width, longest)
    step = torch.ones(1, dtype=torch.long, device=device)

    def attend_captured():
        column = step + (width - 1)
        mask = cache.visible & (cache.columns <= column)

        def attend(i, q, k, v):
            for cached, new in zip(cache.layers[i], (k, v), strict=True):
                cached.index_copy_(1, column, new)
            return attention(q, *cache.layers[i], attn_mask=mask)

        return attend

    def decode_step():
        batch.emit(decode(model, batch.token, attend_captured()), step)
        step.add_(1)

    replay = captured(prepare_step(decode_step), device)

    def answer(prompts, lengths):
        lengths = lengths.to(device)
        for state in (batch.ended, batch.answers, batch.hidden):
            state.zero_()
        cache.visible.copy_(Concatenated(model, lengths, width, longest).visible)
        batch.emit(prefill(model, prompts, lengths, cache.store), batch.steps[:1])
        step.fill_(1)
        for _ in range(1, longest):
            if batch.ended.all():
                break
            replay()
        return batch.answers.clone(), batch.hidden.clone()

    return lambda _model, prompts, lengths, *_: _in_batches(answer, prompts, lengths, size)


graph = partial(_in_graph, lambda step: step)
compiled = partial(_in_graph, partial(torch.compile, dynamic=False))
