"""All passes over a few frames that the caches hold beat each pass over all frames in turn.

To find the background of an astronomical frame, sigma clipping leaves out all pixels that are far
from the mean, and repeats that with the mean and deviation of the rest: six passes here, and each
needs the sums of the one before. A batch of 128 frames is 512 MiB, many times the L2 cache, so each
pass over all of them ("sweeps") reads device memory. Frames do not depend on each other. If all six
passes run over a few frames before the next frames begin (cache blocking), only the first of them
reads device memory, and the others find the frames in the caches.

"resident" is one persistent kernel, in which a group of blocks takes a frame through all passes and
meets at a barrier in device memory (a cooperative launch). Six frames (24 MiB) are in flight. Each
SM has blocks of several groups, so that some load while others wait. The same order with a kernel
per pass and six frames has 132 short kernels, whose starts, first loads and last sums cost more
than the cache saves: 1.39 ms in an earlier run, where six passes at the rate of device memory would
take 0.7. The present claim has no record.

If one pass of six reads device memory and five the L2 cache, at twice the rate, "resident" can be
at most 1.7 times as fast. More frames at once would leave the cache: of data that all SMs read it
holds about half its size, because each of its two halves keeps a copy. The library arm is
torch.compile, which makes one sweep per pass. A frame that fits the registers of a few SMs needs
neither cache nor further reads.
"""

import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

PASSES = 6

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


def test_l2_resident_blocking(compare: Compare, nvcc: Nvcc) -> None:
    clip = nvcc("ch02/sigma_clip.cu")
    compare(
        baseline=clip["sweeps"],
        optimized=clip["resident"],
        library=compiled,
        inputs=frames,
        work=lambda x, out, *_: Work(read=x.nbytes, written=out.nbytes),
        reference=in_fp64,
        cache="warm",  # makes no difference: the frames are many times the L2 capacity
        # one pass of six reads device memory
        evidence=[evidence.counter("dram__bytes_read.sum", max=1.8, per="work")],
    )
