"""PyTorch's cuDNN attention backend beats its FlashAttention 2 backend on Hopper.

`scaled_dot_product_attention` chooses among several implementations. FlashAttention 2 keeps the
scores on chip, but was written for Ampere: each warp issues mma.sync instructions and waits for
them. cuDNN uses Hopper's wgmma: a warpgroup of 128 threads issues one large product, which reads
its operands from shared memory and runs asynchronously while another tile's softmax is computed.
Both backends do the same arithmetic, forward ("forward") and with the three gradients ("training").

The default depends on the PyTorch version, the GPU and the shapes, so both arms force a backend.
Recent versions choose cuDNN on Hopper by default: the claim then shows what that choice is worth.
The limit is the tensor-core rate; softmax, which runs on other units, keeps attention below it.
On Ampere, with arbitrary masks or in shapes that cuDNN rejects, the FlashAttention 2 and
memory-efficient backends remain; for short sequences launch overhead dominates.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pytest_aiperf import Bench, Compare, Work, evidence

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def heads(bench: Bench) -> Heads:
    """Draw queries, keys and values (1 x heads x tokens x 128) and the output's gradient."""
    shape = 4, 1, bench.size(16, check=2), bench.size(8192, check=64), 128
    q, k, v, gradient = torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
    return q, k, v, gradient


def forward(q, k, v, _):
    return scaled_dot_product_attention(q, k, v)


def training(q, k, v, gradient):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient)


def with_backend(passes, backend):
    def run(*inputs):
        with sdpa_kernel(backend):
            return passes(*inputs)

    return run


def in_fp64(passes):
    def run(*inputs):
        """Go head by head: the scores of all heads would take 8 GiB."""
        heads = zip(*(x.double().split(1, 1) for x in inputs), strict=True)
        outputs = [passes(*head) for head in heads]
        if passes is forward:
            return torch.cat(outputs, 1)
        return tuple(torch.cat(parts, 1) for parts in zip(*outputs, strict=True))

    return run


PASSES = {"forward": (forward, 4), "training": (training, 14)}


@pytest.mark.gpu(min_sm=90)
@pytest.mark.parametrize("name", PASSES)
def test_sdpa_backend_choice(compare: Compare, name: str) -> None:
    passes, flops = PASSES[name]
    compare(
        baseline=with_backend(passes, SDPBackend.FLASH_ATTENTION),
        optimized=with_backend(passes, SDPBackend.CUDNN_ATTENTION),
        against="library",
        inputs=heads,
        work=lambda q, *_: Work(flops=flops * q.numel() * q.shape[2], dtype="bf16"),
        reference=in_fp64(passes),
        # one wgmma replaces many mma.sync, so far fewer instructions are executed
        evidence=[evidence.counter("smsp__inst_executed.sum", max=0.8, per="baseline")],
    )
