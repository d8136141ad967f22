"""Recomputing activations in the backward pass beats keeping them, in peak memory.

The forward pass of these 12 residual MLP blocks leaves ten arrays as wide as the model in each
block for the backward pass: input and norm (one each), both sides of the activation function (four
each). "full" keeps the input alone and runs the block again when its gradient is due, up to the
last value needed: one GEMM of six is done twice. "selective" also keeps what the first GEMM
computed, and repeats only the norm and the activation function.

Peak memory is judged; the time of the step (wall) is shown, because it is the price. The gradients
must be equal. What remains of the peak is the weights' gradients and the block being redone, so the
gain grows with depth and with tokens, towards 10x and 2x, and is small where weights outweigh
activations.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, rms_norm
from torch.utils import checkpoint

from pytest_aiperf import Bench, Compare, Work, evidence


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
KEPT = {"selective": 0.6, "full": 0.25}  # of ten arrays a block five or one, and the gradients


@pytest.mark.parametrize("rung", RUNGS)
def test_activation_checkpointing(compare: Compare, rung: str) -> None:
    compare(
        baseline=step,
        optimized=partial(step, run=RUNGS[rung]),
        inputs=model,
        work=lambda x, up, down: Work(flops=12 * x.shape[0] * up.numel(), dtype="bf16"),
        reference=lambda x, up, down: step(x.double(), up.double(), down.double()),
        metric=("memory", "wall"),
        evidence=[evidence.peak_memory(KEPT[rung], per="baseline")],
    )
