"""More resident warps hide the latency of memory, until its bandwidth is used up.

A block that asks for all the shared memory of a multiprocessor is alone there: 8 warps of 64, each
waiting most of its time for its 16 bytes a lane. 4 KiB in flight on each multiprocessor over a
latency of most of a microsecond is a fraction of what memory can deliver. Two blocks that share the
multiprocessor put twice as much in flight, four come near the limit, and eight gain little more:
occupancy is a means to keep memory busy, and worth nothing beyond that.

The kernel and its bytes are the same in every rung; only the shared memory that a block reserves
differs; the lowest is a handicap on purpose, hence a naive baseline. More loads in flight a thread
(ch06, elementwise_ilp) reach the same end with few warps.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

RESIDENT = "sm__warps_active.avg.pct_of_peak_sustained_active"
PERCENT = {"quarter": 25, "half": 50, "full": 100}


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    n = bench.size(2**26, check=4096)
    a = torch.randn(n, device=bench.device)
    return a, torch.empty_like(a), 0.75, n


@pytest.mark.parametrize("rung", PERCENT)
def test_occupancy_block_size(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    scale = nvcc("ch08/occupancy.cu")
    compare(
        baseline=scale["eighth"],
        optimized=scale[rung],
        against="naive",
        inputs=floats,
        work=lambda a, out, by, n: Work(bytes=2 * a.nbytes, flops=n, dtype="fp32"),
        reference=lambda a, out, by, n: a.double() * by,
        evidence=[
            # of all rungs: with more registers "full" would not be full
            evidence.registers(most=32, kernel="scale"),
            evidence.counter(RESIDENT, kernel="scale", least=0.8 * PERCENT[rung]),
        ],
    )
