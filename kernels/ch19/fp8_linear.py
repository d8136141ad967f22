"""A linear layer whose three GEMMs run on the FP8 tensor cores, operands quantized in each step.

Each tensor has one scale, which maps its largest magnitude to the largest E4M3 number. cuBLASLt's
FP8 GEMM takes both operands with k contiguous (A times B transposed), so the backward pass
transposes the FP8 tensors that it needs in the other orientation. The forward pass saves the FP8
operands instead of the bf16 ones, at half the bytes.

Hopper's tensor cores align products and running sum to the largest of them and keep 14 bits. The
gradient of a weight is a sum over tokens. Unless its products average to zero, it grows with their
number, and the products lose their low bits: after 8192 tokens the sum is several percent too
small. Without fast accumulation, cuBLASLt adds partial sums of few products in fp32. The other two
GEMMs sum over channels with weights of both signs, and their sums stay small.
"""

import torch

E4M3_MAX = 448  # largest finite value of float8_e4m3fn


def quantize(x):
    scale = x.abs().amax().float().clamp(min=1e-30) / E4M3_MAX
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def scaled_mm(a, scale_a, b, scale_b, *, fast=True):
    """Return a @ b.T in bf16, with each fp8 operand multiplied by its scale.

    ``fast`` keeps the sums in the tensor cores, which is faster and less accurate.
    """
    multiply = torch._scaled_mm  # noqa: SLF001  its public wrapper breaks torch.compile's graph
    return multiply(a, b.T, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        quantized = *quantize(x), *quantize(weight)
        ctx.save_for_backward(*quantized)
        return scaled_mm(*quantized)

    @staticmethod
    def backward(ctx, grad_out):
        x, scale_x, weight, scale_w = ctx.saved_tensors
        grad, scale_grad = quantize(grad_out)
        grad_x = scaled_mm(grad, scale_grad, weight.T.contiguous(), scale_w)
        columns = grad.T.contiguous(), scale_grad, x.T.contiguous(), scale_x
        grad_weight = scaled_mm(*columns, fast=False)
        return grad_x, grad_weight


def fp8_linear(x, weight):
    return _Fp8Linear.apply(x, weight)
