"""Weight-only int8 beats bf16 for one token, int4 beats int8; for 256, dequantizing int4 loses.

A linear layer that decodes one token uses each weight once, so it is bound by reading them. With
8192 inputs and 28672 outputs, as in the MLP of a 70B Llama, they are 470 MB in bf16, 239 in int8
and 121 in int4, scales included: by bytes, each rung may gain 1.97x, and both together 3.9x. On an
H200 they gain 1.70x and 1.51x, together 2.56x: 108, 64 and 42 µs. The token stays in bf16 (W8A16,
W4A16). "int8" and "int4" are the same kernel. It unpacks codes in registers, because a dequantized
matrix would be written and read again; DRAM moves 1.02 and 1.03 times the bytes of the packed
layer. But from bf16 to int4, the share of the read rate falls from 92 to 80 and 61 %. At the full
rate, the three arms would take 8, 13 and 16 µs less. Part of this may be fixed costs, such as the
last tiles (of 396 blocks of "int4", 20 have ten, the others nine). Instructions may also bind: half
a byte leaves an SM time for some 3.4 instructions, and the compiled loop of "int4" has 3.4
(kernels/ch19/weight_only.py). Which of them it is was not measured.

The baseline of "int8" is PyTorch's linear layer in bf16 (cuBLAS), which cannot read packed weights,
so the kernel changes with the format. cuBLAS has the larger share of the read rate, so the gain is
due to the bytes. The library arm is the product as torch.compile fuses it with the conversion of
int8 codes, as in gpt-fast, but with scales per group. It takes 162 µs, longer than bf16. The
baseline of "int4" is "int8"; its library arm is tinygemm, PyTorch's int4 kernel, which torchao
calls: 62 µs, 1.47x as long as "int4". Marlin and Machete are not compared. All arms compute the
same product: the int8 arms hold the same int4 codes, one per byte, with the same scale per group of
128, and a scale has 5 significant bits, so that code times scale is exact in bf16. What
quantization costs in accuracy is another question, which labs/decode_ladder touches.

"int4_prefill" multiplies 256 tokens, where the weights' bytes are no longer the limit: by the rates
of an H200, reading the bf16 matrix takes 0.10 ms and the 1.2e11 operations 0.15. The baseline,
cuBLAS in bf16, takes 0.174 ms. The rung dequantizes the matrix with torch.compile and then runs the
same product, as some kernels for GPTQ do for long prompts. The conversion reads codes and scales
(121 MB) and writes bf16 weights (470 MB), which the product reads: 1.06 GB instead of 0.47. The
rung takes 0.51 ms, so it reaches 0.34x. The conversion alone takes two thirds of it, at 1.7 TB/s;
the reason for that rate was not examined. As fast as a copy, it would leave the rung at 0.56x.
Kernels that unpack in the tensor-core loop, such as Marlin, exist and were not compared. They save
the bf16 copy, but their products are of bf16 numbers too, and cuBLAS reaches 85 % of that rate.

Arithmetic takes as long as reading at about 170 tokens in bf16 and 45 in int4. Between them, the
gain from fewer bytes shrinks; beyond, they save memory only. Other numbers of tokens than 1 and 256
were not measured.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import linear

from kernels.ch19 import weight_only
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def layer(bench: Bench, tokens: int) -> Inputs:
    """Draw tokens, int4 weights in words of 8, and the scale of each group of 128 weights."""
    outputs, inputs = bench.size(28672, check=72), bench.size(8192, check=1024)
    # the check runs in fp16: Triton's interpreter, which it uses, is wrong in bf16
    options = {"device": bench.device, "dtype": torch.bfloat16 if bench.full else torch.float16}
    x = torch.randn(tokens, inputs, **options)
    shape = outputs, inputs // 8
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=bench.device)
    # 5 significant bits, so that code times scale is exact in bf16
    scales = torch.randint(16, 32, (outputs, inputs // weight_only.GROUP), device=bench.device)
    return x, static(words), static(scales.to(x.dtype) * 2**-13)


def one_token(bench: Bench) -> Inputs:
    return layer(bench, 1)


def prompt(bench: Bench) -> Inputs:
    return layer(bench, bench.size(256, check=5))


@prepared
def bf16(x, words, scales):
    weight = weight_only.dequantized(words, scales)
    return lambda x, words, scales: linear(x, weight)


@prepared
def int8(x, words, scales):
    int8_words = weight_only.widened(words)
    return lambda x, words, scales: weight_only.gemv(8, x, int8_words, scales)


def int4(x, words, scales):
    return weight_only.gemv(4, x, words, scales)


@partial(torch.compile, dynamic=False, options={"coordinate_descent_tuning": True})
def compiled_product(x, codes, scales):
    # a sum of products, because a GEMM would need the whole weight in 16 bits first
    groups = codes.unflatten(1, (-1, weight_only.GROUP)).float() * scales[:, :, None].float()
    return (groups.flatten(1) * x.float()).sum(1)[None].to(x.dtype)


@prepared
def compiled_int8(x, words, scales):
    codes = weight_only.integers(words).flatten(1).to(torch.int8) - 8
    return lambda x, words, scales: compiled_product(x, codes, scales)


@prepared
def tinygemm(x, words, scales):
    """Repack for PyTorch's int4 kernel, which exists for GPUs only."""
    if not x.is_cuda:
        return bf16.make(x, words, scales)
    codes = weight_only.integers(words).flatten(1)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)
    # it subtracts 8 from a nibble, and adds a zero point per group
    scales_and_zeros = torch.stack([scales.T, torch.zeros_like(scales.T)], 2).contiguous()
    mm = torch.ops.aten._weight_int4pack_mm
    return lambda x, words, scales: mm(x, packed, weight_only.GROUP, scales_and_zeros)


