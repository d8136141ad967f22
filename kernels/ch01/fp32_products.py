"""A context manager for the precision of fp32 matrix products on the GPU."""

from contextlib import contextmanager

import torch


@contextmanager
def fp32_products(precision):
    """Compute fp32 products in full precision ("ieee") or on the tensor cores in TF32 ("tf32").

    The switch is global to the process, so the previous value is restored: other products must not
    change. torch selects the kernel at launch, so the switch need not outlast the launch.
    """
    matmul = torch.backends.cuda.matmul
    previous, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = previous
