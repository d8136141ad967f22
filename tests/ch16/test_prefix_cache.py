"""Prefilling only the tokens behind a shared prefix beats prefilling each prompt in full.

The keys and values (KV) of a token depend only on the tokens up to it, so prompts with a common
prefix can share them. Here eight prompts of 4,096 tokens begin with the same system prompt of 3,686
tokens, 90 %. The baseline prefills all 32,768 tokens in one packed pass, as an engine without
prefix caching does. On an H200 that takes 29 ms, at 65 % of the bf16 rate. The optimized arm looks
up each prompt in a radix tree over token ids on the host (RadixAttention in SGLang; vLLM compares
whole blocks) and packs only the tokens behind the longest prefix found. Each layer writes their KV
into a pool; then each request attends to the slots of its whole prompt, with the causal mask
aligned to the lower right. The claim is judged on the time to first token (TTFT): the wall time of
the call, lookup included, until the logits of all prompts are there.

"empty" starts without cached KV: the first prompt pays for the prefix, and the others find it in
the same pass. 6,966 tokens remain: 9.2 ms, a gain of 3.1x to 3.2x, where 4.5x is the limit by
operations. In "filled", an earlier request has paid for the prefix, outside the timed region. 3,280
tokens remain: 5.6 ms, a gain of 5.0x to 5.3x, where 8.8x is the limit. The tensor cores execute 23
% and 12 % of the baseline's operations. In "filled", kernels run for 4.4 ms, and the GPU is idle
for 1.2 ms; how much of that the lookup takes was not measured. The products with the weights take a
tenth of the baseline's time, like the tokens, but attention takes 1.7 ms, more than a fifth.
Gathering its KV from the pool, 268 MB per layer, adds 0.5 ms. Kernels for paged attention read the
KV in place; that was not tried.

The library arm is written by hand for a prefix of known length: compute it once, then attend to
concatenated KV with SDPA. It needs no lookup, but takes 1.2x and 1.3x as long, because torch.cat
takes 2.8 ms, nearly six times as long as the gather. By arithmetic, a copy as fast as the gather
would make it about 5 % faster than the radix tree. Cascade attention (Hydragen, FlashInfer), which
reads the shared KV once for all requests, was not compared. The baseline's FlashAttention 2 reaches
280 TFLOP/s; cuDNN reached 440 on the prefix in the library arm. At that rate the baseline would be
about 10 % faster. A cache of whole prompts would find nothing here. Prompts that share nothing gain
nothing; what the lookup then costs was not measured. Eviction is the subject of
ch16/radix_tree_host. The model has 4 layers of width 2048 and no positional encoding.
"""

from functools import partial

import pytest
import torch

from kernels.ch15 import oracle
from kernels.ch15.decoder import Decoder, random_decoder
from kernels.ch16 import prefix_cache
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

TENSOR_OPS = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"


def requests(bench: Bench, *, filled: bool) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    """Make a model, a system prompt and what follows it in each prompt; tokens are on the host."""
    count, prefix, rest = (
        bench.size(8, check=3),
        bench.size(3686, check=37),
        bench.size(410, check=9),
    )
    layers, width = bench.size(4, check=2), bench.size(2048, check=128)
    vocabulary = bench.size(32_000, check=100)
    model = random_decoder(layers, width, vocabulary, device=bench.device, dtype=torch.bfloat16)
    model.qkv[..., :width].mul_(2)  # larger scores: averages over 4,096 tokens would vanish
    system = torch.randint(vocabulary, (1, prefix))
    users = torch.randint(vocabulary, (count, rest))
    return static(model), static(system) if filled else system, users


def in_fp64(model, system, users):
    """Compute all tokens of one prompt after the other."""
    model = model.to(torch.float64)
    prompts = [torch.cat([system[0], user])[None].to(model.embedding.device) for user in users]
    states = torch.cat([oracle.hidden_states(model, prompt)[:, -1] for prompt in prompts])
    return oracle.normalized(states) @ model.lm_head.T


def minimum(model, system, users, *, filled):
    """Count each distinct token once, in the products and in causal attention."""
    (count, rest), prefix = users.shape, system.shape[1]
    tokens, pairs = users.numel(), count * (rest * prefix + rest * (rest + 1) // 2)
    if not filled:
        tokens, pairs = tokens + prefix, pairs + prefix * (prefix + 1) // 2
    weights, channels = sum(kind.numel() for kind in model[2:]), model.out.shape[:2].numel()
    head = 2 * count * model.lm_head.numel()
    return Work(flops=2 * tokens * weights + 4 * pairs * channels + head, dtype="bf16")


# 0.22 and 0.11 of the baseline's operations remain; an H200's counter shows 0.23 and 0.12
POOLS = {
    "empty": (prefix_cache.radix, prefix_cache.known, 0.3),
    "filled": (prepared(prefix_cache.radix_filled), prepared(prefix_cache.known_filled), 0.2),
}


@pytest.mark.parametrize("pool", POOLS)
def test_prefix_cache(compare: Compare, pool: str) -> None:
    optimized, library, share_of_operations = POOLS[pool]
    compare(
        baseline=prefix_cache.full,
        optimized=optimized,
        library=library,
        inputs=partial(requests, filled=pool == "filled"),
        reference=in_fp64,
        work=partial(minimum, filled=pool == "filled"),
        metric="wall",
        cache="warm",
        evidence=[evidence.counter(TENSOR_OPS, max=share_of_operations, per="baseline")],
    )
