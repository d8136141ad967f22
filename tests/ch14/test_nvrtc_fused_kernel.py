"""A kernel compiled at run time beats the ten array operations that it fuses.

CuPy runs every array operation as a kernel of its own: LayerNorm and SiLU, written in NumPy's
terms, pass 256 MiB through memory about 20 times. NVRTC compiles CUDA C++ from a string while the
program runs, in a fraction of a second, and CuPy keeps the result on disk. The fused kernel reads
each row once and writes it once; because it is compiled for the width at hand, its loops unroll and
the row stays in registers between the two sums. The ratio of the passes is about 10; the rest of
the gain is that CuPy's reductions over rows do not reach the speed of memory, and the kernel does.
torch.compile of the same operations, over views of the same arrays, is the library arm.

It ends where the arithmetic left over outweighs the bytes, where a row outgrows the registers of a
block, and where widths change all the time: each new width is a new compilation.
"""

import cupy
import pytest
import torch

from kernels.ch14.layernorm_silu import EPSILON, layernorm_silu
from pytest_aiperf import Bench, Compare, Work, evidence


def rows(bench: Bench) -> tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray]:
    rng, width = cupy.random.default_rng(bench.seed), 4096
    scale, shift = rng.standard_normal((2, width), dtype=cupy.float32)
    count = bench.size(16384, check=8)
    return rng.standard_normal((count, width), dtype=cupy.float32), scale, shift


def separate(x, scale, shift):
    y = x - x.mean(axis=1, keepdims=True)
    y /= cupy.sqrt(x.var(axis=1, keepdims=True) + EPSILON)
    y *= scale
    y += shift
    return y / (1 + cupy.exp(-y))


@torch.compile(dynamic=False)
def fused_by_torch(x, scale, shift):
    y = x - x.mean(1, keepdim=True)
    y = y / torch.sqrt(x.var(1, correction=0, keepdim=True) + EPSILON) * scale + shift
    return y / (1 + torch.exp(-y))


def compiled(*arrays):
    """Hand the arrays over and back through their addresses: nothing is copied."""
    return cupy.asarray(fused_by_torch(*(torch.as_tensor(each, device="cuda") for each in arrays)))


def in_fp64(x, scale, shift):
    x = x.astype(cupy.float64)
    x -= x.sum(axis=1, keepdims=True) / x.shape[1]
    lengths = cupy.linalg.norm(x, axis=1, keepdims=True)
    y = x * (lengths**2 / x.shape[1] + EPSILON) ** -0.5 * scale + shift
    return y / 2 * (1 + cupy.tanh(y / 2))


@pytest.mark.gpu
def test_nvrtc_fused_kernel(compare: Compare) -> None:
    compare(
        baseline=separate,
        optimized=layernorm_silu,
        library=compiled,
        inputs=rows,
        work=lambda x, scale, shift: Work(2 * x.nbytes + 2 * scale.nbytes, 16 * x.size, "fp32"),
        reference=in_fp64,
        evidence=[
            evidence.kernels(1),
            evidence.counter("dram__bytes.sum", most=1.1, per="work"),
        ],
    )
