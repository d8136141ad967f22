"""Compacting the few elements above a threshold beats a branch that nearly every warp takes.

A warp executes a branch when any of its 32 lanes takes it, with the other lanes masked off. With
7 % of random elements above the threshold, 9 of 10 warps execute the expensive side with two or
three active lanes. A block that first collects these elements in a shared-memory queue (stream
compaction) needs about a tenth as many warps for them, and the rest of the kernel is a copy. The
compacted kernel also loads 8 elements per thread instead of 1, which is part of the gain.

The copy bandwidth limits the compacted kernel, and the speedup cannot exceed the inverse of the
fraction above the threshold, 14x here. A cheap side needs no compaction: the compiler predicates it
or uses a select, and memory is the limit anyway. In sorted or clustered data few warps diverge, and
the queue is pure overhead.
"""

import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

ACTIVE_LANES = "smsp__thread_inst_executed_per_inst_executed.ratio"


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    n = bench.size(2**26 + 1000, check=5000)
    a = torch.randn(n, device=bench.device)
    return a, torch.empty_like(a), 1.5, n


def by_newton(a, out, threshold, n):
    """Apply Lambert's W to the elements above the threshold, with Newton's method from w = 1."""
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
        work=lambda a, out, threshold, n: Work(read=a.nbytes, written=a.nbytes),
        reference=by_newton,
        evidence=[
            evidence.opcode("BRA", kernel="apply_branch", min=2),  # every kernel ends with one BRA
            evidence.opcode("ATOMS", kernel="apply_compacted"),
            evidence.counter(ACTIVE_LANES, kernel="apply_compacted", min=20),
        ],
    )
