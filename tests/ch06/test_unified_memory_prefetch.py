"""Prefetching managed memory to the GPU beats migrating its pages on demand.

Managed (unified) memory has one address for CPU and GPU. After the CPU has written it, its pages
are in host memory, and the first access of a kernel to each of them faults. The GPU collects
faults, and the driver on the CPU migrates these pages and some of their neighbors, while the warps
wait. cudaMemPrefetchAsync migrates all pages ahead of the kernel, in large pieces and without
faults. The kernel is the same. The library arm uses no managed memory: it copies the same data from
pinned memory, which a program should prefer where it can. It takes 9 to 14 % less time than the
prefetch on H200s and 11 % less on an H100.

The score is the time from the launch until the result is there; the writing on the CPU before it is
not part of it. On H200s, data arrives at 6 to 9 GB/s on demand, at 43 to 46 with the prefetch and
at 50 to 51 from pinned memory. On demand, the driver on the CPU most likely sets the pace, so the
gain varies: 5.2x to 7.3x. Faults are fine where a kernel touches few of the pages, and nobody knows
in advance which ones. For data beyond the GPU's memory, pages must also move back, which is slower
still. Where the hardware keeps the memory of CPU and GPU coherent (GH200, GB200), a kernel can read
host memory without a fault. The GPU's page faults are not counted here. The evidence is their
effect: the clocks in which the SMs hold warps. On demand they hold them until the last page has
come, and after a prefetch only for as long as the kernel takes to read device memory.
"""

import time
from functools import partial

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Score, evidence


def host_data(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Draw values in pinned host memory; make room for the result on the GPU."""
    n = bench.size(2**25 - 7, check=3001)
    values = torch.randn(n, device=bench.device)
    return torch.empty(n, pin_memory=True).copy_(values), torch.empty_like(values), n


def timed(write_on_host, launch, values, out, n):
    write_on_host(values, n)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    launch(values, out, n)
    torch.cuda.synchronize()
    return Score(1e3 * (time.perf_counter() - begin), "ms", "lower")


@pytest.mark.gpu
def test_unified_memory_prefetch(compare: Compare, nvcc: Nvcc) -> None:
    kernels = nvcc("ch06/managed_memory.cu")
    compare(
        baseline=partial(timed, kernels["write_on_host"], kernels["on_demand"]),
        optimized=partial(timed, kernels["write_on_host"], kernels["prefetched"]),
        library=partial(timed, kernels["write_on_host"], kernels["copied"]),
        inputs=host_data,
        reference=lambda values, out, n: 2 * values.to(out.device).double() + 1,
        metric="score",
        # warps are on the SMs for as long as their pages take to arrive, or find them there
        evidence=[evidence.counter("sm__cycles_active.max", max=0.05, per="baseline")],
    )
