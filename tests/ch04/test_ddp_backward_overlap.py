"""Reducing gradients while the backward pass still runs beats reducing them after it.

The gradient of the last layer is final while all other layers still wait for theirs. Reduced at
once, on NCCL's own stream, it travels while the GPU computes the next one. Only the first layer's
gradient has nothing left to hide behind. Reduced after the backward pass, all communication is
exposed. "hooks" starts an asynchronous all-reduce in each parameter's hook. "ddp" is
DistributedDataParallel, which does the same with buckets; the gradients are views of the buckets.

With F, B and C the times of forward, backward and communication, the limit is (F + B + C) / (F +
max(B, C) + one layer's communication): about 1.4x for six layers, where C is nearly half of the sum
(3.1 of 7.0 ms in a trace on two H100s) and B about 2 F. A third to half of that gain was measured:
1.19x with "hooks" and 1.16x with "ddp" on two H200s, 1.17x and 1.14x on two H100s. What the overlap
costs is the reason: NCCL's kernels share SMs and memory bandwidth with the GEMMs that run beside
them. In a trace on the H100s, those of the backward pass take 2.9 ms instead of 2.0, and the
all-reduces 3.2 instead of 3.1. If B or C is much shorter than the other, there is little to hide.
If layers are so small that the GPU waits for Python, both arms take as long as Python.
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pytest_aiperf import Bench, Compare, evidence, prepared, static


def model(bench: Bench) -> tuple[torch.Tensor, list[torch.Tensor]]:
    layers, width = bench.size(6, check=2), bench.size(8192, check=16)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    weights = [torch.randn(width, width, **options) * width**-0.5 for _ in range(layers)]
    torch.manual_seed(bench.seed * 100 + dist.get_rank())  # same model, another batch per rank
    return torch.randn(bench.size(1024, check=8), width, **options), static(weights)


def forward(x, weights):
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x.float().square().mean()


def reduce_after_backward(x, weights):
    parameters = [w.detach().requires_grad_() for w in weights]
    gradients = torch.autograd.grad(forward(x, parameters), parameters)
    for gradient in gradients:
        gradient.div_(dist.get_world_size())
        dist.all_reduce(gradient)
    return list(gradients)


def hooks(x, weights):
    parameters = [w.detach().requires_grad_() for w in weights]
    pending = []

    def start_all_reduce(parameter):
        parameter.grad.div_(dist.get_world_size())
        pending.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(start_all_reduce)
    forward(x, parameters).backward()
    for work in pending:
        work.wait()
    return [parameter.grad for parameter in parameters]


class Layers(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = torch.nn.ParameterList([w.detach().clone() for w in weights])

    def forward(self, x):
        return forward(x, self.weights)


@prepared
def ddp(x, weights):
    model = DistributedDataParallel(Layers(weights), gradient_as_bucket_view=True)

    def step(x, weights):
        model.zero_grad(set_to_none=True)
        model(x).backward()
        return [p.grad for p in model.module.weights]

    step(x, weights)  # DDP rebuilds its buckets once, in the forward pass after this step
    return step


def in_fp64(x, weights):
    """Differentiate the mean of the squares by hand: tanh' = 1 - tanh ** 2."""
    activations = [x.double()]
    for weight in weights:
        activations.append((activations[-1] @ weight.double()).tanh())
    upstream, gradients = 2 * activations[-1] / activations[-1].numel(), []
    for i in reversed(range(len(weights))):
        before_tanh = upstream * (1 - activations[i + 1].square())
        gradients.insert(0, activations[i].T @ before_tanh)
        upstream = before_tanh @ weights[i].double().T
    for gradient in gradients:
        dist.all_reduce(gradient)
    return [g / dist.get_world_size() for g in gradients]


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("rung", [hooks, ddp], ids=["hooks", "ddp"])
def test_ddp_backward_overlap(compare: Compare, rung) -> None:
    compare(
        baseline=reduce_after_backward,
        optimized=rung,
        inputs=model,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.overlap(min=1.1)],  # gradients travel while the GPU computes
    )
