"""A context manager for the precision of fp32 matrix products on the GPU."""

from contextlib import contextmanager

import torch


@contextmanager
def fp32_products(precision):
    """Compute fp32 products in full precision ("ieee") or on the tensor cores in TF32 ("tf32").

    The setting applies to the whole process, so the previous one is restored at the end. torch
    selects the kernel at launch, so a product that is still queued at the end is not affected.
    """
    matmul = torch.backends.cuda.matmul
    previous, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = previous