compiled_dequantize = torch.compile(weight_only.dequantized, dynamic=False)


def dequantize_first(x, words, scales):
    return linear(x, compiled_dequantize(words, scales))


def in_fp64(x, words, scales):
    parts = []
    for some_words, some_scales in zip(words.split(2048), scales.split(2048), strict=True):
        sums = torch.zeros(len(x), len(some_words), dtype=torch.float64, device=x.device)
        for field in range(8):
            codes = some_words // 16**field % 16 - 8  # rounds down, so the sign does not matter
            weights = codes.double().unflatten(1, (scales.shape[1], -1)) * some_scales[:, :, None]
            # 16 words per group: a field of them is a run of 16 of its 128 columns
            columns = x.double().unflatten(1, (scales.shape[1], 8, -1))[:, :, field]
            sums += columns.flatten(1) @ weights.flatten(1).T
        parts.append(sums)
    return torch.cat(parts, 1)


def traffic(bits, x, words, scales):
    outputs, weights = len(words), 8 * words.numel()
    read = weights * bits // 8 + scales.nbytes + x.nbytes
    flops = 2 * len(x) * weights
    return Work(read=read, written=len(x) * outputs * x.itemsize, flops=flops, dtype="bf16")


UNPACKED_IN_REGISTERS = [
    # half of the weights' bytes, and the scales
    evidence.counter("dram__bytes_read.sum", max=0.55, per="baseline"),
    evidence.counter("dram__bytes.sum", max=1.1, per="work"),
    evidence.opcode("LDGSTS*.128", kernel="_gemv"),
    evidence.spills(kernel="_gemv"),
    evidence.kernels(max=1),
]
# 2.2 by bytes: a bf16 copy is written as well; part of it may be in the L2 cache when it is read
CONVERTED_FIRST = [
    evidence.counter("dram__bytes.sum", min=1.8, per="baseline"),
    evidence.kernels(min=2, per="baseline"),
]

RUNGS = {
    "int8": (bf16, int8, compiled_int8, one_token, 8, UNPACKED_IN_REGISTERS),
    "int4": (int8, int4, tinygemm, one_token, 4, UNPACKED_IN_REGISTERS),
    "int4_prefill": (bf16, dequantize_first, None, prompt, 4, CONVERTED_FIRST),
}


@pytest.mark.gpu(min_sm=90, shared_memory=160 * 2**10, cpu=True)
@pytest.mark.parametrize("rung", RUNGS)
def test_sub_byte_weight_only(compare: Compare, rung: str) -> None:
    baseline, optimized, library, inputs, bits, proof = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        library=library,
        against="previous rung" if baseline is int8 else "idiomatic",
        inputs=inputs,
        work=partial(traffic, bits),
        reference=in_fp64,
        evidence=proof,
    )
