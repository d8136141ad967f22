"""A kernel compiled at run time beats the ten array operations that it fuses.

CuPy runs every array operation as a kernel of its own: LayerNorm and SiLU, written in NumPy's
terms, pass 256 MiB through memory about 20 times. NVRTC compiles CUDA C++ from a string while the
program runs, in a fraction of a second, and CuPy keeps the result on disk. The fused kernel reads
each row once and writes it once; because it is compiled for the width at hand, its loops unroll and
the row stays in registers between the two sums. The ratio of the passes is about 10; the rest of
the gain is that CuPy's reductions over rows do not reach the speed of memory, and the kernel does.

It ends where the arithmetic left over outweighs the bytes, where a row outgrows the registers of a
block, and where widths change all the time: each new width is a new compilation.
"""

import cupy
import pytest

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


@pytest.mark.gpu
def test_nvrtc_fused_kernel(compare: Compare) -> None:
    compare(
        baseline=separate,
        optimized=layernorm_silu,
        inputs=rows,
        work=lambda x, scale, shift: Work(2 * x.nbytes + 2 * scale.nbytes, 16 * x.size, "fp32"),
        reference=lambda x, scale, shift: separate(x.astype(cupy.float64), scale, shift),
        evidence=[
            evidence.kernels(1),
            evidence.counter("dram__bytes.sum", most=1.1, per="work"),
        ],
    )
