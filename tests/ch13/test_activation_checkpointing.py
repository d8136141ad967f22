"""Recomputing activations in the backward pass beats keeping them, in peak memory.

The forward pass of these 12 residual MLP blocks leaves ten arrays of the width of the model in
each block for the backward pass to read. "full" keeps one of them, the block's input, and runs the
block again when its gradient is due: least memory, at most the cost of a second forward pass, a
third of the step. "selective" also keeps what the GEMMs computed, and repeats only the
normalisation and the activation function, which hold 5 of the 10 arrays and cost almost nothing.

Peak memory is judged; the time of the step (wall) is shown, because it is the price. The gradients
must be equal. What is left of the peak is weights, their gradients and the one block being redone,
so the gain grows with depth and with tokens, and is small where weights outweigh activations.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, rms_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pytest_aiperf import Bench, Compare, Work


def model(bench: Bench):
    layers, width = bench.size(12, check=2), bench.size(1024, check=16)
    kind = {"device": bench.device, "dtype": torch.bfloat16}
    up = torch.randn(layers, width, 4 * width, **kind) * width**-0.5
    down = torch.randn(layers, 4 * width, width, **kind) * width**-0.5
    return torch.randn(bench.size(16384, check=32), width, **kind), up, down


def block(x, up, down):
    return x + gelu(rms_norm(x, x.shape[-1:]) @ up) @ down


def step(x, up, down, run=block):
    """One forward and backward pass: the loss and the gradient of each weight."""
    weights = [w.detach().requires_grad_() for w in (*up, *down)]
    for layer in zip(weights[: len(up)], weights[len(up) :], strict=True):
        x = run(x, *layer)
    loss = x.square().mean()
    return loss.detach(), *torch.autograd.grad(loss, weights)


def checkpointed(context):
    again = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False, **context)
    return partial(step, run=again)


keep_gemms = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
RUNGS = {"selective": checkpointed({"context_fn": keep_gemms}), "full": checkpointed({})}


@pytest.mark.parametrize("rung", RUNGS)
def test_activation_checkpointing(compare: Compare, rung: str) -> None:
    compare(
        baseline=step,
        optimized=RUNGS[rung],
        inputs=model,
        work=lambda x, up, down: Work(flops=12 * x.shape[0] * up.numel(), dtype="bf16"),
        reference=lambda x, up, down: step(x.double(), up.double(), down.double()),
        metric=("memory", "wall"),
    )
