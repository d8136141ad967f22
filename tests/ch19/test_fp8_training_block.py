"""The feed-forward block of a transformer trains faster in fp8 than in bf16, both compiled.

Each linear layer has three products: forward, to its input's gradient, to its weight's gradient.
In fp8 the tensor cores run them at up to twice the rate, but the operands must be quantised in each
step: a pass for the largest magnitude, a pass to scale and cast, and transposed copies for the
backward pass. torch.compile fuses these passes with each other and with norm and activation
function; eager, they would eat up the gain.

The passes grow with the matrices, the products with the matrices times the width: below a width of
about 2048 nothing is gained. e4m3 serves gradients here because a scale per tensor and step catches
them; e5m2 has more range and less precision. Loss and gradients stay within fp8's error, and inputs
have offsets per channel, as activations do, their targets larger ones: gradients of pure noise
would be noise, in bf16, too, and with equal offsets the worst element of one gradient came as far
off as fp8's tolerance in one run of six.
"""

from functools import partial

import torch
from torch.nn.functional import gelu, mse_loss, rms_norm

from kernels.ch19.fp8_linear import fp8_linear
from pytest_aiperf import Bench, Compare, Work, evidence


def block(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make tokens, what the block shall make of them, and both weights."""
    tokens, width = bench.size(8192, check=64), bench.size(4096, check=32)
    kind = {"device": bench.device, "dtype": torch.bfloat16}
    offset, aim = torch.randn(2, 1, width, **kind).sign()
    x, target = torch.randn(2, tokens, width, **kind)
    x, target = x + offset, target + 2 * aim
    up = torch.randn(4 * width, width, **kind) * width**-0.5
    return x, target, up, torch.randn(width, 4 * width, **kind) * (4 * width) ** -0.5


def bf16_linear(x, weight):
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
    exact = partial(step, loss=loss_of, linear=bf16_linear)
    compare(
        baseline=partial(step, loss=COMPILED, linear=bf16_linear),
        optimized=partial(step, loss=COMPILED, linear=fp8_linear),
        against="library",
        inputs=block,
        work=lambda x, target, up, down: Work(flops=12 * len(x) * up.numel(), dtype="fp8"),
        reference=lambda *inputs: exact(*(tensor.double() for tensor in inputs)),
        precision="fp8",
        evidence=[evidence.counter("sm__ops_path_tensor_src_fp8_dst_fp32.sum", least=1e12)],
    )
