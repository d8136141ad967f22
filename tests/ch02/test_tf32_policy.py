"""Switching fp32 matrix products to TF32 tensor cores beats computing them on the fp32 units.

TF32 is fp32 with 10 bits of fraction instead of 23. The product rounds its operands to that,
multiplies on tensor cores, and accumulates in fp32. Matrices stay fp32 in memory and need no
conversion. Only `torch.backends.cuda.matmul.fp32_precision` changes. By default torch runs the
product on the fp32 units, at an eighth of the tf32 rate on Hopper, which limits the gain to 8x.

The error is known in advance: an operand is off by at most 2**-11 of its value, and the errors of
many products average out. The result's error (2.9e-4 rms as measured), whatever the size of the
matrices, is what rounding predicts; cutting the bits off would give 7.7e-4. `precision` holds the
claim to 2e-3 rms. Neural networks rarely notice; solvers that iterate to fp32 accuracy do.
Memory-bound products (a few rows, small matrices) gain nothing, since they move the same bytes. The
switch is global to the process, so the arms set it for one call and restore it.
ch01/precision_ladder_mlp has the same switch in a layer; here it is alone.
"""

import torch

from kernels.ch01.fp32_products import fp32_products
from pytest_aiperf import Bench, Compare, Work, evidence


def matrices(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    n = bench.size(4096, check=64)
    return torch.randn(n, n, device=bench.device), torch.randn(n, n, device=bench.device)


def fp32(a, b):
    with fp32_products("ieee"):
        return a @ b


def tf32(a, b):
    with fp32_products("tf32"):
        return a @ b


def test_tf32_policy(compare: Compare) -> None:
    compare(
        baseline=fp32,
        optimized=tf32,
        inputs=matrices,
        work=lambda a, b: Work(
            read=a.nbytes + b.nbytes,
            written=a.nbytes,
            flops=2 * a.numel() * a.shape[0],
            dtype="tf32",
        ),
        reference=lambda a, b: a.double() @ b.double(),
        precision="tf32",
        # almost no multiplication is left on the fp32 units
        evidence=[
            evidence.counter(
                "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum", max=0.01, per="baseline"
            )
        ],
    )
