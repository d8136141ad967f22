"""RMSNorm that keeps the sum of its inputs in registers beats an addition and a norm kernel.

Between two layers of a transformer there is a residual addition and a norm. One PyTorch operation
per step makes nine kernels, most of which read and write whole arrays, several of them in fp32: the
bytes of 23 fp16 arrays, where four are needed (two read, two written). PyTorch's RMSNorm ("two")
leaves two kernels and five arrays, because it reads the sum back. In the fused kernel ("one_pass")
each program keeps its row in registers from the load to the store: four arrays. torch.compile, the
library arm, makes a single kernel of the nine steps. Its loop reads the row once for the sum of
squares and once more for the result. "two" takes 1.3 times as long as that kernel on an H200 and
1.4 times on an H100, and "one_pass" takes 1 to 2 % less time.

Each rung is compared with the one before. The steps are a naive baseline, since PyTorch has an
RMSNorm. From "two" to "one_pass" the ratio of the bytes is 5 / 4. The rest of the gain is PyTorch's
RMSNorm kernel: in the traces of an H200 it moves its two arrays at 3.3 to 3.4 TB/s, and the fused
kernel moves its four at 4.2. On an H100 the rates are 2.2 to 2.3 and 3.1. The gain ends where a row
exceeds the registers of a block, where the arrays stay in the L2 cache, or where few rows leave SMs
idle.
"""

from functools import cache

import pytest
import torch

from kernels.ch09 import add_rms_norm
from pytest_aiperf import Bench, Compare, Work, evidence

EVIDENCE = {
    "two": [
        evidence.kernels(max=2),
        evidence.counter("dram__bytes.sum", max=1.1 * 5 / 23, per="baseline"),  # by the arrays
    ],
    "one_pass": [
        evidence.kernels(max=1),
        evidence.counter("dram__bytes.sum", max=1.1, per="work"),
        evidence.opcode("LDG.E.128", kernel="_add_rms_norm", min=4),
    ],
}


def activations(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = bench.size(16384, check=5), bench.size(4096, check=4080)
    options = {"device": bench.device, "dtype": torch.float16}
    x, residual = torch.randn(2, rows, width, **options)
    return x, residual, torch.rand(width, **options) + 0.5


def in_fp64(x, residual, weight):
    total = x + residual  # rounded to fp16, which is part of the definition
    wide = total.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + add_rms_norm.EPSILON)
    return wide * scale * weight.double(), total


LADDER = ["steps", *EVIDENCE]
compiled = cache(torch.compile)  # one object for all rungs, so that it is timed once


@pytest.mark.parametrize("rung", EVIDENCE)
def test_fused_norm(compare: Compare, rung: str) -> None:
    compare(
        baseline=getattr(add_rms_norm, LADDER[LADDER.index(rung) - 1]),
        optimized=getattr(add_rms_norm, rung),
        library=compiled(add_rms_norm.steps, dynamic=False),
        against="naive" if rung == "two" else "previous rung",
        inputs=activations,
        work=lambda x, residual, weight: Work(
            read=2 * x.nbytes + weight.nbytes, written=2 * x.nbytes
        ),
        reference=in_fp64,
        evidence=EVIDENCE[rung],
    )
