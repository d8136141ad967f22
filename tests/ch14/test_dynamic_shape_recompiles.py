"""Compiling with dynamic shapes takes one compilation for all lengths instead of one per length.

A compiled graph has guards on the shapes of its inputs. With dynamic=False, sizes are constants:
the kernels fit one length, and every new length compiles again, seconds each, up to a limit (8 by
default), after which PyTorch runs eagerly. "buckets" pads sequences to multiples of 512 tokens: one
compilation per bucket, and work for the padding. "dynamic" makes sizes symbols in guards and
kernels (dynamic=True, or torch._dynamo.mark_dynamic for a single dimension). The library arm is the
default: the first length is compiled as a constant, and the second makes what changed a symbol.

The first claim counts compilations, which is exact: graphs that Dynamo hands to its backend for
eight lengths. The second judges the wall time of the same eight calls when everything is compiled:
there "dynamic" must beat eager PyTorch, and the library arm is a graph per length. Kernels with
symbolic sizes check bounds that others know, and their tiles fit no length exactly; here attention
and GEMMs outweigh that. CUDA graphs need fixed shapes, so decoding prefers buckets.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import pad

from kernels.ch14 import llama
from pytest_aiperf import Bench, Compare, Score, evidence, prepared, static

LENGTHS = 1187, 389, 1531, 902, 283, 1999, 611, 1720  # two per bucket


def prompts(bench: Bench) -> tuple[llama.Weights, list[torch.Tensor], int]:
    """Draw a model of one layer, prompts of different lengths, and the size of buckets."""
    width, hidden = bench.size(2048, check=128), bench.size(5632, check=192)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    weights = llama.random_weights(1, width, hidden, 1000, **options)
    scale = bench.size(1, check=32)
    shapes = [(1, length // scale) for length in LENGTHS]
    tokens = [torch.randint(1000, shape, device=bench.device) for shape in shapes]
    return static(weights), tokens, bench.size(512, check=16)


def last_logits(model, tokens, _bucket):
    return [model(prompt)[:, -1] for prompt in tokens]


def padded(model, tokens, bucket):
    """Pad at the end: attention is causal, so the prompt's own logits do not change."""
    return [model(pad(t, (0, -t.shape[1] % bucket)))[:, t.shape[1] - 1] for t in tokens]


def counted(dynamic, run, weights, *requests):
    """Compile anew, run all prompts, and return the number of compilations as the score."""
    torch.compiler.reset()
    compilations = 0

    def backend(graph, _example_inputs):
        nonlocal compilations
        compilations += 1
        return graph.forward

    model = llama.Llama(weights).requires_grad_(requires_grad=False)
    model.compile(backend=backend, dynamic=dynamic)
    return run(model, *requests), Score(compilations, "compilations", "lower")


def compiled(dynamic, weights, *requests):
    """Compile for all lengths, or for each of them; ``dynamic`` may also be "eager"."""
    model = llama.Llama(weights).requires_grad_(requires_grad=False)
    if dynamic != "eager":
        model.compile(dynamic=dynamic)
        last_logits(model, *requests)
    return lambda _weights, *requests: last_logits(model, *requests)


@torch.no_grad()
def in_fp64(weights, tokens, _bucket):
    return [llama.in_fp64(weights, prompt)[:, -1] for prompt in tokens]


PER_LENGTH = partial(counted, False, last_logits)
RUNGS = {"buckets": partial(counted, False, padded), "dynamic": partial(counted, True, last_logits)}
DEFAULT = partial(counted, None, last_logits)


@pytest.mark.parametrize("rung", RUNGS)
def test_dynamic_shape_recompiles(compare: Compare, rung: str) -> None:
    compare(
        baseline=PER_LENGTH,
        optimized=RUNGS[rung],
        library=DEFAULT,
        against="naive",
        inputs=prompts,
        reference=in_fp64,
        metric="score",
    )


def test_dynamic_shape_steady_state(compare: Compare) -> None:
    compare(
        baseline=prepared(partial(compiled, "eager")),
        optimized=prepared(partial(compiled, True)),
        library=prepared(partial(compiled, False)),
        inputs=prompts,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.kernels(max=0.8, per="baseline")],
    )
