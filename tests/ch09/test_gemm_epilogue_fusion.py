"""Adding a bias and GELU in the epilogue of a GEMM beats two more passes over its result.

A GEMM holds its result in registers before it stores it. Arithmetic at that point, in the epilogue,
needs no kernel of its own and moves no bytes. The library has variants that add a bias per column
and apply an activation function. The three kernels of "eager" move the result five times: one
write, then two reads and two writes. "addmm" adds the bias in the epilogue, "gelu_epilogue" applies
GELU as well: one kernel, one write. Each is measured against the rung before. torch.nn.Linear calls
addmm, so its users have the first rung already, and `x @ weight + bias` is declared naive; most of
what "addmm" gains over it is PyTorch's slow kernel for a broadcast addition. torch.compile is the
library arm: it makes one kernel of bias and GELU, behind the GEMM, and so moves the result as often
as "addmm". With mode="max-autotune" it may choose a Triton GEMM that has both in its epilogue; that
is not measured here. On H200s the library arm is slower than both rungs: it takes 1.02 times as
long as "addmm", and took 1.13 times as long in one session. In that session its kernel of bias and
GELU took almost twice as long as PyTorch's GELU for the same bytes. On an H100 that kernel takes
1.2 times as long as GELU, and the arm as long as "addmm".

torch.addmm calls cuBLASLt with a bias epilogue if the bias is a vector. `torch._addmm_activation`
has no public name; torch.nn.TransformerEncoderLayer calls it for inference. On a GPU its GELU is
the tanh approximation, which all arms use. The layer has 2048 inputs and 8192 outputs, for 16384
tokens. Both epilogues make the GEMM longer: in the traces of H200s, the passes that they replace
take 330 to 354 and 152 to 180 µs, and the rungs save 308 to 319 and 109 to 113 µs. A larger inner
dimension makes the GEMM longer and the passes no longer, so the gain falls with the width of the
model. Training needs the input of GELU for the backward pass, so the epilogue has to store it, too.
"""

import pytest
import torch
from torch.nn.functional import gelu

from pytest_aiperf import Bench, Compare, Work, evidence


def layer(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, width = bench.size(16384, check=40), bench.size(2048, check=64)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    weight = torch.randn(width, 4 * width, **options) * width**-0.5
    return torch.randn(tokens, width, **options), weight, torch.randn(4 * width, **options)


def eager(x, weight, bias):
    return gelu(x @ weight + bias, approximate="tanh")


def addmm(x, weight, bias):
    return gelu(torch.addmm(bias, x, weight), approximate="tanh")


def gelu_epilogue(x, weight, bias):
    return torch._addmm_activation(bias, x, weight, use_gelu=True)


RUNGS = {
    # baseline, optimized, kernels, and bytes: the result is moved 3 times instead of 5, and then
    # once instead of 3 times; the operands come on top
    "addmm": (eager, addmm, 2, 0.75),
    "gelu_epilogue": (addmm, gelu_epilogue, 1, 0.6),
}
compiled = torch.compile(eager, dynamic=False)


def in_fp64(x, weight, bias):
    y = x.double() @ weight.double() + bias.double()
    return y * torch.sigmoid((8 / torch.pi) ** 0.5 * (y + 0.044715 * y**3))


@pytest.mark.parametrize("rung", RUNGS)
def test_gemm_epilogue_fusion(compare: Compare, rung: str) -> None:
    baseline, optimized, kernels, share = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        library=compiled,
        against="naive" if rung == "addmm" else "previous rung",
        inputs=layer,
        work=lambda x, weight, bias: Work(
            read=x.nbytes + weight.nbytes + bias.nbytes,
            written=len(x) * bias.nbytes,
            flops=2 * len(x) * weight.numel(),
            dtype="bf16",
        ),
        reference=in_fp64,
        evidence=[
            evidence.kernels(max=kernels),
            evidence.counter("dram__bytes.sum", max=share, per="baseline"),
        ],
    )
