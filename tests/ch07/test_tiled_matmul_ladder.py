"""Each step from one dot product per thread to double-buffered tiles makes an fp32 matmul faster.

Each output takes k multiply-adds (FMAs) with two operands each, and an SM executes more FMAs than
it can load operands. So each step saves loads, until the next limit takes over. "coalesced" only
exchanges the indices. In "naive", the lanes of a warp walk down a column, whose elements are a row
of 16 KiB apart. So a warp touches 33 cache lines per k. If the L1 looks them up one by one, 33
clocks per k make 0.27 s at 1980 MHz; it takes 0.276 s, on an H200 as on an H100. So most likely the
lookups count, not the power of two between the rows. "coalesced" touches 2 lines, which allows up
to 16x. It gains 11.8x, the largest step. The sectors fall by less, from 33 to 5. "shared" loads
each element once per block of 32 x 32 outputs, a twentieth of the sectors, but gains little: every
FMA still takes two operands, now from shared memory. "registers_1d" (8 outputs per thread) and
"registers_2d" (8 x 8) reuse operands in registers, and each more than halves the accesses to shared
memory. Now instructions count, and waiting. "vector" loads 16 bytes per instruction.
"double_buffered" loads the next tile while this one is multiplied, so that the FMAs hide the
latency of the loads. cuBLAS with TF32 off, the library arm, is faster than all rungs; the last one
reaches 0.91 of its speed.

Each rung is measured against the one before it; the first baseline is naive. The matrices are 4096
x 4096. The limit that is drawn is the rate of the fp32 units; the top rung reaches 72 to 73 % of it
and cuBLAS 79 to 80 %. Loads and addresses take a share of the issue slots; what takes the rest was
not measured. Tensor cores have a much higher limit (test_tf32_policy.py, test_wgmma_ladder.py), but
less precision. Small matrices have too few tiles for all SMs.
"""

import pytest
import torch

from kernels.ch01.fp32_products import fp32_products
from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
WAITING = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
LADDER = [
    "naive", "coalesced", "shared", "registers_1d", "registers_2d", "vector", "double_buffered"
]  # fmt: skip
PROOF = {
    # for each k, a warp loads 5 sectors instead of 33
    "coalesced": [evidence.counter(SECTORS, max=0.16, per="baseline")],
    # each element of a tile is loaded once and used 32 times
    "shared": [
        evidence.counter(SECTORS, max=0.06, per="baseline"),
        evidence.opcode("LDS", "matmul_shared"),
    ],
    # loads from shared memory per FMA: fewer with each step
    "registers_1d": [evidence.counter(WAVEFRONTS, max=0.6, per="baseline")],
    "registers_2d": [
        evidence.counter(WAVEFRONTS, max=0.75, per="baseline"),
        evidence.counter(SECTORS, max=0.55, per="baseline"),  # 128 x 128 tiles, not 64 x 64
    ],
    "vector": [
        evidence.opcode("LDG.E.128", kernel="matmul_vector", min=2),
        evidence.opcode("LDS.128", kernel="matmul_vector", min=32),  # 4 for each of 8 k
    ],
    "double_buffered": [
        # two before the loop, two per tile in it (unrolled twice)
        evidence.opcode("LDG.E.128", kernel="matmul_double_buffered", min=4),
        evidence.counter(WAITING, max=0.5, per="baseline"),  # warps that wait for device memory
    ],
}

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]


def matrices(bench: Bench) -> Matrices:
    # the check sizes end within a tile in every direction
    m, n, k = (bench.size(4096, check=size) for size in (133, 140, 76))
    a = torch.randn(m, k, device=bench.device)
    b = torch.randn(k, n, device=bench.device)
    return a, b, torch.empty(m, n, device=bench.device), m, n, k


def cublas(a, b, out, *_):
    with fp32_products("ieee"):
        return torch.mm(a, b, out=out)


@pytest.mark.parametrize("rung", PROOF)
def test_tiled_matmul_ladder(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    matmul = nvcc("ch07/tiled_matmul.cu")
    compare(
        baseline=matmul[LADDER[LADDER.index(rung) - 1]],
        optimized=matmul[rung],
        library=cublas,
        against="naive" if rung == "coalesced" else "previous rung",
        inputs=matrices,
        work=lambda a, b, out, m, n, k: Work(
            read=a.nbytes + b.nbytes, written=out.nbytes, flops=2 * m * n * k, dtype="fp32"
        ),
        reference=lambda a, b, *_: a.double() @ b.double(),
        evidence=[*PROOF[rung], evidence.spills(kernel=f"matmul_{rung}")],
    )
