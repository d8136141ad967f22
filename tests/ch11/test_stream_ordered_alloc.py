"""Scratch memory from a pool, in the order of the stream, beats cudaMalloc and cudaFree.

cudaMalloc maps physical memory and cudaFree unmaps it, a matter of tens to hundreds of microseconds
each; and cudaFree waits until the GPU is idle, so that the launches behind it come late as well. A
stream-ordered allocation is an entry in the stream: what one step frees the next one takes, neither
mapped nor waited for. "pool" gives its memory back to the system at every synchronisation, hence
pays for one mapping a call; "retained" keeps it.

Both arms launch the same kernels, so the time saved is the allocator's. What the caller waits
(wall) is judged; each call ends with a wait for its answer. Where sizes are known in advance,
allocating once outside the loop is as good, and a framework's own caching allocator does what the
pool does. The gain shrinks as the kernels between two allocations grow longer; memory that a pool
retains is lost to other processes.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work


def rows(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    count, n = bench.size(8, check=3), bench.size(2**22, check=1000)
    a = torch.randn(count, n, device=bench.device)
    return a, torch.empty_like(a), count, n


def smoothed_twice(a, out, count, n):
    a = a.double()
    for _ in range(2):
        a = (a.roll(1, 1) + a + a.roll(-1, 1)) / 3
    return a


@pytest.mark.parametrize("rung", ["pool", "retained"])
def test_stream_ordered_alloc(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    smooth = nvcc("ch11/scratch_memory.cu")
    compare(
        baseline=smooth["malloc_free"],
        optimized=smooth[rung],
        inputs=rows,
        work=lambda a, out, count, n: Work(bytes=2 * a.nbytes),
        reference=smoothed_twice,
        metric="wall",
    )
