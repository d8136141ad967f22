"""One stacked matmul call beats a Python loop over 2048 tiny matrices.

A product of two 16x16 matrices is 8192 operations, a fraction of a microsecond. A call from Python
costs more than a microsecond: the interpreter runs the loop and creates three views, then NumPy
parses arguments, selects a loop for the types, and checks shapes and strides. A stack of matrices
pays for that once, and the loop over the products runs in C.

Both arms compute the same products, so the gain is limited by the time per call over the time per
product. It grows as matrices shrink, and vanishes where a product takes longer than its call, by
estimate from about 64x64. All matrices of a stack have one shape: pad ragged ones, or group them by
size. A test beside the claim counts the calls of both arms, 2048 and 1.
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


class Counted(np.ndarray):
    """An array that counts the calls of NumPy's functions on it and on its views."""

    calls = 0

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        Counted.calls += 1
        plain = [x.view(np.ndarray) for x in inputs]
        return getattr(ufunc, method)(*plain, out=tuple(x.view(np.ndarray) for x in out), **options)


@pytest.mark.parametrize(("arm", "calls"), [(one_by_one, 2048), (stacked, 1)])
def test_calls_of_an_arm(arm, calls: int) -> None:
    Counted.calls = 0
    arm(*(np.ones((2048, 2, 2)).view(Counted) for _ in range(3)))
    assert Counted.calls == calls


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
