"""Keeping keys and values beats computing the prefix again, and a slab beats a growing copy.

A token's keys and values depend only on the tokens before it and never change. Without a cache each
new token runs the whole prefix through all layers, and a text of n tokens costs n * n / 2 of them.
With a cache ("concat", against the recomputation) each token is computed once, and reads weights
and cache instead: the gain is about the length of the prefix until memory becomes the limit.

The obvious cache is appended to with `torch.cat`, which allocates and copies all of it for each
token: read, write, and read once more by attention. A slab of the final length, allocated in
advance ("slab", against concat), takes the new keys and values in place, so that attention's read
is all that is left: 3x at most, where the cache outweighs the weights, and nothing for short
prefixes. Its price is memory reserved for tokens that may never come, which paging avoids
(ch15/paged_kv_admission_host).
"""

import pytest
import torch

from kernels.ch15 import kv_cache
from kernels.ch15.decoder import Decoder, after, attention, before, block, causal, random_decoder
from pytest_aiperf import Bench, Compare, evidence, prepared, static


def texts(bench: Bench) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    """Make a model, a batch of prompts, and the next two tokens of each."""
    batch, prompt = bench.size(64, check=3), bench.size(512, check=10)
    width, tokens = bench.size(2048, check=128), 1000
    layers = bench.size(1, check=2)  # the gain is that of each layer
    model = random_decoder(layers, width, tokens, device=bench.device, dtype=torch.bfloat16)
    ids = torch.randint(tokens, (batch, prompt + 2), device=bench.device)
    return static(model), static(ids[:, :-2].clone()), ids[:, -2:].clone()


def in_fp64(model, prompts, new):
    """Run the prefix through all layers; of the last one only the new tokens are wanted."""
    model, whole, count = model.to(torch.float64), torch.cat([prompts, new], 1), new.shape[1]
    *most, (qkv, *rest) = model.layers()
    seen = torch.ones(count, whole.shape[1], dtype=torch.bool, device=new.device)
    seen = seen.tril(prompts.shape[1])
    answers = []
    for part in whole.split(8):
        x = model.embedding[part]
        for layer in most:
            x = block(x, layer, causal)
        q, k, v = before(x, qkv)
        mixed = attention(q[:, -count:], k, v, attn_mask=seen)
        answers.append(after(x[:, -count:], mixed.flatten(-2), *rest))
    return torch.cat(answers).transpose(0, 1)


RUNGS = {
    "concat": (kv_cache.recompute, kv_cache.concat, "naive", []),
    "slab": (
        kv_cache.concat,
        kv_cache.slab,
        "previous rung",
        [evidence.peak_memory(most=0.2, per="baseline")],
    ),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_kv_cache_vs_recompute(compare: Compare, rung: str) -> None:
    baseline, optimized, against, more = RUNGS[rung]
    compare(
        baseline=prepared(baseline),
        optimized=prepared(optimized),
        against=against,
        inputs=texts,
        reference=in_fp64,
        evidence=[evidence.counter("dram__bytes.sum", most=0.7, per="baseline"), *more],
    )
