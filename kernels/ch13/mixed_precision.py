"""A training step of a small language model with AdamW, in four stages that differ by one change.

fp32      PyTorch's default: products of fp32 matrices run on the fp32 units.
tf32      torch.set_float32_matmul_precision("high"): they run on tensor cores, from fp32 operands
          of which the tensor cores use 10 bits of the fraction (TF32).
autocast  The forward pass runs under torch.autocast: matrix products and attention get their
          operands cast to bf16. Weights, norms, residual stream, loss and AdamW stay in fp32.
compiled  The model with its loss is compiled, forward and backward pass.

The step updates weights and both moments in place and returns the loss of each token. Weights and
moments are each an llama.Weights: one tensor per kind for all layers (kernels/ch14/llama.py).
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.adamw import adamw

from kernels.ch14 import llama

RATE, BETA1, BETA2, DECAY, EPSILON = 0.05, 0.9, 0.9, 0.01, 1e-8
"""AdamW's parameters. The rate is so large that weights that are left as they are differ from
updated ones by more than the tolerance of bf16."""
STEP = 10
"""Number of this step: it sets AdamW's bias corrections."""


class LanguageModel(nn.Module):
    """A decoder and its loss; its parameters share the memory of the weights."""

    def __init__(self, weights, length):
        super().__init__()
        self.decoder = llama.Llama(weights, length)

    def forward(self, tokens, target):
        """Return the cross entropy of each token."""
        logits = self.decoder(tokens).flatten(0, 1)
        # cross_entropy rounds the log-softmax to the dtype of the logits, also under autocast
        return cross_entropy(logits.float(), target.flatten(), reduction="none")


@contextmanager
def matmul_precision(precision):
    """Set the precision of fp32 products, and restore the previous one at the end.

    Setting `torch.backends.cuda.matmul.fp32_precision` instead, as kernels/ch01/fp32_products.py
    does, makes the compiler of torch 2.11 fail: it reads the older setting and finds them unequal.
    """
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def training_step(precision, *, autocast=False, compiled=False):
    """Return a function that makes a training step for a set of inputs."""

    def make(tokens, _target, weights, _means, _squares):
        model = LanguageModel(weights, tokens.shape[1])
        if compiled:
            model.compile(dynamic=False)
        parameters = list(model.parameters())

        def step(tokens, target, *state):
            with matmul_precision(precision):
                with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
                    losses = model(tokens, target)
                grads = torch.autograd.grad(losses.mean(), parameters)
            update(grads, *state)
            return losses.detach()

        return step

    return make


def update(grads, weights, means, squares):
    """Run AdamW as one kernel over weights, gradients and moments: the same in all stages."""
    lists = flat(weights), list(grads), flat(means), flat(squares)
    steps = torch.full((len(grads),), STEP - 1.0, device=grads[0].device)
    adamw(
        *lists, [], list(steps.unbind()), foreach=False, fused=True,
        lr=RATE, beta1=BETA1, beta2=BETA2, weight_decay=DECAY, eps=EPSILON,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def flat(weights):
    """List the tensors in the order of the model's parameters, which share their memory."""
    layers = [(*norms, *matrices) for norms, *matrices in weights.layers()]
    return [*weights[:2], *(tensor for layer in layers for tensor in layer)]


fp32 = training_step("highest")
tf32 = training_step("high")
autocast = training_step("high", autocast=True)
compiled = training_step("high", autocast=True, compiled=True)
