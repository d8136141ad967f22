"""TF32, bf16 autocast and torch.compile each make a training step faster at the same losses.

The model has 3 Llama blocks of width 2,048. A step multiplies 4,096 tokens by 171 million weights,
forward and backward: 4.2e12 operations. On an H200 it takes 94.7 ms in fp32, 25.7 in TF32, 13.9
under autocast, and 9.5 compiled: gains of 3.7x, 1.85x and 1.46x, in all 10x. The first arm is
PyTorch's default: the fp32 units multiply the matrices, at a seventh of the TF32 rate. "tf32" is
one call, torch.set_float32_matmul_precision("high"): tensor cores use 10 bits of the operands'
fractions. In a trace, the products take 12.9 ms instead of 82.2. Attention ignores the setting, and
the other operations move the same bytes: attention takes 5.9 ms in both arms, AdamW 1.5 and the
rest 4.9. The step reaches 39 % of the TF32 rate.

"autocast" runs the forward pass under torch.autocast; the backward pass uses the same dtypes.
Tensor cores multiply bf16 at nearly twice the TF32 rate: the products take 5.3 ms. Attention takes
0.6, because cuDNN's flash kernel replaces PyTorch's memory-efficient one for fp32, written for
Ampere. How much of that is due to bf16 was not measured. The rest grows from 4.9 ms to 6.0:
activations inside a block take half the bytes, but each weight, its gradient and most activations
are cast, and the step runs 315 kernels instead of 234. It reaches 38 % of the bf16 rate. Weights
that AdamW updates (master weights), RMSNorm, rotations of the positions and residual stream stay in
fp32. So does the loss, because the model calls logits.float(): cross_entropy rounds the log-softmax
to the dtype of the logits, also under autocast. In bf16, losses near 9 have steps of 0.06. Losses,
weights and moments agree with fp64 within the tolerance of TF32 or bf16. bf16 has the exponents of
fp32: small gradients do not underflow, and the loss needs no scaling, unlike in fp16.

"compiled" fuses casts of activations with norms, rotations, SwiGLU and residual additions: 137
kernels instead of 315, and 29 % fewer DRAM bytes. The rest falls to 1.8 ms. Products, attention and
AdamW (one fused implementation in all arms) take as long as before, and the step reaches 55 % of
the bf16 rate. Of the 1.8 ms, 0.5 are casts of the 13 weight matrices and their gradients (26
kernels). A bf16 copy of the weights would save some, but the optimizer must then maintain it.
ch20/training_stack_ladder casts by hand, keeps all activations in bf16, and compiling gains 1.05x.
AdamW and the casts of weights take 2 ms however few the tokens. Device time is judged: in a small
model launches decide, and autocast is slower (ch01/training_step_ladder).
"""

from itertools import pairwise

import pytest
import torch

from kernels.ch13 import mixed_precision
from kernels.ch14 import llama
from pytest_aiperf import Bench, Compare, Work, evidence, prepared

State = tuple[torch.Tensor, torch.Tensor, llama.Weights, llama.Weights, llama.Weights]

LADDER = ["fp32", "tf32", "autocast", "compiled"]
BEFORE = {rung: before for before, rung in pairwise(LADDER)}
ARMS = {name: prepared(getattr(mixed_precision, name)) for name in LADDER}
PROOF = {
    # the products no longer run on the fp32 units
    "tf32": [
        evidence.counter(
            "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum", max=0.1, per="baseline"
        )
    ],
    "autocast": [
        # all products: 6 operations for each of 171 million weights and 4,096 tokens
        evidence.counter("sm__ops_path_tensor_src_bf16_dst_fp32.sum", min=4e12),
        evidence.kernel_name("flash", min=6),  # there is none for fp32; 3 layers, two passes
    ],
    "compiled": [
        evidence.kernels(max=0.7, per="baseline"),
        evidence.counter("dram__bytes.sum", max=0.85, per="baseline"),
    ],
}


def state(bench: Bench) -> State:
    """Draw tokens, the tokens that follow, the model in fp32, and both moments of each weight."""
    layers, width = bench.size(3, check=2), bench.size(2048, check=128)
    hidden, vocabulary = bench.size(5632, check=192), bench.size(8192, check=300)
    shape = 2, bench.size(4, check=2), bench.size(1024, check=20)
    x, target = torch.randint(vocabulary, shape, device=bench.device)
    weights = llama.random_weights(layers, width, hidden, vocabulary, device=bench.device)
    # about as large as the gradients of a mean over tokens; a row of the embedding gets few terms
    sizes = [scale / x.numel() for scale in (width**-0.5, *[1.0] * (len(weights) - 1))]
    means = [size * torch.randn_like(w) for size, w in zip(sizes, weights, strict=True)]
    squares = [
        size**2 * (2 + 4 * torch.rand_like(w)) for size, w in zip(sizes, weights, strict=True)
    ]
    return x, target, weights, llama.Weights(*means), llama.Weights(*squares)


def flops(x, target, weights, means, squares):
    """Count what a step needs; looking up embeddings needs nothing, and attention is causal."""
    layers, width = weights.out.shape[:2]
    multiplied = sum(w.numel() for w in weights[1:]) + layers * width * x.shape[1]
    return 6 * x.numel() * multiplied


def in_fp64(x, target, *state):
    """Train independently: logits of an oracle, and the loss and AdamW from their definitions."""
    weights, means, squares = (llama.Weights(*(w.double() for w in part)) for part in state)
    logits = llama.in_fp64(llama.Weights(*(w.requires_grad_() for w in weights)), x).flatten(0, 1)
    losses = logits.logsumexp(1) - logits.gather(1, target.flatten()[:, None])[:, 0]
    grads = torch.autograd.grad(losses.mean(), weights)
    updated = zip(*map(adamw, weights, grads, means, squares), strict=True)
    return losses.detach(), *(tensor for part in updated for tensor in part)


@torch.no_grad()
def adamw(w, g, m, v):
    beta1, beta2 = mixed_precision.BETA1, mixed_precision.BETA2
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    denominator = (v / (1 - beta2**mixed_precision.STEP)).sqrt() + mixed_precision.EPSILON
    rate = mixed_precision.RATE / (1 - beta1**mixed_precision.STEP)
    return w * (1 - mixed_precision.RATE * mixed_precision.DECAY) - rate * m / denominator, m, v


@pytest.mark.parametrize("rung", LADDER[1:])
def test_amp_compile_ladder(compare: Compare, rung: str) -> None:
    dtype = "tf32" if rung == "tf32" else "bf16"
    compare(
        baseline=ARMS[BEFORE[rung]],
        optimized=ARMS[rung],
        against="idiomatic" if rung == "tf32" else "previous rung",
        inputs=state,
        work=lambda *state: Work(flops=flops(*state), dtype=dtype),
        reference=in_fp64,
        cache="warm",  # makes no difference: the weights are many times the L2 capacity
        precision=dtype,
        evidence=PROOF[rung],
    )
