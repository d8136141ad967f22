"""A linear layer in fp8 with a scale per row, as in torchao's recipe "rowwise".

A scale can be taken out of a sum only if all its terms share it, so scales are along the rows that
a product keeps, not along the dimension that it sums over. An operand takes part in two of the
three products, in two orientations. So it is quantized twice, the second time from its transpose,
where `fp8_linear.py` transposes what is quantized already. On the other hand, a row's scale is
known as soon as the row has been read, and a scale per tensor only after the whole tensor.
"""

import torch

from kernels.ch19.fp8_linear import E4M3_MAX


def quantize_rows(x):
    scales = x.abs().amax(1, keepdim=True).float().clamp(min=1e-30) / E4M3_MAX
    return (x.float() / scales).to(torch.float8_e4m3fn), scales


def product(a, b, *, fast=True):
    """Return a @ b.T in bf16, with the rows of both quantized."""
    a, scales_a = quantize_rows(a)
    b, scales_b = quantize_rows(b)
    multiply = torch._scaled_mm  # noqa: SLF001  its public wrapper breaks torch.compile's graph
    return multiply(a, b.T, scales_a, scales_b.T, out_dtype=torch.bfloat16, use_fast_accum=fast)


class _RowwiseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx, grad_out):
        x, weight = ctx.saved_tensors
        grad_x = product(grad_out, weight.T.contiguous())
        # without fast accumulation, as in fp8_linear.py
        grad_weight = product(grad_out.T.contiguous(), x.T.contiguous(), fast=False)
        return grad_x, grad_weight


def rowwise_linear(x, weight):
    return _RowwiseLinear.apply(x, weight)
