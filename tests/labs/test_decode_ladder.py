"""A CUDA graph, fused kernels and int8 weights each decode one sequence faster than eager PyTorch.

Decoding one sequence takes a matrix-vector product per matrix. It is bound by reading the weights,
about 70 microseconds per token here, but eager PyTorch also launches some 160 small kernels per
token, one by one from Python. "graph" replays all of them with one launch; their number and
duration remain. "fused" has five kernels per layer instead of the graph's sixteen: norm, activation
function and residual are computed in the matrix-vector products, and the attention kernel writes to
the KV cache itself. "int8" halves the bytes of the weights (weight-only quantization; `precision`
declares its error). It adds little to "fused", because reading the weights is only a small part of
a token's time at this width. The rest is sixty kernels that depend on each other, and attention:
its 16 programs, one per head, loop over the sequence and leave most of the 132 SMs idle
(ch18/split_kv_decode shows the remedy).

Each rung is judged against eager PyTorch, on wall time for 8 tokens. The limit is the time to read
the weights from memory; the larger the layers, the closer the kernels come to it. Batches share one
read of the weights and turn the matrix-vector products into GEMMs.
"""

import pytest
import torch

from kernels.ch15.decoder import HEAD_DIM, Decoder, random_decoder
from kernels.labs import decode
from pytest_aiperf import Bench, Compare, evidence, prepared, static


def sequence(bench: Bench) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    """Draw a model, the KV cache of a sequence, and the tokens that follow it."""
    layers, width = bench.size(12, check=1), bench.size(1024, check=128)
    # the check runs in fp16: Triton's interpreter, which it uses, is wrong in bf16
    options = {"device": bench.device, "dtype": torch.bfloat16 if bench.full else torch.float16}
    model = random_decoder(layers, width, 1000, **options)
    shape = layers, 2, width // HEAD_DIM, bench.size(500, check=20), HEAD_DIM
    tokens = torch.randint(1000, (bench.size(8, check=2),), device=bench.device)
    return static(model), static(torch.randn(shape, **options)), tokens


def in_fp64(model, past, tokens):
    model, past = model.to(torch.float64), past.double()
    return decode.eager(model, past, tokens)(model, past, tokens)


FEW_LAUNCHES = evidence.launches(max=0.1, per="baseline")
RUNGS = {
    "graph": [FEW_LAUNCHES],
    "fused": [FEW_LAUNCHES, evidence.kernels(max=0.5, per="baseline"), evidence.spills()],
    "int8": [FEW_LAUNCHES, evidence.counter("dram__bytes_read.sum", max=0.65, per="baseline")],
}


@pytest.mark.parametrize("rung", RUNGS)
def test_decode_ladder(compare: Compare, rung: str) -> None:
    compare(
        baseline=prepared(decode.eager),
        optimized=prepared(decode.RUNGS[rung]),
        inputs=sequence,
        reference=in_fp64,
        metric="wall",
        precision="fp8" if rung == "int8" else None,
        evidence=RUNGS[rung],
    )
