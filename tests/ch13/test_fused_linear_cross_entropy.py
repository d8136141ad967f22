"""Loss and gradients of the output layer need less memory and time in fused chunks than at once.

The logits of a language model are its largest array: 8,192 tokens times a vocabulary of 128,256 are
2.1 GB in bf16 and 4.2 GB in fp32, in which the loss is computed. Autograd keeps the log
probabilities for the backward pass, which adds their gradient and the gradient of the logits: at
the peak, three fp32 arrays of 4.2 GB exist. But rows do not depend on each other, and the gradient
of a loss is known as soon as the loss is. "chunked" computes losses and gradients of 1,024 rows at
a time, so that only an eighth of the logits exists; that takes 1 to 5 % more time than eager
PyTorch. "fused" avoids the fp32 copies of the chunk as well: a Triton kernel sweeps each row of
bf16 logits with an online softmax (ch14/online_softmax), and a second sweep writes the gradient
over them. What remains is mostly the gradient of the weights. The library arm is torch.compile,
which fuses the passes but keeps all logits. "chunked" needs 1/1.4 of its memory, but takes 36 ms
instead of 20 on an H100. "fused" needs less than a third of the memory of torch.compile, and at
most 7 % more time.

The second claim judges the time of "fused" against eager PyTorch: it is 1.5x as fast on an H200 and
1.7x on an H100. Both run the same three products, which take most of it. Between them, eager
PyTorch makes about ten passes over arrays of 2.1 or 4.2 GB; the kernel reads the logits twice and
writes them once, 2.1 GB each time. The evidence is the bytes that device memory reads and writes:
half as many. The kernel takes 2.2 ms on an H200 and 2.4 on an H100, a tenth of the time and about
twice as long as a copy of the logits. Its own bytes were not counted. Two rows in flight per SM
already exceed the L2 cache, so the second sweep may read device memory again; if it does, the
kernel moves 2.8 to 3.1 TB/s on H200s and 2.6 on an H100.

Chunks have a price, too: each reads all weights twice and adds its part to their gradient, so
smaller chunks save memory and lose time. This is where torch.compile wins: in a trace on an H100
its three products take 16.2 ms and those of the chunks 17.6, while the fused loss kernel takes 2.4
ms and the two loss kernels of torch.compile 3.0. The sum of the gradients is rounded to bf16 after
each chunk; in fp32 it would take twice the memory. Labels are distinct here: where one recurs,
terms of opposite sign from several chunks, each rounded before, could cancel, and what that costs
in accuracy is not measured.

The gradients are computed in the forward pass, for the mean loss: a loss that is scaled later must
scale them as well. Liger Kernel (arXiv 2410.10989) has this method; Cut Cross-Entropy (arXiv
2411.09009) keeps even the chunk's logits out of device memory. The gain grows with the vocabulary
and vanishes where logits are smaller than the weights, at fewer tokens than the width of the model.
"""

import pytest
import torch

from kernels.ch13 import linear_cross_entropy
from pytest_aiperf import Bench, Compare, Work, evidence


def hidden_states(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Draw hidden states, the output layer and the labels; the last value is rows per chunk."""
    tokens, width = bench.size(8192, check=30), bench.size(2048, check=24)
    vocabulary, options = bench.size(128256, check=5003), {"device": bench.device}
    weight = torch.randn(vocabulary, width, **options) * width**-0.5
    x = torch.randn(tokens, width, **options)
    # distinct labels: of a repeated one, chunks could add opposite terms, rounded to bf16 before
    target = torch.randperm(vocabulary, **options)[:tokens]
    return x.bfloat16(), weight.bfloat16(), target, bench.size(1024, check=8)


def in_fp64(x, weight, target, chunk):
    """Compute 512 rows at a time, because the logits of all take too much memory in fp64."""
    weight, of_weight = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    losses, of_x = [], []
    for rows, labels in zip(x.double().split(512), target.split(512), strict=True):
        logits = rows @ weight.T
        exponentials = torch.exp(logits - logits.amax(1, keepdim=True))
        probabilities = exponentials / exponentials.sum(1, keepdim=True)
        picked = torch.arange(len(labels), device=x.device), labels
        losses.append(-probabilities[picked].log())
        probabilities[picked] -= 1
        of_x.append(probabilities @ weight / len(x))
        of_weight += probabilities.T @ rows / len(x)
    return torch.cat(losses), torch.cat(of_x), of_weight


def flops(x, weight, target, chunk):
    return Work(flops=6 * len(x) * weight.numel(), dtype="bf16")


RUNGS = {
    "chunked": (linear_cross_entropy.eager, linear_cross_entropy.chunked, "idiomatic"),
    "fused": (linear_cross_entropy.chunked, linear_cross_entropy.fused, "previous rung"),
}
EVIDENCE = {
    "chunked": evidence.kernels(min=2, per="baseline"),  # those of one chunk, eight times
    "fused": evidence.kernel_name("_loss_and_gradient", min=8),  # one per chunk
}


@pytest.mark.parametrize("rung", RUNGS)
def test_fused_linear_cross_entropy(compare: Compare, rung: str) -> None:
    baseline, optimized, against = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        library=linear_cross_entropy.compiled,
        against=against,
        inputs=hidden_states,
        work=flops,
        reference=in_fp64,
        metric=("memory", "device"),
        cache="warm",  # makes no difference: the logits are many times the L2 capacity
        precision="bf16",
        evidence=[EVIDENCE[rung]],
    )


def test_fused_linear_cross_entropy_time(compare: Compare) -> None:
    compare(
        baseline=linear_cross_entropy.eager,
        optimized=linear_cross_entropy.fused,
        library=linear_cross_entropy.compiled,
        inputs=hidden_states,
        work=flops,
        reference=in_fp64,
        cache="warm",
        precision="bf16",
        evidence=[
            # if each array that exceeds the L2 cache is moved once per use, eager PyTorch must move
            # at least 42 GB, and the chunks 27 to 30, most of them for their products: 0.71 at most
            evidence.counter("dram__bytes.sum", max=0.75, per="baseline"),
            evidence.spills(kernel="_loss_and_gradient"),
        ],
    )
