"""One pass with k FMAs per element beats k passes; below the ridge it takes as long as one of them.

x -> a x + b is applied k times. By algebra the steps collapse to one FMA, as the reference computes
them; here they stand for k different operations. With a kernel per step, as eager PyTorch runs it,
each step reads and writes the array: k times the bytes, 0.25 operations per byte whatever k is. The
fused kernel reads each element once, keeps it in a register for all k steps, and writes it once.
Its arithmetic intensity is k / 4 operations per byte. The ridge is the ratio of the GPU's FMA rate
to its bandwidth: 15 operations per byte for an H200 in fp32, k = 60. Below it, memory sets the time
and k steps take as long as one: the gain is nearly k. Beyond it the FMAs set the time, which then
grows with k. The share is measured against the roofline: the lower of the two limits. The library
arm, one kernel of torch.compile, fuses the loop as well. On an H200 it takes 4 to 5 % less time
below the ridge, 1.5 % less beyond it and 3 % more at the ridge; on an H100, from k = 32 on, it
takes 1 to 2 % less.

On an H200 the sweep has two points below the ridge, one at it and one beyond. At the ridge, the
bytes alone would take 125 µs and the FMAs alone 133. The kernel takes 157, so neither hides the
other entirely. That is 84 to 85 % of the roofline; 90 % was the aim, and torch.compile's kernel
reaches 82 to 83 %. On an H100, whose memory is slower, the ridge is at k = 86, so k = 64 lies below
it: the gain is 63. Fusing needs steps that follow each other element by element; a step that needs
other elements starts a new pass.
"""

import pytest
import torch

from kernels.ch01 import fma_passes
from pytest_aiperf import Bench, Compare, Work, evidence


def elements(k):
    def inputs(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.randn(bench.size(2**26 + 1000, check=5000), device=bench.device)
        return x, torch.empty_like(x), k

    return inputs


def in_fp64(x, out, k):
    """Use the sum of the geometric series."""
    factor = fma_passes.A**k
    return x.double() * factor + fma_passes.B * (1 - factor) / (1 - fma_passes.A)


@pytest.mark.parametrize("k", [8, 32, 64, 256])
def test_roofline_fma_sweep(compare: Compare, k: int) -> None:
    compare(
        baseline=fma_passes.passes,
        optimized=fma_passes.fused,
        library=torch.compile(fma_passes.passes, dynamic=False),
        against="naive",
        inputs=elements(k),
        work=lambda x, out, k: Work(
            read=x.nbytes, written=out.nbytes, flops=2 * k * x.numel(), dtype="fp32"
        ),
        reference=in_fp64,
        evidence=[
            evidence.kernels(max=1),
            evidence.counter("dram__bytes.sum", max=1.05, per="work"),
            evidence.spills(),
        ],
    )
