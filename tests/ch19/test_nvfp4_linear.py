"""A linear layer in NVFP4 multiplies twice as fast as one in fp8, on Blackwell.

NVFP4 stores a value in 4 bits and shares an fp8 scale among 16 of them: 4.5 bits a value, 3.56
times less than bf16. Blackwell's tensor cores take numbers and scales as they are and apply the
scales inside the product, 64 values deep at once, so no arithmetic is spent on unpacking. Weights
are quantised once, activations at each call, by both arms.

What is gained costs accuracy: numbers err by a tenth, products of long rows by about as much
relative to their size, four times the error of fp8. That is what `precision` declares. GPUs
before Blackwell must unpack in software, and small batches are bound by reading the weights, where
the gain is in bytes only. Codec and layout are tested in test_nvfp4_codec.py.
"""

import pytest
import torch

from kernels.ch19 import nvfp4
from pytest_aiperf import Bench, Compare, Nvcc, evidence, prepared, static


def layer(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, width = bench.size(8192, check=128), bench.size(8192, check=256)
    x = torch.randn(tokens, width, device=bench.device).bfloat16()
    w = torch.randn(width, width, device=bench.device) * width**-0.5
    return x, static(w.bfloat16())


def in_fp8(x, w):
    scale = w.abs().max().float() / 448
    packed, one = (w.float() / scale).to(torch.float8_e4m3fn), torch.ones_like(scale)

    def run(x, w):
        narrow = x.to(torch.float8_e4m3fn)
        return torch._scaled_mm(narrow, packed.T, one, scale, out_dtype=torch.bfloat16)

    return run


@pytest.mark.sm100
@pytest.mark.sm103
def test_nvfp4_linear(compare: Compare, nvcc: Nvcc) -> None:
    kernels = nvcc("ch19/nvfp4_linear.cu")

    def in_nvfp4(x, w):
        (m, k), n, scale = x.shape, len(w), nvfp4.matrix_scale(w)
        packed, scales = nvfp4.quantize(w, scale)
        numbers = packed.new_empty(m, k // 2)
        x_scales = packed.new_empty(m * k // nvfp4.GROUP)

        def run(x, w):
            out = x.new_empty(m, n)
            kernels["nvfp4_linear"](x, packed, scales, numbers, x_scales, out, m, n, k, scale)
            return out

        return run

    compare(
        baseline=prepared(in_fp8),
        optimized=prepared(in_nvfp4),
        against="library",
        inputs=layer,
        reference=lambda x, w: x.double() @ w.double().T,
        precision="fp8_e5m2",
        evidence=[
            evidence.opcode("UTCOMMA", kernel="linear"),
            evidence.opcode("UTCCP", kernel="linear"),
            evidence.spills(kernel="linear"),
        ],
    )
