"""One batch gives the same gradient faster than the sum over eight micro-batches.

Gradient accumulation runs forward and backward pass for a part of the batch at a time and adds up
the gradients, because the activations of the whole batch do not fit in memory. Where they do fit,
it is pure cost. Every micro-batch casts all weights to bf16, reads them in both passes, and adds
its gradient to the sum, a pass over three arrays as large as the model: most of these bytes do not
depend on the number of rows. Products with 64 rows also leave tensor cores idle. And about eight
times as many kernels are launched: on an H200 the GPU idles between them for most of the time, in
all arms, and device time includes these gaps. In kernel time alone, one batch is about 6.4 times as
fast and two micro-batches 3.7 times.

Activations grow with the rows of a micro-batch, which is why one accumulates. At this size they are
not what counts: the recorded peak is highest with eight micro-batches and about half of that with
one. So use the largest micro-batch that fits. The gain ends where a micro-batch alone has so many
rows (here about a thousand) that products outweigh the passes over weights and gradients. Losses
are averaged over the batch, so each micro-batch counts one eighth; that is exact only for
micro-batches of equal size.
"""

from functools import partial

import pytest
import torch

from kernels.ch01.training_loop import loss_of
from pytest_aiperf import Bench, Compare, Work, evidence

MICRO_BATCHES = 8
RUNGS = {"two_micro_batches": 2, "one_batch": 1}


def batch(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw inputs and targets, and the weights and biases of a residual network."""
    rows, width = bench.size(512, check=32), bench.size(2048, check=24)
    layers, options = bench.size(8, check=2), {"device": bench.device}
    weights = torch.randn(layers, width, width, **options) * width**-0.5
    biases = torch.randn(layers, width, **options) * 0.1
    return *torch.randn(2, rows, width, **options), weights, biases


def gradients(x, target, weights, biases, micro_batches):
    """Return the gradients of the mean loss, summed over equal parts of the batch."""
    layers = zip(weights, biases, strict=True)
    parameters = [p.detach().requires_grad_() for layer in layers for p in layer]
    parts = x.chunk(micro_batches), target.chunk(micro_batches)
    for part in zip(*parts, strict=True):
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = loss_of(*part, parameters) / micro_batches
        loss.backward()
    return [p.grad for p in parameters]


ARMS = {count: partial(gradients, micro_batches=count) for count in (1, 2, MICRO_BATCHES)}


def in_fp64(x, target, weights, biases):
    parameters = [p.double().requires_grad_() for p in (weights, biases)]
    x = x.double()
    for weight, bias in zip(*parameters, strict=True):
        hidden = x / x.pow(2).mean(1, keepdim=True).sqrt() @ weight.mT + bias
        x = x + hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    of_weights, of_biases = torch.autograd.grad(((x - target) ** 2).sum() / len(x), parameters)
    return [p for layer in zip(of_weights, of_biases, strict=True) for p in layer]


@pytest.mark.parametrize("rung", RUNGS)
def test_microbatch_fusion(compare: Compare, rung: str) -> None:
    share = RUNGS[rung] / MICRO_BATCHES
    compare(
        baseline=ARMS[MICRO_BATCHES],
        optimized=ARMS[RUNGS[rung]],
        inputs=batch,
        work=lambda x, target, weights, biases: Work(
            flops=6 * len(x) * weights.numel(), dtype="bf16"
        ),
        reference=in_fp64,
        metric=("device", "wall", "memory"),
        precision="bf16",
        # the share of the micro-batches, with room for split-K products and for activations
        evidence=[
            evidence.kernels(max=1.2 * share, per="baseline"),
            evidence.counter("dram__bytes.sum", max=2 * share, per="baseline"),
        ],
    )
