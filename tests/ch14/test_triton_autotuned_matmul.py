"""Larger tiles, and then autotuning, bring a Triton GEMM near cuBLAS.

A 64x64 tile of the result loads a value for each 32 multiplications, and the traffic between L2 and
multiprocessors keeps the tensor cores waiting. A 128x256 tile loads three eighths of that
("larger"). "autotuned" times five schedules at its first call, which is outside the clock, and
keeps the best: what is best differs between GPUs. They differ in tile, stages and bands of rows.
Bands alone are no rung: they save reads of device memory, which is not the limit here, and "larger"
in bands was no faster.

The accumulators set the limit: 128x256 of them take half of all registers of a multiprocessor, and
from there a tile can only grow where accumulators live elsewhere. cuBLAS is the library arm. Small
matrices want small tiles, since a GPU must have a tile for each multiprocessor.
"""

import pytest
import torch

from kernels.ch14 import matmul
from pytest_aiperf import Bench, Compare, Work, evidence

LADDER = ["default", "larger", "autotuned"]
PROOF = {
    "larger": [evidence.counter("lts__t_sectors_op_read.sum", most=0.6, per="baseline")],
    "autotuned": [],
}


def matrices(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    n, k = bench.size(8192, check=256), bench.size(4096, check=64)
    kind = {"device": bench.device, "dtype": torch.float16}  # the interpreter is wrong in bf16
    return torch.randn(n, k, **kind), torch.randn(k, n, **kind)


@pytest.mark.parametrize("rung", PROOF)
def test_triton_autotuned_matmul(compare: Compare, rung: str) -> None:
    compare(
        baseline=getattr(matmul, LADDER[LADDER.index(rung) - 1]),
        optimized=getattr(matmul, rung),
        library=torch.mm,
        against="previous rung",
        inputs=matrices,
        work=lambda a, b: Work(3 * a.nbytes, 2 * len(a) ** 2 * len(b), "fp16"),
        reference=lambda a, b: a.double() @ b.double(),
        evidence=[evidence.spills(most=0, kernel="_matmul"), *PROOF[rung]],
    )
