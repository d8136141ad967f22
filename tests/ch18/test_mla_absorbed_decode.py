"""Decoding in the latent space of MLA beats caching the keys and values of all heads.

DeepSeek's multi-head latent attention (MLA) caches 512 latent values and a rotary key of 64 per
token, which all heads share. The model is defined with an up-projection from the latents to each
head's keys (192 values with the rotary part) and values (128). The baseline caches these for 16
heads, as "naive" does in DeepSeek's inference code: 8.9 times as many bytes, which every step
reads. But the up-projection is linear. One can multiply the query by the half of the weights that
makes keys, and the weighted sum of the latents by the half that makes values, so all heads attend
to the same 576 values per token. "absorbed" does so in plain PyTorch. On an H200 the step takes
0.176 ms instead of 0.683, so it gains 3.9x. It reads the latents twice, for the scores and for the
sum, so it saves 4.4x of the bytes, not 8.9x. The gain is smaller still, because about a fifth of
its time is not spent on the cache: the softmax takes 9 %, small kernels 8 %, and gaps between
kernels 5 %. To expand the latents again in every step is slower still, and no arm here.

"fused" reads the cache once and is compared with "absorbed": a Triton kernel with an online softmax
uses a tile as keys and as values. The counters show 1.02 times the least bytes, after 2.00. It
takes 0.091 ms: 1.94x, 1.8x over "absorbed" under torch.compile (its library arm), and 7.5x over the
baseline. One block per sequence would leave half of the SMs idle, so the cache is split in four
(flash-decoding). The limit, reading cache and weights once, is 0.064 ms. The step reads at 70 % of
the measured rate, the attention kernel alone at 85 %; the products with the weights and the merge
take 10 us, and gaps between kernels about 7. Why the attention kernel stays at 85 % was not
examined. FlexAttention, SDPA with heads as queries, FlashMLA and FlashInfer were not compared, nor
caches in pages or of different lengths.

The widths are those of DeepSeek-V2 and V3. V2-Lite has 16 heads, and so does one of 8 GPUs that
share V3's 128 (tensor parallelism). 16 heads need 30 operations per byte; 128 on one GPU need 242,
where an H200 does 170 in the time of reading a byte: arithmetic would be the limit. Neither that
nor prefill was measured. Absorbing takes 3.4 times the operations of attention to expanded keys and
values, so from 171 queries per cached token on, expanding takes fewer in all.
"""

from functools import partial

import pytest
import torch

from kernels.ch18 import latent
from kernels.ch18.latent import LATENT, NOPE, ROPE, V
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

HEADS = 16


def decode_step(bench: Bench) -> State:
    """Draw a query per sequence and head, the latent cache and the up-projection.

    Cache and weights are known before the step, so an arm may expand them in its setup.
    """
    sequences, tokens = bench.size(64, check=2), bench.size(4000, check=150)
    heads = bench.size(HEADS, check=2 * HEADS)  # two groups of heads, so that the check covers both
    # fp16: Triton's interpreter, which the check uses, is wrong in bf16
    options = {"device": bench.device, "dtype": torch.float16}
    q = torch.randn(sequences, heads, NOPE + ROPE, **options)
    cache = torch.randn(sequences, tokens, LATENT + ROPE, **options)
    up = torch.randn(heads, NOPE + V, LATENT, **options) * LATENT**-0.5
    return q, static(cache), static(up)


def expanded_cache(_q, cache, up):
    keys, values = (x.contiguous() for x in latent.expand(cache, up))
    return lambda q, _cache, _up: latent.attend(q, keys, values)


def in_fp64(q, cache, up):
    """Go sequence by sequence: all keys and values in fp64 would take 10 GB."""
    up_keys, up_values = up.double().split([NOPE, V], 1)
    out = []
    for queries, rows in zip(q.double(), cache.double(), strict=True):
        latents, rotary_keys = rows.split([LATENT, ROPE], 1)
        keys = torch.einsum("tc,hdc->htd", latents, up_keys)
        values = torch.einsum("tc,hdc->htd", latents, up_values)
        scores = torch.einsum("hd,htd->ht", queries[:, :NOPE], keys)
        scores += queries[:, NOPE:] @ rotary_keys.T
        weights = torch.softmax(scores / (NOPE + ROPE) ** 0.5, 1)
        out.append(torch.einsum("ht,htd->hd", weights, values))
    return torch.stack(out)


def least_work(q, cache, up):
    sequences, heads, _ = q.shape
    written = 2 * sequences * heads * V
    per_head = cache.shape[1] * (2 * LATENT + ROPE) + LATENT * (NOPE + V)
    return Work(
        read=q.nbytes + cache.nbytes + up.nbytes,
        written=written,
        flops=2 * sequences * heads * per_head,
        dtype="fp16",
    )


FUSED = partial(latent.fused, parts=4)  # 256 blocks; 2 fit on each of 132 SMs
BASELINE = {"absorbed": prepared(expanded_cache), "fused": latent.absorbed}
COMPILED = torch.compile(latent.absorbed, dynamic=False)
OPTIMIZED = {"absorbed": latent.absorbed, "fused": FUSED}
PROOF = {
    # twice the bytes of the latents, which are read for the scores and for the sum
    "absorbed": [
        evidence.counter(
            "dram__bytes.sum",
            max=2.2 * (LATENT + ROPE) / (HEADS * (NOPE + ROPE + V)),
            per="baseline",
        ),
    ],
    "fused": [
        evidence.spills(kernel="_part"),
        evidence.counter("dram__bytes.sum", max=1.1, per="work"),
    ],
}


@pytest.mark.parametrize("rung", PROOF)
def test_mla_absorbed_decode(compare: Compare, rung: str) -> None:
    compare(
        baseline=BASELINE[rung],
        optimized=OPTIMIZED[rung],
        library=COMPILED if rung == "fused" else None,
        against="previous rung" if rung == "fused" else "idiomatic",
        inputs=decode_step,
        work=least_work,
        reference=in_fp64,
        evidence=PROOF[rung],
    )
