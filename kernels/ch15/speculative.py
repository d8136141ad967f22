"""Greedy decoding of one sequence at a time, and two ways to let one pass give several tokens.

All run the prompt in one pass, which gives the first token.

greedy   a pass of the model for each token.
lookup   the last two tokens are looked up in the text so far; what followed them there is the
         guess. Costs no pass, and is right where a text repeats itself.
draft    the model's own first layer guesses, token by token; its keys and values are the model's.

A guess of AHEAD tokens is checked in one pass over all of them. The tokens up to the first wrong
guess, and the right one in its place, are what greedy decoding gives. Everything but the end of a
sequence is decided on the GPU: a round is one captured graph.
"""

import torch

from kernels.ch15.decoder import attention, block, captured, forward, norm

AHEAD = 3
DRAFT_LAYERS = 1


class Sequence:
    """A text in the making: its tokens, the position of the last one, keys and values."""

    def __init__(self, model, prompts, out):
        self.model, self.prompt = model, prompts.shape[1]
        device, width = model.embedding.device, model.embedding.shape[1]
        room = self.prompt + out.shape[1] + AHEAD
        self.tokens = torch.zeros(room, dtype=torch.long, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.places = torch.arange(room, device=device)
        shape = 2, 1, room, width // 64, 64
        self.caches = [model.embedding.new_zeros(shape) for _ in model.qkv]

    def predict(self, tokens, first, layers=None):
        """Give the token that follows each of these; the first one is at position ``first``."""
        positions = first + self.places[: len(tokens)]
        seen = self.places <= positions[:, None]
        x = self.model.embedding[tokens][None]
        for layer, cache in zip(self.model.layers(layers), self.caches, strict=False):

            def attend(q, k, v, cache=cache):
                for kept, new in zip(cache, (k, v), strict=True):
                    kept.index_copy_(1, positions, new)
                return attention(q, *cache, attn_mask=seen)

            x = block(x, layer, attend)
        return (norm(x[0]) @ self.model.head.T).argmax(1)

    def begin(self):
        """Run the prompt, which lies in ``tokens``."""
        self.tokens[self.prompt] = self.predict(self.tokens[: self.prompt], 0)[-1]
        self.at.fill_(self.prompt)

    def step(self):
        self.tokens.index_copy_(0, self.at + 1, self.predict(self.tokens[self.at], self.at))
        self.at += 1

    def round(self, guess):
        """Check a guess, and take over what is right of it and one token more."""
        guessed = guess(self)
        answers = self.predict(torch.cat([self.tokens[self.at], guessed]), self.at)
        right = (answers[:-1] == guessed).long().cumprod(0).sum()
        # beyond the first wrong guess these are wrong, and the next round writes over them
        self.tokens.index_copy_(0, self.at + 1 + self.places[: AHEAD + 1], answers)
        self.at += right + 1


def lookup(text):
    before, last = text.tokens[text.at - 1], text.tokens[text.at]
    places = text.places[1:]
    same = (text.tokens[:-1] == before) & (text.tokens[1:] == last) & (places < text.at)
    found = (places * same).max()  # 0: nothing is found, and any guess will do
    return text.tokens[(found + 1 + text.places[:AHEAD]).clamp(max=len(places))]


def draft(text):
    guessed = [text.tokens[text.at]]
    for i in range(AHEAD):
        guessed.append(text.predict(guessed[-1], text.at + i, DRAFT_LAYERS))
    return torch.cat(guessed[1:])


def greedy(model, prompts, out):
    text = Sequence(model, prompts, out)
    begin, replay = captured(text.begin, out.device), captured(text.step, out.device)

    def run(_model, prompts, out):
        for prompt, answer in zip(prompts, out, strict=True):
            text.tokens[: len(prompt)] = prompt
            begin()
            for _ in range(len(answer) - 1):
                replay()
            answer.copy_(text.tokens[len(prompt) :][: len(answer)])

    return run


def speculative(guess):
    def prepare(model, prompts, out):
        text = Sequence(model, prompts, out)
        begin = captured(text.begin, out.device)
        replay = captured(lambda: text.round(guess), out.device)

        def run(_model, prompts, out):
            for prompt, answer in zip(prompts, out, strict=True):
                text.tokens[: len(prompt)] = prompt
                begin()
                last = len(prompt) + len(answer) - 1
                while text.at.item() < last:  # waits for each round, as a server would
                    replay()
                answer.copy_(text.tokens[len(prompt) :][: len(answer)])

        return run

    return prepare


def oracle(model, prompts, count):
    """Decode greedily in fp64 without a cache: the tokens, and each text's narrowest decision.

    That is the difference of the two largest logits, over the standard deviation of all.
    """
    model = model.to(torch.float64)
    texts, narrowest = prompts, prompts.new_full((len(prompts),), torch.inf, dtype=torch.float64)
    for _ in range(count):
        logits = norm(forward(model, texts)[:, -1]) @ model.head.T
        best, second = logits.topk(2).values.unbind(1)
        narrowest = narrowest.minimum((best - second) / logits.std(1))
        texts = torch.cat([texts, logits.argmax(1, keepdim=True)], 1)
    return texts[:, prompts.shape[1] :], narrowest
