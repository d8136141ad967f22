"""Forward and backward of a feed-forward block run faster in fp8 than in bf16, both compiled.

Each linear layer has three GEMMs: the output, the gradient of the input and the gradient of the
weight. FP8 tensor cores run them at up to twice the bf16 rate, but the operands must be quantized
in every step: one pass for the largest magnitude, one to scale and cast, and transposed copies for
the backward pass. torch.compile fuses these passes with each other and with the norm and the
activation function; in eager mode they would use up the gain.

The cost of the passes grows with the size of the matrices, the GEMMs with that size times the
width, so narrow blocks gain nothing. E4M3 is enough for the gradients here because every tensor is
rescaled in every step; E5M2 has more range and less precision. Rounding the operands costs some
percent of a gradient. The gradients of the weights add up the tokens without cuBLASLt's fast
accumulation, which would cost more than the rounding (see the kernel file). The oracle checks the
loss and all gradients of one step; there is no optimizer, and convergence is not tested.
"""

from functools import partial

import torch
from torch.nn.functional import gelu, mse_loss, rms_norm

from kernels.ch19.fp8_linear import fp8_linear
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


def loss_of(linear, x, target, up, down):
    hidden = gelu(linear(rms_norm(x, x.shape[-1:]), up))
    return mse_loss(x + linear(hidden, down), target)


def step(x, target, up, down, *, loss, linear):
    leaves = [tensor.detach().requires_grad_() for tensor in (x, up, down)]
    value = loss(linear, leaves[0], target, *leaves[1:])
    return value.detach(), *torch.autograd.grad(value, leaves)


COMPILED = torch.compile(loss_of, dynamic=False)


def test_fp8_training_block(compare: Compare) -> None:
    reference_step = partial(step, loss=loss_of, linear=matmul_linear)
    compare(
        baseline=partial(step, loss=COMPILED, linear=matmul_linear),
        optimized=partial(step, loss=COMPILED, linear=fp8_linear),
        against="library",
        inputs=block,
        work=lambda x, target, up, down: Work(flops=12 * len(x) * up.numel(), dtype="fp8"),
        reference=lambda *inputs: reference_step(*(tensor.double() for tensor in inputs)),
        precision="fp8",
        evidence=[evidence.counter("sm__ops_path_tensor_src_fp8.sum", min=1e12)],
    )
