"""One stacked matmul call beats a Python loop over 2048 tiny matrices.

A product of two 16x16 matrices is 8192 operations, a fraction of a microsecond. Calling it from
Python costs several: the interpreter walks the loop and makes three views, NumPy parses arguments,
picks a loop for their types and checks shapes and strides, all to learn what it learnt the time
before. A stack of matrices goes through that once; the loop over the products runs in C.

The same products are computed, so the limit is the ratio of the time of a call to that of a
product. It grows as matrices shrink, and is gone where a product outlasts its call, from about
64x64. Stacks must have one shape: ragged ones are padded or sorted by size first.
"""

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work


def matrices(bench: Bench) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng, n = np.random.default_rng(bench.seed), 16
    a, b = rng.random((2, bench.size(2048, check=20), n, n), np.float32)
    return a, b, np.empty_like(a)


def one_by_one(a, b, out):
    for x, y, z in zip(a, b, out, strict=True):
        np.matmul(x, y, out=z)


def stacked(a, b, out):
    np.matmul(a, b, out=out)


@pytest.mark.host
def test_batched_matmul_host(compare: Compare) -> None:
    compare(
        baseline=one_by_one,
        optimized=stacked,
        inputs=matrices,
        work=lambda a, b, out: Work(3 * a.nbytes, 2 * a.size * a.shape[-1], "fp32"),
        reference=lambda a, b, out: np.einsum("bik,bkj->bij", a.astype(float), b.astype(float)),
        metric="wall",
        cache="warm",
    )
