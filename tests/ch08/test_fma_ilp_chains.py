"""Independent accumulators fill the FMA pipe that a single chain leaves idle.

The result of an FMA can be used 4 clocks later, and a scheduler could issue one every clock. With
one warp on each scheduler, a chain in which every FMA needs the one before it uses a quarter of the
slots. Two chains in the same thread use half. Four could fill the pipe, and come near: 4 clocks
over 1 are the limit. Eight come nearer, since the loop's own instructions and the wait for the next
values come half as often. All rungs do the same FMAs and give the same bits. One chain is a
handicap on purpose, hence a naive baseline.

Few warps are the point: four warps on a scheduler fill the slots with one chain each, and more
chains then win nothing. Kernels that need many registers (GEMMs) have few warps and live by this.
The data is half a megabyte and stays in the L2 cache, where it hardly matters.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

ISSUED = "smsp__issue_active.avg.per_cycle_active"
PROOF = {  # FMAs in the unrolled loop (16 steps), issues a clock
    "chains_2": ("Chains2", 32, 0.45),
    "chains_4": ("Chains4", 64, 0.85),
    "chains_8": ("Chains8", 128, 0.85),
}


def values(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, float, int, int]:
    n = 132 * 128 * 8  # a block of 128 threads on each multiprocessor of an H200, 8 values a thread
    x = torch.randn(n, device=bench.device)
    return x, torch.empty_like(x), 1 - 2**-11, bench.size(4096, check=50), n


def closed_form(x, out, a, steps, n):
    return 1 + (x.double() - 1) * a**steps


@pytest.mark.parametrize("rung", PROOF)
def test_fma_ilp_chains(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    kernel, unrolled, issued = PROOF[rung]
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
            evidence.opcode("FFMA", kernel=kernel, least=unrolled),
            evidence.counter(ISSUED, kernel=kernel, least=issued),
        ],
    )
