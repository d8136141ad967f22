"""cuDNN's attention beats FlashAttention 2 on Hopper, and PyTorch already chooses it by default.

`scaled_dot_product_attention` chooses among several implementations. "math" multiplies, applies the
softmax and multiplies again, and writes all scores to memory in fp32. It also runs both products in
fp32, without tensor cores: they take half of its time. The memory-efficient backend ("efficient")
and FlashAttention 2 ("flash") keep the scores on chip with an online softmax and multiply in bf16
on the tensor cores. But both use Ampere's instructions: each warp issues mma.sync and waits for its
result. "flash" takes half the time of "efficient" with the same instructions; why was not measured
(their tiles are 128 x 64 and 64 x 128, queries x keys). Both lose to the default, which takes a
quarter of the time of "efficient" and half of that of "flash". cuDNN ("cudnn") uses Hopper's wgmma:
a warpgroup of 128 threads issues one large product, which runs asynchronously. Meanwhile another
tile's softmax can be computed. FlashAttention 3 ("flash3") does the same in open source; it needs a
package of its own, and has not been measured here.

Each backend is forced with `sdpa_kernel` and compared with the one before ("flash3" with
FlashAttention 2), forward and with the three gradients ("training", which begins at "efficient").
The library arm is the plain call. In torch 2.11 it chooses cuDNN for these inputs, so forcing cuDNN
gains nothing over the default. The ratio to "flash" is the loss of a program that disables cuDNN or
forces FlashAttention. Print the kernel's name to see which backend runs: versions, masks and shapes
that cuDNN rejects change the choice. The limit is the tensor-core rate, of which cuDNN reaches 83
to 85 % (74 to 76 % in training); the softmax runs on other units and must overlap with the
products. For short sequences launch overhead dominates.
"""

from importlib.util import find_spec

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pytest_aiperf import Bench, Compare, Work, evidence

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
BASELINES = {"efficient": "math", "flash": "efficient", "cudnn": "flash", "flash3": "flash"}
KERNELS = {
    "efficient": "fmha_cutlass",
    "flash": "pytorch_flash",
    "cudnn": "cudnn",
    "flash3": "Sm90",
}
NO_FLASH3 = pytest.mark.skipif(
    find_spec("flash_attn_interface") is None, reason="FlashAttention 3 is not installed"
)


def heads(bench: Bench) -> Heads:
    """Draw queries, keys and values (1 x heads x tokens x 128) and the output's gradient."""
    shape = 4, 1, bench.size(16, check=2), bench.size(8192, check=64), 128
    q, k, v, gradient = torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
    return q, k, v, gradient


def flash3(q, k, v):
    from flash_attn_interface import flash_attn_func  # optional

    return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def with_backend(backend):
    def attention(q, k, v):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v)

    return attention


def forward(attention):
    return lambda q, k, v, _: attention(q, k, v)


def training(attention):
    def run(q, k, v, gradient):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, gradient)

    return run


def in_fp64(passes):
    def run(*inputs):
        """Go head by head: the scores of all heads would take 8 GiB."""
        each_head = zip(*(x.double().split(1, 1) for x in inputs), strict=True)
        outputs = [passes(softmax_of_products)(*head) for head in each_head]
        if passes is forward:
            return torch.cat(outputs, 1)
        return tuple(torch.cat(parts, 1) for parts in zip(*outputs, strict=True))

    return run


def softmax_of_products(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


PASSES = {"forward": (forward, 4), "training": (training, 14)}
"""How a backend is called, and the multiples of heads x tokens^2 x 128 flops of one call."""

ATTENTION = {"default": scaled_dot_product_attention, "flash3": flash3} | {
    name: with_backend(backend) for name, backend in BACKENDS.items()
}
ARMS = {
    name: {rung: passes(call) for rung, call in ATTENTION.items()}
    for name, (passes, _) in PASSES.items()
}
REFERENCES = {name: in_fp64(passes) for name, (passes, _) in PASSES.items()}


CASES = [
    pytest.param(passes, rung, marks=NO_FLASH3 if rung == "flash3" else ())
    for passes in PASSES
    for rung in BASELINES
    # "efficient" gradients: the worst element is 1.7 % off, more than bf16 is allowed
    if (passes, rung) != ("training", "efficient")
]


@pytest.mark.gpu(min_sm=90)
@pytest.mark.parametrize(("passes", "rung"), CASES)
def test_sdpa_backend_choice(compare: Compare, passes: str, rung: str) -> None:
    arms, flops = ARMS[passes], PASSES[passes][1]
    compare(
        baseline=arms[BASELINES[rung]],
        optimized=arms[rung],
        library=arms["default"],
        against="naive" if rung == "efficient" else "library",
        inputs=heads,
        work=lambda q, *_: Work(flops=flops * q.numel() * q.shape[2], dtype="bf16"),
        reference=REFERENCES[passes],
        evidence=[evidence.kernel_name(KERNELS[rung])],
    )
