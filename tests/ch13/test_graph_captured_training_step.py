"""Replaying a training step from a CUDA graph beats launching its kernels from Python.

The step of a small model runs 141 kernels of about two microseconds each: forward pass, backward
pass and SGD with momentum. Python, autograd and the dispatcher take longer to launch a kernel than
the GPU takes to run it. Captured once, the whole step is one launch. Here the graph replaces the
launches of an eager step; in ch20/training_stack_graph it replaces those of a step whose passes are
compiled and whose optimizer is fused already.

torch.compile with mode="reduce-overhead", the library arm, captures the two passes and the update
by itself and fuses their elementwise kernels, but each step still runs autograd in Python, checks
whether the compiled code fits the inputs, and launches three graphs. On H200s it takes 5 to 8 times
as long as the graph of the whole step, and the eager step 11 to 15 times, depending on the host.
The fused kernels alone are faster, 0.16 ms per step instead of 0.27. To compile first and then
capture the whole step, as in ch20/training_stack_graph, was not measured for this model.

The claim is judged on wall time; losses, weights and momentum must be the same. A graph is bound to
the addresses of its capture: batches are copied into the same tensors (not timed here), shapes must
not change, no value may be needed on the CPU (a printed loss, a comparison with the gradient norm),
and none may change there (a learning rate that is not a tensor). It gains nothing where kernels
take longer than their launches.
"""

import pytest
import torch

from kernels.ch13 import training_step
from pytest_aiperf import Bench, Compare, evidence, prepared

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def network(bench: Bench) -> Batch:
    """Make a batch, its targets, the fp32 weights of 12 layers, and their momentum."""
    layers, width = bench.size(12, check=2), bench.size(256, check=16)
    x, target = torch.randn(2, 64, width, device=bench.device).bfloat16()
    weights = torch.randn(layers, width, width, device=bench.device) * width**-0.5
    return x, target, weights, torch.randn_like(weights) * 0.01


def in_fp64(x, target, weights, momentum):
    """Compute the step independently, with all layers' weights in one tensor."""
    x, target, weights = x.double(), target.double(), weights.double().requires_grad_()
    for layer in range(len(weights)):
        hidden = x / x.pow(2).mean(-1, keepdim=True).sqrt() @ weights[layer]
        x = x + hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    losses = ((x - target) ** 2).mean(1)
    gradient = torch.autograd.grad(losses.mean(), weights)[0]
    momentum = gradient.add(momentum.double(), alpha=training_step.MOMENTUM)
    return losses.detach(), weights.detach() - training_step.LEARNING_RATE * momentum, momentum


@pytest.mark.gpu
def test_graph_captured_training_step(compare: Compare) -> None:
    compare(
        baseline=training_step.eager,
        optimized=prepared(training_step.whole_step),
        library=prepared(training_step.compiled),
        inputs=network,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        precision="bf16",
        evidence=[evidence.launches(max=1)],
    )
