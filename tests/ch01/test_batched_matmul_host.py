"""One stacked matmul call beats a Python loop over 2048 tiny matrices.

A product of two 16x16 matrices is 8192 operations, a fraction of a microsecond. A call from Python
costs several microseconds: the interpreter runs the loop and creates three views, then NumPy parses
arguments, selects a loop for the types, and checks shapes and strides. A stack of matrices pays for
that once, and the loop over the products runs in C.

Both arms compute the same products, so the gain is limited by the time per call over the time per
product. It grows as matrices shrink, and vanishes where a product takes longer than its call, from
about 64x64. All matrices of a stack have one shape: pad ragged ones, or group them by size. The
ratio is the only evidence: nothing counts the interpreter's calls here.
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
        work=lambda a, b, out: Work(
            read=a.nbytes + b.nbytes,
            written=out.nbytes,
            flops=2 * a.size * a.shape[-1],
            dtype="fp32",
        ),
        reference=lambda a, b, out: np.einsum("bik,bkj->bij", a.astype(float), b.astype(float)),
        metric="wall",
        cache="warm",
    )
