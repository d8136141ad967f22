"""Fused attention, which never writes its score matrix, beats two matrix products and a softmax.

The scores of one head are tokens x tokens. With 16 heads and 8,192 tokens, they take 2 GiB in bf16,
and q, k, v and the output 32 MiB each. The explicit version writes and reads the scores several
times: first product, scaling, softmax, second product. A fused kernel (FlashAttention, arXiv
2205.14135) computes one tile of scores at a time, keeps it on chip, and rescales the output so far
whenever the running maximum of a row grows (online softmax, test_online_softmax.py). Scores never
reach device memory, so bytes and peak memory grow with the number of tokens, not its square.

`scaled_dot_product_attention` is PyTorch's fused attention; test_sdpa_backend_choice.py compares
its implementations. torch.compile, the library arm, recognizes the explicit version and calls the
same fused kernel, so it is level. The products are the same, so most of the gain is the time of the
passes over the scores. On an H200 traffic explains only part of it: eager softmax takes four times
as long as the scaling, which moves as many bytes. So the second claim has a stronger baseline: its
softmax is compiled by itself, and q is scaled instead of the scores. Four of six passes over the
scores are left, and fused attention gains 4.6x on an H200. There the compiled softmax takes 2.4 ms,
2.4 times as long as a copy of the scores. At copy speed, which ch14/online_softmax comes close to,
the gain would be 2.8x: half of the time saved is due to that slow kernel. The gain must shrink for
short sequences, whose scores stay in the L2 cache, and for a single query, whose scores are one row
(not measured).
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from pytest_aiperf import Bench, Compare, Work, evidence

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def heads(bench: Bench) -> Heads:
    shape = 3, 1, bench.size(16, check=2), bench.size(8192, check=64), 128
    q, k, v = torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
    return q, k, v


def explicit(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


@torch.compile(dynamic=False)
def compiled_softmax(scores):
    return scores.softmax(-1)


def with_compiled_softmax(q, k, v):
    return compiled_softmax((q * q.shape[-1] ** -0.5) @ k.mT) @ v


def fused(q, k, v):
    return scaled_dot_product_attention(q, k, v)


def in_fp64(*inputs):
    """Go head by head: the scores of all heads would take 8 GiB."""
    outputs = []
    for q, k, v in zip(*(x.double().split(1, 1) for x in inputs), strict=True):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
        weights = torch.exp(scores - scores.logsumexp(-1, keepdim=True))
        outputs.append(torch.einsum("bhqk,bhkd->bhqd", weights, v))
    return torch.cat(outputs, 1)


def work(q, k, v):
    return Work(
        read=q.nbytes + k.nbytes + v.nbytes,
        written=q.nbytes,
        flops=4 * q.numel() * q.shape[2],
        dtype="bf16",
    )


COMPILED = torch.compile(explicit, dynamic=False)
EVIDENCE = [
    evidence.kernels(max=2),
    evidence.counter("dram__bytes.sum", max=0.1, per="baseline"),
    evidence.peak_memory(max=0.1, per="baseline"),
]


def test_fused_attention_bytes(compare: Compare) -> None:
    compare(
        baseline=explicit,
        optimized=fused,
        library=COMPILED,
        against="idiomatic",
        inputs=heads,
        work=work,
        reference=in_fp64,
        evidence=EVIDENCE,
    )


def test_fused_attention_compiled_softmax(compare: Compare) -> None:
    compare(
        baseline=with_compiled_softmax,
        optimized=fused,
        library=COMPILED,
        against="idiomatic",
        inputs=heads,
        work=work,
        reference=in_fp64,
        evidence=EVIDENCE,
    )
