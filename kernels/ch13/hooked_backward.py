"""A training step whose hooks clip and average gradients, with and without compiled autograd.

eager_hooks        Forward and backward pass are compiled. Autograd calls a hook in Python for each
                   parameter, as soon as its gradient is there, and the hook's operations are
                   launched kernel by kernel.
compiled_backward  Compiled autograd traces the whole backward pass when it runs, the hooks
                   included, and compiles it.
after              There are no hooks: a compiled function clips and averages all gradients
                   afterwards.

In all of them, the averages are applied to the parameters when the backward pass has ended. Hooks
that do so at once, as in ch13/optimizer_in_backward, are wrong under compiled autograd in torch
2.11 if the model is compiled: the compiled pass may write a parameter before it has read it.
"""

from functools import partial

import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.nn.functional import gelu, rms_norm

RATE, MOMENTUM, MAX_RMS = 0.1, 0.9, 1e-2
"""Learning rate, momentum and the greatest root mean square of a gradient: larger ones are scaled
down, each parameter's by itself."""


class Network(nn.Module):
    """A residual network; its parameters share the memory of ``weights``."""

    def __init__(self, weights):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(w) for w in weights)

    def forward(self, x):
        for w in self.weights:
            x = x + gelu(rms_norm(x, x.shape[-1:]) @ w)
        return x.square().mean(-1)


@torch.no_grad()
def clip_and_average(parameter, momentum):
    """Clip the gradient of a parameter, add it to the momentum, and free it."""
    rms = parameter.grad.square().mean().sqrt()
    momentum.mul_(MOMENTUM).add_(parameter.grad * (MAX_RMS / rms).clamp(max=1))
    parameter.grad = None


def with_hooks(weights, momenta):
    network = Network(weights)
    for parameter, momentum in zip(network.weights, momenta, strict=True):
        hook = partial(clip_and_average, momentum=momentum)
        parameter.register_post_accumulate_grad_hook(hook)
    return network


@torch.no_grad()
def apply(network, momenta):
    torch._foreach_add_(list(network.parameters()), momenta, alpha=-RATE)


def eager_hooks(_x, weights, momenta):
    network = with_hooks(weights, momenta)
    forward = torch.compile(network, dynamic=False)

    def step(x, _weights, momenta):
        losses = forward(x)
        losses.mean().backward()
        apply(network, momenta)
        return losses.detach()

    return step


def compiled_backward(_x, weights, momenta):
    network = with_hooks(weights, momenta)
    forward = torch.compile(network, dynamic=False)
    compiler = torch.compile(dynamic=False)

    def step(x, _weights, momenta):
        losses = forward(x)
        with compiled_autograd._enable(compiler, dynamic=False):  # noqa: SLF001  private so far
            losses.mean().backward()
        apply(network, momenta)
        return losses.detach()

    return step


def after(_x, weights, _momenta):
    network = Network(weights)
    forward = torch.compile(network, dynamic=False)

    def step(x, _weights, momenta):
        losses = forward(x)
        losses.mean().backward()
        clip_and_average_all(list(network.parameters()), momenta)
        apply(network, momenta)
        return losses.detach()

    return step


@torch.compile(dynamic=False)
def clip_and_average_all(parameters, momenta):
    for parameter, momentum in zip(parameters, momenta, strict=True):
        clip_and_average(parameter, momentum)
