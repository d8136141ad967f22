"""Residual addition and RMSNorm in one kernel read and write each row once.

Between two layers of a transformer stand an addition and a norm. Step by step they are nine
kernels, most of which move whole arrays, and in fp32 for the sake of the mean: as many bytes as 23
arrays of fp16, where four are needed (two in, two out). PyTorch's own RMSNorm ("two") leaves two
kernels and five arrays, since the sum is read back. One program that keeps its row in registers
adds, squares, sums and scales without touching memory in between: four arrays.

torch.compile of the steps is the library arm and fuses them, too. Fewer bytes alone give 23 / 5 and
23 / 4. The gain is larger, because the eager kernels reach only some 70 % of the speed of a copy.
It ends where a row outgrows the registers of a block, where the arrays stay in the L2 cache, and
where few rows leave most of the chip idle.
"""

import pytest
import torch

from kernels.ch09 import add_rms_norm
from pytest_aiperf import Bench, Compare, Work, evidence

PROOF = {
    "two": [evidence.kernels(most=2)],
    "one_pass": [
        evidence.kernels(most=1),
        evidence.counter("dram__bytes.sum", most=1.1, per="work"),
        evidence.opcode("LDG.E.128", kernel="_add_rms_norm", least=4),
    ],
}


def activations(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = bench.size(16384, check=5), bench.size(4096, check=4080)
    kind = {"device": bench.device, "dtype": torch.float16}
    x, residual = torch.randn(2, rows, width, **kind)
    return x, residual, torch.rand(width, **kind) + 0.5


def in_fp64(x, residual, weight):
    total = x + residual  # the sum is rounded to fp16 before it is used: part of the definition
    wide = total.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + add_rms_norm.EPSILON)
    return wide * scale * weight.double(), total


@pytest.mark.parametrize("rung", PROOF)
def test_fused_norm(compare: Compare, rung: str) -> None:
    compare(
        baseline=add_rms_norm.steps,
        optimized=getattr(add_rms_norm, rung),
        library=torch.compile(add_rms_norm.steps, dynamic=False),
        inputs=activations,
        work=lambda x, residual, weight: Work(bytes=4 * x.nbytes + weight.nbytes),
        reference=in_fp64,
        evidence=PROOF[rung],
    )
