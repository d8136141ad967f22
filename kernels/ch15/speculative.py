"""Greedy decoding of one sequence at a time, and two kinds of speculative decoding.

All run the prompt in one pass, which gives the first token.

greedy   One pass of the model per token.
lookup   Prompt lookup: find the last two tokens earlier in the sequence, and draft the tokens that
         followed them there. The draft costs no pass and is right where the text repeats itself.
draft    Self-speculation: the model's own first layer drafts token by token. Draft and model share
         that layer's keys and values.

One pass verifies a draft of DRAFT_LENGTH tokens. The accepted tokens, and the model's own token in
place of the first wrong one, are the tokens of greedy decoding. Only the end of a sequence is
decided on the host: a round (draft and verify) is one captured graph.
"""

import torch

from kernels.ch15.decoder import HEAD_DIM, attention, block, captured, forward, norm

DRAFT_LENGTH = 3
"""Tokens drafted per round."""

DRAFT_LAYERS = 1
"""Layers of the model that draft in self-speculation."""


class Sequence:
    """A growing sequence: its tokens, the position of the last one, its keys and values."""

    def __init__(self, model, prompts, out):
        self.model, self.prompt_length = model, prompts.shape[1]
        device, width = model.embedding.device, model.embedding.shape[1]
        capacity = self.prompt_length + out.shape[1] + DRAFT_LENGTH
        self.tokens = torch.zeros(capacity, dtype=torch.long, device=device)
        self.last = torch.zeros(1, dtype=torch.long, device=device)
        self.positions = torch.arange(capacity, device=device)
        shape = 2, 1, capacity, width // HEAD_DIM, HEAD_DIM
        self.caches = [model.embedding.new_zeros(shape) for _ in model.qkv]

    def predict(self, tokens, first, layers=None):
        """Predict the successor of each of ``tokens``; ``first`` is the position of the first."""
        positions = first + self.positions[: len(tokens)]
        mask = self.positions <= positions[:, None]
        x = self.model.embedding[tokens][None]
        for layer, cache in zip(self.model.layers(layers), self.caches, strict=False):

            def attend(q, k, v, cache=cache):
                for cached, new in zip(cache, (k, v), strict=True):
                    cached.index_copy_(1, positions, new)
                return attention(q, *cache, attn_mask=mask)

            x = block(x, layer, attend)
        return (norm(x[0]) @ self.model.lm_head.T).argmax(1)

    def prefill(self):
        """Run the prompt at the start of ``tokens`` and append the first token."""
        length = self.prompt_length
        self.tokens[length] = self.predict(self.tokens[:length], 0)[-1]
        self.last.fill_(length)

    def step(self):
        next_token = self.predict(self.tokens[self.last], self.last)
        self.tokens.index_copy_(0, self.last + 1, next_token)
        self.last += 1

    def round(self, draft_tokens):
        """Verify a draft; append its accepted tokens and one token of the model."""
        drafted = draft_tokens(self)
        verified = self.predict(torch.cat([self.tokens[self.last], drafted]), self.last)
        accepted = (verified[:-1] == drafted).long().cumprod(0).sum()
        # tokens beyond the first wrong one are not accepted; the next round overwrites them
        self.tokens.index_copy_(0, self.last + 1 + self.positions[: DRAFT_LENGTH + 1], verified)
        self.last += accepted + 1


def lookup(sequence):
    tokens, at, positions = sequence.tokens, sequence.last, sequence.positions[1:]
    previous, last = tokens[at - 1], tokens[at]
    is_match = (tokens[:-1] == previous) & (tokens[1:] == last) & (positions < at)
    match = (positions * is_match).max()  # 0 if there is no match: the draft is then arbitrary
    drafted = match + 1 + sequence.positions[:DRAFT_LENGTH]
    return tokens[drafted.clamp(max=len(positions))]


def draft(sequence):
    tokens = [sequence.tokens[sequence.last]]
    for i in range(DRAFT_LENGTH):
        tokens.append(sequence.predict(tokens[-1], sequence.last + i, DRAFT_LAYERS))
    return torch.cat(tokens[1:])


def greedy(model, prompts, out):
    sequence = Sequence(model, prompts, out)
    prefill, replay = captured(sequence.prefill, out.device), captured(sequence.step, out.device)

    def run(_model, prompts, out):
        for prompt, answer in zip(prompts, out, strict=True):
            sequence.tokens[: len(prompt)] = prompt
            prefill()
            for _ in range(len(answer) - 1):
                replay()
            answer.copy_(sequence.tokens[len(prompt) :][: len(answer)])

    return run


def speculative(draft_tokens):
    def prepare(model, prompts, out):
        sequence = Sequence(model, prompts, out)
        prefill = captured(sequence.prefill, out.device)
        replay = captured(lambda: sequence.round(draft_tokens), out.device)

        def run(_model, prompts, out):
            for prompt, answer in zip(prompts, out, strict=True):
                sequence.tokens[: len(prompt)] = prompt
                prefill()
                end = len(prompt) + len(answer) - 1
                while sequence.last.item() < end:  # one synchronization per round, as in a server
                    replay()
                answer.copy_(sequence.tokens[len(prompt) :][: len(answer)])

        return run

    return prepare


def decode_in_fp64(model, prompts, count):
    """Decode greedily in fp64 without a cache: the tokens, and each sequence's smallest margin.

    The margin of a decision is the difference of the two largest logits, divided by the standard
    deviation of all logits.
    """
    model = model.to(torch.float64)
    sequences = prompts
    margins = prompts.new_full((len(prompts),), torch.inf, dtype=torch.float64)
    for _ in range(count):
        logits = norm(forward(model, sequences)[:, -1]) @ model.lm_head.T
        best, second = logits.topk(2).values.unbind(1)
        margins = margins.minimum((best - second) / logits.std(1))
        sequences = torch.cat([sequences, logits.argmax(1, keepdim=True)], 1)
    return sequences[:, prompts.shape[1] :], margins
