"""A training step of a small language model with AdamW, in four stages.

eager     PyTorch's defaults: bf16 products, fp32 master weights, foreach AdamW.
fused     AdamW in one pass over weights and moments.
compiled  The forward and backward pass compiled as well.
graph     The whole step in one CUDA graph.

`reduce_overhead` is the compiled step with the graphs that torch.compile captures by itself, one
per pass.

The step updates weights and both moments in place and returns the loss of each token. Weights and
moments are each a Decoder: embedding, lm_head and one tensor per kind of weight
(kernels/ch15/decoder.py).
"""

import torch
from torch.nn.functional import cross_entropy
from torch.optim.adamw import adamw

from kernels.ch15.decoder import Decoder, captured, forward, norm

RATE, BETA1, BETA2, DECAY, EPSILON = 0.5, 0.9, 0.9, 0.01, 1e-6
"""AdamW's parameters. The step is so large that weights and moments that are left as they are
differ from updated ones by more than the tolerance of bf16."""
STEP = 10
"""Number of this step: it sets AdamW's bias corrections."""


class _PerLayer(Decoder):
    """A decoder with one tensor per layer and kind, so that each has a gradient of its own."""

    __slots__ = ()


def loss_of(x, target, weights, layers, dtype):
    """Return the loss of a batch and of each token; ``weights`` are in the order of `flat`."""
    tables, rest = weights[:2], weights[2:]
    kinds = [[w.to(dtype) for w in rest[i * layers : (i + 1) * layers]] for i in range(4)]
    model = _PerLayer(*(table.to(dtype) for table in tables), *kinds)
    logits = norm(forward(model, x)).flatten(0, 1) @ model.lm_head.T
    losses = cross_entropy(logits.to(weights[0].dtype), target.flatten(), reduction="none")
    # summed over each sequence, not averaged, so that the gradients do not become tiny
    return losses.sum() / len(x), losses.detach()


COMPILED = torch.compile(loss_of, dynamic=False)


def flat(model):
    """List embedding, lm_head and the matrices of each kind, layer by layer."""
    return [model[0], model[1], *(w for kind in model[2:] for w in kind.unbind())]


def gradients(x, target, model, loss, dtype):
    """Return the loss of each token and the gradients of the mean over sequences.

    The mean itself is nearly the same for all batches and weights, so it would prove little.
    """
    leaves = [w.detach().requires_grad_() for w in flat(model)]
    mean, losses = loss(x, target, leaves, len(model[2]), dtype)
    return losses, torch.autograd.grad(mean, leaves)


def update(model, means, squares, grads, **options):
    lists = [flat(model), list(grads), flat(means), flat(squares)]
    # the fused kernel reads the step count on the GPU, foreach reads it on the CPU
    device = grads[0].device if "fused" in options else "cpu"
    steps = list(torch.full((len(grads),), STEP - 1.0, device=device).unbind())
    rates = {"lr": RATE, "beta1": BETA1, "beta2": BETA2, "weight_decay": DECAY, "eps": EPSILON}
    adamw(*lists, [], steps, **options, **rates, amsgrad=False, maximize=False)


def step(x, target, model, means, squares, *, loss=loss_of, **options):
    losses, grads = gradients(x, target, model, loss, torch.bfloat16)
    update(model, means, squares, grads, **options)
    return losses


def eager(*state):
    return step(*state, foreach=True)


def fused(*state):
    return step(*state, fused=True)


def compiled(*state):
    return step(*state, fused=True, loss=COMPILED)


class Network(torch.nn.Module):
    """The loss as a module: torch.compile does not copy a module's weights into its graphs."""

    def __init__(self, model):
        super().__init__()
        # shares the memory of the weights
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(w) for w in flat(model))
        self.layers = len(model[2])

    def forward(self, x, target):
        return loss_of(x, target, list(self.weights), self.layers, torch.bfloat16)


def reduce_overhead(_x, _target, model, *_moments):
    network = Network(model)
    loss = torch.compile(network, mode="reduce-overhead", dynamic=False)
    parameters = list(network.parameters())

    def run(x, target, model, means, squares):
        torch.compiler.cudagraph_mark_step_begin()
        mean, losses = loss(x, target)
        update(model, means, squares, torch.autograd.grad(mean, parameters), fused=True)
        return losses.clone()  # the next replay overwrites the graph's own output

    return run


def graph(*state):
    outputs = {}

    def whole_step():
        outputs["losses"] = compiled(*state)

    compiled(*state)  # compile first: a capture forbids it
    replay = captured(whole_step, state[0].device)

    def run(*_):  # unused: the graph reads the state by address
        replay()
        return outputs["losses"]

    return run
