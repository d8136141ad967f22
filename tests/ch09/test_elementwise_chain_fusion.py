"""Eight elementwise operations in one kernel beat eight kernels by the bytes they no longer move.

Eager PyTorch runs each operation as a kernel that reads the whole array from memory and writes it
back, in place or not: 8 kernels move 16 arrays. The arithmetic is almost free: at one operation per
8 bytes the chip waits for memory. torch.compile generates one kernel that keeps each element in a
register from the first operation to the last and moves 2 arrays, so the limit of the gain is 8x,
the ratio of bytes, once both run at memory speed.

It shrinks where the array fits into the L2 cache (the passes in between then cost less), where a
chain is interrupted by something that does not fuse (a sort, a GEMM of a library), and where the
chain is long enough for the arithmetic itself to become the limit.
"""

import torch

from pytest_aiperf import Bench, Compare, Work, evidence


def values(bench: Bench) -> torch.Tensor:
    return torch.randn(bench.size(2**26, check=5000), device=bench.device)


def bump(x):
    """Standardise, clip to three deviations, and weigh with a parabola around the mean."""
    y = x.sub(0.1).mul_(1.5).clamp_(-3, 3)
    return y.mul_(1 / 6).add_(0.5).square_().neg_().add_(1)


def in_fp64(x):
    return 1 - (((x.double() - 0.1) * 1.5).clamp(-3, 3) / 6 + 0.5) ** 2


def test_elementwise_chain_fusion(compare: Compare) -> None:
    compare(
        baseline=bump,
        optimized=torch.compile(bump, fullgraph=True, dynamic=False),
        inputs=values,
        work=lambda x: Work(bytes=2 * x.nbytes, flops=8 * x.numel(), dtype="fp32"),
        reference=in_fp64,
        evidence=[
            evidence.kernels(1),
            evidence.graph_breaks(0),
            evidence.counter("dram__bytes.sum", most=1.1, per="work"),
        ],
    )
