"""Compiling with dynamic shapes takes one compilation for all lengths instead of one per length.

A compiled graph has guards on the shapes of its inputs. With dynamic=False, sizes are constants:
the kernels fit one length, and every new length compiles again, up to a limit (8 by default), after
which PyTorch runs eagerly. "buckets" pads sequences to multiples of 512 tokens: one compilation per
bucket, and work for the padding. "dynamic" makes sizes symbols in guards and kernels (dynamic=True,
or torch._dynamo.mark_dynamic for a single dimension). The library arm is the default: the first
length is compiled as a constant, and the second makes what has changed a symbol.

The claim counts compilations, which is exact: the graphs of a gated MLP that Dynamo hands to its
backend for six lengths. It says nothing about the time of the compiled code. Kernels for one length
know where their last tile ends, and others must check it. CUDA graphs need fixed shapes, so
decoding prefers buckets.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import pad, rms_norm, silu

from pytest_aiperf import Bench, Compare, Score

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
