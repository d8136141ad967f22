"""Compiling the backward pass together with its hooks beats eager hooks in a compiled model.

torch.compile compiles the backward pass of a model, but not what autograd does around it: it adds
gradients up and calls hooks in Python, and what a hook does is launched kernel by kernel. Here a
hook per parameter clips its gradient and adds it to the momentum. That takes nine short kernels, of
which five read a matrix of 1 MiB and four compute with a single value: 216 for 24 layers. Compiled
autograd traces the backward pass when it runs, the hooks included, and compiles all of it: a call
launches 242 kernels instead of 387, and no hook runs in Python. The host decides: on H200s a call
takes 4 to 6 ms instead of 6 to 10, of which the kernels take about 1. So the gain varies with the
host: 1.25x to 1.64x on H200s, in intervals from 1.02 to 2.07, and 1.27x on an H100 (1.03 to 1.57).

Compiling each hook as a function has no arm here: Python would still call each of them, and check
before each call whether the compiled code fits.

The library arm does without hooks: a compiled function does the same for all gradients after the
backward pass. On an H100 it takes about as long as compiled autograd (1.05 times, 0.95 to 1.16),
and on H200s longer (1.22 to 1.37 times). But it needs no private function of torch, so it is the
safer choice where all gradients may be kept until then: a hook frees its own at once. Compiled
autograd finds its compiled pass again by comparing the graph of each call, which takes time on the
host, and compiles anew if the graph has changed. With larger matrices, the kernels outlast their
launches, and only the bytes of unfused operations are left to gain. Hooks may not change what the
backward pass still reads: with hooks that update their parameter, torch 2.11 computes wrong results
under compiled autograd.
"""

import torch

from kernels.ch13 import hooked_backward as arms
from pytest_aiperf import Bench, Compare, evidence, prepared

State = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]


def state(bench: Bench) -> State:
    """Draw a batch of rows, the weights of each layer, and the momentum of each."""
    layers, width = bench.size(24, check=2), bench.size(512, check=32)
    shape = layers, width, width
    weights = torch.randn(shape, device=bench.device) * width**-0.5
    momenta = 1e-3 * torch.randn(shape, device=bench.device)
    x = torch.randn(bench.size(256, check=16), width, device=bench.device)
    return x, list(weights), list(momenta)


def in_fp64(x, weights, momenta):
    doubles = [w.double().requires_grad_() for w in weights]
    rows = x.double()
    for w in doubles:
        hidden = rows / rows.pow(2).mean(1, keepdim=True).sqrt() @ w
        rows = rows + hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    losses = (rows * rows).mean(1)
    losses.mean().backward()
    sums = [
        arms.MOMENTUM * m.double() + clipped(w.grad) for w, m in zip(doubles, momenta, strict=True)
    ]
    updated = [w.detach() - arms.RATE * m for w, m in zip(doubles, sums, strict=True)]
    return [losses.detach(), *updated, *sums]


def clipped(grad):
    return grad * min(1.0, arms.MAX_RMS / float(grad.norm() / grad.numel() ** 0.5))


def test_compiled_autograd(compare: Compare) -> None:
    compare(
        baseline=prepared(arms.eager_hooks),
        optimized=prepared(arms.compiled_backward),
        library=prepared(arms.after),
        inputs=state,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.kernels(max=0.75, per="baseline")],
    )
