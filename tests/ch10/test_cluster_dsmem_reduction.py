"""A cluster that holds a long row between its blocks reads it from memory once.

RMSNorm needs the whole row before it can scale the first element. A row of 65536 floats is larger
than the shared memory of one multiprocessor. Two kernels, for the sum and for the scaling, read all
rows from memory twice: one block a row ("one_block") makes three passes two, 1.5x at most, as far
as its second walk finds the row in the L2 cache. The blocks of a cluster run together and read each
other's shared memory (DSMEM): each holds a part of the row, one barrier exchanges the sums, and
what is held is scaled and written, without a second walk.

The clusters are compared with the one block. Where the L2 cache holds all rows under way, they save
the second walk and nothing else; here these rows are up to 66 MiB, the cache of an H200 is 60 MiB,
and what it loses is read from memory again. In a cluster of 2 a block holds so much that it has
its multiprocessor to itself and idles at the barrier: that ran at 0.95x of one block, and is no
rung. Smaller parts let blocks of other rows work then. Rows that fit in one block need no cluster,
and rows beyond 16 blocks' shared memory do not fit one.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

IN_CLUSTER = [
    evidence.opcode("UCGABAR_ARV", kernel="norm_cluster"),
    evidence.counter("dram__bytes_read.sum", most=0.55, per="work"),  # half is read, half written
]
PROOF = {
    "one_block": [
        evidence.kernels(most=1),
        evidence.counter("dram__bytes_read.sum", most=0.8, per="baseline"),
    ],
    "cluster_4": IN_CLUSTER,
    "cluster_8": IN_CLUSTER,
}


def rows(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    count, width = bench.size(1024, check=3), bench.size(65536, check=4096)
    x = torch.randn(count, width, device=bench.device)
    return x, torch.empty_like(x), torch.empty(count, device=bench.device), count, width


def in_fp64(x, out, rstd, count, width):
    rstd = (x.double().square().mean(1) + 1e-5).rsqrt()
    return x.double() * rstd[:, None], rstd


@pytest.mark.gpu(min_sm=90)
@pytest.mark.parametrize("rung", PROOF)
def test_cluster_dsmem_reduction(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    norm = nvcc("ch10/cluster_dsmem_reduction.cu")
    compare(
        baseline=norm["two_kernels" if rung == "one_block" else "one_block"],
        optimized=norm[rung],
        inputs=rows,
        work=lambda x, out, rstd, *_: Work(2 * x.nbytes + rstd.nbytes, 3 * x.numel(), "fp32"),
        reference=in_fp64,
        evidence=PROOF[rung],
    )
