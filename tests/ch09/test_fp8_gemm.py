"""An fp8 GEMM beats bf16 even with the cast of its activations, and most with a fused cast.

The tensor cores multiply fp8 at twice the rate of bf16. Weights are cast once, when the model is
loaded; activations are new in each call, so their cast belongs to the cost. Each row has a scale,
which follows from its largest magnitude. In eager PyTorch ("eager_cast"), finding the scale and
applying it takes one kernel per operation, five of which pass over a whole matrix; with
torch.compile ("fused_cast"), the cast reads 2 bytes per element and writes 1. GEMM and scales are
the same in both rungs, and each is compared with the one before; the first baseline is cuBLAS in
bf16. Bytes are not all that fusing saves. On an H200, the division by the rows' maxima takes two
fifths of the eager cast, three times as long as the multiplication by a constant, which passes over
as many bytes: PyTorch's kernel for operands of different shapes is slower. Eager code could also
multiply by 448 / maximum and so save one pass (not measured); against it, "fused_cast" would gain
less.

The GEMM takes O(n^3) operations and the cast O(n^2) bytes, so the cast matters less the more
outputs a layer has: with few, it costs more than fp8 gains. The cast costs least in the kernel that
produces the activations (test_fused_rowwise_quantize.py, test_fp8_inference.py). The result differs
by some percent of a typical value, which `precision` declares. `use_fast_accum` keeps partial sums
in the tensor cores, with fewer bits than fp32: inference allows it, training often does not.
"""

import pytest
import torch

from kernels.ch16.fp8_mlp import FP8_MAX, quantized
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

N = 8192
FEWER_BYTES = (3 + 10) / (17 + 10)
"""Bytes per element with a fused and an eager cast. The casts take 3 and 17. The GEMM reads two fp8
operands and writes bf16: 4, or 10 if its tiles read each operand four times from memory."""
MARGIN = 1.25
"""How far above FEWER_BYTES the fused cast may be. The cast passes over a row twice, first for its
largest magnitude: if both passes read memory, the ratio is (5 + 10) / (17 + 10), 1.15 times as
high. The rest is for scales, partly used lines, and tiles that read operands more often. One more
matrix in bf16 that is written and read again, 4 bytes, would exceed it: (7 + 10) / (17 + 10)."""


def layer(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, width, outputs = (bench.size(N, check=size) for size in (40, 64, 48))
    options = {"device": bench.device, "dtype": torch.bfloat16}
    weight = torch.randn(outputs, width, **options) * width**-0.5
    return torch.randn(tokens, width, **options), static(weight)


def cast(x):
    # in bf16, because dividing bf16 by an fp32 scale takes a slow path in eager PyTorch
    row_max = x.abs().amax(1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return (x / row_max * FP8_MAX).to(torch.float8_e4m3fn), row_max.float() / FP8_MAX


def with_cast(cast_rows):
    def cast_weight(x, weight):
        w, w_scale = quantized(weight, torch.float8_e4m3fn)

        def gemm(x, weight):
            y, scale = cast_rows(x)
            return torch._scaled_mm(
                y, w.T, scale, w_scale.T, out_dtype=x.dtype, use_fast_accum=True
            )

        return gemm

    return prepared(cast_weight)


def bf16(x, weight):
    return x @ weight.T


eager_cast = with_cast(cast)
RUNGS = {
    "eager_cast": (
        bf16,
        eager_cast,
        # at least one operation per multiply-add; the baseline has none in fp8
        [evidence.counter("sm__ops_path_tensor_src_fp8.sum", min=N**3)],
    ),
    "fused_cast": (
        eager_cast,
        with_cast(torch.compile(cast, dynamic=False)),
        [
            evidence.kernels(max=3),  # eager: one per operation of the cast
            evidence.counter("dram__bytes.sum", max=MARGIN * FEWER_BYTES, per="baseline"),
        ],
    ),
}


@pytest.mark.gpu(min_sm=89, cpu=True)
@pytest.mark.parametrize("rung", RUNGS)
def test_fp8_gemm(compare: Compare, rung: str) -> None:
    baseline, optimized, proof = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        against="library" if rung == "eager_cast" else "previous rung",
        inputs=layer,
        work=lambda x, weight: Work(
            read=x.nbytes + weight.numel(),
            written=2 * len(x) * len(weight),
            flops=2 * len(x) * weight.numel(),
            dtype="fp8",
        ),
        reference=lambda x, weight: torch.einsum("tk,nk->tn", x.double(), weight.double()),
        precision="fp8",
        evidence=proof,
    )
