"""Copying to the GPU from pinned host memory beats copying from pageable memory.

The GPU's copy engine reads host memory by physical address, so the pages must not move. Pageable
memory may move: the driver first copies it, piece by piece, into its own pinned staging buffer, and
one CPU core's memory copy sets the pace. From pinned (page-locked) memory the engine reads directly
over PCIe, without the CPU.

The data is in pinned memory before the clock starts. A program that must first copy pageable data
there does the driver's staging copy itself and gains little. Pinning is slow (the system locks
every page) and leaves less memory to other programs, so it pays for buffers that are reused.

"pinned" waits for one copy. "chunks" enqueues 12 copies of 2 MiB; a caller could do other work
meanwhile, which is what overlap needs (test_pinned_prefetch_stream.py). Below about 64 KiB the
fixed cost of a copy dominates. The limit is the link: 64 GB/s for PCIe 5.0 x16, minus protocol
overhead.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, evidence

CHUNKS = 12


def buffers(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make the same values in pageable and in pinned memory, and their destination on the GPU."""
    values = torch.randn(bench.size(6 << 20, check=1024), device=bench.device)
    pinned = torch.empty(values.shape, pin_memory=True).copy_(values)
    return values.cpu(), pinned, torch.empty_like(values)


def pageable(source, pinned, out):
    out.copy_(source)


def blocking(source, pinned, out):
    out.copy_(pinned)


def in_chunks(source, pinned, out):
    for part, chunk in zip(out.chunk(CHUNKS), pinned.chunk(CHUNKS), strict=True):
        part.copy_(chunk, non_blocking=True)


RUNGS = {"pinned": blocking, "chunks": in_chunks}


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS)
def test_pinned_h2d(compare: Compare, rung: str) -> None:
    compare(
        baseline=pageable,
        optimized=RUNGS[rung],
        inputs=buffers,
        reference=lambda source, pinned, out: source,
        metric="wall",
        # the driver stages copies from pageable memory only
        evidence=[evidence.copied_bytes("host to device", memory="pageable", max=0)],
    )
