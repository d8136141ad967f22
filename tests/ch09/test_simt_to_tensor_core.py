"""Tensor cores multiply bf16 matrices over nine times as fast as the SM's fp32 units.

A kernel that multiplies bf16 with ordinary instructions (SIMT) converts each element to fp32, and a
warp issues one FMA per 32 products. A tensor core multiplies whole fragments: one warp-wide
mma.sync makes 2048 products for 16 x 8 outputs, and takes bf16 as it is. On Hopper, that is still
half the speed of cuBLAS, the library arm, which uses wgmma. For mma.sync, warps first load all
fragments into registers; wgmma reads tiles from shared memory. How much of the other half is due to
that was not measured. ch10/wgmma_ladder starts with mma.sync and goes there.

Sums are in fp32 in both kernels, and tiles, threads and copies are the same; what multiplies the
tiles is the only difference. The baseline keeps 8 x 8 sums per thread in registers and copies tiles
two steps ahead. Most of its instructions are FMAs already, and on an H200 it does 39 TFLOP/s, three
quarters of cuBLAS in fp32 (ch07/tiled_matmul_ladder), so only other units can be much faster.
Packed arithmetic (HFMA2) would double the rate of the ordinary units, but round each sum to the 8
bits of bf16. Tensor cores gain nothing where bytes are the limit, as in a product with a vector.
"""

import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]


def matrices(bench: Bench) -> Matrices:
    # check sizes of several tiles and steps, different in each direction
    m, n, k = (bench.size(4096, check=size) for size in (256, 384, 320))
    a = torch.randn(m, k, device=bench.device).bfloat16()
    b = torch.randn(n, k, device=bench.device).bfloat16()
    return a, b, torch.empty(m, n, device=bench.device, dtype=torch.bfloat16), m, n, k


def test_simt_to_tensor_core(compare: Compare, nvcc: Nvcc) -> None:
    product = nvcc("ch09/tensor_cores.cu")
    compare(
        baseline=product["fp32_units"],
        optimized=product["tensor_cores"],
        library=lambda a, b, out, m, n, k: torch.mm(a, b.T, out=out),
        against="idiomatic",
        inputs=matrices,
        work=lambda a, b, out, m, n, k: Work(
            read=a.nbytes + b.nbytes, written=out.nbytes, flops=2 * m * n * k, dtype="bf16"
        ),
        reference=lambda a, b, out, m, n, k: a.double() @ b.double().T,
        evidence=[
            evidence.opcode("HMMA.16816", kernel="TensorCores"),
            # an mma.sync makes as many products as 64 FMAs; loads and addresses remain
            evidence.counter("smsp__inst_executed.sum", max=0.15, per="baseline"),
            evidence.spills(kernel="TensorCores"),
        ],
    )
