"""A score mod compiled into FlexAttention beats a bias tensor, and beats scores kept in memory.

Attention variants change each score before the softmax. Fused kernels have arguments for few of
them; for others, a program keeps an array of heads x tokens x tokens in memory. In FlexAttention
the change is a function of the score and its indices. torch.compile inlines it into the kernel,
which applies it to scores in registers: nothing of size tokens^2 is read or written. By counters it
has 1.4 % ("softcap") and 2.7 % ("alibi") of the baseline's DRAM traffic.

"alibi" subtracts slope x distance, as encoders for long texts do (16 heads of 64, 8192 tokens). The
baseline passes 2 GiB of biases to PyTorch's attention, which chooses cuDNN. They are made once and
untimed. It takes 1.16 ms on an H200, FlexAttention 0.77: 1.5 times as fast, at 45 % of the fp16
rate instead of 30 %. The biases take 0.45 ms at 4.8 TB/s, the products 0.34 at 800 TFLOP/s; even
one after the other these are 0.79 ms, so 0.37 ms of the baseline is unexplained, about as much as
FlexAttention gains: the counters show that the biases are not read, not that reading them costs
this time. Heads of 128 double the products but not the biases; they were not measured. PyTorch's
FlashAttention 2 refuses slopes; the flash-attn package accepts them, but was not measured.

"softcap" bounds the scores with 50 tanh(score / 50), as Gemma 2 does; the shape, 16 heads of 128
and 4096 tokens, is not that of a Gemma model. PyTorch's attention has no such argument, so the
baseline is two products with tanh and softmax between them, in place where possible. It takes 1.68
ms: softmax 0.84, tanh and the factor 0.26 each, the products 0.31. Tanh moves its 1 GiB at 4.1
TB/s, softmax as much at 1.3: so memory does not bind softmax, and with one as fast as tanh the gain
would be about 1.6. The library arm, the same code under torch.compile, fuses what is between the
products (0.63 ms, 1.7 TB/s) and takes 0.94 in all; at 4.1 TB/s it would be faster than
FlexAttention. FlexAttention takes 0.69 to 0.70: 2.4 times as fast as the baseline and 1.36 times as
fast as the library arm. It keeps scores in fp32, with an RMS error of 0.02 %; the other arms round
them to fp16 (0.3 and 0.2 %), and bf16 would be 8 times as coarse.

With "softcap", FlexAttention reaches only 25 % of the fp16 rate. Its mod runs once per score, 3 x
10^8 times, and computes a tanh each time; what that costs, the approximate instruction
(tanh.approx) and the flash-attn package, which has arguments for both variants, were not measured.
Both variants are bidirectional; sliding_window_block_mask skips tiles. Causal ALiBi needs only a
row of biases, because softmax cancels what is constant in a row. A learned bias per pair must be
read in any case.
"""

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention

from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

CAP = 50.0


def heads(bench: Bench, length: int, width: int) -> Heads:
    length, width = bench.size(length, check=200), bench.size(width, check=32)
    shape = 3, 1, bench.size(16, check=4), length, width
    # fp16: in bf16 the worst results of eager soft-capping miss the tolerance
    q, k, v = torch.randn(shape, device=bench.device, dtype=torch.float16)
    return q, k, v


def heads_and_slopes(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = heads(bench, 8192, 64)
    count = q.shape[1]
    exponents = torch.arange(1, count + 1, device=bench.device) * (-8 / count)
    return q, k, v, static(exponents.exp2())


def heads_with_large_scores(bench: Bench) -> Heads:
    """Scores have a standard deviation of 4: without the cap, results would be 10 % off (RMS)."""
    q, k, v = heads(bench, 4096, 128)
    return 4 * q, k, v


def bias_tensor(q, _k, _v, slopes):
    position = torch.arange(q.shape[2], device=q.device)
    distance = (position[:, None] - position).abs()
    # one head at a time: in fp32, the biases of all heads would take another 4 GiB
    bias = torch.stack([(distance * -slope).to(q.dtype) for slope in slopes])[None]
    return lambda q, k, v, _: scaled_dot_product_attention(q, k, v, attn_mask=bias)


COMPILED = torch.compile(flex.flex_attention, dynamic=False)


def flex_alibi(_q, _k, _v, slopes):
    def subtract_distance(score, _batch, head, query, key):
        # convert the positions, not their difference: that would take a conversion per score
        return score - slopes[head] * (query.float() - key.float()).abs()

    return lambda q, k, v, _: COMPILED(q, k, v, score_mod=subtract_distance)


def eager_softcap(q, k, v):
    """Scale the queries, which are small, not the scores."""
    scores = (q * (q.shape[3] ** -0.5 / CAP)) @ k.mT
    return scores.tanh_().mul_(CAP).softmax(3) @ v


def flex_softcap(_q, _k, _v):
    def cap(score, _batch, _head, _query, _key):
        return CAP * torch.tanh(score / CAP)

    return lambda q, k, v: COMPILED(q, k, v, score_mod=cap)


def in_fp64(modify):
    def attend(q, k, v, *slopes):
        """Go head by head: the scores of all heads would take 8 GiB."""
        outputs = []
        for head in range(q.shape[1]):
            queries, keys, values = (x[:, head].double() for x in (q, k, v))
            scores = modify(queries @ keys.mT * q.shape[3] ** -0.5, *(x[head] for x in slopes))
            outputs.append(scores.softmax(2) @ values)
        return torch.stack(outputs, 1)

    return attend


def with_biases(scores, slope):
    ahead = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    return scores - slope.double() * torch.maximum(ahead - ahead.mT, ahead.mT - ahead)


def capped(scores):
    return CAP - 2 * CAP / (torch.exp(scores * (2 / CAP)) + 1)


INPUTS = {"alibi": heads_and_slopes, "softcap": heads_with_large_scores}
REFERENCES = {"alibi": in_fp64(with_biases), "softcap": in_fp64(capped)}
ARMS = {
    "alibi": (prepared(bias_tensor), prepared(flex_alibi), None),
    "softcap": (
        eager_softcap,
        prepared(flex_softcap),
        torch.compile(eager_softcap, dynamic=False),
    ),
}


@pytest.mark.parametrize("modification", ARMS)
def test_flex_score_mods(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, modification: str
) -> None:
    # check mode disables torch.compile; this flag lets FlexAttention run without it
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    baseline, optimized, library = ARMS[modification]
    compare(
        baseline=baseline,
        optimized=optimized,
        library=library,
        inputs=INPUTS[modification],
        work=lambda q, *_: Work(flops=4 * q.numel() * q.shape[2], dtype="fp16"),
        reference=REFERENCES[modification],
        evidence=[evidence.counter("dram__bytes.sum", max=0.1, per="baseline")],
    )
