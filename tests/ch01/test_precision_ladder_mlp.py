"""Products in fewer bits run on the tensor cores, and beat fp32 within an error that is known.

A GPU multiplies fp32 matrices on its ordinary arithmetic units, a product a lane and clock. Tensor
cores multiply whole tiles at once, but only of narrower numbers: tf32 keeps 10 bits of an operand's
fraction, fp16 as many at half the bytes (and twice the rate), bf16 only 7 with the range of fp32.
Products are summed up in fp32 each time, so the error is that of rounding the operands: less than
0.1 % of a typical result in tf32 and fp16, about that in bf16. `precision` declares it, and the
results of each rung are held to it; fewer bits are a trade, not a better kernel.

The two layers of this MLP do a thousand operations a byte, so arithmetic binds all rungs. Weights
are converted once, when a model is loaded; activations in every call. tf32 asks for no conversion
at all. The limit is the ratio of the units' rates: 8x (tf32) and 16x (fp16, bf16) on Hopper. With
a few rows memory binds, and only the bytes count: no gain in tf32, 2x in fp16 and bf16.
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


def mlp(x, up, down, kind):
    """One residual block; the residual itself stays as it is, as in mixed-precision training."""
    return x + gelu(x.to(kind) @ up) @ down


def full(x, up, down):
    with fp32_products("ieee"):
        return mlp(x, up, down, torch.float32)


def tf32(x, up, down):
    with fp32_products("tf32"):
        return mlp(x, up, down, torch.float32)


def half(kind):
    def load(x, up, down):
        weights = up.to(kind), down.to(kind)
        return lambda x, up, down: mlp(x, *weights, kind)

    return prepared(load)


RUNGS = {"tf32": tf32, "fp16": half(torch.float16), "bf16": half(torch.bfloat16)}


@pytest.mark.parametrize("rung", RUNGS)
def test_precision_ladder_mlp(compare: Compare, rung: str) -> None:
    compare(
        baseline=full,
        optimized=RUNGS[rung],
        inputs=layers,
        work=lambda x, up, down: Work(flops=4 * x.shape[0] * up.numel(), dtype=rung),
        reference=lambda x, up, down: mlp(x, up.double(), down.double(), torch.float64),
        precision=rung,
        # the products have left the fp32 units; what is left there is the activation function
        evidence=[
            evidence.counter(
                "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum", most=0.05, per="baseline"
            )
        ],
    )
