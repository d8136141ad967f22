"""Reading a file straight into pinned blocks beats reading it whole and copying it to the GPU.

Read into an array of its own, a file is copied by the CPU twice: from the page cache into fresh
pages, which the kernel must clear first, and from there, since they are pageable, into the driver's
pinned buffer; and each step waits for the one before. With a ring of pinned blocks the CPU copies
it once, from the page cache to where the GPU fetches it, and reading a block runs beside the
transfer of those before it: the slower of the two sets the pace.

That is reading. One reader brought 5.6 GB/s to an H200, four brought 12.6: a quarter of PCIe's 55.
A read must not touch a block before its last transfer is over (an event each). The page cache is
the medium, warm for both arms, since the file was just written; from a cold disk, the disk decides.
Small files gain nothing: there is nothing to overlap.
"""

import tempfile
from functools import lru_cache
from typing import IO

import numpy as np
import pytest
import torch

from kernels.ch05.block_readers import BLOCK, PinnedRing
from pytest_aiperf import Bench, Compare, prepared

BLOCKS = 18
READERS = {"ring": 1, "threaded_ring": 4}


@lru_cache(maxsize=8)  # both arms read the same files, and nobody writes them
def random_file(seed: int, size: int, device: str) -> IO[bytes]:
    content = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it has no name, and goes when nobody has it
    file.write(content.cpu().numpy())
    file.flush()
    return file


def stored(bench: Bench) -> tuple[IO[bytes], torch.Tensor]:
    size = bench.size(BLOCKS * BLOCK, check=5000)
    out = torch.empty(size, dtype=torch.uint8, device=bench.device)
    return random_file(bench.seed, size, bench.device), out


def read_whole(file, out):
    file.seek(0)
    out.copy_(torch.from_numpy(np.fromfile(file, np.uint8)))


@pytest.mark.gpu
@pytest.mark.parametrize("rung", READERS)
def test_pinned_ring_reader(compare: Compare, rung: str) -> None:
    def from_file(file, out):
        file.seek(0)
        return torch.from_numpy(np.fromfile(file, np.uint8)).to(out.device)

    compare(
        baseline=read_whole,
        optimized=prepared(lambda file, out: PinnedRing(READERS[rung]).load),
        inputs=stored,
        reference=from_file,
        metric="wall",
        cache="warm",
    )
