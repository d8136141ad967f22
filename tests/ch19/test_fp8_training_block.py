"""Forward and backward of a feed-forward block run faster in fp8 than in bf16, both compiled.

Each linear layer has three GEMMs: the output, the gradient of the input and the gradient of the
weight. FP8 tensor cores run them at up to twice the bf16 rate, but the operands must be quantized
in every step: one pass for the largest magnitude, one to scale and cast, and transposed copies for
the backward pass. torch.compile fuses these passes with each other and with the norm and the
activation function. The library arm does the same with a scale per row instead of one per tensor,
as torchao's recipe "rowwise". That is more precise, but every operand is quantized twice. A step
takes 8 to 9 % longer on H200s and 13 % longer on an H100. The packages torchao and Transformer
Engine are not compared.

On an H100 the GEMMs take 4.5 ms instead of 8.3, and all other kernels 2.3 ms instead of 0.8: the
passes cost two fifths of what the GEMMs save (three tenths on an H200). Their cost grows with the
size of the matrices, that of the GEMMs with the size times the width, so narrow blocks gain less.
E4M3 is used for the gradients as well, because every tensor is rescaled in every step; E5M2 has
more range and less precision. Rounding the operands costs some percent of a gradient. The gradients
of the weights add up the tokens without cuBLASLt's fast accumulation, whose error would exceed that
of the rounding (see the kernel file). The oracle checks the block's output and all gradients of one
step; there is no optimizer, and convergence is not tested.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, mse_loss, rms_norm

from kernels.ch19.fp8_linear import fp8_linear
from kernels.ch19.fp8_rowwise_linear import rowwise_linear
from pytest_aiperf import Bench, Compare, Work, evidence


def block(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw tokens, targets and both weights.

    Tokens have an offset per channel, as activations do, and targets a larger one: the gradients of
    zero-mean noise would be noise themselves, in bf16 as well.
    """
    tokens, width = bench.size(8192, check=64), bench.size(4096, check=32)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    offset, target_offset = torch.randn(2, 1, width, **options).sign()
    x, target = torch.randn(2, tokens, width, **options)
    x, target = x + offset, target + 2 * target_offset
    up = torch.randn(4 * width, width, **options) * width**-0.5
    return x, target, up, torch.randn(width, 4 * width, **options) * (4 * width) ** -0.5


def matmul_linear(x, weight):
    return x @ weight.T


@partial(torch.compile, dynamic=False)
def forward(linear, x, target, up, down):
    """Return the block's output (tokens x width) and the loss.

    The loss alone would prove little: the mean of so many values is nearly the same for all inputs.
    """
    y = x + linear(gelu(linear(rms_norm(x, x.shape[-1:]), up)), down)
    return y.detach(), mse_loss(y, target)


def step(x, target, up, down, *, linear):
    leaves = [tensor.detach().requires_grad_() for tensor in (x, up, down)]
    y, loss = forward(linear, leaves[0], target, *leaves[1:])
    return y, *torch.autograd.grad(loss, leaves)


def in_fp64(x, target, up, down):
    x, target, up, down = (tensor.double() for tensor in (x, target, up, down))
    leaves = [tensor.requires_grad_() for tensor in (x, up, down)]
    hidden = x / x.pow(2).mean(-1, keepdim=True).sqrt() @ up.T
    y = x + hidden * (1 + torch.erf(hidden / 2**0.5)) / 2 @ down.T
    loss = ((y - target) ** 2).sum() / x.numel()
    return y.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.gpu(features=("fp8",), cpu=True)
def test_fp8_training_block(compare: Compare) -> None:
    compare(
        baseline=partial(step, linear=matmul_linear),
        optimized=partial(step, linear=fp8_linear),
        library=partial(step, linear=rowwise_linear),
        against="library",
        inputs=block,
        work=lambda x, target, up, down: Work(flops=12 * len(x) * up.numel(), dtype="fp8"),
        reference=in_fp64,
        precision="fp8",
        # all six GEMMs, 1.1e12 operations each; the baseline has none in fp8
        evidence=[evidence.counter("sm__ops_path_tensor_src_fp8.sum", min=6.5e12)],
    )
