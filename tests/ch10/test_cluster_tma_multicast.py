"""With small tiles, blocks that share them by TMA multicast beat blocks that each load all tiles.

A block that computes 128 x 128 elements of a matrix product loads 16 KiB of a and 16 KiB of b per
step, most of it from the L2 cache, because other blocks need the same tiles. At n = 8192 these are
17 GB, and an L2 cache that delivers 9.4 TB/s needs 1.8 ms for them, longer than the tensor cores
for the products. This baseline is naive: it is the best rung of test_wgmma_ladder.py with smaller
tiles, which make the L2 cache bind. Blocks whose tiles of the result lie below each other share the
tile of b. As a thread block cluster they run at the same time, on SMs of one GPC, and TMA can write
what it reads once to the shared memory of all of them (multicast). Each block loads its part of the
tile for all: with clusters of two ("cluster_2"), a block causes 24 KiB of reads per step instead of
32, and with clusters of four ("cluster_4") 20. cuBLAS, the library arm, shares tiles in clusters
and has larger ones, so it is expected to stay ahead of both. Nothing here has been measured yet.

Larger tiles are the other remedy: with 128 x 256, a block loads 48 KiB for twice the products, and
the L2 cache is no longer what binds. "wide_cluster_2" adds clusters of two to that kernel, the best
rung of test_wgmma_ladder.py, against which it is judged: 32 KiB per step instead of 48. It is
required to be no slower, because fewer bytes from the L2 cache save power rather than time. Where
the result is too small for such tiles, or registers are needed for something else, multicast takes
their place. The price: a stage of the pipeline is free only when the consumers of all blocks have
released it, so blocks wait for each other. And clusters of four leave SMs without work where four
does not divide the number of SMs of a GPC. The limit is the rate of the tensor cores, at the clock
that the power cap allows.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

L2_READS = "lts__t_sectors_srcunit_tex_op_read.sum"  # by SMs, not between the halves of the L2
BYTES_FROM_L2 = {"cluster_2": 0.82, "cluster_4": 0.7, "wide_cluster_2": 0.75}
"""Relative to blocks without clusters: 24 and 20 KiB of 32 per step, 32 of 48, and a margin."""

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]


def matrices(bench: Bench) -> Matrices:
    n = bench.size(8192, check=512)
    a, b = torch.randn(2, n, n, device=bench.device).bfloat16()
    return a, b, torch.empty_like(a), n, n, n


@pytest.mark.sm90
@pytest.mark.parametrize("rung", BYTES_FROM_L2)
def test_cluster_tma_multicast(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    gemm = nvcc("ch10/cluster_multicast.cu")
    is_wide = rung == "wide_cluster_2"
    compare(
        baseline=nvcc("ch10/wgmma_ladder.cu")["tma_store"] if is_wide else gemm["no_cluster"],
        optimized=gemm[rung],
        library=lambda a, b, out, m, n, k: torch.mm(a, b.T, out=out),
        against="previous rung" if is_wide else "naive",
        inputs=matrices,
        work=lambda a, b, out, m, n, k: Work(
            read=a.nbytes + b.nbytes, written=out.nbytes, flops=2 * m * n * k, dtype="bf16"
        ),
        reference=lambda a, b, out, m, n, k: a.double() @ b.double().T,
        evidence=[
            evidence.opcode("UTMALDG.2D.MULTICAST", kernel=f"gemm_{rung}("),
            evidence.counter(L2_READS, max=BYTES_FROM_L2[rung], per="baseline"),
            evidence.spills(kernel=f"gemm_{rung}("),
        ],
    )
