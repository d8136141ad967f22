"""Keeping data that each kernel reads again in the L2 cache beats letting a stream evict it.

A camera's frames are corrected as they arrive: for each pixel, a dark value is subtracted, and the
rest is multiplied by the pixel's gain. The two maps are 34 MB for a sensor of 2048 x 2048 pixels,
and each frame needs them again; a frame and its result, 25 MB, are needed once. All of that passes
through an L2 cache of 60 MB, which treats it alike. So lines of the maps are evicted for lines that
nobody will ask for again, and more than half of the bytes of a frame can be the maps once more.

"hints" marks the loads of frames and the stores of results as evict-first; "window" marks the maps
as persisting, with an access-policy window over their addresses and a part of the cache set aside.
Both kernels do the same work as the baseline. The limit is the ratio of the bytes, 14 per pixel
over 6, and the L2 cache's own bandwidth. There is nothing to gain if the maps are small, because
they stay in the cache anyway, or much larger than it. If all frames are there at once, do
better: let each thread correct its pixel in all frames, with the maps in registers.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

Frames = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]


def frames(bench: Bench) -> Frames:
    """Draw frames of 12-bit values, the maps of dark values and gains; the last is their count."""
    pixels, count = bench.size(2048**2, check=36), bench.size(64, check=3)
    raw = torch.randint(4096, (count, pixels), dtype=torch.int16, device=bench.device)
    maps = torch.rand(2, pixels, device=bench.device) + 0.5
    return raw, maps, torch.empty(count, pixels, device=bench.device), pixels, count


def in_fp64(raw, maps, *_):
    dark, gain = maps.double()
    return torch.addcmul(-dark * gain, raw.double(), gain)


@pytest.mark.parametrize("rung", ["hints", "window"])
def test_l2_persisting_window(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    correct = nvcc("ch07/flat_field.cu")
    compare(
        baseline=correct["no_policy"],
        optimized=correct[rung],
        inputs=frames,
        work=lambda raw, maps, out, pixels, count: Work(
            read=raw.nbytes + maps.nbytes, written=out.nbytes
        ),
        reference=in_fp64,
        evidence=[evidence.counter("dram__bytes.sum", max=0.8, per="baseline")],
    )
