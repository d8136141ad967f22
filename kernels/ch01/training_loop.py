"""A training loop over batches in host memory, in six stages that differ by one change each.

naive     fp32. Each step copies its batch from pageable memory, reads loss and gradient norm with
          `.item()`, and updates one parameter tensor after the other.
no_sync   Loss and gradient norm stay on the GPU, in a log that is read after the loop.
pinned    Batches lie in pinned memory, and their copies are asynchronous.
bf16      Autocast: the products of the forward and backward pass run in bf16.
fused     One kernel updates all parameters.
captured  A step is one CUDA graph.

The model is a residual network of linear layers; a batch holds its inputs and its targets. The loop
updates parameters and both moments in place and returns loss and gradient norm of each step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import gelu, linear, rms_norm
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from kernels.ch15.decoder import captured

RATE, BETA1, BETA2, DECAY, EPSILON = 0.01, 0.9, 0.9, 0.01, 1e-8
"""AdamW's parameters. Rate and betas are such that a few steps change parameters and moments by
more than the tolerance of bf16."""
STEP = 10
"""Number of steps before this loop: it sets AdamW's bias corrections."""


def loss_of(x, target, parameters):
    """Return the squared error of a row, averaged over the rows of the batch."""
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        x = x + gelu(linear(rms_norm(x, x.shape[-1:]), weight, bias))
    # summed over the width: a mean over it would make the gradients tiny
    return (x - target).square().sum(1).mean()


@dataclass(frozen=True)
class Loop:
    """A stage of the loop; the fields are what the stages change."""

    waits: bool = True
    """Read loss and gradient norm in every step: the CPU waits until the GPU has computed them."""
    pinned: bool = False
    bf16: bool = False
    fused: bool = False
    loss: Callable = loss_of

    def __call__(self, pageable, pinned, parameters, means, squares):
        """Train on batches (steps x 2 x rows x width), given in both kinds of host memory."""
        device, counts, log = parameters[0].device, self.step_counts(parameters), []
        for batch in pinned if self.pinned else pageable:
            on_gpu = batch.to(device, non_blocking=self.pinned)
            log.append(self.step(on_gpu, parameters, means, squares, counts.unbind()))
        return torch.tensor(log, device=device) if self.waits else torch.stack(log)

    def step_counts(self, parameters):
        """Count the steps of each parameter: the fused kernel reads the counts on the GPU."""
        device = parameters[0].device if self.fused else "cpu"
        return torch.full((len(parameters),), STEP, dtype=torch.float32, device=device)

    def step(self, batch, parameters, means, squares, counts):
        """Train on one batch and return its loss and the norm of the gradient."""
        read = torch.Tensor.item if self.waits else torch.Tensor.detach
        leaves = [p.detach().requires_grad_() for p in parameters]
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.loss(*batch, leaves)
        logged_loss = read(loss)
        grads = torch.autograd.grad(loss, leaves)
        logged_norm = read(get_total_norm(grads))
        lists = parameters, list(grads), means, squares, [], list(counts)
        rates = {"lr": RATE, "beta1": BETA1, "beta2": BETA2, "weight_decay": DECAY, "eps": EPSILON}
        adamw(*lists, foreach=False, fused=self.fused, **rates, amsgrad=False, maximize=False)
        row = logged_loss, logged_norm
        return row if self.waits else torch.stack(row)


naive = Loop()
no_sync = replace(naive, waits=False)
pinned_batches = replace(no_sync, pinned=True)
bf16 = replace(pinned_batches, bf16=True)
fused = replace(bf16, fused=True)


def captured_steps(_pageable, pinned, parameters, means, squares):
    """Capture a step of `fused`; the graph reads batches and writes its log at fixed addresses."""
    batch = torch.zeros_like(pinned[0], device=parameters[0].device)
    counts, row = fused.step_counts(parameters), batch.new_empty(2)

    def step():
        row.copy_(fused.step(batch, parameters, means, squares, counts.unbind()))

    replay = captured(step, batch.device)

    def run(_pageable, pinned, *_state):
        log = batch.new_empty(len(pinned), 2)
        counts.fill_(STEP)
        for host_batch, log_row in zip(pinned, log, strict=True):
            batch.copy_(host_batch, non_blocking=True)
            replay()
            log_row.copy_(row)
        return log

    return run
