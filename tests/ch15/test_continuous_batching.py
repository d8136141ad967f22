"""Refilling each slot as soon as its request ends beats waiting for the whole batch.

A decoding step costs nearly the same whether its 64 slots hold 64 requests or 3, because the
captured step launches the same kernels and reads the same weights. A static batch runs until its
longest request ends, and the slots of shorter requests compute padding. Continuous batching
(iteration-level scheduling) gives a slot to the next request while the others go on. When a text
ends is found out, not known: a request ends when the model emits the end token, and the host polls
how many have ended, two steps late. Both arms replay the same captured decoding step of a model
with 4 layers of width 2048, heads of 64 channels and a vocabulary of 4,096. It is shallow, so that
the 1,200 steps of the static batches take less than a second. The limit is the mean of a batch's
longest answer divided by the mean of all answers.

1,024 requests arrive at once. Their answers have the quantiles of the Azure LLM inference trace of
2023 (conversations; its median is 129 tokens), divided by eight. For 64 slots the limit is 2.94x.
What keeps continuous batching below it: the tail, when no requests are left to refill slots (the
more requests, the less it matters), and prefill, which both arms need. Continuous batching prefills
up to eight prompts within every third step, so that they share its read of the weights (piggybacked
prefill). Prompts are short here, 6 to 24 tokens. If they were as long as in the trace, they would
take about as much time as decoding, and the service as a whole would gain less than 2x. Answers of
equal length gain nothing.

The model is untrained: its output layer is constructed so that each text counts down to the end
token by a wide margin, and rounding changes no token. The logit of the end token is compared as
well, in one request of 16, because it depends on the prompt and on the KV cache.
"""

from typing import NamedTuple

import numpy as np
import torch

from kernels.ch15 import slots
from kernels.ch15.decoder import Decoder, forward, norm, random_decoder
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

SLOTS = 64
PERCENTS = 0, 1, 5, 10, 25, 40, 50, 60, 75, 90, 95, 99, 100
TOKENS = 7, 16, 41, 54, 85, 103, 129, 177, 395, 424, 451, 601, 1000
"""Percentiles of the answers in the Azure LLM inference trace 2023, conversations (CC-BY)."""
LONGEST = 700
"""Longer answers are cut. With interpolated percentiles the longest one percent would be too long:
64 slots then have about the limit of the trace itself, 2.95x; without the cut it is 3.2x."""


class Requests(NamedTuple):
    model: Decoder
    prompts: torch.Tensor
    """Requests x longest prompt; what follows a shorter prompt is padding."""
    prompt_lengths: torch.Tensor
    longest: int
    """The most tokens that an answer may have."""


def answer_lengths(count: int, divisor: int) -> torch.Tensor:
    """Return lengths at evenly spaced quantiles of the trace, in random order."""
    quantiles = 100 * (np.arange(count) + 0.5) / count
    lengths = np.exp(np.interp(quantiles, PERCENTS, np.log(TOKENS))).clip(max=LONGEST)
    lengths = np.ceil(lengths / divisor).astype(np.int64)
    return torch.from_numpy(lengths)[torch.randperm(count)]


def requests(bench: Bench) -> Requests:
    """Draw prompts whose last token determines the length of the answer."""
    count, divisor = bench.size(1024, check=80), bench.size(8, check=64)
    longest_prompt, vocabulary = bench.size(24, check=6), bench.size(4096, check=64)
    layers, width = bench.size(4, check=2), bench.size(2048, check=128)
    dtype = torch.bfloat16
    model = random_decoder(layers, width, vocabulary, device=bench.device, dtype=dtype)
    model.out.mul_(0.5)  # the layers must not outweigh the embedding of the token
    model.down.mul_(0.5)
    countdown = torch.cat([torch.tensor([slots.END]), 1 + torch.randperm(vocabulary - 1)])
    model.lm_head[countdown[:-1]] = model.embedding[countdown[1:]]
    prompts = torch.randint(vocabulary, (count, longest_prompt))
    prompt_lengths = torch.randint(longest_prompt // 4, longest_prompt + 1, (count,))
    lengths = answer_lengths(count, divisor)
    prompts[torch.arange(count), prompt_lengths - 1] = countdown[lengths]
    longest = -(-LONGEST // divisor)
    moved = (x.to(bench.device) for x in (prompts, prompt_lengths))
    return Requests(static(model), *moved, longest)


def answers_of(request: Requests) -> torch.Tensor:
    """Return the answers (requests x longest), which follow from the output layer alone."""
    model, prompts, prompt_lengths, longest = request
    successor = (model.embedding.float() @ model.lm_head.T.float()).argmax(1)
    successor[slots.END] = slots.END  # an answer stays at its end
    tokens = [prompts.gather(1, prompt_lengths[:, None] - 1)]
    for _ in range(longest):
        tokens.append(successor[tokens[-1]])
    return torch.cat(tokens[1:], 1)


def in_fp64(*args):
    """Run each sampled text on its own, prompt and answer in one pass."""
    request, answers = Requests(*args), answers_of(Requests(*args))
    model, sampled = request.model.to(torch.float64), slice(None, None, slots.SAMPLING_INTERVAL)
    logits = torch.zeros_like(answers[sampled], dtype=torch.float64)
    for row, prompt, length, answer in zip(
        logits, request.prompts[sampled], request.prompt_lengths[sampled], answers[sampled],
        strict=True,
    ):  # fmt: skip
        count = min(int((answer != slots.END).sum()) + 1, len(answer))  # the longest has no end
        text = torch.cat([prompt[:length], answer[: count - 1]])
        hidden = norm(forward(model, text[None])[0, length - 1 :])
        row[:count] = hidden @ model.lm_head[slots.END]
    return answers, logits


def reading_weights(*args) -> Work:
    """Each step reads the weights, and no schedule needs fewer steps than all slots at work."""
    answers = answers_of(Requests(*args))
    tokens = ((answers != slots.END).sum(1) + 1).clamp(max=answers.shape[1]).sum()
    weights = sum(weight.nbytes for weight in args[0][1:])
    return Work(read=weights * float(tokens) / SLOTS)


def test_continuous_batching(compare: Compare) -> None:
    compare(
        baseline=prepared(slots.static(SLOTS)),
        optimized=prepared(slots.continuous(SLOTS)),
        inputs=requests,
        reference=in_fp64,
        work=reading_weights,
        metric="wall",
        # one launch per step: continuous batching needs less than half of the steps
        evidence=[evidence.launches(max=0.5, per="baseline")],
    )
