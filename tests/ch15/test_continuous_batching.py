"""A slot that takes the next request as soon as its own has ended beats waiting for the batch.

A step of decoding costs the same whether its 32 slots hold 32 requests or 3, since it is bound by
weights and launches. A static batch runs until its longest text ends, and lengths differ a lot: the
slots of short ones idle. Continuous batching refills a slot in the very next step. Both arms replay
the same captured step, in which only the rule for refilling differs, so that the gain is the ratio
of steps. Slots that are never empty would make that 4.8x: the longest text of each batch, summed,
over all lengths divided by the slots. The last texts run in half-empty slots, which costs the rest.
Sorting by length before batching has no such tail and needs even a few steps less here, but it must
know the lengths beforehand, and it reorders.

Requests are first tokens, so that refilling costs nothing; a real server runs a prompt first, and
must keep that from holding up the others (chunked prefill). The gain is small where lengths are
alike. Tokens are robust: the model prefers each next one by a wide margin. What shows the attention
and its cache is the logit of token 0 at each step.
"""

import pytest
import torch

from kernels.ch15 import slots
from kernels.ch15.decoder import Decoder, forward, norm, random_decoder
from pytest_aiperf import Bench, Compare, evidence, prepared, static

SLOTS = 32
State = tuple[Decoder, torch.Tensor, torch.Tensor, torch.Tensor, int]


def requests(bench: Bench) -> State:
    """Make lognormal lengths, always the same ones in another order, and a model that is sure."""
    count, longest, typical = bench.size(320, check=70), bench.size(20, check=9), 1.5
    tokens, width = bench.size(1024, check=64), bench.size(512, check=128)
    layers = bench.size(1, check=2)  # the gain is in the number of steps
    model = random_decoder(layers, width, tokens, device=bench.device, dtype=torch.float16)
    model.head[torch.randperm(tokens, device=bench.device)] = model.embedding.clone()
    ranks = (torch.randperm(count) + 0.5) / count
    lengths = (typical * torch.exp(1.3 * torch.special.ndtri(ranks))).ceil().long()
    lengths = lengths.clamp(max=longest)
    first = torch.randint(tokens, (count,), device=bench.device)
    return static(model), first, lengths.to(bench.device), lengths, longest


def in_fp64(model, first, limits, lengths, longest):
    model, texts = model.to(torch.float64), first[:, None]
    following = (model.embedding @ model.head.T).argmax(1)  # what the model is made to say
    for _ in range(longest - 1):
        texts = torch.cat([texts, following[texts[:, -1:]]], 1)
    logits = norm(forward(model, texts)) @ model.head.T  # what it says
    wanted = torch.arange(longest, device=first.device) < limits[:, None]
    return logits.argmax(2) * wanted, logits[:, :, 0] * wanted


RUNGS = {
    "sorted": slots.serve(SLOTS, together=True, ordered=True),
    "continuous": slots.serve(SLOTS, together=False),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_continuous_batching(compare: Compare, rung: str) -> None:
    compare(
        baseline=prepared(slots.serve(SLOTS, together=True)),
        optimized=prepared(RUNGS[rung]),
        inputs=requests,
        reference=in_fp64,
        cache="warm",
        evidence=[evidence.launches(most=0.4, per="baseline")],
    )
