"""A linear layer whose three products run on the fp8 tensor cores, quantised anew in each step.

One scale a tensor maps its largest magnitude to the largest fp8 number. cuBLASLt multiplies rows by
rows (both operands along the sum), so that the backward pass transposes the fp8 copies that it
needs the other way round. The copies, of half the bytes, are what is kept for it.
"""

import torch

LARGEST = 448  # of float8_e4m3fn


def quantized(x):
    scale = x.abs().amax().float().clamp(min=1e-30) / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def product(a, scale_a, b, scale_b):
    """Multiply a @ b.T."""
    multiply = torch._scaled_mm  # noqa: SLF001  its public wrapper breaks torch.compile's graph
    return multiply(a, b.T, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        copies = *quantized(x), *quantized(weight)
        ctx.save_for_backward(*copies)
        return product(*copies)

    @staticmethod
    def backward(ctx, gradient):
        x, scale_x, weight, scale_w = ctx.saved_tensors
        g, scale_g = quantized(gradient)
        to_x = product(g, scale_g, weight.T.contiguous(), scale_w)
        to_weight = product(g.T.contiguous(), scale_g, x.T.contiguous(), scale_x)
        return to_x, to_weight


def fp8_linear(x, weight):
    return _Fp8Linear.apply(x, weight)
