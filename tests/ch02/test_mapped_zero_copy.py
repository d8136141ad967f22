"""A kernel that reads rows of a host table over PCIe beats gathering them on the CPU first.

A table that does not fit the GPU's memory, such as embeddings or the features of a graph, stays in
host memory, and a step needs 3 % of its rows. Gathering on the CPU reads the rows from random
places, writes them to a pinned buffer, and only then copies this buffer to the GPU. Pinned memory
can also be read by a kernel itself (mapped memory, zero-copy): the loads of thousands of warps are
in flight at once, the same bytes cross PCIe, at 50 GB/s, 92 % of the rate of the copy engine for a
large pinned buffer, and neither the CPU nor a buffer takes part. The library arm is what an expert
writes without such a kernel: it gathers in eight chunks into two pinned buffers, and gathers a
chunk while the one before is copied. The kernel must beat that as well. On an H200 and an H100 the
chunks took longer than the plain baseline, since the GPU waited for the CPU between their copies.

On an H200, the copy of 8.4 MB takes 280 to 340 µs, most often about two thirds of the baseline's
time. That is 25 to 30 GB/s, half of what pinned memory has elsewhere (ch02/pinned_h2d). The reason
was not examined; the CPU has just written the buffer, so part of it may still be in the CPU's
caches. In two of eight sessions the CPU gathered more slowly, and the copy took a third of the
time. At 55 GB/s the copy would take 150 µs, and the gain would be about a third smaller. On the
host of an H100 it is the other way round: the copy takes 200 µs, 42 GB/s, a third of the baseline's
time.

The claim is judged on wall time until the rows are in the GPU's memory. Both arms have the row
numbers where they need them. The gain depends on how fast the CPU gathers, which differs between
hosts and from one call to the next: hence the wide interval. Copying the whole table, 268 MB at 55
GB/s, would take 4.9 ms, 22 to 25 times as long as the kernel arm. The limit is PCIe's bandwidth for
reads of 128 bytes: of the 190 to 220 µs of a call, the kernel takes 166 to 168, and the rest is the
launch and the wait for its end. Rows must be that long: a request for 4 bytes fetches a sector of
32, and pays for the same packet headers as one for 128. Each row should be read once, because
mapped memory is not cached for later kernels; a program that needs most of the table should copy
all of it, at the copy engine's full speed.
"""

from functools import partial

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence, prepared

CHUNKS = 8  # of the library arm: about 1 MB, 20 µs of PCIe, much more than a launch takes
Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def tables(bench: Bench) -> Tables:
    """Make a pinned table, the numbers of rows on the host and on the GPU, and their place."""
    length, count = bench.size(2**19, check=3001), bench.size(2**14 + 3, check=35)
    values = torch.randn(length, 128, device=bench.device)
    table = torch.empty(values.shape, pin_memory=True).copy_(values)
    rows = torch.randint(length, (count,), dtype=torch.int32, device=bench.device)
    return table, rows.cpu(), rows, torch.empty(count, 128, device=bench.device)


def on_cpu(_table, _host_rows, _rows, out):
    buffer = torch.empty(out.shape, pin_memory=True)

    def run(table, host_rows, _rows, out):
        torch.index_select(table, 0, host_rows, out=buffer)
        out.copy_(buffer, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    return run


def in_chunks(_table, host_rows, _rows, out):
    """Gather into two pinned buffers in turn; copy one while the other is filled."""
    chunk = -(-len(host_rows) // CHUNKS)
    buffers = [torch.empty(chunk, out.shape[1], pin_memory=True) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in buffers]

    def run(table, host_rows, _rows, out):
        parts = zip(host_rows.split(chunk), out.split(chunk), strict=True)
        for i, (part, target) in enumerate(parts):
            buffer, done = buffers[i % 2][: len(part)], copied[i % 2]
            done.synchronize()  # the buffer's chunk before is on the GPU
            torch.index_select(table, 0, part, out=buffer)
            target.copy_(buffer, non_blocking=True)
            done.record()
        torch.cuda.current_stream().synchronize()

    return run


def mapped(gather, table, _host_rows, rows, out):
    gather(table, rows, out, len(rows))
    torch.cuda.current_stream().synchronize()


def selected(table, host_rows, _rows, out):
    return torch.stack([table[row] for row in host_rows.tolist()]).to(out.device)


@pytest.mark.gpu
def test_mapped_zero_copy(compare: Compare, nvcc: Nvcc) -> None:
    compare(
        baseline=prepared(on_cpu),
        optimized=partial(mapped, nvcc("ch02/mapped_gather.cu")["gather"]),
        library=prepared(in_chunks),
        inputs=tables,
        reference=selected,
        metric="wall",
        evidence=[evidence.copied_bytes("host to device", max=0)],
    )
