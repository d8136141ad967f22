"""Reading a file past the page cache: one request at a time, larger requests, several at a time."""

import mmap
import os
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

PAGE_BYTES = 4096
"""Bytes per record: O_DIRECT needs offsets, lengths and addresses aligned, for any disk to this."""

_threads = cache(ThreadPoolExecutor)


class DirectFile:
    """A file on a disk, opened with O_DIRECT: every read is a request to the disk.

    Raises OSError (EINVAL) where the file system of /var/tmp does not support O_DIRECT.
    """

    def __init__(self, content):
        # /tmp is often in memory
        with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            self._fd = os.open(file.name, os.O_RDONLY | os.O_DIRECT)  # outlives the file's name
        weakref.finalize(self, os.close, self._fd)  # deletes the file

    def fileno(self):
        """Return the file descriptor."""
        return self._fd


def read_all(block_bytes, depth, file, order):
    """Read a file block by block in random order, with ``depth`` requests in flight.

    ``order`` is a permutation of the file's pages; a block is read when its first page is due.
    """
    content = mmap.mmap(-1, len(order) * PAGE_BYTES)  # aligned to pages
    view = memoryview(content)
    offsets = order[order % (block_bytes // PAGE_BYTES) == 0] * PAGE_BYTES

    def read(part):
        for offset in part.tolist():
            if os.preadv(file.fileno(), [view[offset : offset + block_bytes]], offset) == 0:
                raise EOFError(f"the file ends at {offset}")

    list(_threads(depth).map(read, [offsets[i::depth] for i in range(depth)]))
    return np.frombuffer(content, np.uint8)
