"""The loop of training_loop with a forward and a backward pass that torch.compile captures."""

from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from kernels.ch01 import training_loop
from kernels.ch01.training_loop import Loop, loss_of


class Network(nn.Module):
    """The model as a module: torch.compile does not copy a module's parameters into its graphs."""

    def __init__(self, parameters):
        super().__init__()
        self.leaves = nn.ParameterList(nn.Parameter(p) for p in parameters)  # shares their memory

    def forward(self, x, target):
        return loss_of(x, target, list(self.leaves))


@dataclass(frozen=True)
class CompiledLoop(Loop):
    """As `fused`, but the loss is that of a compiled network, which holds the parameters."""

    network: nn.Module | None = None

    def step(self, batch, parameters, means, squares, counts):
        """Train on one batch and return its loss and the norm of the gradient."""
        torch.compiler.cudagraph_mark_step_begin()  # the results of the last step have been read
        leaves = list(self.network.parameters())
        with torch.autocast(batch.device.type, torch.bfloat16):
            loss = self.loss(*batch)
        grads = torch.autograd.grad(loss, leaves)
        row = torch.stack((loss.detach(), get_total_norm(grads)))
        adamw(
            parameters, list(grads), means, squares, [], list(counts), foreach=False, fused=True,
            lr=training_loop.RATE, beta1=training_loop.BETA1, beta2=training_loop.BETA2,
            weight_decay=training_loop.DECAY, eps=training_loop.EPSILON,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        return row


def compiled_steps(_pageable, _pinned, parameters, _means, _squares):
    """Compile the network in mode "reduce-overhead": a CUDA graph for each of the two passes."""
    network = Network(parameters)
    stages = {f.name: getattr(training_loop.fused, f.name) for f in fields(Loop)}
    stages["loss"] = torch.compile(network, mode="reduce-overhead", dynamic=False)
    return CompiledLoop(**stages, network=network)
