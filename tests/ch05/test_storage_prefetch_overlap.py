"""Reading the next batch from a disk while the GPU works on this one beats taking turns.

A service evaluates images from a file that is too large for the page cache. The usual loop reads a
batch, copies it to the GPU, evaluates it, and takes the result: the disk waits for the GPU, and the
GPU for the disk. With a second buffer, a thread reads the next batch meanwhile (read-ahead, double
buffering). Both arms read into pinned buffers, and the model is the same.

The limit is the sum of the stages over the longest one: 2x where the disk and the GPU take equally
long. The first read stays exposed, so eight batches leave 16 steps in 9, 1.78x at most. On H200s
the gain is 1.6x to 1.76x, with intervals from 1.34 to 2.09, because the disk varies. The GPU works
for 38 to 40 ms of a call. The baseline takes 79 to 91 ms, so reading takes about as long as the
GPU's work, and read-ahead takes 49 to 54; in one session they took 133 and 83. Between the first
copy and the last kernel, the GPU works for 28 to 53 % of the time in the baseline, and for 76 to 95
% with read-ahead. Where one stage dominates, hiding the other saves little, and the remedy is to
make that one faster: with larger or parallel requests for the disk (ch05/io_block_depth_host), or
with less work for the GPU. A DataLoader with workers and pinned memory reads ahead in the same way,
and has the same limit. Reads bypass the page cache (O_DIRECT); from there they would be a copy by
the CPU, which overlaps in the same way.
"""

from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch

from kernels.ch05.direct_reads import DirectFile
from kernels.ch05.storage_inference import PATCH_BYTES, PATCHES, service
from pytest_aiperf import Bench, Compare, evidence

BATCHES = 8
Inputs = tuple[DirectFile, int, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]


@lru_cache(maxsize=2)  # all arms read the same file
def random_images(seed: int, images: int, device: str) -> DirectFile:
    """Write random images; each has a mean patch of its own, so that features differ."""
    shape = images, PATCHES, PATCH_BYTES
    means = torch.randint(128, (images, 1, PATCH_BYTES), dtype=torch.uint8, device=device)
    pixels = means + torch.randint(128, shape, dtype=torch.uint8, device=device)
    return DirectFile(pixels.cpu().numpy())


def images_and_model(bench: Bench) -> Inputs:
    """Return the file, the images per batch, and the weights: an embedding and residual MLPs."""
    images, layers = bench.size(64, check=4), bench.size(12, check=2)
    width, options = bench.size(1024, check=32), {"device": bench.device, "dtype": torch.bfloat16}
    embedding = torch.randn(PATCH_BYTES, width, **options) * PATCH_BYTES**-0.5
    ups = torch.randn(layers, width, 4 * width, **options) * width**-0.5
    downs = torch.randn(layers, 4 * width, width, **options) * (4 * width) ** -0.5
    file = random_images(bench.seed, BATCHES * images, bench.device)
    return file, images, embedding, list(zip(ups, downs, strict=True))


def in_fp64(file, images, embedding, layers):
    """Read the file through the page cache, and evaluate 16 images at a time."""
    content = Path(f"/proc/self/fd/{file.fileno()}").read_bytes()
    pixels = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    results = []
    for part in pixels.view(BATCHES * images, PATCHES, PATCH_BYTES).split(16):
        x = (part.to(embedding.device).double() - 128) / 128 @ embedding.double()
        for up, down in layers:
            hidden = x / x.square().mean(-1, keepdim=True).sqrt() @ up.double()
            x = x + hidden * (1 + torch.erf(hidden / 2**0.5)) / 2 @ down.double()
        results.append(x.mean(1))
    return torch.cat(results).cpu()


@pytest.mark.gpu
def test_storage_prefetch_overlap(compare: Compare) -> None:
    compare(
        baseline=partial(service, 0),
        optimized=partial(service, 1),
        against="idiomatic",
        inputs=images_and_model,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        precision="bf16",
        # between the first copy and the last kernel the GPU hardly waits for the disk
        evidence=[evidence.busy_share(min=0.7)],
    )
