"""A training step of a small residual network with SGD, eager and captured in a CUDA graph.

eager              Forward pass, backward pass and update are launched kernel by kernel.
forward_backward   A graph computes loss and gradients; the optimizer runs eagerly.
whole_step         One graph runs the whole step and updates weights and momentum in place.
"""

import torch
from torch.nn.functional import gelu, mse_loss, rms_norm
from torch.optim.sgd import sgd

LEARNING_RATE, MOMENTUM = 0.1, 0.9


def loss_and_gradients(x, target, weights):
    """Run the forward and the backward pass in the dtype of ``x``."""
    parameters = [w.detach().requires_grad_() for w in weights]
    for w in parameters:
        x = x + gelu(rms_norm(x, x.shape[-1:]) @ w.to(x.dtype))
    loss = mse_loss(x, target)
    return loss.detach(), torch.autograd.grad(loss, parameters)


def update(weights, momentum, grads):
    unused = {"weight_decay": 0, "dampening": 0, "nesterov": False, "maximize": False}
    lists = list(weights), list(grads), list(momentum)
    sgd(*lists, foreach=True, lr=LEARNING_RATE, momentum=MOMENTUM, **unused)


def eager(x, target, weights, momentum):
    loss, grads = loss_and_gradients(x, target, weights)
    update(weights, momentum, grads)
    return loss


def _capture(call, *args):
    """Capture a call in a CUDA graph, after a first call outside the graph loads the kernels."""
    call(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call(*args)
    return graph, outputs


def forward_backward(x, target, weights, momentum):  # noqa: ARG001  momentum: not captured
    graph, (loss, grads) = _capture(loss_and_gradients, x, target, weights)

    def step(x, target, weights, momentum):  # noqa: ARG001  x, target: read by the graph
        graph.replay()
        update(weights, momentum, grads)
        return loss

    return step


def whole_step(*batch):
    graph, loss = _capture(eager, *batch)

    def step(*_):
        graph.replay()
        return loss

    return step
