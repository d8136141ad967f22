"""Independent FMA chains keep the FMA pipe busier than a single dependency chain.

The result of an FMA is available after 4 clocks, and a warp scheduler can issue one per clock. With
one warp per scheduler, a single dependency chain uses a quarter of the issue slots and two chains
in the same thread use half. Four can fill the pipe, so the limit is 4x. Eight come closer to it
(1.08x over four), because the loop instructions and the loads of the next values come half as
often. This is instruction-level parallelism (ILP). All rungs execute the same FMAs and give
bit-identical results. The single chain is built to be slow, so the baseline is naive.

The low occupancy is deliberate: with four warps per scheduler, one chain per thread can fill the
slots, and more chains have little to gain (not measured here). Kernels that need many registers,
such as GEMMs, run few warps and depend on ILP. The data, half a megabyte of input and as much
output, stay in the L2 cache and hardly affect the time.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

ISSUE_RATE = "smsp__issue_active.avg.per_cycle_active"
# The latency allows an issue rate of chains / 4. The end of the loop costs about 8 clocks per 64,
# and the start about 4000 of 40,000; the bounds leave 20 to 25 % for both.
EVIDENCE = {  # kernel, FMAs in the loop body (16 steps unrolled), instructions issued per clock
    "chains_2": ("Chains2", 32, 0.4),
    "chains_4": ("Chains4", 64, 0.75),
    "chains_8": ("Chains8", 128, 0.8),
}


def values(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, float, int, int]:
    n = 132 * 128 * 8  # one block of 128 threads on each of the 132 SMs, 8 values per thread
    x = torch.randn(n, device=bench.device)
    return x, torch.empty_like(x), 1 - 2**-11, bench.size(4096, check=50), n


def closed_form(x, out, a, steps, n):
    return 1 + (x.double() - 1) * a**steps


@pytest.mark.parametrize("rung", EVIDENCE)
def test_fma_ilp_chains(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    kernel, ffmas, issue_rate = EVIDENCE[rung]
    iterate = nvcc("ch08/fma_chains.cu")
    compare(
        baseline=iterate["chains_1"],
        optimized=iterate[rung],
        against="naive",
        inputs=values,
        work=lambda x, out, a, steps, n: Work(flops=2 * steps * n, dtype="fp32"),
        reference=closed_form,
        cache="warm",
        evidence=[
            evidence.opcode("FFMA", kernel=kernel, min=ffmas),
            evidence.counter(ISSUE_RATE, kernel=kernel, min=issue_rate),
        ],
    )
