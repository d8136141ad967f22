"""A backward pass compiled with its gradient hooks beats one that calls each hook eagerly.

torch.compile turns a model into two graphs, one per direction. For autograd, the backward graph is
a single node; what follows it is not compiled. Here each of 12 parameters has a hook that clips its
gradient to a norm, as one adds it without touching the model or the loop. A hook launches half a
dozen kernels, and each takes the host longer to launch than the GPU to run. Compiled autograd
records the whole backward pass when it first runs, the compiled graph and the hooks, and compiles
that: the operations of a hook become two or three kernels, and Python runs none of them.

The claim is judged on wall time per step, which is bound by launches. Later steps pay for a check
that the recorded pass is still valid, so where there is little beside the compiled graph (no hooks,
no graph breaks), there is nothing to gain, and large layers hide their hooks' launches. The library
arm does without hooks: it clips the gradients after the backward pass with foreach operations, a
few launches for all norms and one per parameter for the result. Where the loop can be changed, that
is the simpler way.
"""

from contextlib import nullcontext
from functools import partial

import torch
from torch._dynamo import compiled_autograd
from torch.nn.functional import gelu, rms_norm

from pytest_aiperf import Bench, Compare, evidence, prepared

MAX_NORM = 0.2
Model = tuple[torch.Tensor, ...]


def tokens_and_model(bench: Bench) -> Model:
    """Draw tokens, and per layer the weights of the norm, of the product and of the bias."""
    count, width = bench.size(256, check=12), bench.size(512, check=16)
    options = {"device": bench.device}
    parameters = []
    for _ in range(bench.size(4, check=2)):
        parameters.append(1 + 0.1 * torch.randn(width, **options))
        parameters.append(torch.randn(width, width, **options) * width**-0.5)
        parameters.append(0.1 * torch.randn(width, **options))
    return torch.randn(count, width, **options), *parameters


@torch.compile(dynamic=False)
def loss_of(x, parameters):
    for i in range(0, len(parameters), 3):
        scale, weight, bias = parameters[i : i + 3]
        x = x + gelu(rms_norm(x, x.shape[-1:], scale) @ weight + bias)
    return x.square().mean()


def clipped(gradient):
    return gradient * (MAX_NORM / gradient.norm()).clamp(max=1)


def step(context, x, *parameters):
    """Register the hooks; return a step that gives the loss and the clipped gradients."""
    leaves = [parameter.detach().requires_grad_() for parameter in parameters]
    for leaf in leaves:
        leaf.register_hook(clipped)

    def run(x, *_):
        loss = loss_of(x, leaves)
        with context():
            loss.backward()
        return loss.detach(), gradients_of(leaves)

    return run


def without_hooks(x, *parameters):
    leaves = [parameter.detach().requires_grad_() for parameter in parameters]

    def run(x, *_):
        loss = loss_of(x, leaves)
        loss.backward()
        gradients = gradients_of(leaves)
        factors = torch._foreach_div(torch._foreach_norm(gradients), MAX_NORM)
        torch._foreach_clamp_min_(factors, 1)
        torch._foreach_div_(gradients, factors)
        return loss.detach(), gradients

    return run


def gradients_of(leaves):
    """Take the gradients, so that the next step does not add to them."""
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


compiling = partial(compiled_autograd._enable, torch.compile(dynamic=False))


def in_fp64(x, *parameters):
    x, leaves = x.double(), [p.double().requires_grad_() for p in parameters]
    for scale, weight, bias in zip(*[iter(leaves)] * 3, strict=True):
        normalized = x / (x * x).mean(-1, keepdim=True).sqrt() * scale
        hidden = normalized @ weight + bias
        x = x + hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    loss = (x * x).mean()
    gradients = torch.autograd.grad(loss, leaves)
    return loss.detach(), [g * min(1.0, MAX_NORM / float((g * g).sum()) ** 0.5) for g in gradients]


def test_compiled_autograd(compare: Compare) -> None:
    compare(
        baseline=prepared(partial(step, nullcontext)),
        optimized=prepared(partial(step, compiling)),
        library=prepared(without_hooks),
        inputs=tokens_and_model,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(max=0.7, per="baseline")],
    )
