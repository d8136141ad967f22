"""Steps from mma.sync to wgmma, TMA, larger tiles and TMA stores bring a bf16 GEMM up to cuBLAS.

With mma.sync, warps load all fragments into registers, which alone takes 1.5 times as long as the
products. With wgmma, four warps pass descriptors of tiles in shared memory, and one instruction
multiplies 64 x 128 x 16; each step still waits for its product, and all threads issue copies.
"in_flight" issues a product before it waits for the one before, so that the tensor cores have work
while threads copy. "tma" loads the tiles with TMA: no thread computes addresses, and an mbarrier
signals that the bytes have arrived. "wide" multiplies tiles of 128 x 256; one block per SM now has
four stages, which take the shared memory of two blocks with three. "specialised" gives the loads to
a producer warp, and "persistent" lets one block per SM loop over the tiles, so that loads of the
next tile overlap the epilogue of this one. These two gain nothing (0.997x and 1.005x on an H200,
1.001x and 0.990x on an H100), so they claim parity: like "wide", they reach 0.90 to 0.93 of the
tensor cores' rate. What is left is most likely the epilogue, in which threads store the results. In
"tma_store", TMA writes the results while the consumers go on with the next tile, which gains 6 % on
an H200 and 8 % on an H100. Only this rung is faster than cuBLAS, the library arm, by 1.1 to 1.7 %.

"tma" gains 1.6x to 1.7x on H200s and 1.33x to 1.44x on H100s, and "wide" 1.13x to 1.16x and 1.34x
to 1.37x. With tiles of 128 x 128, the blocks load 17 GB, at 10.2 TB/s on H200s and 8.5 to 8.7 on
H100s. The kernel that measures the L2 rate reaches 9.4 and 8.1 there, which suggests that the L2
cache limits "tma". But the ping-pong kernel loads 12.5 TB/s or more on H200s, so this is open; no
counter has confirmed it. "wide" loads a quarter less; the counter shows a third fewer sectors.

Each rung is compared with the one before, on the same operands (b transposed, as in a linear
layer). Clusters with multicast are in test_cluster_tma_multicast.py; for a small k see
test_pingpong_consumers.py. All rungs need whole tiles. The limit is power: at n = 8192 the GPU
lowers its clock, and random data draw more power than zeros. Small products gain less, because
their tiles do not fill the SMs; n = 4096 was not compared with cuBLAS.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LADDER = [
    "mma_sync", "wgmma", "in_flight", "tma", "wide", "specialised", "persistent", "tma_store"
]  # fmt: skip
OPCODES = {
    "wgmma": ["HGMMA.64x128x16", "LDGSTS"],
    "in_flight": ["HGMMA.64x128x16", "LDGSTS"],
    "tma": ["HGMMA.64x128x16", "UTMALDG.2D"],
    "wide": ["HGMMA.64x256x16", "UTMALDG.2D"],
    "specialised": ["HGMMA.64x256x16", "UTMALDG.2D", "USETMAXREG"],
    "persistent": ["HGMMA.64x256x16", "UTMALDG.2D", "USETMAXREG"],
    "tma_store": ["STSM", "UTMASTG.2D"],
}
L2_READS = "lts__t_sectors_srcunit_tex_op_read.sum"  # by SMs, not between the halves of the L2
KERNELS = {"persistent": "gemm_specialised("}  # the same kernel with fewer blocks
PROOF = {
    # two waits: for the product before, and after the loop for the last
    "in_flight": [evidence.opcode("WARPGROUP.DEPBAR", kernel="gemm_in_flight(", min=2)],
    # per step a block loads 24 KiB for each 128 x 128 products instead of 32
    "wide": [evidence.counter(L2_READS, max=1.1 * 24 / 32, per="baseline")],
    "persistent": [evidence.grid_size(max=512)],  # one block per SM, not one for each of 2048 tiles
}


def matrices(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    n = bench.size(8192, check=512)
    a, b = torch.randn(2, n, n, device=bench.device).bfloat16()
    return a, b, torch.empty_like(a), n, n, n


@pytest.mark.sm90
@pytest.mark.parametrize("rung", OPCODES)
def test_wgmma_ladder(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    gemm, kernel = nvcc("ch10/wgmma_ladder.cu"), KERNELS.get(rung, f"gemm_{rung}(")
    compare(
        baseline=gemm[LADDER[LADDER.index(rung) - 1]],
        optimized=gemm[rung],
        library=lambda a, b, out, m, n, k: torch.mm(a, b.T, out=out),
        against="previous rung",
        inputs=matrices,
        work=lambda a, b, out, m, n, k: Work(
            read=a.nbytes + b.nbytes, written=out.nbytes, flops=2 * m * n * k, dtype="bf16"
        ),
        reference=lambda a, b, out, m, n, k: a.double() @ b.double().T,
        evidence=[
            *(evidence.opcode(name, kernel) for name in OPCODES[rung]),
            evidence.spills(kernel=kernel),
            *PROOF.get(rung, []),
        ],
    )
