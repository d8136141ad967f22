"""Four int8 products an instruction and 16 bytes a load bring a matrix in as fast as memory has it.

A matrix-vector product in int8 reads each byte of the matrix once: memory is the limit, if the
kernel keeps up. In plain C it does not. Its loads bring a byte a lane, 32 bytes a warp, far too
little in flight; the compiler even collects four bytes into a word to use dp4a, and the collecting
costs more than the products. With words of four int8 loaded as they lie, the instruction (`dp4a`,
inline PTX) takes them directly, and four times the bytes are in flight. With 16-byte loads
(`ld.global.nc.L1::no_allocate.v4`) it is sixteen times, and a quarter of the loads.

The limit is reading the matrix once. The sums are exact in 32 bits below 131072 columns. Many
vectors at a time are a GEMM, which tensor cores do.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

PROOF = {
    "dp4a": [
        evidence.opcode("LDG.E.U8", kernel="dot_scalar"),
        evidence.opcode("LDG.E.U8", kernel="dot_dp4a", most=0),
        evidence.opcode("IDP.4A.S8.S8", kernel="dot_dp4a", least=4),
    ],
    "dp4a_v4": [
        evidence.opcode("LDG.E.NA.128.CONSTANT", kernel="dot_v4_dp4a", least=4),
        evidence.opcode("IDP.4A.S8.S8", kernel="dot_v4_dp4a", least=16),
    ],
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]


def matrix(bench: Bench) -> Inputs:
    rows, columns = bench.size(65536, check=16), bench.size(4096, check=160)
    kind = {"device": bench.device, "dtype": torch.int8}
    w = torch.randint(-128, 128, (rows, columns), **kind)
    x = torch.randint(-128, 128, (columns,), **kind)
    return w, x, torch.empty(rows, device=bench.device, dtype=torch.int32), rows, columns


@pytest.mark.parametrize("rung", PROOF)
def test_inline_ptx_packed_math(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    dot = nvcc("ch09/packed_dot.cu")
    compare(
        baseline=dot["scalar"],
        optimized=dot[rung],
        inputs=matrix,
        work=lambda w, x, y, rows, columns: Work(
            bytes=w.nbytes + x.nbytes + y.nbytes, written=y.nbytes
        ),
        reference=lambda w, x, y, rows, columns: (w.double() @ x.double()).int(),
        evidence=PROOF[rung],
    )
