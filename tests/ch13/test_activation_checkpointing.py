"""Recomputing activations in the backward pass beats keeping them, in peak memory.

The forward pass of these 12 residual MLP blocks leaves ten arrays as wide as the model in each
block for the backward pass: input and norm (one each), both sides of the activation function (four
each). "full" keeps the input alone and runs the block again when its gradient is due, up to the
last value needed: one GEMM of six is done twice. "selective" also keeps what the first GEMM
computed, and repeats only the norm and the activation function.

Peak memory is judged. The price is time: the GPU does a part of the forward pass twice, which is
shown beside the memory (device): in a trace it was busy for a quarter longer with "full", for a
seventh with "selective". In a step as small as this one Python and autograd are the limit, and what
the caller waits grows several times over, most with "selective", which asks Python about each
operation. Of the peak the weights' gradients and the block being redone remain, so the gain grows
with depth and with tokens, towards 10x and 2x, and is small where weights outweigh activations.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, rms_norm
from torch.utils import checkpoint

from pytest_aiperf import Bench, Compare, Work


def model(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layers, width = bench.size(12, check=2), bench.size(512, check=16)
    kind = {"device": bench.device, "dtype": torch.bfloat16}
    up = torch.randn(layers, width, 4 * width, **kind) * width**-0.5
    down = torch.randn(layers, 4 * width, width, **kind) * width**-0.5
    return torch.randn(bench.size(8192, check=32), width, **kind), up, down


def block(x, up, down):
    return x + gelu(rms_norm(x, x.shape[-1:]) @ up) @ down


def step(x, up, down, run=block):
    """One forward and backward pass: the loss and the gradient of each weight."""
    weights = [w.detach().requires_grad_() for w in (*up, *down)]
    for layer in zip(weights[: len(up)], weights[len(up) :], strict=True):
        x = run(x, *layer)
    loss = x.square().mean()
    return loss.detach(), *torch.autograd.grad(loss, weights)


def first_gemm(_, op, *args, **__):
    keep = op is torch.ops.aten.mm.default and args[1].shape[0] < args[1].shape[1]
    policy = checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if keep else policy.MUST_RECOMPUTE


SELECT = partial(checkpoint.create_selective_checkpoint_contexts, first_gemm)
FULL = partial(checkpoint.checkpoint, block, use_reentrant=False)
RUNGS = {"selective": partial(FULL, context_fn=SELECT), "full": FULL}


def in_fp64(x, up, down):
    """Compute loss and gradients anew: other operations, and all layers' weights as one tensor."""
    x, up, down = x.double(), up.double().requires_grad_(), down.double().requires_grad_()
    for layer in range(len(up)):
        hidden = x / x.pow(2).mean(-1, keepdim=True).sqrt() @ up[layer]
        x = x + hidden * (1 + torch.erf(hidden / 2**0.5)) / 2 @ down[layer]
    loss = (x * x).sum() / x.numel()
    ups, downs = torch.autograd.grad(loss, (up, down))
    return loss.detach(), *ups, *downs


@pytest.mark.parametrize("rung", RUNGS)
def test_activation_checkpointing(compare: Compare, rung: str) -> None:
    compare(
        baseline=step,
        optimized=partial(step, run=RUNGS[rung]),
        inputs=model,
        work=lambda x, up, down: Work(flops=12 * x.shape[0] * up.numel(), dtype="bf16"),
        reference=in_fp64,
        metric=("memory", "device"),
        cache="warm",  # a step overwrites the cache many times over
    )
