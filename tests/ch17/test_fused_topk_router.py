"""One kernel that routes tokens to experts beats softmax, top-k and renormalisation in a row.

A router picks the 4 largest of 128 probabilities for each token and lets them sum to one. Written
with torch that is a softmax, which reads and writes all logits, a general top-k, which works
through each row several times because it serves any k, a sum, and a division. Here k is small: a
row fits the registers of a warp, and its 4 largest are taken out one after the other. The logits
are read once, 512 of the 560 bytes a token.

The softmax itself is not needed: renormalised, the sum over all experts cancels. Reading would be
the limit, and the kernel is at 29 % of it: each of the four maxima is a reduction of value and
index over the row, which waits for the one before. With a larger k that grows until sorting is
better. The gain ends where tokens are so few that only launches count. The logits of a token are
all different by construction, so that there is one right choice.
"""

import torch

from kernels.ch17 import topk_router
from pytest_aiperf import Bench, Compare, Work, evidence


def logits(bench: Bench) -> torch.Tensor:
    """Draw each token's ranking of the experts and how decided it is."""
    tokens, experts = bench.size(2**18, check=37), 128
    ranks = torch.rand(tokens, experts, device=bench.device).argsort(1)
    return (ranks - experts / 2) / 16 * (1 + torch.rand(tokens, 1, device=bench.device))


def chain(x):
    weights, experts = torch.softmax(x, 1).topk(topk_router.EXPERTS_PER_TOKEN)
    return weights / weights.sum(1, keepdim=True), experts


def test_fused_topk_router(compare: Compare) -> None:
    compare(
        baseline=chain,
        optimized=topk_router.route,
        inputs=logits,
        work=lambda x: Work(
            bytes=x.nbytes + 48 * len(x), written=48 * len(x), flops=5 * x.numel(), dtype="fp32"
        ),
        reference=lambda x: chain(x.double()),
        evidence=[
            evidence.kernels(most=1),
            evidence.spills(most=0, kernel="_route"),
            evidence.counter("dram__bytes.sum", most=1.1, per="work"),
        ],
    )
