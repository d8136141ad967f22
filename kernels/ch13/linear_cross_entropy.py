"""Loss and gradients of a language model's output layer: logits = x @ weight.T, cross-entropy.

eager     Autograd over all logits at once, with the loss in fp32.
compiled  The same, with forward and backward pass compiled.
chunked   A chunk of the rows at a time, forward and backward: its logits, losses, gradient of the
          logits, and from these its part of both gradients. The logits of the chunk are then freed.
fused     The same chunks; a Triton kernel reads the logits of a row, writes its loss, and replaces
          the logits by their gradient.

All return the loss of each row and the gradients of the mean loss with respect to x and weight.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch.nn.functional import cross_entropy, log_softmax


def loss_of(x, weight, target):
    return cross_entropy((x @ weight.T).float(), target, reduction="none")


def whole(x, weight, target, _chunk, loss):
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    losses = loss(*leaves, target)
    return losses.detach(), *torch.autograd.grad(losses.mean(), leaves)


def in_chunks(x, weight, target, chunk, loss_and_gradient):
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight)
    for first in range(0, len(x), chunk):
        rows = slice(first, first + chunk)
        logits = x[rows] @ weight.T
        gradient = loss_and_gradient(logits, target[rows], losses[rows], 1 / len(x))
        torch.mm(gradient, weight, out=of_x[rows])
        of_weight.addmm_(gradient.T, x[rows])
        del logits, gradient  # before the next chunk allocates its own
    return losses, of_x, of_weight


def separate_operations(logits, target, losses, scale):
    """Write the losses; return the gradient of their sum, scaled."""
    labels = target[:, None]
    log_probabilities = log_softmax(logits, 1, dtype=torch.float32)
    losses.copy_(-log_probabilities.gather(1, labels)[:, 0])
    probabilities = log_probabilities.exp_()
    minus_one = probabilities.new_full(labels.shape, -1)
    return probabilities.scatter_add_(1, labels, minus_one).mul_(scale).to(logits.dtype)


@triton.jit
def _loss_and_gradient(  # noqa: PLR0917  a Triton launch passes arguments by position
    logits, target, losses, scale, columns, TILE: tl.constexpr
):
    row = tl.program_id(0)
    start = row.to(tl.int64) * columns
    label = tl.load(target + row)
    label_logit = tl.load(logits + start + label).to(tl.float32)
    running_max = -float("inf")
    denominator = 0.0
    for first in range(0, columns, TILE):
        at = first + tl.arange(0, TILE)
        tile = tl.load(logits + start + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        old_max, running_max = running_max, tl.maximum(running_max, tl.max(tile, 0))
        rescale = tl.exp(old_max - running_max)
        denominator = denominator * rescale + tl.sum(tl.exp(tile - running_max), 0)
    tl.store(losses + row, running_max + tl.log(denominator) - label_logit)
    for first in range(0, columns, TILE):
        at = first + tl.arange(0, TILE)
        tile = tl.load(logits + start + at, mask=at < columns, other=0).to(tl.float32)
        probability = tl.exp(tile - running_max) / denominator
        gradient = tl.where(at == label, probability - 1, probability) * scale
        tl.store(logits + start + at, gradient.to(logits.dtype.element_ty), mask=at < columns)


def in_place(logits, target, losses, scale):
    """Write the losses, and the gradient of their sum, scaled, over the logits."""
    rows, columns = logits.shape
    # 16 warps: at most four rows in flight per SM. With the claim's vocabulary, four are 135 MB on
    # 132 SMs, more than the L2 cache holds: the second sweep may read device memory again
    _loss_and_gradient[(rows,)](logits, target, losses, scale, columns, TILE=4096, num_warps=16)
    return logits


eager = partial(whole, loss=loss_of)
compiled = partial(whole, loss=torch.compile(loss_of, dynamic=False))
chunked = partial(in_chunks, loss_and_gradient=separate_operations)
fused = partial(in_chunks, loss_and_gradient=in_place)
