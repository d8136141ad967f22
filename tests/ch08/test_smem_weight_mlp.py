"""A small MLP that uses each weight from shared memory for several points beats one load per use.

A thread evaluates a whole point with the hidden layers in registers, so memory sees only the 4
inputs and 4 outputs. All lanes of a warp need the same weight at the same time. From global memory
("global"), the weights stay in the L1 cache, and a 16-byte load brings four of them: at most four
FMAs per load. Shared memory ("shared") has a shorter latency, which is the likely reason for its
gain: the evidence shows that the weights moved, not why that is faster. Constant memory, which
serves one address per warp as an operand of the FMA, suits such weights as well; it is not
measured. Using each weight for two or four points ("shared_2", "shared_4") loads it half or a
quarter as often, and the points are independent, so their FMAs fill each other's latency (ILP). On
an H200 two points gain and four do not: the loads halve again, as counted, but the time is the
same, at two thirds of the fp32 rate. Loads are then no longer the limit. The registers double (127
to 243), so half as many warps fit.

Each rung is measured against the one before it, and the additions keep their order. The library arm
is three matrix products in PyTorch, which write both hidden layers to memory. The limit is the rate
of the fp32 units. More points per thread take registers, until they spill or too few warps fit.
Tensor cores have a higher limit, with TF32 or half precision.
"""

import pytest
import torch

from kernels.ch01.fp32_products import fp32_products
from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

GLOBAL = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
LADDER = ["global", "shared", "shared_2", "shared_4"]
PROOF = {
    "shared": evidence.counter(GLOBAL, max=0.2, per="baseline"),
    "shared_2": evidence.counter(WAVEFRONTS, max=0.55, per="baseline"),
    "shared_4": evidence.counter(WAVEFRONTS, max=0.55, per="baseline"),
}
LAYERS = [(4, 32), (32, 32), (32, 4)]  # as in the kernel

Points = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


def points(bench: Bench) -> Points:
    n = bench.size(2**23 + 77, check=5003)  # the last block is partly beyond the end
    x = torch.randn(n, 4, device=bench.device)
    layers = [torch.randn(k, m, device=bench.device) * (2 / k) ** 0.5 for k, m in LAYERS]
    return x, torch.cat([w.flatten() for w in layers]), torch.empty_like(x), n


def by_layers(x, weights, out=None):
    w1, w2, w3 = (
        w.view(size)
        for w, size in zip(weights.split([k * m for k, m in LAYERS]), LAYERS, strict=True)
    )
    return torch.mm((x @ w1).relu_().mm(w2).relu_(), w3, out=out)


def products(x, weights, out, n):
    with fp32_products("ieee"):
        by_layers(x, weights, out)


@pytest.mark.parametrize("rung", PROOF)
def test_smem_weight_mlp(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    mlp = nvcc("ch08/small_mlp.cu")
    compare(
        baseline=mlp[LADDER[LADDER.index(rung) - 1]],
        optimized=mlp[rung],
        library=products,
        against="idiomatic" if rung == "shared" else "previous rung",
        inputs=points,
        work=lambda x, weights, out, n: Work(
            read=x.nbytes + weights.nbytes,
            written=out.nbytes,
            flops=2 * n * weights.numel(),
            dtype="fp32",
        ),
        reference=lambda x, weights, out, n: by_layers(x.double(), weights.double()),
        evidence=[PROOF[rung], evidence.spills(kernel="mlp")],
    )
