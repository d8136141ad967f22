"""Unpacking int4 weights as bits of fp16 numbers beats converting them; inline PTX adds nothing.

A matrix-vector product (GEMV) with int4 weights reads half a byte per weight, so at memory
bandwidth weights arrive faster than an SM converts them one by one. Plain C ("convert") shifts,
masks, converts and subtracts: three of these run on the integer units, which have half of the SM's
issue rate. "bit_trick" makes no integer conversion. It masks two nibbles at once and sets the bits
of 1024 above them, which gives the fp16 numbers 1024 + nibble; one packed subtraction follows. The
library arm of this rung is tinygemm (`torch.ops.aten._weight_int4pack_mm`), PyTorch's kernel for
such weights, with x and results in bf16. It uses tensor cores, whose tiles are made for several
vectors, and is slower than even "convert" here. Inline PTX ("lop3") gains nothing over "bit_trick".
Its library arm, a C kernel with as few LOP3s, is faster: by 2 % on an H200 and 1 % on an H100.

nvcc makes two LOP3 of (word & mask) | bits if both constants are immediates, because the
instruction has room for one. Inline PTX gets one instruction, with the second constant in a
register. In C, a constant that the compiler cannot see (in `__constant__` memory) does the same.
That is the library arm of "lop3"; on an H100 "bit_trick" is 1 % faster than it. With half of the
LOP3s gone, "lop3" takes as long as "bit_trick" on an H200 and 2 % longer on an H100, so the kernel
does not wait for the integer units: this rung claims parity. Look at the counters before you write
PTX.

Each rung is compared with the one before; loads, scales and fp32 sums are the same in all. The
limit is one read of the weights at memory bandwidth. "bit_trick" reaches 61 to 62 % of it on H200s,
and 85 % on an H100, whose memory is slower. What binds on an H200 was not measured. It may be x:
for 16 bytes of weights from each of its four rows, a lane loads as many bytes of x, 64, from the
caches and converts them. There is no gain where plain C reaches the memory bandwidth already, as on
a GPU that delivers fewer weights per clock. With many vectors at once this is a GEMM on tensor
cores, where the same unpacking feeds the operands.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence, prepared, static

LADDER = ["convert", "bit_trick", "lop3"]
GROUP = 128
NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Position in its word of each of eight neighbouring weights."""

EVIDENCE = {
    "bit_trick": [evidence.opcode("I2FP", kernel="dot_bit_trick", max=0)],
    # 128 weights in the loop: one LOP3 per two, and a few for addresses
    "lop3": [evidence.opcode("LOP3", kernel="dot_lop3", min=64, max=80)],
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]


def matrix(bench: Bench) -> Inputs:
    """Draw words of eight weights, their scales, and x; y takes the result."""
    rows, columns = bench.size(65536, check=32), bench.size(8192, check=1152)
    device = bench.device
    words = torch.randint(-(2**31), 2**31, (rows, columns // 8), device=device, dtype=torch.int32)
    scales = torch.rand(rows, columns // GROUP, device=device).half() / 8
    x = torch.randn(columns, device=device).half()
    y = torch.empty(rows, device=device)
    return static(words), static(scales), x, y, rows, columns


def in_fp64(words, scales, x, *_):
    """Go in slices of rows: all weights in fp64 would take 4 GiB."""
    pairs = zip(words.split(2048), scales.split(2048), strict=True)
    return torch.cat([weights(*pair) @ x.double() for pair in pairs])


def weights(words, scales):
    groups = (nibbles(words).double() - 8).view(*scales.shape, GROUP)
    return (groups * scales[:, :, None].double()).flatten(1)


def nibbles(words):
    shifts = 4 * torch.tensor(NIBBLES, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).flatten(1)


def tinygemm(words, scales, *_):
    """Pack the weights for PyTorch's int4 product, in slices of rows; it subtracts 8 itself."""
    slices = (nibbles(part).to(torch.uint8) for part in words.split(2048))
    pairs = torch.cat([part[:, ::2] << 4 | part[:, 1::2] for part in slices])
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    scales = scales.T.bfloat16()
    scales_and_zeros = torch.stack([scales, torch.zeros_like(scales)], 2).contiguous()

    def product(words, scales, x, y, *_):
        x = x.bfloat16()[None]
        y.copy_(torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales_and_zeros)[0])

    return product


LIBRARY = prepared(tinygemm)


@pytest.mark.parametrize("rung", EVIDENCE)
def test_inline_ptx_packed_math(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    dot = nvcc("ch09/int4_dot.cu")
    compare(
        baseline=dot[LADDER[LADDER.index(rung) - 1]],
        optimized=dot[rung],
        library=LIBRARY if rung == "bit_trick" else dot["lop3_c"],
        against="idiomatic" if rung == "bit_trick" else "previous rung",
        inputs=matrix,
        work=lambda words, scales, x, y, rows, columns: Work(
            read=words.nbytes + scales.nbytes + x.nbytes,
            written=y.nbytes,
            flops=2 * rows * columns,
            dtype="fp32",
        ),
        reference=in_fp64,
        # that of tinygemm; the rung "lop3" checks both kernels with the tolerance of fp32
        precision="bf16" if rung == "bit_trick" else None,
        evidence=[*EVIDENCE[rung], evidence.spills(kernel=f"dot_{rung}")],
    )
