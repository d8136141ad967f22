"""One kernel that routes tokens to experts beats softmax, top-k and renormalization in sequence.

A router selects the 4 largest of 128 expert probabilities per token and scales them to a sum of 1.
In PyTorch that is a softmax, which reads and writes all logits; a general top-k, which passes over
each row several times because it serves any k; a sum; and a division. Here k is small: a row fits
in the registers of a warp, and 4 argmax reductions find the experts one after the other. Of the 560
bytes moved per token, 512 are the logits.

The softmax over all experts is unnecessary: renormalization cancels its denominator. The read is
the limit, and the kernel stays far below read bandwidth, because the reductions over value and
index take longer. With a larger k they take longer still, until sorting is better. The gain ends
where there are so few tokens that only launches count. The logits of a token are distinct by
construction, so that exactly one choice is right.
"""

import torch

from kernels.ch17 import topk_router
from pytest_aiperf import Bench, Compare, Work, evidence


def logits(bench: Bench) -> torch.Tensor:
    """Draw for each token a random ranking of the experts and the scale of its logits."""
    tokens, experts = bench.size(2**18, check=37), 128
    ranks = torch.rand(tokens, experts, device=bench.device).argsort(1)
    return (ranks - experts / 2) / 16 * (1 + torch.rand(tokens, 1, device=bench.device))


def separate_operations(x):
    weights, experts = torch.softmax(x, 1).topk(topk_router.EXPERTS_PER_TOKEN)
    return weights / weights.sum(1, keepdim=True), experts


def test_fused_topk_router(compare: Compare) -> None:
    compare(
        baseline=separate_operations,
        optimized=topk_router.route,
        inputs=logits,
        work=lambda x: Work(read=x.nbytes, written=48 * len(x), flops=5 * x.numel(), dtype="fp32"),
        reference=lambda x: separate_operations(x.double()),
        evidence=[
            evidence.kernels(max=1),
            evidence.spills(max=0, kernel="_route"),
            evidence.counter("dram__bytes.sum", max=1.1, per="work"),
        ],
    )
