"""Decoding in the latent space of MLA beats expanding the cache to all heads' keys and values.

DeepSeek's multi-head latent attention (MLA) caches 512 latent values and a rotary key of 64 per
token, which all heads share. The keys (192 values per head) and values (128) of 16 heads would take
8.9 times as much. The model is defined with an up-projection from the latents to the keys and
values, and "expanded", the baseline, computes just that, for the whole cache in each step. It costs
512 x 256 multiply-adds per head and token, and writes and reads 8.9 times the cache. But the
up-projection is linear. One can multiply the query by the half of the weights that makes keys, and
the weighted sum of the latents by the half that makes values. "absorbed" does so in plain PyTorch:
all heads attend to the same 576 values per token. The weights are then applied once per head and
sequence, not once per token too. That is 120 times fewer operations, and no expanded cache.

"absorbed" reads the cache twice, for the scores and for the sum. "fused" is compared with it: a
Triton kernel with an online softmax, in which a tile in shared memory serves as keys and as values.
That halves the bytes, so the gain is at most about 2x. One block per sequence would leave half of
the SMs idle, so the cache is split in four (flash-decoding, split_kv_decode) and a second kernel
merges the parts. The library arm of "absorbed" caches the expanded keys and values, as "naive" in
DeepSeek's inference code. That saves the expansion, but reads and occupies 8.9 times the bytes. The
library arm of "fused" is "absorbed" under torch.compile. FlashMLA is not compared: it is a package.

The widths are those of DeepSeek-V2 and V3. V2-Lite has 16 heads, and so does one of 8 GPUs that
share V3's 128 (tensor parallelism). The limit is reading the cache once: 16 heads need 30
operations per byte. 128 heads on one GPU need 242, and an H200 does about 170 in the time of
reading a byte. There arithmetic is the limit: a kernel needs wgmma instead of this one's tiles of
16 heads, and fusing saves less. In prefill, where many queries share one expansion, absorbing does
not pay: attention with 576 and 512 values takes 3.4 times the operations of 192 and 128.
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
BASELINE = {"absorbed": latent.expanded, "fused": latent.absorbed}
OPTIMIZED = {"absorbed": latent.absorbed, "fused": FUSED}
LIBRARY = {
    "absorbed": prepared(expanded_cache),
    "fused": torch.compile(latent.absorbed, dynamic=False),
}
PROOF = {
    # the latents are read twice, where keys and values of all heads are written and read
    "absorbed": [
        evidence.counter(
            "dram__bytes.sum",
            max=(LATENT + ROPE) / (HEADS * (NOPE + ROPE + V)),
            per="baseline",
        ),
        evidence.peak_memory(max=0.05, per="baseline"),
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
        library=LIBRARY[rung],
        against="previous rung" if rung == "fused" else "idiomatic",
        inputs=decode_step,
        work=least_work,
        reference=in_fp64,
        evidence=PROOF[rung],
    )
