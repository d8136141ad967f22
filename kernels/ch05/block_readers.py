"""Loading a file to the GPU through a ring of pinned blocks that reader threads fill."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

BLOCK_BYTES = 2 << 20
"""Bytes per read and per copy. A block may stay in the CPU's cache in between."""

_thread_pool = cache(ThreadPoolExecutor)


class PinnedRing:
    """A ring of pinned blocks: readers fill some while others are being copied to the GPU."""

    def __init__(self, readers):
        slots = 2 * readers + 2
        self._readers = _thread_pool(readers)
        self._blocks = torch.empty(slots, BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        self._views = [memoryview(block.numpy()) for block in self._blocks]
        self._copied = [torch.cuda.Event() for _ in range(slots)]

    def load(self, file, out):
        """Fill ``out``, a byte tensor on the GPU, from the beginning of ``file``."""
        parts, slots = out.split(BLOCK_BYTES), len(self._blocks)
        reads = [self._start(file, parts, i) for i in range(min(slots, len(parts)))]
        for i, part in enumerate(parts):
            reads[i].result()
            part.copy_(self._blocks[i % slots, : len(part)], non_blocking=True)
            self._copied[i % slots].record()
            if i + slots < len(parts):
                reads.append(self._start(file, parts, i + slots))

    def _start(self, file, parts, i):
        return self._readers.submit(self._read, file.fileno(), i, len(parts[i]))

    def _read(self, fd, i, length):
        slot = i % len(self._views)
        self._copied[slot].synchronize()  # the block's previous content is on the GPU
        if os.preadv(fd, [self._views[slot][:length]], i * BLOCK_BYTES) != length:
            raise EOFError(f"the file ends within block {i}")
