"""Packed int8 loads of 4 and 16 bytes make a matrix-vector product faster than byte loads.

An int8 matrix-vector product (GEMV) reads each byte of the matrix once, so reading the matrix at
full bandwidth is the limit. Plain C does not reach it. It loads one byte per lane, 32 bytes per
warp load, which keeps too few bytes in flight; the compiler then packs four bytes into a word to
use dp4a, an instruction that adds four int8 products to an int32 sum. "dp4a" loads packed words and
passes them to the instruction directly (inline PTX; the intrinsic __dp4a is the same): four times
the bytes per load and no packing. "dp4a_v4" loads 16 bytes per lane
(`ld.global.nc.L1::no_allocate.v4`): sixteen times the bytes per load.

All rungs execute dp4a, so the gain is the width of the loads. The int32 sums are exact below
131072 columns. With many vectors at once this is a GEMM, which belongs on tensor cores.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

EVIDENCE = {
    "dp4a": [
        evidence.opcode("LDG.E.U8", kernel="dot_scalar"),
        evidence.opcode("LDG.E.U8", kernel="dot_dp4a", max=0),
        evidence.opcode("IDP.4A.S8.S8", kernel="dot_dp4a", min=4),
    ],
    "dp4a_v4": [
        evidence.opcode("LDG.E.NA.128.CONSTANT", kernel="dot_v4_dp4a", min=4),
        evidence.opcode("IDP.4A.S8.S8", kernel="dot_v4_dp4a", min=16),
    ],
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]


def matrix(bench: Bench) -> Inputs:
    rows, columns = bench.size(65536, check=16), bench.size(4096, check=160)
    options = {"device": bench.device, "dtype": torch.int8}
    w = torch.randint(-128, 128, (rows, columns), **options)
    x = torch.randint(-128, 128, (columns,), **options)
    return w, x, torch.empty(rows, device=bench.device, dtype=torch.int32), rows, columns


@pytest.mark.parametrize("rung", EVIDENCE)
def test_inline_ptx_packed_math(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    dot = nvcc("ch09/packed_dot.cu")
    compare(
        baseline=dot["scalar"],
        optimized=dot[rung],
        inputs=matrix,
        work=lambda w, x, y, rows, columns: Work(read=w.nbytes + x.nbytes, written=y.nbytes),
        reference=lambda w, x, y, rows, columns: (w.double() @ x.double()).int(),
        evidence=EVIDENCE[rung],
    )
