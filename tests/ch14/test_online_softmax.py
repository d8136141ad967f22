"""A softmax that reads each row from memory once beats one pass per step.

Written as four steps, softmax runs as five kernels (maximum, difference, exponential, sum,
quotient), and rows of 8192 columns pass through memory eight times: five reads and three writes.
One block that keeps its row on the chip needs one read and one write: 4x by the bytes, and more
where the eager reductions do not reach the speed of memory. "online" finds maximum and sum in the
same sweep by rescaling the sum whenever the maximum grows, and fetches the row a second time from
the L2 cache; "resident" holds the row in registers.

torch.compile of the four steps is the library arm: it fuses them, too. The gain ends where the
whole matrix stays in the L2 cache; "resident" ends where a row outgrows the registers of a block,
and "online" loses its cache hits when the rows in flight outgrow the cache.
"""

import pytest
import torch

from kernels.ch14 import softmax
from pytest_aiperf import Bench, Compare, Work, evidence


def rows(bench: Bench) -> torch.Tensor:
    shape = bench.size(8192, check=3), bench.size(8192, check=5000)
    return torch.randn(shape, device=bench.device)


def four_steps(x):
    y = (x - x.amax(1, keepdim=True)).exp_()
    return y.div_(y.sum(1, keepdim=True))


@pytest.mark.parametrize("rung", ["online", "resident"])
def test_online_softmax(compare: Compare, rung: str) -> None:
    compare(
        baseline=four_steps,
        optimized=getattr(softmax, rung),
        library=torch.compile(four_steps, dynamic=False),
        inputs=rows,
        work=lambda x: Work(bytes=2 * x.nbytes, flops=5 * x.numel(), dtype="fp32"),
        reference=lambda x: torch.softmax(x.double(), 1),
        evidence=[
            evidence.kernels(1),
            evidence.spills(kernel=f"_{rung}"),
            evidence.counter("dram__bytes.sum", most=1.1, per="work"),
        ],
    )
