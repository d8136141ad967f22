"""Decoding one text at a time: one pass per token, and speculative decoding with three drafts.

A token is sampled by the Gumbel-max rule: the largest sum of a logit and Gumbel noise wins. The
noise of each position is an input, so every way of decoding must produce the same text. All arms
run the prompt in one pass, which gives the first token.

plain        One pass of the model per token.
ngram        The draft is sampled from a table of which token follows which pair in the corpus.
small_model  A model of one layer drafts token by token. It has a KV cache of its own.
untrained    The same with random weights: hardly a token is accepted.

The draft uses the noise of the model, so that similar predictions lead to the same token. One pass
verifies a draft of DRAFT_LENGTH tokens: the accepted tokens, and the model's own token in place of
the first wrong one, are those that one pass per token would give. A round (draft and verify) is one
captured graph; only the end of a text is decided on the host.
"""

from typing import NamedTuple

import torch

from kernels.ch15.decoder import HEAD_DIM, Decoder, attention, block, captured, norm
from kernels.ch15.trained import alibi_slopes
from pytest_aiperf import Score

DRAFT_LENGTH = 4
"""Tokens drafted per round."""


class Requests(NamedTuple):
    """The inputs of a call."""

    model: Decoder
    ngram: torch.Tensor
    """Vocabulary x vocabulary x vocabulary: log-probabilities of the token after each pair."""
    small_model: Decoder
    untrained: Decoder
    prompts: torch.Tensor
    """Texts x prompt length."""
    noise: torch.Tensor
    """Texts x tokens to generate x vocabulary."""


