"""A small MLP that uses each weight from shared memory twice beats one that loads it for each use.

A thread evaluates a whole point with the hidden layers in registers, so memory sees only the 4
inputs and 4 outputs. All lanes of a warp need the same weight at the same time. From global memory
("global"), the weights stay in the L1 cache, and a 16-byte load brings four of them: at most four
FMAs per load. At the full fp32 rate, an SM issues four FMAs of a warp per clock, and needs one such
load per clock. On an H200, "global" reaches a quarter of that rate: one load per four clocks. From
shared memory ("shared"), it completes one per 2.3 clocks. The evidence shows that the warps no
longer wait for global memory (long scoreboard); waits for shared memory are counted elsewhere
(short scoreboard). The kernel also needs fewer registers, so five blocks fit an SM instead of four.
Using each weight for two points ("shared_2") loads it half as often, and the points are
independent, so their FMAs fill each other's latency (ILP). Constant memory serves one address per
warp and seems made for such weights. But with two points per thread ("constant_2"), it takes 2.2
times as long as "shared_2" and longer than "shared". On Hopper each instruction (ULDC.64) loads two
weights into uniform registers: 640 per warp beside 2560 FMAs. After a load from shared memory, a
warp goes on until it needs the value (a scoreboard tracks it). After a load that misses the
constant cache it cannot: the evidence shows that an average of 4.4 warps per issued instruction
wait for that cache, over half of those that are resident, and so the schedulers issue in 51 % of
the clocks instead of 79 %. The bar permits "constant_2" to be slower.

Each rung is measured against the one before it, and the additions keep their order. The library arm
is torch.compile of three matrix products in PyTorch, which write both hidden layers, 2 GiB of
floats, to memory. On an H200 it takes 4.6 times as long as "shared" and 6.7 times as long as
"shared_2": two thirds of that are cuBLAS kernels, and most of the rest is the ReLU between them. An
H100 has no record of this arm yet. The limit is the rate of the fp32 units; "shared_2" reaches two
thirds of it. Four points per thread were tried as well: the loads halve again, but the time is the
same, so loads are no longer the limit. More points also take registers, until they spill or too few
warps fit. Tensor cores have a higher limit, with TF32 or half precision.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

GLOBAL = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
WAITING = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
CONSTANT_MISS = "smsp__average_warps_issue_stalled_imc_miss_per_issue_active.ratio"
LADDER = ["global", "shared", "shared_2", "constant_2"]
PROOF = {
    "shared": [
        evidence.counter(GLOBAL, max=0.2, per="baseline"),
        evidence.counter(WAITING, max=0.5, per="baseline"),  # warps that wait for global memory
    ],
    "shared_2": [evidence.counter(WAVEFRONTS, max=0.55, per="baseline")],
    "constant_2": [
        evidence.counter(WAVEFRONTS, max=0.05, per="baseline"),  # no loads from it
        evidence.counter(CONSTANT_MISS, min=1),  # but warps that wait for the constant cache
    ],
}
LAYERS = [(4, 32), (32, 32), (32, 4)]  # as in the kernel

Points = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


def points(bench: Bench) -> Points:
    n = bench.size(2**23 + 77, check=5003)  # the last block is partly beyond the end
    x = torch.randn(n, 4, device=bench.device)
    layers = [torch.randn(k, m, device=bench.device) * (2 / k) ** 0.5 for k, m in LAYERS]
    return x, torch.cat([w.flatten() for w in layers]), torch.empty_like(x), n


def by_layers(x, weights):
    w1, w2, w3 = (
        w.view(size)
        for w, size in zip(weights.split([k * m for k, m in LAYERS]), LAYERS, strict=True)
    )
    return ((x @ w1).relu() @ w2).relu() @ w3


@torch.compile(dynamic=False)
def compiled(x, weights, out, _n):
    out.copy_(by_layers(x, weights))


@pytest.mark.parametrize("rung", PROOF)
def test_smem_weight_mlp(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    mlp = nvcc("ch08/small_mlp.cu")
    compare(
        baseline=mlp[LADDER[LADDER.index(rung) - 1]],
        optimized=mlp[rung],
        library=compiled,
        against="idiomatic" if rung == "shared" else "previous rung",
        inputs=points,
        work=lambda x, weights, out, n: Work(
            read=x.nbytes + weights.nbytes,
            written=out.nbytes,
            flops=2 * n * weights.numel(),
            dtype="fp32",
        ),
        reference=lambda x, weights, out, n: by_layers(x.double(), weights.double()),
        evidence=[*PROOF[rung], evidence.spills(kernel="mlp")],
    )
