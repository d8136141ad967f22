"""Decoding one text gets faster by fewer launches, fewer kernels and fewer bytes, in this order.

A token of one text is a product of each matrix with a vector: the weights are read once, which
takes the GPU about 70 microseconds here, and some 160 small kernels are launched, which takes
Python about 3 milliseconds. "graph" launches them all at once; their number and length remain.
"fused" has five kernels a layer instead of the graph's sixteen: norms, activation functions and
residuals are computed where the products are, and the cache is written where it is read. "int8"
halves the weights' bytes; its error is declared. It adds 3 % to "fused", because at this size the
weights are a seventh of a token's time. The rest is sixty kernels that wait for each other, and
attention, whose 16 programs, one a head, walk through the text tile by tile and leave most of the
132 multiprocessors idle (ch18/split_kv_decode).

What the caller waits for 8 tokens (wall) is judged, each rung against eager PyTorch. The limit is
the time in which memory delivers the weights; the more a layer holds, the closer the first rungs
are to it: with 16 times the weights, eager launches hide behind the kernels. Batches share one
reading of the weights, and turn these products into proper matrix products.
"""

import pytest
import torch

from kernels.ch15.decoder import HEAD_DIM, Decoder, random_decoder
from kernels.labs import decode
from pytest_aiperf import Bench, Compare, evidence, prepared, static


def text(bench: Bench) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    """Make a model, keys and values of a text, and the tokens that follow."""
    layers, width = bench.size(12, check=1), bench.size(1024, check=128)
    # the interpreter of the check is wrong in bf16
    kind = {"device": bench.device, "dtype": torch.bfloat16 if bench.full else torch.float16}
    model = random_decoder(layers, width, 1000, **kind)
    shape = layers, 2, width // HEAD_DIM, bench.size(500, check=20), HEAD_DIM
    tokens = torch.randint(1000, (bench.size(8, check=2),), device=bench.device)
    return static(model), static(torch.randn(shape, **kind)), tokens


def in_fp64(model, past, tokens):
    model, past = model.to(torch.float64), past.double()
    return decode.eager(model, past, tokens)(model, past, tokens)


LAUNCHED = evidence.launches(most=0.1, per="baseline")
RUNGS = {
    "graph": [LAUNCHED],
    "fused": [LAUNCHED, evidence.kernels(most=0.5, per="baseline"), evidence.spills()],
    "int8": [LAUNCHED, evidence.counter("dram__bytes_read.sum", most=0.65, per="baseline")],
}


@pytest.mark.parametrize("rung", RUNGS)
def test_decode_ladder(compare: Compare, rung: str) -> None:
    compare(
        baseline=prepared(decode.eager),
        optimized=prepared(decode.RUNGS[rung]),
        inputs=text,
        reference=in_fp64,
        metric="wall",
        precision="fp8" if rung == "int8" else None,
        evidence=RUNGS[rung],
    )
