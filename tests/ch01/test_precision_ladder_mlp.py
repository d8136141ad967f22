"""Matrix products in tf32, fp16 or bf16 run on tensor cores and beat fp32 at a stated error.

A GPU multiplies fp32 matrices on its fp32 units, one multiply-add per lane and clock. Tensor cores
multiply whole tiles at once, but not in fp32: operands are rounded to fewer bits. tf32 keeps 10
bits of an operand's fraction, fp16 also 10 at half the bytes (and twice the rate), bf16 only 7 with
the range of fp32. All three accumulate in fp32, so the error comes from rounding the operands and,
in fp16 and bf16, the results. With a residual that stays in fp32 it is 0.01 to 0.02 % (rms) of a
typical result in tf32 and fp16, and 0.13 % in bf16. `precision` declares an error, and each rung is
checked against it: fewer bits trade accuracy for speed.

The two layers of this MLP do about a thousand operations per byte, so all rungs are compute-bound.
GELU, residual and casts are kernels of their own: in fp16 and bf16 they take a fifth of the time,
and an epilogue of the products could save most of it (ch09/gemm_epilogue_fusion). In tf32 they take
9 % on an H200 and 13 % on an H100. There, the library computes one of the two equal products in
smaller tiles (128x128 instead of 128x256), and this one takes a fifth longer. Weights are converted
once, when a model is loaded, and activations in every call; tf32 needs no conversion. The limit is
the ratio of the units' rates: 8x (tf32) and 16x (fp16, bf16) on Hopper. With a few rows the product
is memory-bound and only bytes count: 1x in tf32, 2x in fp16 and bf16.
"""

import pytest
import torch
from torch.nn.functional import gelu

from kernels.ch01.fp32_products import fp32_products
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static


def layers(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width, device = bench.size(2048, check=64), bench.device
    up = torch.randn(width, 4 * width, device=device) * width**-0.5
    down = torch.randn(4 * width, width, device=device) * 0.5 * (4 * width) ** -0.5
    return torch.randn(bench.size(4096, check=48), width, device=device), static(up), static(down)


def mlp(x, up, down, dtype):
    """Run one residual block; the residual stays in fp32, as in mixed-precision training."""
    return x + gelu(x.to(dtype) @ up) @ down


def fp32(x, up, down):
    with fp32_products("ieee"):
        return mlp(x, up, down, torch.float32)


def tf32(x, up, down):
    with fp32_products("tf32"):
        return mlp(x, up, down, torch.float32)


def half_precision(dtype):
    def load(x, up, down):
        weights = up.to(dtype), down.to(dtype)
        return lambda x, up, down: mlp(x, *weights, dtype)

    return prepared(load)


def in_fp64(x, up, down):
    hidden = torch.einsum("rw,wh->rh", x.double(), up.double())
    activated = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    return x.double() + torch.einsum("rh,hw->rw", activated, down.double())


RUNGS = {
    "tf32": tf32,
    "fp16": half_precision(torch.float16),
    "bf16": half_precision(torch.bfloat16),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_precision_ladder_mlp(compare: Compare, rung: str) -> None:
    compare(
        baseline=fp32,
        optimized=RUNGS[rung],
        inputs=layers,
        work=lambda x, up, down: Work(flops=4 * x.shape[0] * up.numel(), dtype=rung),
        reference=in_fp64,
        precision=rung,
        # the products no longer run on the fp32 units; the activation function still does
        evidence=[
            evidence.counter(
                "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum", max=0.05, per="baseline"
            )
        ],
    )
