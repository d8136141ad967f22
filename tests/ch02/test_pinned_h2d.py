"""Copies between the GPU and pinned host memory beat copies from and to pageable memory.

The GPU's copy engine accesses host memory by physical address, so the pages must not move. Pageable
memory may move: the driver copies it, piece by piece, through a pinned staging buffer of its own,
and one CPU core's memory copy sets the pace. With pinned (page-locked) memory the engine transfers
directly over PCIe, without the CPU. "to_gpu" and "to_host" are the two directions. On an H200,
pinned copies run at 49 to 53 GB/s in both directions: the transfer of 24 MiB takes 456 µs (55
GB/s), and starting it and waiting for its end another 15 to 60. Pageable ones, which a CPU core
copies, run at 6 to 9 GB/s to the GPU and 12 to 16 to the host, depending on the host: hence the two
speedups. 5.5x was the aim of both; to the host it is missed, at 3.3x to 4.4x, because pageable
copies are faster in that direction. Why the two differ was not examined. In traces, the GPU's part
of a pageable copy took 1.4 to 2.0 ms in both directions: 35 to 60 % of a call to the GPU, and 83 %
or more of a call to the host.

The data is in pinned memory before the clock starts, or may stay there. A program that must first
copy pageable data there does the driver's staging copy itself and gains little. Pinning is slow
(the system locks every page) and leaves less memory to other programs, so it pays for buffers that
are reused.

All copies here wait until the data has arrived. Only a copy from or to pinned memory can return
earlier (`non_blocking=True`), which overlap needs (ch03/pinned_prefetch_stream). Below about 1 to 3
MB, starting the copy and waiting for its end (15 to 60 µs here) take longer than the transfer. The
limit is the link: 64 GB/s for PCIe 5.0 x16, minus protocol overhead.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, evidence, prepared


def on_host(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the same values in pageable and in pinned memory; allocate a destination on the GPU."""
    values = on_gpu(bench)
    pinned = torch.empty(values.shape, pin_memory=values.is_cuda).copy_(values)
    return values.cpu(), pinned, torch.empty_like(values)


def on_gpu(bench: Bench) -> torch.Tensor:
    return torch.randn(bench.size(6 << 20, check=1024), device=bench.device)


def from_pageable(pageable, pinned, out):
    out.copy_(pageable)


def from_pinned(pageable, pinned, out):
    out.copy_(pinned)


@prepared
def to_pageable(values):
    return torch.empty(values.shape).copy_


@prepared
def to_pinned(values):
    return torch.empty(values.shape, pin_memory=values.is_cuda).copy_


DIRECTIONS = {
    "to_gpu": (on_host, from_pageable, from_pinned, "host to device"),
    "to_host": (on_gpu, to_pageable, to_pinned, "device to host"),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pinned_h2d(compare: Compare, direction: str) -> None:
    inputs, pageable, pinned, copies = DIRECTIONS[direction]
    compare(
        baseline=pageable,
        optimized=pinned,
        inputs=inputs,
        reference=lambda values, *_: values,
        metric="wall",
        # the driver stages copies from and to pageable memory only
        evidence=[evidence.copied_bytes(copies, memory="pageable", max=0)],
    )
