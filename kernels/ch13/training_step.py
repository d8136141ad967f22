"""A training step of a small residual network with SGD: eager, and captured in two ways.

eager              forward pass, backward pass and update, launched kernel by kernel.
forward_backward   a graph computes loss and gradients; the optimizer is launched as before.
whole_step         a graph does all, and writes weights and momentum where they are.
"""

import torch
from torch.nn.functional import gelu, mse_loss, rms_norm
from torch.optim.sgd import sgd

RATE, MOMENTUM = 0.1, 0.9


def gradients(x, target, weights):
    """Run forward and backward pass in the precision of ``x``."""
    leaves = [w.detach().requires_grad_() for w in weights]
    for w in leaves:
        x = x + gelu(rms_norm(x, x.shape[-1:]) @ w.to(x.dtype))
    loss = mse_loss(x, target)
    return loss.detach(), torch.autograd.grad(loss, leaves)


def descend(weights, momentum, grads):
    unused = {"weight_decay": 0, "dampening": 0, "nesterov": False, "maximize": False}
    lists = list(weights), list(grads), list(momentum)
    sgd(*lists, foreach=True, lr=RATE, momentum=MOMENTUM, **unused)


def eager(x, target, weights, momentum):
    loss, grads = gradients(x, target, weights)
    descend(weights, momentum, grads)
    return loss


def _captured(call, *args):
    """Capture what a call runs, after running it once: a capture may not load kernels."""
    call(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        left = call(*args)
    return graph, left


def forward_backward(x, target, weights, momentum):  # noqa: ARG001  the update is not captured
    graph, (loss, grads) = _captured(gradients, x, target, weights)

    def step(x, target, weights, momentum):  # noqa: ARG001  the graph knows their addresses
        graph.replay()
        descend(weights, momentum, grads)
        return loss

    return step


def whole_step(*batch):
    graph, loss = _captured(eager, *batch)

    def step(*_):
        graph.replay()
        return loss

    return step
