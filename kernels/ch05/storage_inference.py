"""Inference over a file of image patches: each batch is read, copied to the GPU and evaluated.

With one buffer, the three stages take turns. With more, threads read the following batches into the
other buffers while the GPU works on the current one.
"""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch.nn.functional import gelu, rms_norm

PATCHES, PATCH_BYTES = 196, 768
"""An image of 224 x 224 pixels as a vision transformer reads it: patches of 16 x 16 x 3 bytes."""

_threads = cache(ThreadPoolExecutor)


def read_batches(file, buffers):
    """Yield the batches of a file, each in one of the buffers, and read ahead into the others.

    A buffer is used again as soon as the next batch is asked for.
    """
    views = [memoryview(buffer.numpy()).cast("B") for buffer in buffers]
    ahead, count = len(buffers) - 1, os.fstat(file.fileno()).st_size // len(views[0])

    def read(i):
        view = views[i % len(views)]
        if os.preadv(file.fileno(), [view], i * len(view)) != len(view):
            raise EOFError(f"the file ends within batch {i}")
        return buffers[i % len(buffers)]

    if not ahead:
        yield from map(read, range(count))
        return
    submit = _threads(ahead).submit
    reads = deque(submit(read, i) for i in range(min(ahead, count)))
    for i in range(ahead, count + ahead):
        if i < count:
            reads.append(submit(read, i))
        yield reads.popleft().result()


def features(patches, embedding, layers):
    """Embed each patch, apply residual MLPs, and average over the patches of an image."""
    x = (patches.to(embedding.dtype) / 128 - 1) @ embedding
    for up, down in layers:
        x = x + gelu(rms_norm(x, x.shape[-1:]) @ up) @ down
    return x.float().unflatten(0, (-1, PATCHES)).mean(1)


@cache
def pinned_buffers(count, images):
    """Allocate buffers for batches of images in the first call, and return the same later.

    O_DIRECT needs addresses at the start of a page, where pinned memory begins.
    """
    shape = count, images * PATCHES, PATCH_BYTES
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


def service(ahead, file, images, embedding, layers):
    """Evaluate a file in batches of images, and read ``ahead`` batches ahead."""
    results = []
    for batch in read_batches(file, pinned_buffers(ahead + 1, images)):
        on_gpu = batch.to(embedding.device, non_blocking=True)
        results.append(features(on_gpu, embedding, layers).cpu())  # waits for the result
    return torch.cat(results)
