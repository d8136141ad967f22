"""From a CUDA graph to 4-bit weights, each step decodes one sequence faster than the one before.

Decoding one sequence takes a matrix-vector product per matrix and attention over the whole KV
cache. It is bound by reading weights and cache: each byte is used once per token. The bytes per
token over the read rate of the memory are the limit, and each rung's record has its share of that
rate.

"graph" replays a step's operations with one launch. Eager PyTorch launches them one by one from
Python, which takes longer than they run: the gain is 1.7x to 2.7x on H200s, depending on the host.
A graph needs fixed shapes, so attention goes over the whole slab of the cache with a mask. "fused"
computes norm, activation function and residual in the matrix-vector products, which wait for memory
anyway. Its attention splits each head's cache into parts, so that all SMs read it (flash-decoding).
cuDNN splits the cache as well, and both take 1.2 ms for 8 tokens on an H100. The products with norm
and residual take 8.9 ms there, and cuBLAS's without them 9.6. The rest of the gain, two thirds of
it, comes from the operations between the products. On an H200 these operations are all of the gain:
they fall from 1.3 to 0.1 ms, attention takes 1.0 ms in both, and the products take 7.3 ms, cuBLAS's
7.1. "overlapped" starts each kernel before the previous one has finished (programmatic dependent
launch): its first weights arrive while the memory would idle. After that, only fewer bytes help.
"int8" and "int4" quantize the weights, in groups with a common scale, and convert them in
registers; `precision` declares their error.

The model has the width and heads of a 7B model, but 8 layers. Each rung is judged against the one
before, on wall time for 8 tokens. torch.compile of a layer in the same graph, with cuDNN's
attention, is the library arm of "fused" and "overlapped", and slower than both. That of "int8" and
"int4" is the same layer with the weight-only products of gpt-fast: int8 in a kernel that
torch.compile generates, int4 in tinygemm, PyTorch's kernel that torchao calls. The step with
tinygemm takes 6 to 10 % longer than that of "int4". The int8 arm is compiled in two parts, as in
ch16/fp8_inference: in one the kernel of the last product would compute the GELU again for each
output. Marlin is not compared.

In "fused", the products read weights at nine tenths of the read rate on an H100, attention the
cache at 0.6 of it. On an H200 it is 0.77 and 0.47, so "overlapped" reaches 3.4 TB/s there, where
3.6 was the aim; why a smaller share of its faster memory is used was not measured. The share falls
with the bytes, and "int8" and "int4" gain less than their bytes promise. The cache stays in bf16,
so attention takes as long as before, and so does starting and draining the kernels. And each packed
weight takes instructions to unpack. In the compiled loops, "int4" has more of them than an SM can
issue in the time in which its bytes arrive; "int8" has fewer. This explains only a part: what else
the packed products wait for was not measured. The price of "int4" is an error of an eighth of a
typical new key or value. All rungs together gain 3.0x to 4.6x on H200s and 3.1x on an H100, where
8x was the aim: the time of the eager step depends on the host. On the H100 the limit is 6.4x,
because the eager step reads 3.2 times the bytes of "int4" at half of the read rate. Batches share
one read of the weights and turn the matrix-vector products into GEMMs.
"""

from functools import partial

import pytest
import torch

from kernels.labs import decode
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static


def sequence(bench: Bench) -> tuple[decode.Decoder, torch.Tensor, torch.Tensor]:
    """Draw a model, the KV cache of a sequence, and the tokens that follow it."""
    layers, width = bench.size(8, check=1), bench.size(4096, check=256)
    # the check runs in fp16: Triton's interpreter, which it uses, is wrong in bf16
    options = {"device": bench.device, "dtype": torch.bfloat16 if bench.full else torch.float16}
    length = bench.size(2048, check=127)  # in the check, the first token finds the last part empty
    model = decode.random_decoder(layers, width, 1000, length, **options)
    shape = layers, 2, width // decode.HEAD_DIM, length, decode.HEAD_DIM
    tokens = torch.randint(1000, (bench.size(8, check=2),), device=bench.device)
    return static(model), static(torch.randn(shape, **options)), tokens


def in_fp64(model, past, tokens):
    """Run all tokens at once, as a prefill does: a mask hides from each one those after it."""

    def normalized(x):
        return x / (x.square().mean(1, keepdim=True) + decode.EPSILON).sqrt()

    x, count, added = model.embedding[tokens].double(), len(tokens), []
    is_later = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
    for matrices, cached in zip(model.layers(), past, strict=True):
        qkv, out, up, down = (matrix.double().T for matrix in matrices)
        rows = (normalized(x) @ qkv).reshape(count, 3, -1, decode.HEAD_DIM)
        q, k, v = rows.permute(1, 2, 0, 3)
        added.append(torch.stack([k, v]))
        k, v = (torch.cat([old.double(), new], 1) for old, new in zip(cached, (k, v), strict=True))
        scores = q @ k.mT / decode.HEAD_DIM**0.5
        scores[:, :, -count:].masked_fill_(is_later, -torch.inf)
        x = x + (torch.softmax(scores, 2) @ v).transpose(0, 1).flatten(1) @ out
        hidden = normalized(x) @ up
        x = x + hidden * torch.special.ndtr(hidden) @ down  # GELU is x times the normal CDF of x
    return x, torch.stack(added)


def bytes_read(bits, model, past, tokens):
    """Count the bytes that the tokens' steps read: the weights, their scales and the cache."""
    weights = sum(kind.numel() for kind in model[1:])
    weight_bytes = weights * bits // 8
    if bits < 16:  # a 2-byte scale for each group of 64 bytes
        weight_bytes += weight_bytes // 32
    cached_tokens = sum(range(past.shape[3], past.shape[3] + len(tokens)))
    return Work(read=len(tokens) * weight_bytes + past[:, :, :, 0].nbytes * cached_tokens)


def reads(share):
    return evidence.counter("dram__bytes_read.sum", max=share, per="baseline")


NO_WASTE = evidence.counter("dram__bytes_read.sum", max=1.1, per="work")
EVIDENCE = {
    "graph": [evidence.launches(max=0.1, per="baseline")],
    "fused": [evidence.kernels(max=0.7, per="baseline"), evidence.spills(), NO_WASTE],
    "overlapped": [evidence.overlap(min=1.05), NO_WASTE],
    "int8": [reads(0.65), evidence.spills(), NO_WASTE],
    "int4": [reads(0.7), evidence.spills(), NO_WASTE],
}
PRECISION = {"int8": "fp8", "int4": "nvfp4"}
RUNGS = list(decode.RUNGS)
ARMS = [prepared(decode.eager), *map(prepared, decode.RUNGS.values())]
COMPILED = prepared(decode.Compiled)
LIBRARY = {
    "fused": COMPILED,
    "overlapped": COMPILED,
    "int8": prepared(decode.CompiledInt8),
    "int4": prepared(decode.CompiledInt4),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_decode_ladder(compare: Compare, rung: str) -> None:
    step = RUNGS.index(rung)
    compare(
        baseline=ARMS[step],
        optimized=ARMS[step + 1],
        library=LIBRARY.get(rung),
        against="previous rung" if step else "idiomatic",
        inputs=sequence,
        reference=in_fp64,
        work=partial(bytes_read, decode.RUNGS[rung].bits),
        metric="wall",
        precision=PRECISION.get(rung),
        evidence=EVIDENCE[rung],
    )
