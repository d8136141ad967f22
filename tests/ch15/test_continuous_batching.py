"""Refilling each slot as soon as its request ends beats waiting for the whole batch.

A decoding step costs nearly the same whether its 64 slots hold 64 requests or 3, because the
captured step launches the same kernels and reads the same weights. A static batch runs until its
longest request ends, and the slots of shorter requests compute padding. Continuous batching
(iteration-level scheduling) gives a slot to the next request while the others go on. The lengths of
the answers are not known beforehand: a request ends when the model emits the end token, and the
host reads the number of ended requests two steps late. Only the library arm knows them: it runs
static batches of requests whose answers have similar lengths. It needs fewer steps still, and takes
12 to 16 % less time than continuous batching on H200s.

1,024 requests arrive at once. Prompts and answers have the quantiles of the Azure LLM inference
trace of 2023 (conversations), divided by eight and cut at 256 and 88 tokens; their medians are 128
and 17. In a traced call on an H100, static batches ran 1,264 decoding steps and 16 prefills, and
continuous batching 511 steps; with all slots at work it would be 420, so the limit is 3.0x. The
library arm ran 486 steps and 16 prefills. In time the gain is smaller, because all arms must
prefill the prompts, which have 4.6 times as many tokens as the answers. With continuous batching,
the products of the 171 steps that admit requests take 83 of 367 ms. A static batch prefills its
prompts in one pass. This pass is not captured, because its shape differs from batch to batch; the
GPU waits for its launches for less than a tenth of the time of the static batches. Continuous
batching puts up to eight prompts with up to 1,024 tokens into every third step, so that they share
its read of the weights (piggybacked prefill). All arms replay the same captured decoding step, of a
model with 3 layers of width 2048, heads of 128 channels and a vocabulary of 4,096. It is shallow,
so that the steps of the static batches take less than a second. Continuous batching is 1.8 to 1.9
times as fast as static batches on H200s, and was 1.9 times as fast on an H100 with earlier code.
The tail, when no requests are left to refill slots, keeps it below the limit as well: the more
requests, the less it matters. Reading the weights is not the limit: in the fewest possible steps
that takes 9 % of the time of continuous batching on an H200. A step launches some ninety short
kernels. Its attention goes over the whole cache with a mask, which takes a third of the kernel time
of static batches. Answers of equal length gain nothing.

The model is untrained: its output layer is constructed so that each text counts down to the end
token by a wide margin, and rounding changes no token. The logit of the end token is compared as
well, in one request of 16, because it depends on the prompt and on the KV cache.
"""

from typing import NamedTuple

import numpy as np
import torch

from kernels import azure_trace
from kernels.ch15 import oracle, slots
from kernels.ch15.decoder import Decoder, random_decoder
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

SLOTS = 64
LONGEST_PROMPT, LONGEST_ANSWER = 2048, 700
"""Longer ones are cut. With interpolated percentiles the longest one percent of the answers would
be too long: 64 slots then have about the limit of the trace itself; without the cut, a higher one.
"""


class Requests(NamedTuple):
    model: Decoder
    prompts: torch.Tensor
    """Requests x longest prompt; what follows a shorter prompt is padding."""
    prompt_lengths: torch.Tensor
    longest: int
    """The most tokens that an answer may have."""


def lengths(count: int, tokens: tuple[int, ...], longest: int, divisor: int) -> torch.Tensor:
    """Return lengths at evenly spaced quantiles of the trace, in random order."""
    percents = 100 * (np.arange(count) + 0.5) / count
    of_trace = azure_trace.tokens_at(percents, tokens).clip(max=longest)
    return torch.from_numpy(np.ceil(of_trace / divisor).astype(np.int64))[torch.randperm(count)]


def requests(bench: Bench) -> Requests:
    """Draw prompts whose last token determines the length of the answer."""
    count, divisor = bench.size(1024, check=80), bench.size(8, check=64)
    vocabulary = bench.size(4096, check=64)
    layers, width = bench.size(3, check=2), bench.size(2048, check=128)
    dtype = torch.bfloat16
    model = random_decoder(layers, width, vocabulary, device=bench.device, dtype=dtype)
    model.out.mul_(0.5)  # the layers must not outweigh the embedding of the token
    model.down.mul_(0.5)
    fixed = torch.Generator().manual_seed(1)  # the model is static: later prompts must suit it
    others = 1 + torch.randperm(vocabulary - 1, generator=fixed)
    countdown = torch.cat([torch.tensor([slots.END]), others])
    model.lm_head[countdown[:-1]] = model.embedding[countdown[1:]]
    prompt_lengths = lengths(count, azure_trace.PROMPTS, LONGEST_PROMPT, divisor)
    answer_lengths = lengths(count, azure_trace.ANSWERS, LONGEST_ANSWER, divisor)
    prompts = torch.randint(vocabulary, (count, int(prompt_lengths.max())))
    prompts[torch.arange(count), prompt_lengths - 1] = countdown[answer_lengths]
    longest = -(-LONGEST_ANSWER // divisor)
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
        hidden = oracle.normalized(oracle.hidden_states(model, text[None])[0, length - 1 :])
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
        library=prepared(slots.sorted_static(SLOTS)),
        inputs=requests,
        reference=in_fp64,
        work=reading_weights,
        metric="wall",
        # continuous batching needs 0.4 of the steps; those that admit requests have more kernels
        evidence=[evidence.kernels(max=0.6, per="baseline")],
    )
