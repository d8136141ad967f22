"""On Blackwell, an NVFP4 linear layer takes half the MMA steps of an fp8 one (not measured).

NVFP4 stores a value in 4 bits, with one fp8 scale per 16 values: 4.5 bits per value, 3.56 times
fewer than bf16. Blackwell's tensor cores take numbers and scales as they are and apply the scales
inside the product, 64 values along k per instruction where fp8 takes 32, so unpacking costs no
arithmetic. Weights are quantized once, activations in each call, in both arms. The claim has been
compiled and its instructions checked; it has not run on a Blackwell GPU.

The price is accuracy: a number is off by about a tenth, and a long dot product by 0.13 of its size,
3.6 times the error of fp8; `precision` declares this. GPUs before Blackwell must unpack in
software. Small batches are bound by reading the weights, where only the bytes count.
test_nvfp4_codec.py tests the codec and the memory layout.
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
    w_fp8, one = (w.float() / scale).to(torch.float8_e4m3fn), torch.ones_like(scale)

    def run(x, w):
        x_fp8 = x.to(torch.float8_e4m3fn)
        return torch._scaled_mm(x_fp8, w_fp8.T, one, scale, out_dtype=torch.bfloat16)

    return run


@pytest.mark.sm100
@pytest.mark.sm103
def test_nvfp4_linear(compare: Compare, nvcc: Nvcc) -> None:
    kernels = nvcc("ch19/nvfp4_linear.cu")

    def in_nvfp4(x, w):
        (m, k), n, scale = x.shape, len(w), nvfp4.matrix_scale(w)
        w_numbers, w_scales = nvfp4.quantize(w, scale)
        x_numbers = w_numbers.new_empty(m, k // 2)
        x_scales = w_numbers.new_empty(m * k // nvfp4.GROUP)

        def run(x, w):
            out = x.new_empty(m, n)
            kernels["nvfp4_linear"](
                *(x, w_numbers, w_scales, x_numbers, x_scales, out, m, n, k, scale)
            )
            return out

        return run

    compare(
        baseline=prepared(in_fp8),
        optimized=prepared(in_nvfp4),
        against="library",
        inputs=layer,
        reference=lambda x, w: x.double() @ w.double().T,
        precision="nvfp4",
        evidence=[
            evidence.opcode("UTCOMMA", kernel="linear"),
            evidence.opcode("UTCCP", kernel="linear"),
            evidence.spills(kernel="linear"),
            evidence.kernel_name("linear"),  # this kernel ran, not one of the library
        ],
    )
