"""Guessing tokens cheaply and checking the guesses in one pass gives the same text sooner.

Decoding one sequence reads all weights for each token, and the arithmetic units idle. A pass over
four tokens reads the weights once as well, so that a round of guessing three tokens and checking
them all takes far less time than four passes, and each right guess saves one. The text is exactly
that of greedy decoding, whatever the guess; only its speed depends on how often the guesses are
right. "lookup" copies what followed the last two tokens when they last occurred, and wins where a
text repeats itself. "draft" asks the first layer of the model, an eighth of it, for each token. A
round gives 3.75 tokens with "lookup", the most that rounds of four allow for 15 tokens, and 3.3
with "draft"; with "lookup" it takes about 1.6 times as long as a pass over one token. So many
guesses are right because the model's later layers only refine, and because its text repeats itself:
prompts are what it said before. Each draw gives all tokens other names.

With a share `a` of right guesses, `k` guessed tokens and a draft that costs `c` passes, the limit
is (1 - a^(k+1)) / ((1 - a) (1 + k c)). It ends with the batch: from some dozens of sequences on,
the arithmetic of a pass is no longer free, and wrong guesses cost what right ones save. Decisions
of the tokens are robust: those texts are taken whose choices are far from a tie in fp64.
"""

from functools import cache

import pytest
import torch

from kernels.ch15 import speculative
from kernels.ch15.decoder import Decoder, random_decoder
from pytest_aiperf import Bench, Compare, evidence, prepared, static

RUNGS = {"lookup": speculative.lookup, "draft": speculative.draft}


@cache
def robust(device: str, full: bool) -> tuple[Decoder, torch.Tensor, int]:
    """Make a model and find prompts behind which rounding errors decide nothing."""
    rng = torch.Generator(device).manual_seed(1)
    sizes, before, count = ((8, 1024, 512), 64, 16) if full else ((3, 128, 64), 9, 8)
    model = random_decoder(*sizes, generator=rng, device=device)
    model.out.mul_(0.08)  # later layers refine what the first ones say, as trained ones do
    model.down.mul_(0.08)
    prompts, _ = speculative.oracle(model, torch.arange(12, device=device)[:, None], before)
    _, narrowest = speculative.oracle(model, prompts, count)
    safe = narrowest > 1e-3  # a thousand times what fp32 gets wrong
    return model, prompts[safe][:2], count


def requests(bench: Bench) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    model, prompts, count = robust(bench.device, bench.full)
    names = torch.randperm(len(model.embedding), device=bench.device)
    known = names.argsort()  # which token has a name
    model = model._replace(embedding=model.embedding[known], head=model.head[known])
    return static(model), names[prompts], prompts.new_empty(len(prompts), count)


@pytest.mark.parametrize("rung", RUNGS)
def test_speculative_decoding(compare: Compare, rung: str) -> None:
    compare(
        baseline=prepared(speculative.greedy),
        optimized=prepared(speculative.speculative(RUNGS[rung])),
        inputs=requests,
        reference=lambda model, prompts, out: speculative.oracle(model, prompts, out.shape[1])[0],
        metric="wall",
        # fewer passes: a round has more kernels than one pass, but fewer than its tokens' passes
        evidence=[evidence.kernels(most=0.9, per="baseline")],
    )
