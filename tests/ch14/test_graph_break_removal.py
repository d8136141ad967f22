"""Deciding on the GPU, with torch.where, keeps torch.compile's graph in one piece.

LAMB clips a gradient that is too long, and scales its step by the ratio of two norms unless one is
zero. Written with `if`, Python must know the norm: torch.compile ends its graph there, the CPU
waits for the GPU, and what follows is another graph; nothing fuses across the breaks. With
torch.where both outcomes are computed and one is chosen on the GPU: one graph, no waiting.

What the caller waits for (wall) is judged: a layer's update takes microseconds, the breaks dozens.
The gain ends where the work between two decisions outlasts them, and torch.where loses where the
branch not taken is expensive (torch.cond keeps such a branch in the graph, and waits for it).
"""

import torch

from pytest_aiperf import Bench, Compare, evidence

RATE, LONGEST, DECAY, EPSILON = 0.01, 1.0, 0.01, 1e-6
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def layer(bench: Bench) -> Layer:
    """Make weights, a gradient, and its first two moments."""
    shape = bench.size(256, check=16), bench.size(256, check=16)
    weights, gradient, mean = torch.randn(3, *shape, device=bench.device)
    return weights, gradient, mean, torch.rand(shape, device=bench.device) + 0.1


def with_if(weights, gradient, mean, square):
    length = gradient.norm()
    if length > LONGEST:
        gradient = gradient * (LONGEST / length)
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient**2
    step = mean / (square.sqrt() + EPSILON) + DECAY * weights
    size, pace, ratio = weights.norm(), step.norm(), 1.0
    if size > 0 and pace > 0:
        ratio = size / pace
    return weights - RATE * ratio * step, mean, square


def with_where(weights, gradient, mean, square):
    length = gradient.norm()
    gradient = gradient * torch.where(length > LONGEST, LONGEST / length, 1.0)
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient**2
    step = mean / (square.sqrt() + EPSILON) + DECAY * weights
    size, pace = weights.norm(), step.norm()
    ratio = torch.where((size > 0) & (pace > 0), size / pace, 1.0)
    return weights - RATE * ratio * step, mean, square


def in_fp64(weights, gradient, mean, square):
    w, g = weights.double(), gradient.double()
    g = g / max(1.0, float((g * g).sum().sqrt()) / LONGEST)
    m, v = mean.double().lerp(g, 0.1), square.double().lerp(g * g, 0.001)
    step = m / (v**0.5 + EPSILON) + w * DECAY
    return w - step * (RATE * (w * w).sum().sqrt() / (step * step).sum().sqrt()), m, v


def test_graph_break_removal(compare: Compare) -> None:
    compare(
        baseline=torch.compile(with_if, dynamic=False),
        optimized=torch.compile(with_where, dynamic=False),
        inputs=layer,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.graph_breaks(most=0), evidence.launches(most=0.8, per="baseline")],
    )
