"""Compiling a decoder of a billion weights speeds up a decode step, and a CUDA graph does again.

Eager PyTorch runs RMSNorm, rotary embeddings, SwiGLU and the residual additions as one kernel per
operation. torch.compile fuses what lies between two GEMMs and attention into a kernel or two. A
decode step of one token multiplies vectors, for which all weights are read once; eager PyTorch
needs longer to launch its kernels than the GPU needs to run them. "compiled" launches 236 kernels
instead of 583. "reduce_overhead" replays the same kernels from a CUDA graph and is judged against
"compiled".

The claims are judged on wall time after compilation. On H200s, "compiled" gains 2.1x to 2.4x over
eager PyTorch, and "reduce_overhead" 2.7x to 4.0x over "compiled", depending on the host. The price
is in the record as well: the CPU time of the first call in this process, without results of earlier
runs, is 12 to 18 s on H100s and H200s, compared with 0.4 to 1.1 s without compiling. It has no
interval, because each process compiles once. Compiling pays in a program that runs many steps, and
each new shape compiles again (test_dynamic_shape_recompiles.py). Compiling one block for all layers
costs a fraction (ch13/regional_compile).

The weights are random: a trained model of this form takes the same time. The limit is the time to
read the weights and the caches, 0.46 ms on an H200. Of the 1.3 to 1.5 ms of "reduce_overhead" on
H200s, kernels take 1.0; the rest is what the host does around the graph. In a trace, the
matrix-vector products take 0.71 ms, at three fifths of the read rate, and attention 0.16, at one
fifth. The kernels of "compiled" take 1.0 of its 3.5 to 6.0 ms, so its time is the host's. On H100s
the limit is 0.7 ms, "reduce_overhead" takes 1.7, and "compiled" 6.0 to 7.3. mode="max-autotune",
which tries other kernels for the products, is not measured here. Larger batches gain less: their
kernels take longer, and the host's time is hidden behind them.
"""

import pytest
import torch

from kernels.ch14 import llama
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static


def model(bench: Bench) -> llama.Weights:
    """Draw 1.06 billion weights: 51 million in each of 18 layers, and the vocabulary's."""
    layers, width = bench.size(18, check=2), bench.size(2048, check=128)
    hidden, vocabulary = bench.size(5632, check=192), bench.size(32000, check=300)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    return llama.random_weights(layers, width, hidden, vocabulary, **options)


def context(bench: Bench) -> tuple[llama.Weights, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make the KV caches of one sequence, its next token and that token's position."""
    weights, capacity = model(bench), bench.size(1024, check=24)
    heads = weights.embedding.shape[1] // llama.HEAD_DIM
    caches = weights.qkv.new_empty(2, len(weights.qkv), 1, heads, capacity, llama.HEAD_DIM)
    token = torch.randint(len(weights.embedding), (1, 1), device=bench.device)
    position = torch.tensor([capacity - 5], device=bench.device)
    return static(weights), token, caches.normal_(), position


def step_in_fp64(weights, token, caches, position):
    caches = caches.double()
    with torch.no_grad():
        return llama.in_fp64(weights, token, caches, position), caches


EAGER = prepared(llama.inference())
COMPILED = prepared(llama.inference(llama.whole))
GRAPH = prepared(llama.inference(llama.whole, mode="reduce-overhead"))
RUNGS = {
    "compiled": (EAGER, COMPILED, "idiomatic", evidence.kernels(max=0.7, per="baseline")),
    "reduce_overhead": (COMPILED, GRAPH, "previous rung", evidence.launches(max=8)),
}


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")  # by llama.FirstCall
@pytest.mark.parametrize("rung", RUNGS)
def test_compile_large_model_decode(compare: Compare, rung: str) -> None:
    baseline, optimized, against, proof = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        against=against,
        inputs=context,
        work=lambda weights, token, caches, position: Work(
            read=sum(w.nbytes for w in weights[1:]) + caches.nbytes,
            flops=2 * sum(w.numel() for w in weights[1:]),
            dtype="bf16",
        ),
        reference=step_in_fp64,
        metric=("wall", "score"),
        evidence=[proof],
    )
