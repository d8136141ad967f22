"""A training step of a small language model with AdamW, in four stages.

eager     PyTorch as it comes: bf16 products with fp32 weights behind them, foreach AdamW.
fused     AdamW in one kernel.
compiled  forward and backward pass compiled, too.
graph     all of it in one CUDA graph.

Weights and both moments are updated in place; the loss is returned. They are given as three tuples
(embedding, lm_head, and the layers' kinds of weights, as in ch15's decoder).
"""

import torch
from torch.nn.functional import cross_entropy
from torch.optim.adamw import adamw

from kernels.ch15.decoder import Decoder, captured, forward, norm

RATE, BETA1, BETA2, DECAY, EPSILON = 1e-3, 0.9, 0.99, 0.01, 1e-6
STEP = 10


class _Layered(Decoder):
    """A decoder whose kinds are tuples of matrices: a gradient for each, no array of all."""

    __slots__ = ()


def loss_of(x, target, weights, layers, kind):
    """Give the loss of a batch; ``weights`` is flat: both tables, then each kind's matrices."""
    tables, rest = weights[:2], weights[2:]
    kinds = [[w.to(kind) for w in rest[i * layers : (i + 1) * layers]] for i in range(4)]
    model = _Layered(*(table.to(kind) for table in tables), *kinds)
    logits = norm(forward(model, x)).flatten(0, 1) @ model.lm_head.T
    # summed up over a text: gradients of a handy size
    return cross_entropy(logits.to(weights[0].dtype), target.flatten(), reduction="sum") / len(x)


COMPILED = torch.compile(loss_of, dynamic=False)


def flat(model):
    return [model[0], model[1], *(w for kind in model[2:] for w in kind.unbind())]


def gradients(x, target, model, loss, kind):
    leaves = [w.detach().requires_grad_() for w in flat(model)]
    value = loss(x, target, leaves, len(model[2]), kind)
    return value.detach(), torch.autograd.grad(value, leaves)


def update(model, means, squares, grads, **how):
    lists = [flat(model), list(grads), flat(means), flat(squares)]
    # the fused kernel reads the count of steps on the GPU, foreach on the CPU
    device = grads[0].device if "fused" in how else "cpu"
    steps = list(torch.full((len(grads),), STEP - 1.0, device=device).unbind())
    rates = {"lr": RATE, "beta1": BETA1, "beta2": BETA2, "weight_decay": DECAY, "eps": EPSILON}
    adamw(*lists, [], steps, **how, **rates, amsgrad=False, maximize=False)


def step(x, target, model, means, squares, *, loss=loss_of, **how):
    value, grads = gradients(x, target, model, loss, torch.bfloat16)
    update(model, means, squares, grads, **how)
    return value


def eager(*state):
    return step(*state, foreach=True)


def fused(*state):
    return step(*state, fused=True)


def compiled(*state):
    return step(*state, fused=True, loss=COMPILED)


def graph(*state):
    kept = {}

    def whole():
        kept["loss"] = compiled(*state)

    compiled(*state)  # compiles, which a capture forbids
    replay = captured(whole, state[0].device)

    def run(*_):  # the graph knows their addresses
        replay()
        return kept["loss"]

    return run
