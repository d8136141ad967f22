"""With small tiles, pairs of blocks that share them by TMA multicast beat blocks that load all.

A block that computes 128 x 128 elements of a matrix product loads 16 KiB of a and 16 KiB of b per
step, most of it from the L2 cache, because other blocks need the same tiles. At n = 8192 these are
17 GB. The baseline is naive: it is the best rung of test_wgmma_ladder.py with smaller tiles. On an
H100 it takes 1.83 ms, so its SMs take in 9.4 TB/s. That is more than the measured rate of the L2
cache, 8.1 (results/ceilings-h100.json); how that fits was not examined. The tensor cores reach 73
to 77 % of their rate. Blocks whose tiles of the result lie below each other share the tile of b. As
a thread block cluster they run at the same time, on SMs of one GPC, and TMA can write what it reads
once to the shared memory of all of them (multicast). Each block loads its part of the tile for all:
with clusters of two ("cluster_2"), a block causes 24 KiB of reads per step instead of 32, and with
clusters of four ("cluster_4") 20. In three sessions on H100s, clusters of two gained 1.14x to
1.17x, and clusters of four 1.15x to 1.17x. Both are slower than cuBLAS, the library arm, which
shares tiles in clusters and has larger ones. On H200s, whose L2 cache is faster, clusters of two
gained 1.06x to 1.08x and clusters of four 1.01x to 1.03x.

Larger tiles are the other remedy, and the better one: with 128 x 256, a block loads 48 KiB for
twice the products. "wide_cluster_2" adds clusters of two to that kernel, the best rung of
test_wgmma_ladder.py, against which it is judged: 32 KiB per step instead of 48. It claims parity:
without clusters, the kernel already reaches 94 to 96 % of the measured rate of the tensor cores on
H200s, and more on H100s. Multicast may pay for results that are too small for such tiles, or for
kernels that need the registers for something else.

The evidence of the small tiles counts the sectors that SMs read from the L2 cache. They fall by
less than the bytes of the tiles promise: on H100s to 0.88 to 0.91 of the baseline's with clusters
of two, where 0.75 would be expected, and to 0.75 to 0.77 instead of 0.63 with clusters of four; on
H200s to 0.84 to 0.85, and 0.72 to 0.74. The reason is not known, nor is how the counter counts a
multicast. For the larger tiles the evidence is the instruction alone.

The price of a cluster: a stage of the pipeline is free only when the consumers of all blocks have
released it, so blocks wait for each other. Clusters of four also leave SMs without work where four
does not divide the number of SMs of a GPC: here they get 120 of 132. "cluster_4" reads less than
"cluster_2", but is no faster on H100s and slower on H200s; how much each of these two costs
contributes was not measured. The instruction that releases a stage may matter, too. Consumers have
only read, so they arrive at the other blocks' mbarriers with `.relaxed.cluster`. With
`.release.cluster`, each arrival is preceded by a fence for the whole GPU (MEMBAR.ALL.GPU in the
SASS); no arm measures what that costs.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

L2_READS = "lts__t_sectors_srcunit_tex_op_read.sum"  # by SMs, not between the halves of the L2
LESS_FROM_L2 = {
    "cluster_2": [evidence.counter(L2_READS, max=0.93, per="baseline")],
    "cluster_4": [evidence.counter(L2_READS, max=0.8, per="baseline")],
    "wide_cluster_2": [],
}
"""By how much the reads fall at least: to 0.86 and 0.74 on an H200, and a margin."""

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]


def matrices(bench: Bench) -> Matrices:
    n = bench.size(8192, check=512)
    a, b = torch.randn(2, n, n, device=bench.device).bfloat16()
    return a, b, torch.empty_like(a), n, n, n


@pytest.mark.sm90
@pytest.mark.parametrize("rung", LESS_FROM_L2)
def test_cluster_tma_multicast(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    gemm, large_tiles = nvcc("ch10/cluster_multicast.cu"), nvcc("ch10/wgmma_ladder.cu")
    is_wide = rung == "wide_cluster_2"
    compare(
        baseline=large_tiles["tma_store"] if is_wide else gemm["no_cluster"],
        optimized=gemm[rung],
        library=lambda a, b, out, m, n, k: torch.mm(a, b.T, out=out),
        against="idiomatic" if is_wide else "naive",
        inputs=matrices,
        work=lambda a, b, out, m, n, k: Work(
            read=a.nbytes + b.nbytes, written=out.nbytes, flops=2 * m * n * k, dtype="bf16"
        ),
        reference=lambda a, b, out, m, n, k: a.double() @ b.double().T,
        evidence=[
            evidence.opcode("UTMALDG.2D.MULTICAST", kernel=f"gemm_{rung}("),
            *LESS_FROM_L2[rung],
            evidence.spills(kernel=f"gemm_{rung}("),
        ],
    )
