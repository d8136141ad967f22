"""Reading a file into a ring of pinned blocks beats reading it whole and copying it to the GPU.

The baseline reads the file into a new array. The CPU copies the data twice: from the page cache
into fresh pages, which the operating system must zero first, and from those pageable pages into the
driver's pinned buffer. Each step waits for the one before. With a ring of pinned blocks the CPU
copies the data once, from the page cache into memory that the GPU reads directly, and reading a
block overlaps the transfer of earlier ones. The gain combines three effects: no fresh pages, one
copy less, and overlap.

The slower of the two stages sets the pace. Reading is one CPU core's memory copy and slower than
PCIe, so four readers ("threaded_ring") are faster than one ("ring"). An event per block keeps a
read from overwriting a block before its transfer is complete. The page cache is warm for both arms,
since the file was just written; with a cold cache the disk decides. Small files gain nothing: there
is nothing to overlap.
"""

import tempfile
from functools import lru_cache
from typing import IO

import numpy as np
import pytest
import torch

from kernels.ch05.block_readers import BLOCK_BYTES, PinnedRing
from pytest_aiperf import Bench, Compare, evidence, prepared

BLOCKS = 18
READERS = {"ring": 1, "threaded_ring": 4}


@lru_cache(maxsize=8)  # both arms read the same files; neither writes them
def random_file(seed: int, size: int, device: str) -> IO[bytes]:
    content = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    file = tempfile.TemporaryFile()  # noqa: SIM115 - unnamed, deleted with its last reference
    file.write(content.cpu().numpy())
    file.flush()
    return file


def stored(bench: Bench) -> tuple[IO[bytes], torch.Tensor]:
    size = bench.size(BLOCKS * BLOCK_BYTES, check=5000)
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
        # the driver stages copies from pageable memory only
        evidence=[evidence.copied_bytes("host to device", memory="pageable", max=0)],
    )
