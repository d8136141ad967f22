"""Quantising rows to fp8 in one pass beats an operation for each of its steps.

A row's scale follows from its largest magnitude, and is needed before the first element can be
cast. Written as steps (magnitudes, their maximum, quotients, their multiples, cast), eager PyTorch
runs a kernel each and moves 17 bytes an element. All steps are in bf16, which has more digits than
fp8: to divide bf16 by an fp32 scale is a slow path of PyTorch's. A block that keeps its row in
registers reads 2 bytes and writes 1: 5.7x by the bytes. torch.compile is the library arm: it fuses
the steps as well, and its loop reads a long row again, from the L2 cache.

Rows of fp16 are a reason to keep a reference beside a compiler: of the two kernels that Inductor
tunes between for them (torch 2.11, Triton 3.6), one lost the largest magnitude of 3 % of the rows,
and how long the two took differed by less. ptxas 12.8 and 13.0 let it compare fp16 numbers in
pairs, and forget the absolute value of one number a thread.

The gain ends where rows outgrow the registers of a block, or where the matrix stays in the cache.
Better still is to quantise in the kernel that produces the rows (a norm, an activation function):
then not even the 2 bytes are read.
"""

import torch

from kernels.ch19 import rowwise_fp8
from pytest_aiperf import Bench, Compare, Work, evidence


def rows(bench: Bench) -> tuple[torch.Tensor, torch.dtype]:
    shape = bench.size(16384, check=5), bench.size(8192, check=1000)
    # Triton's interpreter rounds to fp8 wrongly, so that the check has fp16 codes
    kind = torch.float8_e4m3fn if bench.full else torch.float16
    return torch.randn(shape, device=bench.device, dtype=torch.bfloat16), kind


def steps(x, kind):
    # not x / scale: the scale's rounding would be in each quotient, and not in the scale given back
    top = x.abs().amax(1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return (x / top * rowwise_fp8.LARGEST).to(kind), top.float() / rowwise_fp8.LARGEST


def in_fp64(x, kind):
    scale = x.double().abs().amax(1, keepdim=True) / rowwise_fp8.LARGEST
    return x.double() / scale, scale


def test_fused_rowwise_quantize(compare: Compare) -> None:
    compare(
        baseline=steps,
        optimized=rowwise_fp8.quantize,
        library=torch.compile(steps, dynamic=False),
        inputs=rows,
        work=lambda x, kind: Work(bytes=3 * x.numel(), written=x.numel()),
        reference=in_fp64,
        evidence=[
            evidence.kernels(most=1),
            evidence.counter("dram__bytes.sum", most=1.1, per="work"),
        ],
    )
