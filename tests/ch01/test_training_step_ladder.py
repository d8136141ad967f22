"""Removing waits, pageable copies and launches makes a small training step faster; bf16 does not.

The naive loop is correct and common, with one exception: its optimizer updates one tensor after the
other. PyTorch's default (foreach) is turned off, so that "fused" shows what these launches cost.
Each arm changes one thing, and each rung is judged against the fastest arm before it, in wall time
for four steps. The library arm of the last rung is torch.compile with mode="reduce-overhead": it
captures graphs as well, of the forward and of the backward pass, and fuses their elementwise
operations, but the CPU launches the gradient norm and the optimizer. On an H200 its GPU work takes
a quarter less time than that of "captured" (4.6 ms instead of 6.1), but its four steps take 9 to 11
ms, and those of "captured" 6.3 to 6.7: the GPU waits while the CPU works between the graphs. Only
15 launches and copies per step are left, so most of this work is not launching; it was not
profiled.

"no_sync" keeps loss and gradient norm on the GPU. `.item()` makes the CPU wait until the GPU has
computed the value. Meanwhile nothing is launched, so the GPU then waits for the CPU: here before
the backward pass and before the optimizer, whose many short kernels cannot hide their launches.
"pinned" copies batches from pinned memory. A copy from pageable memory waits for all earlier work,
goes through the driver's staging buffer, and returns when it is done. "bf16" multiplies on tensor
cores (a context manager; the parameters stay in fp32). On an H200 the GPU's work takes 60 % less
time, but the step about 20 % more (14 to 23 %): autocast adds a fifth more launches, for casts, and
launches set the pace until they are gone. So this rung is permitted to be slower. "fused" updates
all parameters with one kernel instead of eight per tensor. It keeps bf16, so it must make up for
the casts as well, because it is judged against "pinned". "pinned" takes 12 to 20 % more time than
"fused" on an H200, and 6 % more in older records of an H100. PyTorch's default needs a kernel per
operation, but for all tensors at once: its launches are few as well, and what "fused" saves over it
is bytes (ch13/fused_optimizer). "captured" launches the step as one CUDA graph (ch12/graph_replay),
which is possible only because nothing in it waits for the CPU any more.

Two figures show how well the GPU is used. The share of the bf16 limit is the model FLOPs
utilization (MFU): 6 operations per weight and row, over the time and the rate of the tensor cores,
for all rungs, so that their figures compare. The busy share, which nvidia-smi calls GPU
utilization, is the part of the time in which the GPU runs anything. They are not the same: fp32
products keep the GPU busy at a low MFU, and "captured" keeps it busy at an MFU of 11 to 12 %, with
many short kernels.

The model is small on purpose, 13 million weights in 24 tensors and 2,048 rows per step, because
launches are the subject: with "captured", the GPU needs less than a third of the time that the CPU
takes to launch "fused". In a large model the kernels hide launches, bf16 gains most, and the MFU
can reach the 45 % that are common there; here it cannot. 12x over the first arm was the aim and is
not reached: 5.9x to 6.5x was measured on H200s, because launches, not waits, take most of the time
of "naive", too.
"""

from itertools import pairwise

import pytest
import torch

from kernels.ch01 import compiled_training, training_loop
from pytest_aiperf import Bench, Compare, Work, evidence, prepared

Batches = tuple[torch.Tensor, torch.Tensor]
Tensors = list[torch.Tensor]

STEPS = 4
NORM_EPSILON = torch.finfo(torch.float32).eps  # rms_norm adds it to the mean square
ARMS = {
    "naive": training_loop.naive,
    "no_sync": training_loop.no_sync,
    "pinned": training_loop.pinned_batches,
    "bf16": training_loop.bf16,
    "fused": training_loop.fused,
    "captured": prepared(training_loop.captured_steps),
}
FASTEST_BEFORE = {rung: before for before, rung in pairwise(ARMS)} | {"fused": "pinned"}
COMPILED = prepared(compiled_training.compiled_steps)
PROOF = {
    "no_sync": [evidence.copied_bytes("device to host", max=0)],  # `.item()` is such a copy
    "pinned": [evidence.copied_bytes("host to device", memory="pageable", max=0)],
    "bf16": [evidence.kernels(min=1.1, per="baseline")],  # the casts
    "fused": [
        evidence.kernel_name("FusedOptimizerTensorListMetadata", min=STEPS),
        evidence.launches(max=0.8, per="baseline"),
    ],
    # per step: a copy of the batch, the graph, and a copy of loss and norm, with gaps between them
    "captured": [evidence.launches(max=0.05, per="baseline"), evidence.busy_share(min=0.8)],
}


