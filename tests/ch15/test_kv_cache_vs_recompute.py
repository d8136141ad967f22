"""A KV cache beats recomputing the prefix, and writing it in place beats a growing copy.

The keys and values of a token depend only on the tokens before it and never change. Without a
cache, each new token runs the whole prefix through all layers; a text of n tokens costs n * n / 2
token passes. With a cache ("concat", judged against recomputation) each token runs once, and reads
the weights and the cache. In operations the gain is the length of the prefix, here 512 tokens. In
time it is far less, 14x on H100s and 18x to 19x on H200s, because a single token per text is bound
by reading the weights and the cache, while the prefix is bound by arithmetic. Four layers of width
2048 with heads of 128 channels decode two tokens of 64 texts.

The obvious cache grows with `torch.cat`, which allocates and copies all of it for each token: a
read, a write, and another read by attention. A slab of the final length ("slab", judged against
concat) takes the new keys and values in place, so that only attention's read remains. The limit is
3x where the cache outweighs the weights; short prefixes gain nothing. The gain is 1.9x on H200s and
2.0x on H100s. Of the 1.3 ms that the kernels of "slab" take on an H100, attention takes 0.8. The
rest are products and small kernels that "concat" runs as well. The price is memory reserved for
tokens that may never come, which paging avoids (ch15/paged_kv_admission_host).
"""

import pytest
import torch

from kernels.ch15 import kv_cache, oracle
from kernels.ch15.decoder import Decoder, random_decoder
from pytest_aiperf import Bench, Compare, evidence, prepared, static


def prompts_and_tokens(bench: Bench) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    """Make a model, a batch of prompts, and the next two tokens of each."""
    batch, prompt = bench.size(64, check=3), bench.size(512, check=10)
    width, vocabulary = bench.size(2048, check=128), 1000
    layers = bench.size(4, check=2)
    model = random_decoder(layers, width, vocabulary, device=bench.device, dtype=torch.bfloat16)
    ids = torch.randint(vocabulary, (batch, prompt + 2), device=bench.device)
    return static(model), static(ids[:, :-2].clone()), ids[:, -2:].clone()


def in_fp64(model, prompts, new):
    """Run prompts and new tokens through all layers, eight texts at a time."""
    model, sequences = model.to(torch.float64), torch.cat([prompts, new], 1)
    states = [oracle.hidden_states(model, texts) for texts in sequences.split(8)]
    return torch.cat([x[:, -new.shape[1] :] for x in states]).transpose(0, 1)


RUNGS = {
    "concat": (kv_cache.recompute, kv_cache.concat, "naive", []),
    "slab": (
        kv_cache.concat,
        kv_cache.slab,
        "previous rung",
        [evidence.peak_memory(max=0.2, per="baseline")],
    ),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_kv_cache_vs_recompute(compare: Compare, rung: str) -> None:
    baseline, optimized, against, evidence_of_rung = RUNGS[rung]
    compare(
        baseline=prepared(baseline),
        optimized=prepared(optimized),
        against=against,
        inputs=prompts_and_tokens,
        reference=in_fp64,
        evidence=[evidence.counter("dram__bytes.sum", max=0.7, per="baseline"), *evidence_of_rung],
    )
