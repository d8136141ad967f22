"""Without clusters, consumer warpgroups that take turns are within 2 % of ones that work in step.

With k = 512, a tile of 128 x 256 takes eight steps of products, and then its result has to be
converted, staged in shared memory and stored. In the baseline, the best rung of
test_wgmma_ladder.py, both consumer warpgroups work on one tile (cooperative), so the tensor cores
have nothing to do while both of them stage results. In a ping-pong schedule each warpgroup has
tiles of its own, of 64 x 256, so that the two finish at different times. Named barriers give them
turns: while one stages its result, the other multiplies. On an H200 the turns take 0 to 2 % less
time than the baseline and than cuBLAS, the library arm; on an H100 they take 2 % longer than both.

The price of the turns is that a step loads 256 rows of b for 64 rows of a instead of 128: 1.34 GB
in all instead of 0.81, in 104 to 108 µs on H200s. These are 12.5 to 12.9 TB/s instead of 7.5. The
counter shows 1.3 to 1.5 times as many sectors read from the L2 cache, not 1.67: probably requests
of neighboring SMs for the same rows of b are combined on their way. The L2 delivers 9.4 TB/s to the
kernel that measures it, so the loads may take most of what the turns gain. The evidence counts
them, but it does not show that they are the limit. An H100's L2 cache is slower, which fits its
loss. Tiles of 128 x 128 would load 1.07 GB. Clusters of two with multicast would load 0.81 GB with
such tiles, and CUTLASS runs its ping-pong kernels with both. In attention, where softmax takes the
place of the epilogue, turns do gain (test_flash_attention_hand.py).
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

L2_READS = "lts__t_sectors_srcunit_tex_op_read.sum"  # by SMs, not between the halves of the L2

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]


def matrices(bench: Bench) -> Matrices:
    n, k = bench.size(8192, check=512), bench.size(512, check=128)
    a, b = torch.randn(2, n, k, device=bench.device).bfloat16()
    return a, b, a.new_empty(n, n), n, n, k


@pytest.mark.sm90
def test_pingpong_consumers(compare: Compare, nvcc: Nvcc) -> None:
    gemm = nvcc("ch10/wgmma_ladder.cu")
    compare(
        baseline=gemm["tma_store"],
        optimized=gemm["pingpong"],
        library=lambda a, b, out, m, n, k: torch.mm(a, b.T, out=out),
        against="previous rung",
        inputs=matrices,
        work=lambda a, b, out, m, n, k: Work(
            read=a.nbytes + b.nbytes, written=out.nbytes, flops=2 * m * n * k, dtype="bf16"
        ),
        reference=lambda a, b, out, m, n, k: a.double() @ b.double().T,
        evidence=[
            # the price: 64 + 256 rows per 64 x 256 products, instead of 128 + 256 per 128 x 256;
            # 1.67 times as many, if the L2 cache sees all requests
            evidence.counter(L2_READS, min=1.3, per="baseline"),
            evidence.opcode("BAR.ARV", kernel="gemm_pingpong("),
            evidence.opcode("HGMMA.64x256x16", kernel="gemm_pingpong("),
            evidence.spills(kernel="gemm_pingpong("),
        ],
    )
