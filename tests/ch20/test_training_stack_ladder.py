"""A fused optimizer, compiled passes and one CUDA graph each shorten a training step.

"fused" replaces the eight passes over weights and moments of eager PyTorch's foreach AdamW by one.
"compiled" also fuses the operations between the GEMMs, forward and backward: norms, activation
functions, residuals, some casts of the weights. "graph" launches the compiled step at once. Each is
judged against the rung before it.

"fused" and "compiled" are judged in device time, for a model with 369 million weights and 4,096
tokens per step in bf16; losses, weights and moments must agree. Their share of the bf16 limit is
the model FLOPs utilization (MFU): the work is 6 operations per weight and token, and attention. The
optimizer's time depends on the weights alone, so that more tokens per step raise the MFU and shrink
the gain. On an H200 both rungs together reach 1.33x, where 1.5x was the aim: "fused" gains 1.26x
and "compiled" 1.05x. In a trace, the eager step's kernels take 23.7 ms, of which 10.6 are GEMMs and
7.8 AdamW. Of the 17.9 ms that remain in the end, the same GEMMs take 10.6, AdamW 2.9, the fused
kernels 2.6 and attention 1.7. For 1.5x, everything but the GEMMs would have to fit in 5.2 ms. Fewer
bits are the next step (ch19/fp8_training_block).

"graph" removes the launch overhead of Python. A large model hides that overhead behind its kernels.
The graph is therefore a claim of its own, in wall time, for a model with 23 million weights, whose
step launches 215 short kernels and copies: on an H100 they keep the GPU busy for 1.5 ms of a step
of 6.7 ms, and the graph takes 1.6 ms. The gain depends on how quickly the host launches: it is 4.2x
there (3.5 to 5.0), and 3.5x to 6.0x on H200s. The library arm is the same compiled step with the
graphs that torch.compile captures by itself (mode="reduce-overhead"): one per pass, while autograd
and the optimizer still run in Python. On an H100 it takes 1.7 times as long as the graph of the
whole step (1.5 to 2.0), and 1.5 to 2.2 times on H200s. ch13/graph_captured_training_step captures a
step that is not compiled, and ch12/graph_replay teaches launch overhead by itself.
"""

import pytest
import torch

from kernels.ch15.decoder import HEAD_DIM, Decoder, random_decoder
from kernels.ch20 import training
from pytest_aiperf import Bench, Compare, Work, evidence, prepared

State = tuple[torch.Tensor, torch.Tensor, Decoder, Decoder, Decoder]


def large(bench: Bench) -> State:
    layers, width = bench.size(7, check=2), bench.size(2048, check=64)
    return state(bench, layers, width, bench.size(4, check=2), bench.size(1024, check=16))


def small(bench: Bench) -> State:
    layers, width = bench.size(6, check=2), bench.size(512, check=64)
    return state(bench, layers, width, bench.size(8, check=2), bench.size(256, check=16))


def state(bench: Bench, layers: int, width: int, sequences: int, length: int) -> State:
    """Draw tokens, the tokens that follow, the model in fp32, and both moments of each weight."""
    vocabulary = bench.size(4096, check=100)
    x, target = torch.randint(vocabulary, (2, sequences, length), device=bench.device)
    model = random_decoder(layers, width, vocabulary, device=bench.device)
    model.lm_head.mul_(width**-0.5)  # logits of about 1: predictions are not saturated
    means = Decoder(*(0.1 * torch.randn_like(w) for w in model))
    squares = Decoder(*(torch.rand_like(w) + 0.1 for w in model))
    return x, target, model, means, squares


def flops(x, target, model, means, squares):
    """Count what a step needs; looking up embeddings needs nothing, and attention is causal."""
    layers, width = model.qkv.shape[:2]
    weights = sum(w.numel() for w in model) - model.embedding.numel()
    return Work(flops=6 * x.numel() * (weights + layers * width * x.shape[1]), dtype="bf16")


def in_fp64(x, target, model, means, squares):
    """Sum the gradients of the sequences: in fp64, the attention scores of all take much memory."""
    model, means, squares = (part.to(torch.float64) for part in (model, means, squares))
    for weight in model:
        weight.requires_grad_()
    losses = []
    for tokens, following in zip(x, target, strict=True):
        losses.append(losses_of(tokens, following, model))
        (losses[-1].sum() / len(x)).backward()
    updated = zip(*map(adamw, model, means, squares), strict=True)
    return torch.cat(losses).detach(), *(w for part in updated for w in part)


def losses_of(tokens, following, model):
    """Return the loss of each token of one sequence."""
    x = model.embedding[tokens]
    future = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
    # unbind() has one gradient per kind of weight; indexing has one of that size per layer
    for qkv, out, up, down in zip(*(kind.unbind() for kind in model[2:]), strict=True):
        q, k, v = (normalized(x) @ qkv).view(len(x), 3, -1, HEAD_DIM).permute(1, 2, 0, 3)
        scores = (q @ k.mT / HEAD_DIM**0.5).masked_fill(future, -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ out
        hidden = normalized(x) @ up
        x = x + hidden * (1 + torch.erf(hidden / 2**0.5)) / 2 @ down
    logits = normalized(x) @ model.lm_head.T
    return logits.logsumexp(-1) - logits.gather(1, following[:, None])[:, 0]


def normalized(x):
    return x / x.pow(2).mean(-1, keepdim=True).sqrt()


@torch.no_grad()
def adamw(w, m, v):
    m = training.BETA1 * m + (1 - training.BETA1) * w.grad
    v = training.BETA2 * v + (1 - training.BETA2) * w.grad**2
    rate = training.RATE / (1 - training.BETA1**training.STEP)
    denominator = (v / (1 - training.BETA2**training.STEP)).sqrt() + training.EPSILON
    return w * (1 - training.RATE * training.DECAY) - rate * m / denominator, m, v


RUNGS = {
    "fused": (training.eager, training.fused, "idiomatic", "FusedOptimizerTensorListMetadata"),
    "compiled": (training.fused, training.compiled, "previous rung", "triton_"),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_training_stack_ladder(compare: Compare, rung: str) -> None:
    baseline, optimized, against, kernel = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        against=against,
        inputs=large,
        work=flops,
        reference=in_fp64,
        cache="warm",
        precision="bf16",
        evidence=[evidence.kernel_name(kernel), evidence.kernels(max=0.95, per="baseline")],
    )


def test_training_stack_graph(compare: Compare) -> None:
    compare(
        baseline=training.compiled,
        optimized=prepared(training.graph),
        library=prepared(training.reduce_overhead),
        against="previous rung",
        inputs=small,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        precision="bf16",
        evidence=[evidence.launches(max=0.05, per="baseline")],
    )
