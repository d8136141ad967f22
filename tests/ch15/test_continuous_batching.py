"""Refilling each slot as soon as its request ends beats waiting for the whole batch.

A decoding step costs the same whether its 32 slots hold 32 requests or 3, because weights and
launches bound it. A static batch runs until its longest request ends, and the slots of short
requests idle. Continuous batching refills a slot in the very next step. Both arms replay the same
captured step; only the rule for refilling differs, so the gain is the ratio of steps. Its limit is
the sum of the longest lengths per static batch, divided by all lengths over the number of slots:
4.4x to 5x here, depending on the order of arrival. The half-empty slots at the end of the trace
cost the rest. "sorted" sorts by length before static batching. It has no such tail and is as fast
here, but it must know the lengths in advance, and it reorders requests.

The trace is short: requests have 3.6 tokens on average and at most 20. They start from one token,
so that refilling costs nothing; a real server prefills a prompt first and must interleave that with
decoding (chunked prefill). The gain is small where lengths are alike. The model prefers each next
token by a wide margin, so rounding does not change tokens. The logit of token 0 at each step is
compared as well, because it depends on attention and its cache.
"""

import pytest
import torch

from kernels.ch15 import slots
from kernels.ch15.decoder import Decoder, forward, norm, random_decoder
from pytest_aiperf import Bench, Compare, evidence, prepared, static

SLOTS = 32
State = tuple[Decoder, torch.Tensor, torch.Tensor, torch.Tensor, int]


def requests(bench: Bench) -> State:
    """Draw an order of fixed lognormal lengths, and a model with one clear next token."""
    count, longest, median = bench.size(320, check=70), bench.size(20, check=9), 1.5
    vocabulary, width = bench.size(1024, check=64), bench.size(512, check=128)
    layers = bench.size(1, check=2)  # layers change the time per step, not the number of steps
    model = random_decoder(layers, width, vocabulary, device=bench.device, dtype=torch.float16)
    model.lm_head[torch.randperm(vocabulary, device=bench.device)] = model.embedding.clone()
    ranks = (torch.randperm(count) + 0.5) / count
    lengths = (median * torch.exp(1.3 * torch.special.ndtri(ranks))).ceil().long()
    lengths = lengths.clamp(max=longest)
    first = torch.randint(vocabulary, (count,), device=bench.device)
    return static(model), first, lengths.to(bench.device), lengths, longest


def in_fp64(model, first, limits, lengths, longest):
    model, sequences = model.to(torch.float64), first[:, None]
    next_token = (model.embedding @ model.lm_head.T).argmax(1)  # by construction of lm_head
    for _ in range(longest - 1):
        sequences = torch.cat([sequences, next_token[sequences[:, -1:]]], 1)
    logits = norm(forward(model, sequences)) @ model.lm_head.T
    within_limit = torch.arange(longest, device=first.device) < limits[:, None]
    return logits.argmax(2) * within_limit, logits[:, :, 0] * within_limit


RUNGS = {
    "sorted": slots.serve(SLOTS, static=True, sort_by_length=True),
    "continuous": slots.serve(SLOTS, static=False),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_continuous_batching(compare: Compare, rung: str) -> None:
    compare(
        baseline=prepared(slots.serve(SLOTS, static=True)),
        optimized=prepared(RUNGS[rung]),
        inputs=requests,
        reference=in_fp64,
        cache="warm",
        evidence=[evidence.launches(max=0.4, per="baseline")],
    )