class Text:
    """A growing text: its tokens, the position of the last one, and the noise."""

    def __init__(self, prompt_length, count, noise):
        capacity = -(-(prompt_length + count + DRAFT_LENGTH) // 16) * 16  # aligned for attention
        self.prompt_length, self.count = prompt_length, count
        self.tokens = torch.zeros(capacity, dtype=torch.long, device=noise.device)
        self.noise = noise.new_zeros(capacity, noise.shape[-1])
        self.positions = torch.arange(capacity, device=noise.device)
        self.last = torch.zeros(1, dtype=torch.long, device=noise.device)
        self.passes = torch.zeros(1, dtype=torch.long, device=noise.device)

    def start(self, prompt, noise):
        self.tokens[: self.prompt_length] = prompt
        self.noise[self.prompt_length :][: self.count] = noise

    def sample(self, logits, positions):
        """Choose the tokens that follow ``positions``."""
        return (logits.float() + self.noise[positions + 1]).argmax(1)


class CachedModel:
    """A model with a KV cache for one text."""

    def __init__(self, model, text):
        self.model, self.text = model, text
        heads = model.embedding.shape[1] // HEAD_DIM
        self.slopes = alibi_slopes(heads, model.embedding)
        shape = 2, 1, len(text.positions), heads, HEAD_DIM
        self.caches = [model.embedding.new_zeros(shape) for _ in model.qkv]

    def predict(self, tokens, first):
        """Predict the successor of each of ``tokens``; ``first`` is the position of the first."""
        positions = first + self.text.positions[: len(tokens)]
        mask = self.bias(positions)
        x = self.model.embedding[tokens][None]
        for layer, cache in zip(self.model.layers(), self.caches, strict=True):

            def attend(q, k, v, cache=cache):
                for cached, new in zip(cache, (k, v), strict=True):
                    cached.index_copy_(1, positions, new)
                return attention(q, *cache, attn_mask=mask)

            x = block(x, layer, attend)
        return self.text.sample(norm(x[0]) @ self.model.lm_head.T, positions)

    def bias(self, positions):
        """Return ALiBi's mask for queries at ``positions`` (heads x queries x capacity)."""
        distance = positions[:, None] - self.text.positions
        bias = -self.slopes[:, None, None] * distance
        return bias.masked_fill(distance < 0, -torch.inf)[None]

    def prefill(self):
        """Run the prompt; return the token after it."""
        return self.predict(self.text.tokens[: self.text.prompt_length], 0)[-1]


class NgramDraft:
    def __init__(self, table, text):
        self.table, self.text = table, text

    def prefill(self):
        pass

    def draft(self):
        text = self.text
        tokens = [text.tokens[text.last - 1], text.tokens[text.last]]
        for i in range(DRAFT_LENGTH):
            tokens.append(text.sample(self.table[tokens[-2], tokens[-1]], text.last + i))
        return torch.cat(tokens[2:])


class ModelDraft(CachedModel):
    def draft(self):
        text = self.text
        # the last token but one is not in the cache if the whole previous draft was accepted
        tokens = [self.predict(text.tokens[text.last + text.positions[:2] - 1], text.last - 1)[1:]]
        for i in range(1, DRAFT_LENGTH):
            tokens.append(self.predict(tokens[-1], text.last + i))
        return torch.cat(tokens)


class Decoding:
    """Decodes one text. It holds the tensors that the graphs of its steps read and write."""

    def __init__(self, model, draft, text):
        self.model, self.draft, self.text = model, draft, text
        device = text.tokens.device
        self.start = captured(self.prefill, device)
        self.advance = captured(self.round if draft else self.step, device)

    def prefill(self):
        text = self.text
        if self.draft:
            self.draft.prefill()
        text.tokens[text.prompt_length] = self.model.prefill()
        text.last.fill_(text.prompt_length)
        text.passes += 1

    def step(self):
        """Append one token of the model."""
        text = self.text
        text.tokens.index_copy_(
            0, text.last + 1, self.model.predict(text.tokens[text.last], text.last)
        )
        text.last += 1
        text.passes += 1

    def round(self):
        """Verify a draft; append its accepted tokens and one token of the model."""
        text, drafted = self.text, self.draft.draft()
        verified = self.model.predict(torch.cat([text.tokens[text.last], drafted]), text.last)
        accepted = (verified[:-1] == drafted).long().cumprod(0).sum()
        # tokens beyond the first wrong one are not accepted; the next round overwrites them
        text.tokens.index_copy_(0, text.last + 1 + text.positions[: len(verified)], verified)
        text.last += accepted + 1
        text.passes += 1

    def run(self):
        """Decode the text that was put in place."""
        text = self.text
        self.start()
        if self.draft is None:
            for _ in range(text.count - 1):
                self.advance()
            return
        end = text.prompt_length + text.count - 1
        while text.last.item() < end:  # one synchronization per round, as in a server
            self.advance()


def generate(make_draft=None):
    """Prepare decoding; ``make_draft(requests, text)`` returns the draft, if there is one.

    The callable that it prepares returns the generated tokens (texts x count), and a score: the
    tokens per pass of the model, prefill included.
    """

    def prepare(*args):
        requests = Requests(*args)
        count, prompt_length = requests.noise.shape[1], requests.prompts.shape[1]
        text = Text(prompt_length, count, requests.noise)
        draft = make_draft(requests, text) if make_draft else None
        decoding = Decoding(CachedModel(requests.model, text), draft, text)

        def run(*args):
            requests = Requests(*args)
            answers = requests.prompts.new_empty(len(requests.prompts), count)
            text.passes.zero_()
            for prompt, noise, answer in zip(
                requests.prompts, requests.noise, answers, strict=True
            ):
                text.start(prompt, noise)
                decoding.run()
                answer.copy_(text.tokens[prompt_length:][:count])
            return answers, Score(answers.numel() / text.passes.item(), "tokens per pass")

        return run

    return prepare


plain = generate()
ngram = generate(lambda requests, text: NgramDraft(requests.ngram, text))
small_model = generate(lambda requests, text: ModelDraft(requests.small_model, text))
untrained = generate(lambda requests, text: ModelDraft(requests.untrained, text))
