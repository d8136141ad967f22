"""A file to the GPU through a ring of pinned blocks, filled by reader threads."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

BLOCK = 2 << 20
"""Bytes that are read and copied at a time: small enough to stay in the CPU's cache between."""


_readers = cache(ThreadPoolExecutor)


class PinnedRing:
    """Pinned blocks that take turns: one is read into while others are on their way to the GPU."""

    def __init__(self, readers):
        slots = 2 * readers + 2
        self._readers = _readers(readers)
        self._blocks = torch.empty(slots, BLOCK, dtype=torch.uint8, pin_memory=True)
        self._views = [memoryview(block.numpy()) for block in self._blocks]
        self._copied = [torch.cuda.Event() for _ in range(slots)]

    def load(self, file, out):
        """Fill ``out``, bytes on the GPU, from the beginning of ``file``."""
        parts, slots = out.split(BLOCK), len(self._blocks)
        reads = [self._start(file, parts, i) for i in range(min(slots, len(parts)))]
        for i, part in enumerate(parts):
            reads[i].result()
            part.copy_(self._blocks[i % slots, : len(part)], non_blocking=True)
            self._copied[i % slots].record()
            if i + slots < len(parts):
                reads.append(self._start(file, parts, i + slots))

    def _start(self, file, parts, i):
        return self._readers.submit(self._read, file.fileno(), i, len(parts[i]))

    def _read(self, handle, i, length):
        slot = i % len(self._views)
        self._copied[slot].synchronize()  # the block's last content has left
        if os.preadv(handle, [self._views[slot][:length]], i * BLOCK) != length:
            raise EOFError(f"block {i} of the file is not whole")
