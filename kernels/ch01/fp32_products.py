"""How torch computes products of fp32 matrices on a GPU: a switch that is put back."""

from contextlib import contextmanager

import torch


@contextmanager
def fp32_products(how):
    """Compute them in full ("ieee") or with operands rounded to 10 bits ("tf32"), here only.

    The switch is the process's own, so what it was before is restored: nobody else's products may
    change. Kernels are chosen when a product is launched; the switch need not outlast that.
    """
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, how
    try:
        yield
    finally:
        matmul.fp32_precision = before
