"""A 2-D grid whose x index runs along a row of the matrix beats one whose x runs down a column.

The 32 lanes of a warp have consecutive threadIdx.x. If x counts columns, they access neighboring
floats: 4 sectors of 32 bytes. If x counts rows, they access 32 sectors for the same 128 bytes, and
the load/store units process them one after the other. Only two indices are exchanged ("x_fast").
Then each thread takes four columns, 32 apart, which are loaded before the first is stored
("x_fast_four"), and at last four neighboring ones with 16-byte accesses ("x_fast_vec4"). The last
rung has as many bytes in flight as the one before it, so it claims parity: it is 2 % faster on an
H200 and as fast on an H100. Each rung is measured against the one before it. torch.addcmul, the
library arm, is faster than x_fast and slower than the rungs with four columns per thread.

The first baseline is naive, because the mistake is the subject: (row, column) is the order of
mathematics, (x, y) that of CUDA. The gain of x_fast, 4.5x to 4.6x on H200s, is not 8x, the ratio of
the sectors. The eight warps of a block use the eight floats of each sector, so caches can serve
most of the extra accesses. And with one load per thread, x_fast itself reaches only 56 % of the
copy rate; the last rung is 7.8 times as fast as the first baseline. The limit is the memory
bandwidth of one read and one write. A kernel that has to access two matrices along different axes,
such as a transpose, has no such mapping and needs shared memory (ch07/transpose_ladder).
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LADDER = ["y_fast", "x_fast", "x_fast_four", "x_fast_vec4"]
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"
PROOF = {
    "x_fast": [evidence.counter(SECTORS, max=0.13, per="baseline")],  # 4 per warp, not 32
    "x_fast_four": [evidence.opcode("LDG.E", kernel="scale_x_fast_four", min=8)],
    "x_fast_vec4": [
        evidence.opcode("LDG.E.128", kernel="scale_x_fast_vec4"),
        evidence.opcode("STG.E.128", kernel="scale_x_fast_vec4"),
    ],
}

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]


def matrices(bench: Bench) -> Matrices:
    # no multiples of the block; a multiple of 8 columns, so that every row starts at a sector
    rows, columns = bench.size(10_007, check=67), bench.size(10_008, check=104)
    a = torch.randn(rows, columns, device=bench.device)
    scale = torch.randn(rows, device=bench.device)
    bias = torch.randn(columns, device=bench.device)
    return a, scale, bias, torch.empty_like(a), rows, columns


def in_fp64(a, scale, bias, *_):
    return a.double() * scale.double()[:, None] + bias.double()


@pytest.mark.parametrize("rung", PROOF)
def test_grid_2d_mapping(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    scale_rows = nvcc("ch06/scale_rows.cu")
    compare(
        baseline=scale_rows[LADDER[LADDER.index(rung) - 1]],
        optimized=scale_rows[rung],
        library=lambda a, scale, bias, out, *_: torch.addcmul(bias, a, scale[:, None], out=out),
        against="naive" if rung == "x_fast" else "previous rung",
        inputs=matrices,
        work=lambda a, scale, bias, out, rows, columns: Work(
            read=a.nbytes + scale.nbytes + bias.nbytes,
            written=out.nbytes,
            flops=2 * rows * columns,
            dtype="fp32",
        ),
        reference=in_fp64,
        evidence=PROOF[rung],
    )
