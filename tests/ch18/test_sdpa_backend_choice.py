"""Asking for the cuDNN backend of attention beats the flash backend on Hopper.

`scaled_dot_product_attention` has several implementations behind it. "flash" is FlashAttention 2:
it keeps the scores on the chip, but was written for Ampere, whose tensor-core instruction 32
threads issue and wait for. cuDNN's uses Hopper's own: 128 threads issue a product that reads its
operands from shared memory and runs on while they work on the softmax of another tile. Both do the
same arithmetic, forward ("forward") and with the three gradients ("training").

Which backend is the default depends on version, GPU and shapes, so that it is forced in both arms.
The limit is the tensor cores' rate, of which cuDNN reaches 84 % forward and 73 % in training:
softmax needs other units. On Ampere, with arbitrary masks or in shapes that cuDNN does not take,
flash and the efficient backend remain; for short sequences launches count more than kernels.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pytest_aiperf import Bench, Compare, Work, evidence

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def heads(bench: Bench) -> Heads:
    """Make queries, keys and values (1 x heads x tokens x 128), and the gradient of the result."""
    shape = 4, 1, bench.size(16, check=2), bench.size(8192, check=64), 128
    q, k, v, gradient = torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
    return q, k, v, gradient


def forward(q, k, v, _):
    return scaled_dot_product_attention(q, k, v)


def training(q, k, v, gradient):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient)


def forced(passes, backend):
    def run(*inputs):
        with sdpa_kernel(backend):
            return passes(*inputs)

    return run


def in_fp64(passes):
    def run(*inputs):
        """Head by head: the scores of all of them would take 8 GiB."""
        heads = zip(*(x.double().split(1, 1) for x in inputs), strict=True)
        done = [passes(*head) for head in heads]
        if passes is forward:
            return torch.cat(done, 1)
        return tuple(torch.cat(parts, 1) for parts in zip(*done, strict=True))

    return run


PASSES = {"forward": (forward, 4), "training": (training, 14)}


@pytest.mark.gpu(min_sm=90)
@pytest.mark.parametrize("rung", PASSES)
def test_sdpa_backend_choice(compare: Compare, rung: str) -> None:
    passes, flops = PASSES[rung]
    compare(
        baseline=forced(passes, SDPBackend.FLASH_ATTENTION),
        optimized=forced(passes, SDPBackend.CUDNN_ATTENTION),
        against="library",
        inputs=heads,
        work=lambda q, *_: Work(flops=flops * q.numel() * q.shape[2], dtype="bf16"),
        reference=in_fp64(passes),
        # fewer and larger instructions: what 128 threads issue as one, 32 issue in many pieces
        evidence=[evidence.counter("smsp__inst_executed.sum", most=0.8, per="baseline")],
    )
