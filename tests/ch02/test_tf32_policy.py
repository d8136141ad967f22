"""One switch moves fp32 matrix products to the tensor cores, at a known error.

TF32 is fp32 with 10 bits of fraction instead of 23: a tensor core drops the other 13 as it reads
the operands, multiplies, and adds up in fp32. Matrices stay fp32 in memory, nothing is converted,
no code changes but `torch.backends.cuda.matmul.fp32_precision`. Off, as torch ships it, a product
runs on the fp32 units, at an eighth of the rate of tf32 on Hopper, which is the limit of the gain.

The price is known beforehand: an operand is off by 2**-10 at most, so that a result is off by about
1e-3 of its typical size, however large the matrices; `precision` holds the claim to that. Training
and inference of neural networks seldom notice; solvers that iterate to fp32 accuracy do. Products
that are bound by memory (a few rows, small matrices) gain nothing, since the bytes are the same.
The switch is the whole process's, hence it is set for the one call and put back.
"""

import torch

from kernels.ch01.fp32_products import fp32_products
from pytest_aiperf import Bench, Compare, Work, evidence


def matrices(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    n = bench.size(4096, check=64)
    return torch.randn(n, n, device=bench.device), torch.randn(n, n, device=bench.device)


def full(a, b):
    with fp32_products("ieee"):
        return a @ b


def tf32(a, b):
    with fp32_products("tf32"):
        return a @ b


def test_tf32_policy(compare: Compare) -> None:
    compare(
        baseline=full,
        optimized=tf32,
        inputs=matrices,
        work=lambda a, b: Work(3 * a.nbytes, 2 * a.numel() * a.shape[0], "tf32"),
        reference=lambda a, b: a.double() @ b.double(),
        precision="tf32",
        # hardly a multiplication is left to the fp32 units
        evidence=[
            evidence.counter(
                "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum", most=0.01, per="baseline"
            )
        ],
    )
