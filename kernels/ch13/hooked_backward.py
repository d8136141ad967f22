"""A training step whose update runs in hooks on the gradients, with and without compiled autograd.

hooks      The passes are compiled. Autograd runs the backward pass node by node and calls a hook in
           Python for each parameter, whose operations are launched kernel by kernel.
compiled   Compiled autograd traces the whole backward pass, the hooks included, and compiles it.
after      The update runs once after the backward pass, as a compiled function of all gradients.
"""

from functools import partial

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
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
def update(parameter, grad, momentum):
    """Clip the gradient, add it to the momentum, and apply that."""
    rms = grad.square().mean().sqrt()
    momentum.mul_(MOMENTUM).add_(grad * (MAX_RMS / rms).clamp(max=1))
    parameter.sub_(RATE * momentum)


def hook(parameter, momentum):
    update(parameter, parameter.grad, momentum)
    parameter.grad = None


def passes(network, x):
    losses = network(x)
    losses.mean().backward()
    return losses.detach()


def with_hooks(weights, momenta):
    network = Network(weights)
    for parameter, momentum in zip(network.weights, momenta, strict=True):
        parameter.register_post_accumulate_grad_hook(partial(hook, momentum=momentum))
    return network


def hooks(_x, weights, momenta):
    network = torch.compile(with_hooks(weights, momenta), dynamic=False)
    return lambda x, *_: passes(network, x)


def compiled(_x, weights, momenta):
    network = with_hooks(weights, momenta)
    compiled_passes = torch.compile(passes, dynamic=False)

    def step(x, *_):
        with dynamo_config.patch(compiled_autograd=True):
            return compiled_passes(network, x)

    return step


def after(_x, weights, _momenta):
    network = torch.compile(Network(weights), dynamic=False)
    compiled_update = torch.compile(update_all, dynamic=False)

    def step(x, _weights, momenta):
        losses = passes(network, x)
        parameters = list(network.parameters())
        compiled_update(parameters, [p.grad for p in parameters], momenta)
        for parameter in parameters:
            parameter.grad = None
        return losses

    return step


def update_all(*lists):
    for parameter, grad, momentum in zip(*lists, strict=True):
        update(parameter, grad, momentum)
