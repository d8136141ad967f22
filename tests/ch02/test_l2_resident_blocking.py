"""Passes over a few frames in the L2 cache, in a persistent kernel, beat a kernel per pass.

To find the background of an astronomical frame, sigma clipping leaves out all pixels that are far
from the mean, and repeats that with the mean and deviation of the rest: six passes here, and each
needs the sums of the one before. A batch of 128 frames is 512 MiB, many times the L2 cache, so each
pass over all of them ("sweeps") reads device memory. Frames do not depend on each other. If all six
passes run over a few frames before the next frames begin (cache blocking), only the first of them
reads device memory, and the others find the frames in the L2 cache.

"chunks" runs the same kernel in that order, on six frames (24 MiB) at a time. The price is that
each of its 132 kernels is short: its start, first loads and last sums are no longer negligible.
"resident" is one persistent kernel, in which a group of blocks takes a frame through all passes and
meets at a barrier in device memory (a cooperative launch). Each SM has blocks of several groups, so
that some load while others wait. It is judged against "chunks", and took about half of its time in
a run on almost the same frames. In that run "resident" took 0.72 ms and "chunks" 1.39; six passes
at the rate of device memory take about 0.7 ms. Whether "resident" also beats "sweeps" is therefore
open. The present claim has no record: "sweeps" and "chunks" have not been compared yet, so "chunks"
is only required to be no slower.

If one pass of six reads device memory and five the L2 cache, at twice the rate, both rungs together
can be at most 1.7 times as fast as "sweeps". Chunks that are too large leave the cache, and of data
that all SMs read it holds about half its size, because each of its two halves keeps a copy. The
library arm is torch.compile, which makes one sweep per pass. A frame that fits the registers of a
few SMs needs neither cache nor further reads.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LADDER = ["sweeps", "chunks", "resident"]
PASSES = 6
EVIDENCE = {
    # one pass of six reads device memory
    "chunks": [evidence.counter("dram__bytes_read.sum", max=0.5, per="baseline")],
    # one kernel for all passes and chunks, which still reads device memory about once
    "resident": [
        evidence.kernels(max=2),
        evidence.counter("dram__bytes_read.sum", max=1.8, per="work"),
    ],
}

Frames = tuple[torch.Tensor, torch.Tensor, int, int]


def frames(bench: Bench) -> Frames:
    """Draw frames of a noisy background, different in each, with stars in 2 % of the pixels."""
    count, pixels = bench.size(128, check=5), bench.size(1024**2, check=5000)
    level, noise = torch.rand(2, count, 1, device=bench.device)
    x = torch.randn(count, pixels, device=bench.device).mul_(5 + 10 * noise).add_(100 + 100 * level)
    for frame in x:
        stars = torch.randperm(pixels, device=bench.device)[: pixels // 50]  # without repeats
        frame[stars] += torch.empty_like(frame[stars]).exponential_(1 / 200)
    return x, torch.empty(count, 2, device=bench.device), count, pixels


def background(x):
    """Return mean and standard deviation of each row of ``x`` after all passes."""
    mean, deviation = x.new_zeros(len(x), 1), x.new_full((len(x), 1), torch.inf)
    for _ in range(PASSES):
        difference = x - mean
        keep = difference.abs() <= 3 * deviation
        count = keep.sum(1, keepdim=True)
        correction = torch.where(keep, difference, 0).sum(1, keepdim=True) / count
        squares = torch.where(keep, difference.square(), 0).sum(1, keepdim=True) / count
        mean, deviation = mean + correction, (squares - correction.square()).sqrt()
    return torch.cat((mean, deviation), 1)


@torch.compile(dynamic=False)
def compiled(x, out, *_):
    out.copy_(background(x))


def in_fp64(x, *_):
    results = []
    for frame in x:
        kept = pixels = frame.double()
        for _ in range(PASSES - 1):
            variance, mean = torch.var_mean(kept, correction=0)
            kept = pixels[(pixels - mean).abs() <= 3 * variance.sqrt()]
        results.append(torch.stack((kept.mean(), kept.std(correction=0))))
    return torch.stack(results)


@pytest.mark.parametrize("rung", EVIDENCE)
def test_l2_resident_blocking(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    clip = nvcc("ch02/sigma_clip.cu")
    compare(
        baseline=clip[LADDER[LADDER.index(rung) - 1]],
        optimized=clip[rung],
        library=compiled,
        against="idiomatic" if rung == "chunks" else "previous rung",
        inputs=frames,
        work=lambda x, out, *_: Work(read=x.nbytes, written=out.nbytes),
        reference=in_fp64,
        cache="warm",  # makes no difference: the frames are many times the L2 capacity
        evidence=EVIDENCE[rung],
    )
