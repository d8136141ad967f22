"""Recomputing activations in the backward pass needs less peak memory than storing them.

For the backward pass, each of these 12 residual MLP blocks stores ten arrays as wide as the model:
the input and its norm (one each), and the input and output of the activation function (four each).
"full" stores only the input and runs the block again when its gradient is due, up to the last value
that the gradient needs: one GEMM in six runs twice. "selective" (selective activation
checkpointing) also stores the output of the first GEMM and recomputes only the norm and the
activation function.

The claim is judged on peak memory. The price is time: part of the forward pass runs twice. The
device time is shown beside the memory. It understates the price here, because the kernels of this
narrow model are short and the host's launches limit the step; checkpointing adds autograd work on
the host. The limits are 10x and 2x. The gain approaches them with more layers and more tokens,
because the peak also contains the weights' gradients and the block that is being recomputed. The
gain is small where weights outweigh activations.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, rms_norm
from torch.utils import checkpoint

from pytest_aiperf import Bench, Compare, Work


def residual_mlp(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layers, width = bench.size(12, check=2), bench.size(512, check=16)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    up = torch.randn(layers, width, 4 * width, **options) * width**-0.5
    down = torch.randn(layers, 4 * width, width, **options) * width**-0.5
    return torch.randn(bench.size(8192, check=32), width, **options), up, down


def block(x, up, down):
    return x + gelu(rms_norm(x, x.shape[-1:]) @ up) @ down


def step(x, up, down, run=block):
    """Run a forward and a backward pass; return the loss and the gradient of each weight."""
    weights = [w.detach().requires_grad_() for w in (*up, *down)]
    for layer in zip(weights[: len(up)], weights[len(up) :], strict=True):
        x = run(x, *layer)
    loss = x.square().mean()
    return loss.detach(), *torch.autograd.grad(loss, weights)


def save_first_gemm(_, op, *args, **__):
    # only the weights of the first GEMM have more columns than rows
    is_first = op is torch.ops.aten.mm.default and args[1].shape[0] < args[1].shape[1]
    policy = checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if is_first else policy.MUST_RECOMPUTE


SAVE_FIRST_GEMM = partial(checkpoint.create_selective_checkpoint_contexts, save_first_gemm)
FULL = partial(checkpoint.checkpoint, block, use_reentrant=False)
RUNGS = {"selective": partial(FULL, context_fn=SAVE_FIRST_GEMM), "full": FULL}


def in_fp64(x, up, down):
    """Compute loss and gradients independently, with all layers' weights in one tensor."""
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
        inputs=residual_mlp,
        work=lambda x, up, down: Work(flops=12 * x.shape[0] * up.numel(), dtype="bf16"),
        reference=in_fp64,
        metric=("memory", "device"),
        cache="warm",  # makes no difference: a step streams many times the L2 capacity
    )
