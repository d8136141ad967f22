"""One batch gives the same gradient faster than the sum over eight micro-batches.

Gradient accumulation runs forward and backward pass for a part of the batch at a time and adds up
the gradients, because the activations of the whole batch do not fit in memory. Where they do fit,
it is pure cost. Every micro-batch casts all weights to bf16, reads them in both passes, and adds
its gradient to the sum. The addition is a pass over three arrays as large as the model. Most of
these bytes do not depend on the number of rows. Autocast inside the loop, as in PyTorch's examples,
casts the weights anew for every micro-batch; autocast around the loop, which would cast them once,
was not measured. Products with 512 rows use smaller tiles (128x64 instead of 256x128 in the forward
pass), which reuse each loaded value less often, and eight times as many kernels start and end. On
an H200, the products take a quarter of the kernels' time with eight micro-batches. They account for
less than a fifth of what one batch saves; the rest is casts, additions and other passes. Fewer
bytes of device memory explain only a part of that: one batch takes 42 to 44 % of the time but moves
71 to 73 % of the bytes, and two micro-batches move fewer (60 to 64 %). All arms are CUDA graphs, so
their launches by the CPU are no part of the gain.

Activations grow with the rows of a micro-batch, which is why one accumulates: with one batch, eight
times as many bytes wait for the backward pass, as a test beside the claim counts. So use the
largest micro-batch that fits. 512 rows are few: one long sequence has more. With more rows per
micro-batch the gain gets smaller, because products and activations then outweigh the passes over
weights and gradients. torch.compile fuses some of these passes; it was not compared. Losses are
averaged over the batch, so each micro-batch counts one eighth; that is exact only for micro-batches
of equal size.
"""

import pytest
import torch

from kernels.ch01.training_loop import loss_of
from kernels.ch15.decoder import captured
from pytest_aiperf import Bench, Compare, Work, evidence, prepared

MICRO_BATCHES = 8
RUNGS = {"two_micro_batches": 2, "one_batch": 1}


def batch(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw inputs and targets, and the weights and biases of a residual network."""
    rows, width = bench.size(4096, check=32), bench.size(2048, check=24)
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


def graph_of(micro_batches):
    def capture(*inputs):
        grads = []

        def step():
            grads[:] = gradients(*inputs, micro_batches)

        replay = captured(step, inputs[0].device)

        def run(*_inputs):
            replay()
            return list(grads)

        return run

    return prepared(capture)


ARMS = {count: graph_of(count) for count in (1, 2, MICRO_BATCHES)}


def in_fp64(x, target, weights, biases):
    parameters = [p.double().requires_grad_() for p in (weights, biases)]
    x = x.double()
    for weight, bias in zip(*parameters, strict=True):
        hidden = x / x.pow(2).mean(1, keepdim=True).sqrt() @ weight.mT + bias
        x = x + hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    of_weights, of_biases = torch.autograd.grad(((x - target) ** 2).sum() / len(x), parameters)
    return [p for layer in zip(of_weights, of_biases, strict=True) for p in layer]


def activations_waiting_for_the_backward_pass(rows):
    """Count the bytes that autograd saves and that have a row per row of the batch."""
    width, saved = 16, {}
    parameters = [p.requires_grad_() for p in (torch.randn(width, width), torch.randn(width)) * 2]

    def keep(x):
        if len(x) == rows:
            saved[x.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss_of(*torch.randn(2, rows, width), parameters)
    return sum(x.nbytes for x in saved.values())


def test_activations_grow_with_the_micro_batch() -> None:
    micro_batch, batch = map(activations_waiting_for_the_backward_pass, (64, 64 * MICRO_BATCHES))
    assert batch == MICRO_BATCHES * micro_batch > 0


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
        metric=("device", "wall"),
        precision="bf16",
        # the share of the micro-batches, with room for split-K products
        evidence=[
            evidence.kernels(max=1.2 * share, per="baseline"),
            evidence.counter("dram__bytes.sum", max=0.8, per="baseline"),
        ],
    )
