"""Gathering the few elements over a threshold beats a branch that nearly every warp takes.

A warp runs a branch as soon as one of its 32 lanes wants it; the others are predicated off.
With 7 % of random elements over the threshold, 90 % of the warps run the costly side with two or
three lanes at work. A block that first queues the elements concerned in shared memory hands them
out side by side: the same work in a tenth of the warps, and the rest of the kernel is a copy.

The limit is 1 over the share of elements concerned, or memory speed, whichever comes first. A cheap
side needs none of this: the compiler turns it into a select, and memory is the limit anyway.
Where neighbours agree (sorted or clustered data), few warps diverge and the queue only costs.
"""

import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LANES = "smsp__thread_inst_executed_per_inst_executed.ratio"


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    n = bench.size(2**26 + 1000, check=5000)
    a = torch.randn(n, device=bench.device)
    return a, torch.empty_like(a), 1.5, n


def by_newton(a, out, threshold, n):
    """Lambert's W of what is over the threshold, from 1 in steps that double the digits."""
    result = a.double()
    x = result[a > threshold]
    w = torch.ones_like(x)
    for _ in range(12):
        w -= (w - x * torch.exp(-w)) / (1 + w)
    result[a > threshold] = w
    return result


def test_threshold_predication(compare: Compare, nvcc: Nvcc) -> None:
    apply = nvcc("ch08/threshold.cu")
    compare(
        baseline=apply["branch"],
        optimized=apply["compacted"],
        inputs=floats,
        work=lambda a, out, threshold, n: Work(bytes=2 * a.nbytes),
        reference=by_newton,
        evidence=[
            evidence.opcode("BRA", kernel="apply_branch", least=2),  # one ends every kernel
            evidence.opcode("ATOMS", kernel="apply_compacted"),
            evidence.counter(LANES, kernel="apply_compacted", least=20),
        ],
    )
