"""A model compiled block by block runs as fast as one compiled whole, and compiles in less time.

The blocks of a transformer share their code and differ in their weights. Compiled whole, the model
is one graph: Python is traced, and kernels are generated, for each layer anew. Compiled by region
(`block.compile()`), the first block's code serves all others, because the weights are its inputs.
So the time to compile no longer grows with depth, and a change of batch or length costs one block.

The claim is judged on wall time after compilation, against eager PyTorch; the library arm is the
whole model, compiled. The record shows the CPU time of each arm's first call beside it: that of a
process that compiles once, so it has no interval. Compiled whole, the model takes a sixth longer
here: its kernels compute the angles of the rotary embeddings anew in each layer, 2.1 of 9.4 ms. A
model that passes them as a table would be even. Between blocks nothing is fused, and each call of a
block checks its guards on the CPU. That is mostly hidden here: of 8.4 ms on an H200, the kernels
for 2,048 tokens take 7.5. For one token it is not: there, the whole model in a CUDA graph is faster
(ch14/compile_large_model_decode).
"""

import pytest
import torch

from kernels.ch14 import llama
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static


def prompt(bench: Bench) -> tuple[llama.Weights, torch.Tensor]:
    layers, width = bench.size(18, check=2), bench.size(2048, check=128)
    hidden, vocabulary = bench.size(5632, check=192), bench.size(32000, check=300)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    weights = llama.random_weights(layers, width, hidden, vocabulary, **options)
    tokens = torch.randint(vocabulary, (1, bench.size(2048, check=20)), device=bench.device)
    return static(weights), tokens


@torch.no_grad()
def in_fp64(weights, tokens):
    return llama.in_fp64(weights, tokens)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")  # by llama.FirstCall
def test_regional_compile(compare: Compare) -> None:
    compare(
        baseline=prepared(llama.inference()),
        optimized=prepared(llama.inference(llama.per_block)),
        library=prepared(llama.inference(llama.whole)),
        inputs=prompt,
        work=lambda weights, tokens: Work(
            read=sum(w.nbytes for w in weights[1:]),
            flops=2 * tokens.numel() * sum(w.numel() for w in weights[1:]),
            dtype="bf16",
        ),
        reference=in_fp64,
        metric=("wall", "score"),
        cache="warm",  # makes no difference: the weights are many times the L2 capacity
        evidence=[evidence.kernels(max=0.8, per="baseline")],
    )
