"""Each step from CUDA cores to overlapped warpgroups makes attention faster, up to cuDNN's speed.

All rungs are FlashAttention: a block computes the scores of its queries tile by tile, keeps them on
chip and rescales its output when the running maximum grows (test_online_softmax.py). "mma_sync"
moves both products to the tensor cores, as FlashAttention 2 does. "wgmma" multiplies whole tiles in
shared memory; with mma.sync, each warp loads its queries and all keys and values into registers. By
count, these loads take a quarter longer than the products (1280 clocks per tile instead of 1024).
"wgmma" also has tiles of 128 keys instead of 64, for which mma.sync has too few registers.
"specialised" gives the copies to a producer warp, so that the two consumer warpgroups need not meet
at a barrier. "pingpong" lets them take turns: one issues products, the other computes its softmax
meanwhile. "overlapped" computes the softmax of the next tile while the weights of this tile are
still multiplied with its values. The last two rungs are the schedule of FlashAttention 3 (arXiv
2407.08608). Without a causal mask, the last rung is on a par with cuDNN, the library arm (0.99x to
1.01x on H200s, 0.99x to 1.00x on H100s), and earlier rungs are slower. With a mask, the last rung
is 1.13x to 1.15x as fast as cuDNN, and "specialised" is already 1 to 3 % faster.

Each rung is compared with the one before, with and without a causal mask; cuDNN is PyTorch's
default on Hopper. With the mask, tiles above the diagonal are left out and blocks with the most
keys start first. All rungs need whole tiles of 128. The limit is the rate of the tensor cores.
Exponentials come next: an SM computes 16 per clock, so with 128 elements per head they take half as
long as the products, and with fewer elements a larger share. For short sequences there are too few
blocks for all SMs.
"""

from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LADDER = ["cuda_cores", "mma_sync", "wgmma", "specialised", "pingpong", "overlapped"]
OPCODES = {
    "mma_sync": [("HMMA.16816.F32.BF16", 1)],
    "wgmma": [("HGMMA.64x128x16", 1)],
    "specialised": [("USETMAXREG", 2)],
    "pingpong": [("BAR.ARV", 1), ("HGMMA.64x128x16", 32)],  # before, in and after the loop
    "overlapped": [("WARPGROUP.DEPBAR", 4)],  # two waits in the loop: for scores, and for outputs
}


def inputs(causal: bool):
    def heads(bench: Bench):
        shape = 3, bench.size(16, check=2), bench.size(8192, check=256), 128
        q, k, v = torch.randn(shape, device=bench.device).bfloat16()
        return q, k, v, int(causal)

    return heads


INPUTS = {causal: inputs(causal) for causal in (False, True)}  # shared: one measurement per ladder


def attend(kernel, q, k, v, causal):
    out = torch.empty_like(q)
    kernel(q, k, v, out, *q.shape[:2], causal)
    return out


def cudnn(q, k, v, causal):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q[None], k[None], v[None], is_causal=bool(causal))[0]


def in_fp64(q, k, v, causal):
    """Go head by head: the scores of all heads would take 8 GiB."""
    masked = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    outputs = []
    for queries, keys, values in zip(q.double(), k.double(), v.double(), strict=True):
        scores = queries @ keys.T / queries.shape[1] ** 0.5
        if causal:
            scores.masked_fill_(masked, -torch.inf)
        outputs.append(torch.exp(scores - scores.logsumexp(1, keepdim=True)) @ values)
    return torch.stack(outputs)


def work(q, k, v, causal):
    length = q.shape[1]
    keys = (length + 1) / 2 if causal else length  # per query, on average
    read = q.nbytes + k.nbytes + v.nbytes
    return Work(read=read, written=q.nbytes, flops=int(4 * q.numel() * keys), dtype="bf16")


@pytest.mark.sm90
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rung", OPCODES)
def test_flash_attention_hand(compare: Compare, nvcc: Nvcc, rung: str, causal: bool) -> None:
    attention = nvcc("ch10/flash_attention.cu")
    compare(
        baseline=partial(attend, attention[LADDER[LADDER.index(rung) - 1]]),
        optimized=partial(attend, attention[rung]),
        library=cudnn,
        against="naive" if rung == "mma_sync" else "previous rung",
        inputs=INPUTS[causal],
        work=work,
        reference=in_fp64,
        evidence=[
            *(evidence.opcode(name, f"attention_{rung}<", min=n) for name, n in OPCODES[rung]),
            evidence.spills(kernel=f"attention_{rung}<", max=8 if rung == "mma_sync" else 0),
        ],
    )
