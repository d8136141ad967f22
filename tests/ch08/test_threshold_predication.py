"""Compacting the few elements above a threshold beats a costly branch; a select equals a cheap one.

A warp executes a branch when any of its 32 lanes takes it, with the other lanes masked off. With 7
% of random elements above the threshold, 9 of 10 warps execute the function with two or three
active lanes. "compacted" collects these elements of a tile in a shared-memory queue (stream
compaction). A tenth as many warps compute the function, and the rest of the kernel is a copy. It
reaches 98 % of the copy rate on an H100 and 91 % on an H200; the reason for the difference was not
examined. A cheaper function is better still: on an H200, a plain branch around one Halley step,
which computes the same, takes 133 µs, and "compacted" 137. So the costly baseline is declared
naive, and that branch is the library arm of "compacted": it is 3 % faster on an H200 and 1 % slower
on an H100. "select" lets all lanes compute the function and keeps the result only where it is
needed (predication). That removes the divergence, but it saves only the warps' branch instructions:
nearly all warps computed the function before. It gains 1 to 2 % on H200s and nothing on an H100, so
this rung claims parity.

All kernels load 8 elements per thread. "compacted" is for a costly function that has no cheap form.
Here Lambert's W by bisection stands for one: its 24 steps are there to be expensive. The speedup of
"compacted" cannot exceed the share of warps that compute the function divided by the share of
elements above the threshold, 13x here. "select" is for cheap functions, here the same by one Halley
step, where memory is the limit with the branch as well. So the parity shows only that a select
costs nothing. For a function of a few instructions the compiler replaces the branch with
predication itself. In sorted or clustered data few warps diverge, and then queue and select are
pure overhead.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

ACTIVE_LANES = "smsp__thread_inst_executed_per_inst_executed.ratio"
RUNGS = {
    # baseline, its class, and library arm
    "select": (
        ("branch_cheap", "idiomatic", None),
        # BSSY marks where diverged lanes meet again
        [evidence.opcode("BSSY", kernel="apply_cheap_select", max=0)],
    ),
    "compacted": (
        ("branch", "naive", "branch_cheap"),
        [
            evidence.opcode("ATOMS", kernel="apply_compacted"),
            evidence.counter(ACTIVE_LANES, kernel="apply_compacted", min=20),
        ],
    ),
}


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


@pytest.mark.parametrize("rung", RUNGS)
def test_threshold_predication(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    apply = nvcc("ch08/threshold.cu")
    (baseline, against, library), proof = RUNGS[rung]
    compare(
        baseline=apply[baseline],
        optimized=apply["select_cheap" if rung == "select" else rung],
        library=apply[library] if library else None,
        against=against,
        inputs=floats,
        work=lambda a, out, threshold, n: Work(read=a.nbytes, written=a.nbytes),
        reference=by_newton,
        evidence=proof,
    )
