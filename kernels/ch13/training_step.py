"""A training step of a small residual network with SGD, eager and without its launches.

eager        Forward pass, backward pass and update are launched kernel by kernel.
compiled     torch.compile fuses kernels and replays three CUDA graphs: forward pass, backward
             pass and update.
whole_step   One CUDA graph runs the whole step and updates weights and momentum in place.
"""

from functools import partial

import torch
from torch import nn
from torch._dynamo import mark_static_address
from torch.nn.functional import gelu, rms_norm
from torch.optim.sgd import sgd

LEARNING_RATE, MOMENTUM = 0.1, 0.9


def loss_of(x, target, parameters):
    """Run the forward pass in the dtype of ``x``; return the loss of each row.

    The mean of all rows is nearly the same for all inputs, so it would prove little.
    """
    for w in parameters:
        x = x + gelu(rms_norm(x, x.shape[-1:]) @ w.to(x.dtype))
    return (x - target).square().mean(-1)


def update(parameters, momentum, grads):
    unused = {"weight_decay": 0, "dampening": 0, "nesterov": False, "maximize": False}
    with torch.no_grad():
        lists = list(parameters), list(grads), list(momentum)
        sgd(*lists, foreach=True, lr=LEARNING_RATE, momentum=MOMENTUM, **unused)


def eager(x, target, weights, momentum):
    parameters = [w.detach().requires_grad_() for w in weights]
    losses = loss_of(x, target, parameters)
    update(parameters, momentum, torch.autograd.grad(losses.mean(), parameters))
    return losses.detach()


class Network(nn.Module):
    """The network as a module: torch.compile does not copy a module's weights into its graphs."""

    def __init__(self, weights):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(w) for w in weights)  # shares their memory

    def forward(self, x, target):
        return loss_of(x, target, self.weights)


def compiled(_x, _target, weights, momentum):
    network = Network(weights)
    parameters, averages = list(network.parameters()), list(momentum)
    for tensor in (*parameters, *averages):  # updated in place: a graph must not copy them
        mark_static_address(tensor)
    compile_in_graph = partial(torch.compile, mode="reduce-overhead", dynamic=False)
    compiled_loss, compiled_update = compile_in_graph(network), compile_in_graph(update)

    def step(x, target, *_):
        torch.compiler.cudagraph_mark_step_begin()
        losses = compiled_loss(x, target)
        compiled_update(parameters, averages, torch.autograd.grad(losses.mean(), parameters))
        return losses.detach().clone()  # the next replay overwrites the graph's own output

    return step


def whole_step(*batch):
    eager(*batch)  # loads the kernels, which is not allowed in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = eager(*batch)

    def step(*_):
        graph.replay()
        return losses

    return step
