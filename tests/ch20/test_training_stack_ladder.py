"""A fused optimizer, compiled passes and one CUDA graph each beat an eager training step.

The step of a model with 23 million weights launches a few hundred kernels, most of them short.
"fused" replaces foreach AdamW's eight passes over weights and moments by one. "compiled" also fuses
the operations between the GEMMs, forward and backward: norms, activation functions, casts of the
fp32 weights, residuals. "graph" launches the whole step at once, which removes the launch overhead
of Python. Each is judged against eager PyTorch in bf16; loss, weights and moments must agree.

Launch overhead hides most of what the first two save. They are rungs of a ladder in device time;
the graph is a claim of its own, in wall time. The order matters little, but each shows what the
others leave: a graph of eager kernels still makes every pass, and compiled kernels still wait for
Python. In larger models the GEMMs outweigh the rest, and the gain shrinks to
that of the optimizer and the fused passes; fewer bits are the next step (ch19/fp8_training_block).
"""

import pytest
import torch

from kernels.ch15.decoder import Decoder, random_decoder
from kernels.ch20 import training
from pytest_aiperf import Bench, Compare, evidence, prepared

State = tuple[torch.Tensor, torch.Tensor, Decoder, Decoder, Decoder]


def batch(bench: Bench) -> State:
    """Draw tokens, the tokens that follow, the model in fp32, and both moments of each weight."""
    layers, width = bench.size(6, check=2), bench.size(512, check=64)
    tokens = bench.size(4096, check=100)
    shape = 2, bench.size(8, check=2), bench.size(256, check=16)
    x, target = torch.randint(tokens, shape, device=bench.device)
    model = random_decoder(layers, width, tokens, device=bench.device)
    model.lm_head.mul_(width**-0.5)  # logits of about 1: predictions are not saturated
    means = Decoder(*(0.1 * torch.randn_like(w) for w in model))
    squares = Decoder(*(torch.rand_like(w) + 0.1 for w in model))
    return x, target, model, means, squares


def in_fp64(x, target, model, means, squares):
    doubles = [part.to(torch.float64) for part in (model, means, squares)]
    loss, grads = training.gradients(x, target, doubles[0], training.loss_of, torch.float64)
    state = zip(*map(training.flat, doubles), grads, strict=True)
    updated = zip(*(adamw(*tensors) for tensors in state), strict=True)
    return loss, *(part for kind in updated for part in stacked(kind, len(model[2])))


def adamw(w, m, v, g):
    m = training.BETA1 * m + (1 - training.BETA1) * g
    v = training.BETA2 * v + (1 - training.BETA2) * g * g
    rate = training.RATE / (1 - training.BETA1**training.STEP)
    denominator = (v / (1 - training.BETA2**training.STEP)).sqrt() + training.EPSILON
    return w * (1 - training.RATE * training.DECAY) - rate * m / denominator, m, v


def stacked(flat, layers):
    yield from flat[:2]
    for start in range(2, len(flat), layers):
        yield torch.stack(flat[start : start + layers])


RUNGS = {"fused": (training.fused, 0.96), "compiled": (training.compiled, 0.85)}


@pytest.mark.parametrize("rung", RUNGS)
def test_training_stack_ladder(compare: Compare, rung: str) -> None:
    optimized, launches = RUNGS[rung]
    compare(
        baseline=training.eager,
        optimized=optimized,
        inputs=batch,
        reference=in_fp64,
        cache="warm",
        precision="bf16",
        evidence=[evidence.launches(max=launches, per="baseline")],
    )


def test_training_stack_graph(compare: Compare) -> None:
    compare(
        baseline=training.eager,
        optimized=prepared(training.graph),
        inputs=batch,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        precision="bf16",
        evidence=[evidence.launches(max=0.05, per="baseline")],
    )
