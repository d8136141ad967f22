"""Speculative decoding, which verifies drafted tokens in one pass, beats one pass per token.

Decoding one sequence reads all weights for each token, and the arithmetic units idle. A pass over
four tokens reads the weights once as well, so a round that drafts three tokens and verifies them
takes far less time than four passes, and each accepted token saves one. The text is exactly that of
greedy decoding, whatever the draft; only the speed depends on the acceptance rate. "lookup" (prompt
lookup) copies the tokens that followed the last two when these last occurred, and gains where a
text repeats itself. "draft" (self-speculation) runs the first of the model's eight layers per
drafted token.

The acceptance rate is constructed here, not measured on real text. The later layers are scaled down
so that the first layer usually predicts the same token, and the prompts are the model's own greedy
output, which repeats itself. Each seed relabels the tokens of the same prompts.

With an acceptance rate `a`, `k` drafted tokens and a draft that costs `c` passes, the limit is
(1 - a^(k+1)) / ((1 - a) (1 + k c)). The gain ends with larger batches: at some dozens of sequences
the arithmetic of a pass is no longer free, and a rejected token costs as much as an accepted one
saves. Rounding does not change tokens: only prompts whose greedy choices have a wide margin in fp64
are used.
"""

from functools import cache

import pytest
import torch

from kernels.ch15 import speculative
from kernels.ch15.decoder import Decoder, random_decoder
from pytest_aiperf import Bench, Compare, evidence, prepared, static

RUNGS = {"lookup": speculative.lookup, "draft": speculative.draft}


@cache
def model_with_safe_prompts(device: str, full: bool) -> tuple[Decoder, torch.Tensor, int]:
    """Make a model, and find prompts after which rounding errors do not change the tokens."""
    rng = torch.Generator(device).manual_seed(1)
    sizes, prompt_length, count = ((8, 1024, 512), 64, 16) if full else ((3, 128, 64), 9, 8)
    model = random_decoder(*sizes, generator=rng, device=device)
    model.out.mul_(0.08)  # small updates by each layer: the first layer drafts well
    model.down.mul_(0.08)
    prompts, _ = speculative.decode_in_fp64(
        model, torch.arange(12, device=device)[:, None], prompt_length
    )
    _, margins = speculative.decode_in_fp64(model, prompts, count)
    is_safe = margins > 1e-3  # a thousand times the rounding error of fp32
    return model, prompts[is_safe][:2], count


def requests(bench: Bench) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    model, prompts, count = model_with_safe_prompts(bench.device, bench.full)
    new_ids = torch.randperm(len(model.embedding), device=bench.device)
    old_ids = new_ids.argsort()
    model = model._replace(embedding=model.embedding[old_ids], lm_head=model.lm_head[old_ids])
    return static(model), new_ids[prompts], prompts.new_empty(len(prompts), count)


@pytest.mark.parametrize("rung", RUNGS)
def test_speculative_decoding(compare: Compare, rung: str) -> None:
    compare(
        baseline=prepared(speculative.greedy),
        optimized=prepared(speculative.speculative(RUNGS[rung])),
        inputs=requests,
        reference=lambda model, prompts, out: speculative.decode_in_fp64(
            model, prompts, out.shape[1]
        )[0],
        metric="wall",
        # a round runs more kernels than one pass, but fewer than one pass per token
        evidence=[evidence.kernels(max=0.9, per="baseline")],
    )