def training(
    bench: Bench,
) -> tuple[torch.Tensor, torch.Tensor, Tensors, Tensors, Tensors]:
    """Draw batches of inputs and targets, in both kinds of host memory, and the model's state."""
    rows, width = bench.size(2048, check=16), bench.size(1024, check=24)
    layers, device = bench.size(12, check=3), bench.device
    batches = torch.randn(STEPS, 2, rows, width, device=device)
    # batches differ in scale, or all would have nearly the same loss; they and weights are small
    # and moments large, or the rounding of some bf16 gradients would exceed the tolerance
    batches *= 0.125 + 0.125 * torch.rand(STEPS, 1, 1, 1, device=device)
    pinned = torch.empty(batches.shape, pin_memory=batches.is_cuda).copy_(batches)
    parameters = []
    for _ in range(layers):
        parameters.append(torch.randn(width, width, device=device) * 0.25 * width**-0.5)
        parameters.append(torch.randn(width, device=device) * 0.1)
    means = [0.5 * torch.randn_like(p) for p in parameters]
    squares = [2 + 4 * torch.rand_like(p) for p in parameters]
    return batches.cpu(), pinned, parameters, means, squares


def flops(pageable, pinned, parameters, means, squares):
    weights = sum(p.numel() for p in parameters if p.ndim == 2)
    return Work(flops=6 * weights * pageable[:, 0, :, 0].numel(), dtype="bf16")


def in_fp64(pageable, pinned, parameters, means, squares):
    """Train independently: gradients by hand, AdamW from its definition."""
    state = [[p.double() for p in kind] for kind in (parameters, means, squares)]
    log = []
    for number, batch in enumerate(pageable, training_loop.STEP + 1):
        x, target = batch.to(parameters[0].device).double()
        loss, grads = loss_and_gradients(x, target, state[0])
        log.append(torch.stack([loss, sum(g.square().sum() for g in grads).sqrt()]))
        updated = [adamw(*tensors, number) for tensors in zip(*state, grads, strict=True)]
        state = [list(kind) for kind in zip(*updated, strict=True)]
    return torch.stack(log), *state


def loss_and_gradients(x, target, parameters):
    inputs, hidden = [], []
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        inputs.append(x)
        hidden.append(normalized(x) @ weight.T + bias)
        x = x + hidden[-1] * normal_cdf(hidden[-1])
    difference = x - target
    gradient, grads = 2 * difference / len(x), []
    for x, h, weight in zip(inputs[::-1], hidden[::-1], parameters[-2::-2], strict=True):
        density = torch.exp(-h.square() / 2) / (2 * torch.pi) ** 0.5
        of_hidden = gradient * (normal_cdf(h) + h * density)
        grads += [of_hidden.sum(0), of_hidden.T @ normalized(x)]
        of_norm, rms = of_hidden @ weight, rms_of(x)
        gradient = gradient + (of_norm - x * (of_norm * x).mean(1, keepdim=True) / rms**2) / rms
    return difference.square().sum() / len(x), grads[::-1]


def normal_cdf(h):
    return (1 + torch.erf(h / 2**0.5)) / 2


def rms_of(x):
    return (x.square().mean(1, keepdim=True) + NORM_EPSILON).sqrt()


def normalized(x):
    return x / rms_of(x)


def adamw(w, m, v, gradient, number):
    beta1, beta2 = training_loop.BETA1, training_loop.BETA2
    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient.square()
    denominator = (v / (1 - beta2**number)).sqrt() + training_loop.EPSILON
    update = m / (1 - beta1**number) / denominator + training_loop.DECAY * w
    return w - training_loop.RATE * update, m, v


@pytest.mark.parametrize("rung", PROOF)
def test_training_step_ladder(compare: Compare, rung: str) -> None:
    before = FASTEST_BEFORE[rung]
    compare(
        baseline=ARMS[before],
        optimized=ARMS[rung],
        library=COMPILED if rung == "captured" else None,
        against="naive" if before == "naive" else "previous rung",
        inputs=training,
        work=flops,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        precision="fp32" if rung in ("no_sync", "pinned") else "bf16",
        evidence=PROOF[rung],
    )
