"""Wider accesses put enough bytes in flight to copy at the speed of device memory.

By Little's law the rate is the bytes in flight over the latency. A full multiprocessor of threads
with one 4-byte load each has 8 KiB in flight, too little to cover the latency of fast memory; with
16-byte loads it has 32 KiB, with four of them a thread 128 KiB. Wide accesses also take a quarter
of the instructions.

The gain shrinks where memory is slower for each multiprocessor, and ends when memory is busy all
the time: then more in flight only waits longer. Addresses must be multiples of 16. The limit is
cudaMemcpyAsync, which moves the same bytes.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work

RUNGS = ["vector", "vector_unrolled", "vector_streaming", "vector_persistent"]


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**28, check=13_315)  # the check has chunks of every size and a tail of 3
    a = torch.randn(n, device=bench.device)
    return a, torch.empty_like(a), n


@pytest.mark.parametrize("rung", RUNGS)
def test_vectorized_copy(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    copy = nvcc("ch07/copy.cu")
    compare(
        baseline=copy["coalesced"],
        optimized=copy[rung],
        library=copy["cuda_memcpy"],
        against="idiomatic",
        inputs=floats,
        work=lambda a, out, n: Work(bytes=2 * a.nbytes),
        reference=lambda a, out, n: a,
    )
