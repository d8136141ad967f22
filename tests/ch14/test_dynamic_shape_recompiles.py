"""Compiling with dynamic shapes takes one compilation for all lengths instead of one per length.

A compiled graph has guards on the shapes of its inputs. With dynamic=False, sizes are constants:
the kernels fit one length, and every new length compiles again, up to a limit (8 by default), after
which PyTorch runs eagerly. "buckets" pads sequences to multiples of 512 tokens: one compilation per
bucket, and work for the padding. "dynamic" makes sizes symbols in guards and kernels (dynamic=True,
or torch._dynamo.mark_dynamic for a single dimension). The library arm is the default: the first
length is compiled as a constant, and the second makes what has changed a symbol.

The first claim counts compilations, which is exact: the graphs of a gated MLP that Dynamo hands to
its backend for six lengths. The second judges the wall time of a whole layer, and of the
vocabulary, for six prompts when everything is compiled: there, symbolic sizes must beat eager
PyTorch, and the library arm is a graph per length. Kernels for one length know where their last
tile ends, and others must check it; here attention and GEMMs outweigh that. CUDA graphs need fixed
shapes, so decoding prefers buckets.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import pad, rms_norm, silu

from kernels.ch14 import llama
from pytest_aiperf import Bench, Compare, Score, evidence, prepared, static

LENGTHS = 1187, 389, 1531, 902, 283, 611
"""Tokens per sequence: two in each of three buckets."""
BUCKET = 512

Sequences = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]


def sequences(bench: Bench) -> Sequences:
    width, hidden = bench.size(2048, check=16), bench.size(5632, check=24)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    gate_up = torch.randn(width, 2 * hidden, **options) * width**-0.5
    down = torch.randn(hidden, width, **options) * hidden**-0.5
    return [torch.randn(length, width, **options) for length in LENGTHS], gate_up, down


def mlp(x, gate_up, down):
    gate, up = (rms_norm(x, x.shape[-1:]) @ gate_up).chunk(2, -1)
    return x + (silu(gate) * up) @ down


def one_by_one(call, inputs, *weights):
    return [call(x, *weights) for x in inputs]


def padded(call, inputs, *weights):
    return [call(pad(x, (0, 0, 0, -len(x) % BUCKET)), *weights)[: len(x)] for x in inputs]


def counted(dynamic, run, *arguments):
    """Compile anew, run all sequences, and return the number of compilations as the score."""
    torch.compiler.reset()
    compilations = 0

    def backend(graph, _example_inputs):
        nonlocal compilations
        compilations += 1
        return graph.forward

    outputs = run(torch.compile(mlp, backend=backend, dynamic=dynamic), *arguments)
    return outputs, Score(compilations, "compilations", "lower")


def mlp_in_fp64(inputs, gate_up, down):
    gate_up, down = gate_up.double(), down.double()
    outputs = []
    for x in inputs:
        rows = x.double()
        hidden = rows / rows.square().mean(1, keepdim=True).sqrt() @ gate_up
        gate, up = hidden.chunk(2, 1)
        outputs.append(rows + gate * torch.sigmoid(gate) * up @ down)
    return outputs


PER_LENGTH = partial(counted, False, one_by_one)
RUNGS = {"buckets": partial(counted, False, padded), "dynamic": partial(counted, True, one_by_one)}
DEFAULT = partial(counted, None, one_by_one)


@pytest.mark.parametrize("rung", RUNGS)
def test_dynamic_shape_recompiles(compare: Compare, rung: str) -> None:
    compare(
        baseline=PER_LENGTH,
        optimized=RUNGS[rung],
        library=DEFAULT,
        against="naive",
        inputs=sequences,
        reference=mlp_in_fp64,
        metric="score",
    )


def prompts(bench: Bench) -> tuple[llama.Weights, list[torch.Tensor]]:
    """Draw a model of one layer, and prompts of different lengths."""
    width, hidden = bench.size(2048, check=128), bench.size(5632, check=192)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    weights = llama.random_weights(1, width, hidden, 1000, **options)
    shapes = [(1, length // bench.size(1, check=32)) for length in LENGTHS]
    return static(weights), [torch.randint(1000, shape, device=bench.device) for shape in shapes]


def last_logits(options, weights, tokens):
    """Make an arm that runs the model, compiled with options unless they are None."""
    model = llama.Llama(weights).requires_grad_(requires_grad=False)
    if options is not None:
        model.compile(**options)

    def run(_weights, tokens):
        return [model(prompt)[:, -1] for prompt in tokens]

    run(weights, tokens)  # compiles
    return run


@torch.no_grad()
def last_logits_in_fp64(weights, tokens):
    return [llama.in_fp64(weights, prompt)[:, -1] for prompt in tokens]


def test_dynamic_shape_steady_state(compare: Compare) -> None:
    compare(
        baseline=prepared(partial(last_logits, None)),
        optimized=prepared(partial(last_logits, {"dynamic": True})),
        library=prepared(partial(last_logits, {"dynamic": False})),
        inputs=prompts,
        reference=last_logits_in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.kernels(max=0.8, per="baseline")],
    )
