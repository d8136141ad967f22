"""Copies from pinned host memory run at the speed of PCIe; from pageable memory they do not.

The GPU's copy engine reads host memory by physical address, so the pages must stay where they are.
Pageable memory may move: the driver copies it, piece by piece, into a pinned buffer of its own, and
the engine fetches it from there. A CPU core's memory copy, not PCIe, sets the pace. From pinned
(page-locked) memory the engine reads directly, and the CPU does nothing.

"pinned" waits for the copy; "chunks" enqueues 12 copies and could go on with other work, which is
what overlapping needs (test_pinned_prefetch_stream.py); pieces of 2 MiB still run at nearly full
speed (8 % less here). What the caller waits (wall) is judged. Pinning itself is slow, a system call
for every page, so it pays for buffers that are used again; and pinned memory is lost to everyone
else. Below about 64 KiB the fixed cost of a copy counts for more. The limit is the link: 64 GB/s
for PCIe 5 x16 on paper, about 55 in practice.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare

CHUNKS = 12


def buffers(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same values in pageable and in pinned memory, and where they are to go."""
    values = torch.randn(bench.size(6 << 20, check=1024), device=bench.device)
    pinned = torch.empty(values.shape, pin_memory=True).copy_(values)
    return values.cpu(), pinned, torch.empty_like(values)


def pageable(source, pinned, out):
    out.copy_(source)


def waited_for(source, pinned, out):
    out.copy_(pinned)


def in_chunks(source, pinned, out):
    for part, piece in zip(out.chunk(CHUNKS), pinned.chunk(CHUNKS), strict=True):
        part.copy_(piece, non_blocking=True)


RUNGS = {"pinned": waited_for, "chunks": in_chunks}


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS)
def test_pinned_h2d(compare: Compare, rung: str) -> None:
    compare(
        baseline=pageable,
        optimized=RUNGS[rung],
        inputs=buffers,
        reference=lambda source, pinned, out: source,
        metric="wall",
    )
