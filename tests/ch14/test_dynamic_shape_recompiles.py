"""Dynamic shapes need one compilation for prompts of any length, padding one for each bucket.

A compiled graph has guards on the shapes of its inputs. With dynamic=False, sizes are constants:
the kernels fit one length, every new length compiles again, and after eight compilations (the
default limit) PyTorch runs all further lengths eagerly. "buckets" pads prompts to powers of two:
one compilation per bucket, and work for the padding. "dynamic" makes sizes symbols in guards and
kernels (dynamic=True, or torch._dynamo.mark_dynamic for a single dimension). The library arm is the
plain call of torch.compile: the first length is compiled as a constant, and the second makes what
has changed a symbol. It needs two compilations, so "buckets" loses to it and "dynamic" saves one.

The score is the number of prompts that find no compiled code, because they compile or run eagerly,
of 300 prompts of a gated MLP. Their lengths are drawn anew from the quantiles of the Azure LLM
inference trace of 2023 (conversations). How often a length or a bucket recurs follows from them.
Recompilations are counted, not timed: the time of a compilation depends on the host and on the
compiler's cache, which holds the code of earlier runs. So the backend compiles nothing; it counts
and runs each graph eagerly. What a compilation costs is recorded elsewhere. On the hosts of H200s,
the first call takes 2 to 3 s of CPU time if a decoder block is compiled (ch13/regional_compile),
and 14 to 17 s for a decoder of a billion weights (test_compile_large_model.py). 5x in the time of
all calls with their compilations was the aim, and is not judged. Neither is the price of the saved
compilations: kernels with symbolic sizes must check where their last tile ends, and padding to a
power of two computes half as many tokens again. A service whose prompts have few different lengths
gains nothing. CUDA graphs need fixed shapes, so decoding prefers buckets.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import pad, rms_norm, silu

from kernels import azure_trace
from pytest_aiperf import Bench, Compare, Score

SMALLEST_BUCKET = 128

Prompts = tuple[torch.Tensor, tuple[int, ...], torch.Tensor, torch.Tensor]


def prompts(bench: Bench) -> Prompts:
    """Draw the tokens of all prompts in one tensor, their lengths, and the weights of the MLP.

    The MLP is narrow, because its width changes no count.
    """
    percents = 100 * torch.rand(bench.size(300, check=20)).numpy()
    tokens = azure_trace.tokens_at(percents, azure_trace.PROMPTS)
    lengths = tuple(tokens.astype(int).tolist())
    width, hidden = bench.size(512, check=16), bench.size(1408, check=24)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    gate_up = torch.randn(width, 2 * hidden, **options) * width**-0.5
    down = torch.randn(hidden, width, **options) * hidden**-0.5
    return torch.randn(sum(lengths), width, **options), lengths, gate_up, down


def mlp(x, gate_up, down):
    gate, up = (rms_norm(x, x.shape[-1:]) @ gate_up).chunk(2, -1)
    return x + (silu(gate) * up) @ down


def as_it_is(call, x, *weights):
    return call(x, *weights)


def padded(call, x, *weights):
    bucket = max(SMALLEST_BUCKET, 1 << (len(x) - 1).bit_length())
    return call(pad(x, (0, 0, 0, bucket - len(x))), *weights)[: len(x)]


def counted(dynamic, run, x, lengths, *weights):
    """Compile anew, run all prompts, and count those that find no compiled code."""
    torch.compiler.reset()
    compilations = served = 0

    def backend(graph, _example_inputs):
        nonlocal compilations
        compilations += 1

        def compiled(*arguments):
            nonlocal served
            served += 1
            return graph.forward(*arguments)

        return compiled

    call = torch.compile(mlp, backend=backend, dynamic=dynamic)
    outputs = torch.cat([run(call, prompt, *weights) for prompt in x.split(lengths)])
    missed = compilations + len(lengths) - served
    return outputs, Score(missed, "prompts without compiled code", "lower")


def mlp_in_fp64(x, _lengths, gate_up, down):
    gate_up, down = gate_up.double(), down.double()
    outputs = []
    for part in x.split(32768):
        rows = part.double()
        hidden = rows / rows.square().mean(1, keepdim=True).sqrt() @ gate_up
        gate, up = hidden.chunk(2, 1)
        outputs.append(rows + gate * torch.sigmoid(gate) * up @ down)
    return torch.cat(outputs)


PER_LENGTH, BUCKETS = partial(counted, False, as_it_is), partial(counted, False, padded)
DYNAMIC, DEFAULT = partial(counted, True, as_it_is), partial(counted, None, as_it_is)
RUNGS = {
    "buckets": (PER_LENGTH, BUCKETS, "naive"),
    "dynamic": (BUCKETS, DYNAMIC, "previous rung"),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_dynamic_shape_recompiles(compare: Compare, rung: str) -> None:
    baseline, optimized, against = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        library=DEFAULT,
        against=against,
        inputs=prompts,
        reference=mlp_in_fp64,
        metric="score",
    )
